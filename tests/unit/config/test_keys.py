"""List of config keys: it agrees with the reference page, and its values are accepted."""

from __future__ import annotations

import re

import pytest

from credit.config import Config, build_config
from credit.config.docs_page import render_config_reference
from credit.config.keys import list_keys
from tests.unit.config.test_load import with_key


def test_keys_are_those_of_the_reference() -> None:
    documented = set(re.findall(r"^\| `([\w.]+)` \|", render_config_reference(), re.MULTILINE))
    # Keys of items of lists and mappings are not listed; the shorthand has the keys of an entry of `postprocess`.
    documented = {key for key in documented if not re.search(r"\.(N|NAME)\.|\.hyperdiffusion\.", key)}
    listed = {key for key in list_keys() if ".hyperdiffusion." not in key}
    # The page has headings for sections of the first level, and no rows.
    assert {key for key in listed if "." in key or key in documented} == documented
    assert listed - documented <= set(Config.model_fields)


@pytest.mark.parametrize(
    "key", ["trainer.optimizer", "trainer.amp", "trainer.activation_checkpoint", "trainer.schedule.kind", "loss.kind"]
)
def test_listed_values_are_accepted(key: str) -> None:
    values = list_keys()[key]
    assert len(values) > 1
    for text in values:
        value = {"true": True, "false": False}.get(text, text)
        raw = with_key("data.store", "store.zarr")
        *path, name = key.split(".")
        section = raw
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
        if text not in ("crps", "spectral_crps", "multiscale_crps", "sum", "amse"):
            build_config(raw)


def test_registered_kinds_are_listed() -> None:
    keys = list_keys()
    assert set(keys["model.type"]) >= {"wxformer", "unet"} and "ensemble" in keys["trainer.objective.kind"]
    assert keys["trainer.learning_rate"] == []
