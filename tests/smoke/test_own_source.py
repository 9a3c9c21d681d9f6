"""The example of docs/own_source.md: commands treat a source that a plugin registers like a source of files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from credit.config.sections import source as source_section
from credit.data.formats.plugin import source as plugin_source
from tests.smoke.test_train import rows

PAGE = Path(__file__).parents[2] / "docs" / "own_source.md"
SHORT = ("trainer.max_steps=3", "trainer.validate_every=3", "trainer.checkpoint_every=3", "trainer.log_every=1",
         "inference.initial_times=['2000-02-08', '2000-02-09']", "model.attn_dropout=0")  # fmt: skip


def write_archive(folder: Path) -> None:
    """Write an archive that the example class reads, the module of the class, and a config that uses it as source.

    The fields are those of data.nc. The module and the `plugins` and `data` keys are the code blocks of the page.
    """
    with xr.open_dataset(folder / "data.nc") as data:
        archive = folder / "archive"
        archive.mkdir()
        np.savez(archive / "constant.npz", latitude=data.latitude, longitude=data.longitude, land=data.land)
        for time_index, time in enumerate(data.time.values):
            name = np.datetime_as_string(time, "h").translate(str.maketrans("", "", "-T"))
            np.savez(
                archive / f"{name}.npz",
                **{variable: data[variable][time_index] for variable in ("z", "t2m", "rain", "sst")},
            )
    page = PAGE.read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```(python|yaml)\n(.*?)```", page, re.DOTALL))
    (folder / "lab_archive.py").write_text(blocks["python"])
    config, page_config = yaml.safe_load((folder / "config.yml").read_text()), yaml.safe_load(blocks["yaml"])
    config |= {"plugins": page_config["plugins"], "data": config["data"] | page_config["data"]}
    (folder / "own.yml").write_text(yaml.safe_dump(config))


@pytest.fixture
def archive_run(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of `small_run` with its fields in an archive of npz files as well, and a config that reads the archive."""
    write_archive(small_run)
    monkeypatch.syspath_prepend(small_run)
    monkeypatch.setattr(plugin_source, "_SOURCES", dict(plugin_source._SOURCES))
    monkeypatch.setattr(source_section, "_OPTION_SECTIONS", dict(source_section._OPTION_SECTIONS))
    yield small_run
    sys.modules.pop("lab_archive", None)


def test_plugin_source_gives_same_store_training_and_forecasts_as_file(archive_run: Path, command) -> None:
    process = command("check", "own.yml")
    assert process.returncode == 0 and "no problem found" in process.stdout, process.stdout
    for name in ("config", "own"):
        assert command("preprocess", f"{name}.yml", f"data.store={name}.zarr").returncode == 0
        assert command("train", f"{name}.yml", f"save_loc={name}", *SHORT).returncode == 0
        assert command("rollout", f"{name}.yml", f"save_loc={name}", *SHORT).returncode == 0
    chunks = [file.relative_to("config.zarr") for file in Path("config.zarr").rglob("c/*") if file.is_file()]
    assert len(chunks) > 5
    for chunk in chunks:
        assert ("own.zarr" / chunk).read_bytes() == ("config.zarr" / chunk).read_bytes(), chunk
    file_values, source_values = (
        json.loads(Path(f"{name}.zarr/zarr.json").read_text())["attributes"]["credit"] for name in ("config", "own")
    )
    for key in ("content", "statistics", "channels", "masked_variables", "grid"):
        assert source_values[key] == file_values[key], key
    # The first runs read the source itself. The run continues with batches from the store.
    assert rows(Path("own")) == rows(Path("config"))
    continued = command("train", "own.yml", "save_loc=own", *SHORT, "trainer.max_steps=5", "data.store=own.zarr")
    assert continued.returncode == 0 and len(rows(Path("own"))) == 5, continued.stderr
    forecasts = sorted(Path("config/forecasts").glob("*.nc"))
    assert len(forecasts) == 2
    for file in forecasts:
        with xr.open_dataset(file) as file_values, xr.open_dataset(Path("own/forecasts") / file.name) as source_values:
            xr.testing.assert_equal(source_values, file_values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["data.sources.0.options={}"], ["data.sources.0", "options: folder: this option is missing"]),
        (["data.sources.0.options={foldr: archive}"],
         ['"foldr" is not an option of npz_archive', 'did you mean "folder"']),
        (["data.sources.0.type=npz_archiv"],
         ['type: "npz_archiv" is not a registered source', 'did you mean "npz_archive"']),
        (["data.sources.0.path=data.nc"], ["data.sources.0", "path", "type", "both are given"]),
        (["data.sources.0.format=grib"], ["data.sources.0", "format is only for files"]),
        (["data.sources.0.options.folder=nowhere"],
         ["data.sources.0 (npz_archive)", "FileNotFoundError", "lab_archive.py, line"]),
        (["data.variables.prognostic.vars_2D=[t2m, ssr]"], ['"ssr" is in no file of data.sources']),
        (["data.levels=[850, 700]"], ["data.sources.0 (npz_archive)", "z has no level 700 hPa; it has 850, 500 hPa"]),
    ],
)  # fmt: skip
def test_check_names_the_wrong_source_option(archive_run: Path, command, change: list[str], words: list[str]) -> None:
    result = command("check", "own.yml", *change)
    assert result.returncode == 2, result.stdout
    for word in words:
        assert word in result.stdout + result.stderr


def test_unreadable_time_is_named_and_can_be_skipped(archive_run: Path, command) -> None:
    """The message names the source, the call and the line in the plugin. `on_bad_time=skip` leaves the time out."""
    (archive_run / "archive" / "2000011006.npz").write_bytes(b"PK")
    arguments = ("preprocess", "own.yml", "data.store=own.zarr")
    error_output = command(*arguments).stderr
    call = "data.sources.0 (npz_archive): read('z', 2000-01-10 06:00:00, (850.0, 500.0)) fails"
    for message in (call, "data.sources.0.options", "lab_archive.py, line"):
        assert message in error_output, error_output
    result = command(*arguments, "data.on_bad_time=skip", "preprocess.workers=2")
    assert result.returncode == 0, result.stderr
    described = json.loads(Path("own.zarr/zarr.json").read_text())["attributes"]["credit"]
    assert list(described["bad_times"]) == ["2000-01-10T06:00"]
