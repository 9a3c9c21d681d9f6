"""Tests of the sample data in the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from credit.data.bundled import cut_sample
from credit.data.sources.source_reader import open_sources
from tests.unit.data.files_on_the_fly import make_config


def test_sample_is_small_and_states_its_origin() -> None:
    folder = Path(str(resources.files("credit.data.bundled"))) / "speedy"
    assert sorted(path.name for path in folder.glob("*.nc")) == sorted(cut_sample.FILES)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= cut_sample.LIMIT_BYTES
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "Simulated, not observed" in text
    assert "Apache-2.0" in text


def test_every_field_of_the_sample_can_be_read() -> None:
    names_3d = [name for name, levels in cut_sample.FIELDS.items() if levels]
    names_2d = [name for name, levels in cut_sample.FIELDS.items() if not levels]
    variable_options = {name: {"levels": cut_sample.FIELDS[name]} for name in names_3d}
    if "sst" in names_2d:
        variable_options["sst"] = {"missing": "fill_mean"}
    reader = open_sources(
        make_config(
            "sample:speedy", p3=names_3d, p2=names_2d, static=list(cut_sample.STATIC), variable_options=variable_options
        )
    )
    assert reader.grid.shape == (32, 64)
    assert set(np.diff(reader.times)[:1463]) == {360}
    for index in (0, 1463, len(reader.times) - 1):
        assert reader.read(index).shape[0] == len(reader.channels.time_varying_stored)
