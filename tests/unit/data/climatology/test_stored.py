"""Tests of the climatology in a training store: equal to a fit, complete, and with the settings of the run."""

from __future__ import annotations

import errno
import logging
import math
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.cli.main import main
from credit.config import Config, build_config
from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.config.sections.verification import ClimatologyConfig, VerificationConfig
from credit.data.climatology import blocks
from credit.data.climatology import climatology as climatology_module
from credit.data.climatology import stored as module
from credit.data.climatology.fit import fit_climatology
from credit.data.climatology.stored import load_or_fit_climatology, preprocess_climatology
from credit.data.reader import open_reader
from credit.data.splits import Split, build_splits
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import StoreReader
from credit.errors import ConfigError, DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.train.build.assets import fit_assets
from credit.verify.scorer import score_forecasts
from credit.verify.scores import baselines
from credit.verify.scores.baselines import build_climatology
from credit.verify.table.table import ScoreTable
from tests.unit.data.files_on_the_fly import write_file

ROWS, COLUMNS, DAYS, EVERY = 6, 8, 456, 36
CHANNELS = 4  # t at two levels, t2m, sst
HARMONIC = ClimatologyConfig()
WINDOW = ClimatologyConfig(method="window", window_days=241)
BY_HOUR = ClimatologyConfig(method="window", window_days=241, by_hour=True)
WAVES_BY_HOUR = ClimatologyConfig(harmonics=2, by_hour=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    count = DAYS * 24 // EVERY
    sst = rng.normal(290, 3, (count, ROWS, COLUMNS)).astype(np.float32)
    sst[:, 1, 2] = np.nan
    fields = {
        "t": rng.normal(250, 9, (count, 2, ROWS, COLUMNS)).astype(np.float32),
        "t2m": rng.normal(280, 9, (count, ROWS, COLUMNS)).astype(np.float32),
        "sst": sst,
    }
    path = tmp_path_factory.mktemp("source") / "a.nc"
    return write_file(path, fields, np.arange(count) * EVERY, levels=[500, 850])


def make_conf(source: Path, folder: Path, **changes: object) -> DataConfig:
    settings = {
        "sources": [{"path": str(source)}],
        "levels": [500, 850],
        "variables": {
            "prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m"]},
            "dynamic_forcing": {"vars_2D": ["sst"]},
        },
        "variable_options": {"sst": {"missing": "fill_mean"}},
        "timestep": "36h",
        "splits": {
            "train": ["2000-01-01", "2001-01-20"],
            "valid": ["2001-02-10", "2001-02-20"],
            "test": ["2001-03-10", "2001-03-20"],
        },
        "store": str(folder / "store.zarr"),
    }
    return DataConfig.model_validate({**settings, **changes})


@pytest.fixture(scope="module")
def store(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_training_store(make_conf(source, tmp_path_factory.mktemp("store")), progress=False)


@pytest.fixture
def conf(source: Path, store: Path, tmp_path: Path) -> DataConfig:
    data_config = make_conf(source, tmp_path)
    shutil.copytree(store, data_config.store)
    return data_config


def store_climatology(conf: DataConfig, climatology_config: ClimatologyConfig, **settings: object) -> None:
    preprocess_climatology(conf, PreprocessConfig(climatology=True, **settings), climatology_config, progress=False)


def open_data(conf: DataConfig) -> tuple[StoreReader, Split, list[str]]:
    reader = open_reader(conf)
    return reader, build_splits(conf, reader.calendar)["train"], [c.name for c in reader.channels.time_varying_stored]


def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read", "read_into"):
        monkeypatch.setattr(StoreReader, name, Mock(side_effect=AssertionError("a field of the store was read")))


@pytest.mark.parametrize("room", [None, 9, 1])
@pytest.mark.parametrize("climatology_config", [HARMONIC, WINDOW, BY_HOUR, WAVES_BY_HOUR], ids=str)
def test_stored_climatology_equals_the_fit_bit_for_bit(
    conf: DataConfig, monkeypatch: pytest.MonkeyPatch, climatology_config: ClimatologyConfig, room: int | None
) -> None:
    """A block has `room` fields, of 3 harmonics or 18 parts times 4 channels. A chunk has two channels."""
    if room is not None:
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 12 * ROWS * COLUMNS * room)
        monkeypatch.setattr(blocks, "CHUNK_BYTES", 2 * 4 * ROWS * COLUMNS)
    store_climatology(conf, climatology_config)
    reader, train, names = open_data(conf)
    fitted = fit_climatology(reader, names, train.first, train.last, climatology_config)
    group = zarr.open_group(Path(conf.store) / "climatology", mode="r")
    np.testing.assert_array_equal(group["fields"][:], fitted.fields)
    assert (len(module._list_blocks(Path(conf.store))) > 1) == (room is not None or climatology_config.by_hour)
    chosen_names = [names[3], names[0]]
    rows = [names.index(name) for name in chosen_names]
    forbid_reading(monkeypatch)
    stored = load_or_fit_climatology(reader, chosen_names, train, climatology_config)
    for minutes in reader.times[[0, 1, 77, -1]].tolist():
        # The matrix products over harmonics have other sizes, so they are rounded differently.
        np.testing.assert_allclose(stored.evaluate(minutes), fitted.evaluate(minutes)[rows], rtol=1e-6)
    for key in ("calendar", "kind", "description", "years"):
        assert getattr(stored, key) == getattr(fitted, key)
    np.testing.assert_array_equal(stored.day_minutes, fitted.day_minutes)
    assert not list(Path(conf.store).parent.glob(".*")), "no locks are left"


