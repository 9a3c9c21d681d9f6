"""Old names of config keys: accepted with a warning in files of users, and silently in saved files."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import yaml

from credit.config import Config, build_config, dump_config, load_config
from credit.config.renamed_keys import REMOVED_IN, RENAMED_KEYS, convert_value, rename_dotted_key, rename_keys
from credit.config.sections.loss import LossSection
from credit.errors import ConfigError
from credit.losses import register_loss
from credit.losses.base import Loss
from tests.registries import isolate
from tests.unit.config.test_load import MINIMAL, with_key

# Old key -> a value that is valid and not the default.
VALUES = {
    "data.bad_times": "skip",
    "data.fields": {"t2m": {"units": "K"}},
    "model.post": [{"kind": "clamp", "variable": "t2m", "minimum": 150.0}],
    "trainer.early_view": {"cases": 2},
    "trainer.tensorboard": True,
    "inference.ensemble.noise": {"std": 0.3},
    "inference.ensemble.noise.where": ["decoder"],
}


def build_raw_config(keys: dict[str, object], **sections: dict) -> dict:
    """Return a config with these dotted keys and sections."""
    raw = with_key("data.store", "store.zarr") | sections
    for dotted, value in keys.items():
        *section_path, name = dotted.split(".")
        section = raw
        for section_name in section_path:
            section = section.setdefault(section_name, {})
        section[name] = copy.deepcopy(value)
        if dotted.startswith("inference.ensemble"):
            # This key needs a complete section above it.
            raw["inference"]["ensemble"]["members"] = 2
    return raw


def write_config(path: Path, raw: dict) -> Path:
    """Write a config as YAML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture
def expected() -> Config:
    """Config with the values of all old keys under their new names."""
    return build_config(
        build_raw_config({RENAMED_KEYS[key]: convert_value(key, value) for key, value in VALUES.items()})
    )


def test_values_cover_all_renamed_keys() -> None:
    assert VALUES.keys() == RENAMED_KEYS.keys()


def test_old_keys_of_a_user_are_read_with_one_warning_each(
    tmp_path: Path, expected: Config, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_config(tmp_path / "mine.yml", build_raw_config(VALUES))
    # The key is in the file and in an override, but causes only one warning.
    assert load_config(path, ["data.fields.t2m.units=K"]) == expected
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(messages) == len(RENAMED_KEYS)
    for old_key, new_key in RENAMED_KEYS.items():
        (message,) = [text for text in messages if f"the key {old_key} is now called {new_key};" in text]
        assert message.startswith(f"{path}: ") and REMOVED_IN in message


@pytest.mark.parametrize(
    ("override", "old_key", "origin"),
    [
        ("data.bad_times=skip", "data.bad_times", 'override "data.bad_times=skip"'),
        ("trainer.early_view.cases=2", "trainer.early_view", 'override "trainer.early_view.cases=2"'),
        ("trainer.tensorboard=true", "trainer.tensorboard", 'override "trainer.tensorboard=true"'),
        ("trainer={max_steps: 10, loggers: [tensorboard], early_view: {cases: 2}}", "trainer.early_view", "overrides"),
        ("inference.ensemble.noise.std=0.3", "inference.ensemble.noise", 'override "inference.ensemble.noise.std=0.3"'),
        (
            "inference.ensemble.noise.where=[decoder]",
            "inference.ensemble.noise.where",
            'override "inference.ensemble.noise.where=[decoder]"',
        ),
    ],
)
def test_old_keys_in_overrides(
    tmp_path: Path, override: str, old_key: str, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {RENAMED_KEYS[key]: convert_value(key, value) for key, value in VALUES.items()}
    expected = build_config(build_raw_config(keys))
    # The file does not have the key of the override.
    del keys[RENAMED_KEYS[old_key]]
    path = write_config(tmp_path / "mine.yml", build_raw_config(keys))
    assert load_config(path, [override]) == expected
    assert len(caplog.records) == 1
    assert f"{origin}: the key {old_key} is now called {RENAMED_KEYS[old_key]};" in caplog.text


def test_an_override_under_the_new_name_changes_a_file_with_the_old_one(tmp_path: Path) -> None:
    path = write_config(tmp_path / "mine.yml", build_raw_config(VALUES))
    options = load_config(path, ["data.variable_options.z.minimum=0"]).data.variable_options
    assert options["t2m"].units == "K" and options["z"].minimum == 0


def test_saved_files_are_read_silently(tmp_path: Path, expected: Config, caplog: pytest.LogCaptureFixture) -> None:
    path = write_config(tmp_path / "run" / "config.yml", build_raw_config(VALUES))
    (path.parent / "checkpoints").mkdir()
    assert load_config(path) == expected
    # A checkpoint contains the config as a mapping.
    assert build_config(build_raw_config(VALUES), origin="meta.json") == expected
    assert caplog.records == []
    # Configs are saved with the new names only.
    assert rename_keys(yaml.safe_load(dump_config(expected)), origin="dump")[1] == []
    # An override of a saved file is written by a user.
    assert load_config(path, ["data.bad_times=skip"]) == expected
    assert "data.bad_times is now called data.on_bad_time" in caplog.text


@pytest.mark.parametrize("old_key", RENAMED_KEYS)
def test_both_names_at_once_are_an_error(tmp_path: Path, old_key: str) -> None:
    new_key = RENAMED_KEYS[old_key]
    raw = build_raw_config({old_key: VALUES[old_key], new_key: VALUES[old_key]})
    if old_key.startswith("inference.ensemble.noise"):
        # In this case, the whole section is given under both names.
        old_key, new_key = "inference.ensemble.noise", "inference.ensemble.feature_noise"
    message = f"{old_key} is the old name of {new_key}, and both are set; remove {old_key}"
    with pytest.raises(ConfigError, match=f"mine.yml: {message}"):
        load_config(write_config(tmp_path / "mine.yml", raw))
    with pytest.raises(ConfigError, match=message):
        build_config(raw)


def test_values_of_renamed_key_are_converted(tmp_path: Path) -> None:
    raw = build_raw_config({"trainer.tensorboard": False})
    assert build_config(raw).trainer.loggers == []
    path = write_config(tmp_path / "mine.yml", raw)
    # The override replaces the value of the file, as under any other name.
    assert load_config(path, ["trainer.tensorboard=True"]).trainer.loggers == ["tensorboard"]
    with pytest.raises(ConfigError, match=r"trainer\.loggers"):
        build_config(build_raw_config({"trainer.tensorboard": "sometimes"}))


def test_keys_below_an_old_key() -> None:
    assert rename_dotted_key("data.fields.t2m.units") == "data.variable_options.t2m.units"
    assert rename_dotted_key("data.fields_of_mine") == "data.fields_of_mine"
    assert build_config(MINIMAL).data.variable_options == {}


def test_former_keys_of_losses_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.15 saved `huber_delta` and `global_mean` for every loss, also for those of plugins."""
    isolate(monkeypatch)

    class PluginSection(LossSection):
        pass

    @register_loss("own", PluginSection)
    class PluginLoss(Loss):
        pass

    loss = build_config(build_raw_config({}, loss={"kind": "own", "huber_delta": 1.0, "global_mean": 0.0})).loss
    assert isinstance(loss, PluginSection)
    with pytest.raises(ConfigError, match=r"loss\.huber_delta: loss\.kind own has no such key"):
        build_config(build_raw_config({}, loss={"kind": "own", "huber_delta": 2.0}))
    assert build_config(build_raw_config({}, loss={"kind": "huber", "huber_delta": 1.0})).loss.huber_delta == 1.0