def test_windowed_climatology_is_the_mean_of_its_times(conf: DataConfig) -> None:
    store_climatology(conf, BY_HOUR)
    reader, train, names = open_data(conf)
    inside = np.flatnonzero((reader.times <= train.last) & (reader.times % 1440 == 720))
    days = 365 * reader.calendar.year_fraction(reader.times[inside])
    centre = 365 * 2 / 18 + 0.5
    distance = np.minimum(np.abs(days - centre), 365 - np.abs(days - centre))
    values = np.stack([reader.read(int(index)) for index in inside[distance <= 120.5]]).astype(np.float64)
    stored = zarr.open_group(Path(conf.store) / "climatology", mode="r")["fields"][1, 2]
    np.testing.assert_allclose(stored, values.mean(axis=0), rtol=1e-7)


def test_two_processes_fit_the_same_climatology(conf: DataConfig, source: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_conf(source, tmp_path / "other")
    write_training_store(other, progress=False)
    store_climatology(conf, BY_HOUR)
    store_climatology(other, BY_HOUR, workers=2)
    group, other_group = (zarr.open_group(Path(c.store) / "climatology", mode="r") for c in (conf, other))
    np.testing.assert_array_equal(group["fields"][:], other_group["fields"][:])
    assert dict(group.attrs)["credit"] == dict(other_group.attrs)["credit"]
    assert len(module._list_blocks(Path(conf.store))) == 2


def test_only_requested_chunks_are_read(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "CHUNK_BYTES", 4 * ROWS * COLUMNS)
    store_climatology(conf, BY_HOUR)
    chunks = Path(conf.store) / "climatology" / "fields" / "c"
    reader, train, names = open_data(conf)
    climatology = load_or_fit_climatology(reader, names[1:2], train, BY_HOUR)
    expected = climatology.evaluate(int(reader.times[1]))
    needed = {chunks / "1" / str(part) / "1" for part in (0, 1)}
    for chunk in chunks.glob("*/*/*"):
        if chunk not in needed:
            (chunk / "0" / "0").unlink()
    reloaded = load_or_fit_climatology(reader, names[1:2], train, BY_HOUR)
    np.testing.assert_array_equal(reloaded.evaluate(int(reader.times[1])), expected)
    with pytest.raises(DataError, match="its climatology cannot be read .a chunk is lost.*run credit preprocess"):
        reloaded.evaluate(int(reader.times[0]))


def test_damaged_chunk_is_an_error(conf: DataConfig) -> None:
    store_climatology(conf, WINDOW)
    chunk = Path(conf.store) / "climatology" / "fields" / "c" / "0" / "0" / "0" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    reader, train, names = open_data(conf)
    with pytest.raises(DataError, match="its climatology cannot be read"):
        load_or_fit_climatology(reader, names, train, WINDOW).evaluate(int(reader.times[0]))


@pytest.mark.parametrize(
    ("climatology_config", "splits", "reason"),
    [
        (HARMONIC, {}, "has the settings .*window_days': 241.*, not .*harmonics': 1"),
        (ClimatologyConfig(method="window", window_days=120), {}, "241.*not .*120"),
        (BY_HOUR, {}, "by_hour': False.*not .*True"),
        (
            WINDOW,
            {"train": ["2000-01-02", "2001-01-20"]},
            "of a different period .moving mean of 241 days, 2000-01-01 to",
        ),
    ],
)
def test_climatology_of_other_settings_is_fitted_with_a_message(
    conf: DataConfig,
    source: Path,
    caplog: pytest.LogCaptureFixture,
    climatology_config: ClimatologyConfig,
    splits: dict,
    reason: str,
) -> None:
    caplog.set_level(logging.INFO)
    store_climatology(conf, WINDOW)
    if splits:
        # With valid on the first day, the splits extend over the same times as before.
        splits = {**splits, "valid": ["2000-01-01", "2000-01-01"]}
        conf = make_conf(
            source, Path(conf.store).parent, splits={**conf.splits.model_dump(), **splits}, split_gap="1min"
        )
        write_training_store(conf, progress=False)
    reader, train, names = open_data(conf)
    caplog.clear()
    climatology = load_or_fit_climatology(reader, names, train, climatology_config)
    (record,) = [r for r in caplog.records if r.name == module.__name__]
    assert "fitted now" in record.message
    assert re.search(reason, record.message), record.message
    expected = fit_climatology(reader, names, train.first, train.last, climatology_config)
    np.testing.assert_array_equal(climatology.fields, expected.fields)
    store_climatology(conf, climatology_config)
    caplog.clear()
    load_or_fit_climatology(reader, names, train, climatology_config)
    assert "read from the store" in caplog.text
    store_climatology(conf, climatology_config)
    assert "has its climatology" in caplog.text


def test_missing_climatology(conf: DataConfig, source: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    reader, train, names = open_data(conf)
    load_or_fit_climatology(reader, names, train, HARMONIC)
    assert "the store has no climatology" in caplog.text
    sources = open_reader(make_conf(source, tmp_path, store=None))
    load_or_fit_climatology(sources, names, train, HARMONIC)
    assert "there is no store" in caplog.text


def test_kill_loses_at_most_one_block(
    conf: DataConfig, repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block_bytes = 12 * ROWS * COLUMNS * CHANNELS * 5  # five of 18 parts per block, so four blocks
    worker = "tests.unit.data.climatology.fit_until_killed"
    command = [sys.executable, "-m", worker, conf.model_dump_json(), WINDOW.model_dump_json(), str(block_bytes), "500"]
    process = subprocess.run(command, cwd=repository, check=False)
    assert process.returncode == -signal.SIGKILL
    group = zarr.open_group(Path(conf.store) / "climatology", mode="r")
    missing = module._find_missing_blocks(Path(conf.store))
    assert missing in ([1, 2, 3], [2, 3])
    assert dict(group.attrs)["credit"]["complete"] is False
    reader, train, names = open_data(conf)
    caplog.set_level(logging.INFO)
    load_or_fit_climatology(reader, names, train, WINDOW)
    assert "is not complete" in caplog.text
    assert "fitted now" in caplog.text
    fitted = fit_climatology(reader, names, train.first, train.last, WINDOW)
    written = []
    fit_fields = module.fit_fields
    monkeypatch.setattr(module, "fit_fields", lambda *args: written.append(args[4]) or fit_fields(*args))
    # The blocks stay those of the first run, although the memory for a block has changed.
    store_climatology(conf, WINDOW)
    assert written == [slice(first, min(first + 5, 18)) for first in (0, 5, 10, 15)][missing[0] :]
    np.testing.assert_array_equal(group["fields"][:], fitted.fields)
    assert not list(Path(conf.store).parent.glob(".*"))


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a fit is at most 1 MiB above its estimate, even if the climatology is larger."""
    rows = 64
    columns = 128
    count = 420
    fields = {"t2m": np.random.default_rng(0).normal(280, 9, (count, rows, columns)).astype(np.float32)}
    file = write_file(tmp_path / "b.nc", fields, np.arange(count) * 24)
    conf = make_conf(
        file, tmp_path, timestep="24h", variables={"prognostic": {"vars_2D": ["t2m"]}}, variable_options={}
    )
    write_training_store(conf, progress=False)
    climatology_config = ClimatologyConfig(method="window", window_days=31)
    reader, train, _ = open_data(conf)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 2**22)
    fit = module.FitTask(Path(conf.store), climatology_config, (train.first, train.last), False).plan_fit(reader)
    disk, memory = blocks.estimate_fit_bytes(fit, 1, (rows, columns))
    assert disk == 4 * math.prod(fit.shape) * rows * columns
    assert 2**21 < memory < 2**22 + 16 * rows * columns < disk
    store_climatology(conf, HARMONIC)  # loads and compiles everything that is needed only once
    tracemalloc.start()
    store_climatology(conf, climatology_config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The 1 MiB is for weights, plans and libraries.
    assert memory / 2 < peak < memory + 2**20 < 3 * disk / 2
    expected = fit_climatology(reader, ["t2m"], train.first, train.last, climatology_config)
    np.testing.assert_array_equal(zarr.open_group(f"{conf.store}/climatology", mode="r")["fields"][:], expected.fields)


def test_cache_of_read_parts_is_bounded(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climatology_module, "CACHE_BYTES", 3 * 4 * ROWS * COLUMNS)
    store_climatology(conf, WINDOW)
    reader, train, names = open_data(conf)
    climatology = load_or_fit_climatology(reader, names[:1], train, WINDOW)
    for minutes in reader.times[::9].tolist():
        climatology.evaluate(minutes)
    assert climatology.fields._read_part.cache_info().currsize == 3


def build_run_config(data: DataConfig, **changes: object) -> Config:
    raw = {"save_loc": "unused", "data": data.model_dump(exclude_unset=True), "model": {"type": "wxformer"}}
    verification = {"figure_leads": ["36h"], **changes.pop("verification", {})}
    return build_config({**raw, "trainer": {"max_steps": 1}, "verification": verification, **changes})


def test_training_and_verification_use_the_stored_climatology(
    conf: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, train, names = open_data(conf)
    before = fit_assets(build_run_config(conf), reader, train)
    verification = VerificationConfig(climatology=HARMONIC)
    expected, _ = build_climatology(verification, conf, reader, names[:3], train)
    store_climatology(conf, HARMONIC)
    forbid_reading(monkeypatch)
    after = fit_assets(build_run_config(conf), reader, train)
    assert after.climatology.names == ("sst",)
    for name, array in after.to_tensors().items():
        np.testing.assert_array_equal(array.numpy(), before.to_tensors()[name].numpy())
    np.testing.assert_array_equal(
        build_climatology(verification, conf, reader, names[:3], train)[0].fields, expected.fields
    )


def test_scoring_with_a_stored_climatology_reads_few_training_times(
    conf: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(baselines, "_DAMPING_SAMPLES", 5)
    reader, train, _ = open_data(conf)
    starts = [int(minutes) for minutes in reader.times[-4:-1]]
    fields = OutputFields(reader.channels, reader.grid, reader.calendar, reader.attributes, 2160, masks=reader.masks)
    writer = ForecastWriter(tmp_path / "forecasts", fields, [2160], starts)
    for start in starts:
        writer.write(start, reader.read(reader.index_of(start + 2160))[None, :3] + 1)
    read_indices = set()
    read_field = StoreReader.read
    monkeypatch.setattr(StoreReader, "read", lambda self, index: read_indices.add(index) or read_field(self, index))

    def score() -> tuple[ScoreTable, int]:
        read_indices.clear()
        config = build_run_config(conf, verification={"climatology": BY_HOUR.model_dump()})
        table = score_forecasts(config, reader, open_forecasts(tmp_path / "forecasts")).table
        return table, sum(reader.times[index] <= train.last for index in read_indices)

    before, num_before = score()
    store_climatology(conf, BY_HOUR)
    after, num_after = score()
    assert num_before == (reader.times <= train.last).sum() > 200
    assert num_after <= 10
    xr.testing.assert_identical(after.dataset, before.dataset)


def test_check_and_preprocess_commands(conf: DataConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "config.yml"
    config.write_text(build_run_config(conf, preprocess={"climatology": True}).model_dump_json(exclude_unset=True))
    assert main(["check", str(config)]) in (0, 2)
    assert "climatology: credit preprocess will fit it, with at most 0.00 GiB in the store" in capsys.readouterr().out
    assert main(["preprocess", str(config), "--report"]) == 0
    assert "1 annual harmonic, 2000-01-01 to 2001-01-20" in Path(f"{conf.store}.report.html").read_text()
    with pytest.raises(ConfigError, match="no effect with verification.climatology.method: file"):
        build_run_config(
            conf, preprocess={"climatology": True}, verification={"climatology": {"method": "file", "path": "a.nc"}}
        )
    assert main(["preprocess", str(config), "verification.climatology.harmonics=200"]) == 2
    assert "200 cannot be fitted to 258 times" in capsys.readouterr().err


def test_missing_disk_space_is_detected_before_writing(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "estimate_fit_bytes", lambda *args: (2**60, 0))
    with pytest.raises(DataError, match="needs up to .* more"):
        store_climatology(conf, WINDOW)
    assert not list(Path(conf.store).parent.glob(".*"))
    assert not (Path(conf.store) / "climatology").exists()


def test_fit_continues_after_the_disk_was_full(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fit_fields", Mock(side_effect=OSError(errno.ENOSPC, "no room")))
    with pytest.raises(DataError, match="the disk is full .*continues where it stopped"):
        store_climatology(conf, WINDOW)
    monkeypatch.undo()
    store_climatology(conf, WINDOW)
    reader, train, _ = open_data(conf)
    assert module.describe_mismatch(reader.path, WINDOW, train) is None
