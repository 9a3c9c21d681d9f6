"""Tests of the training store: the values of the sources, and errors for incomplete stores and other configs."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.config.sections.data import DataConfig
from credit.data.reader import open_reader
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.store import store_writer
from credit.data.store.preprocess import write_training_store
from credit.data.store.statistics import Statistics, fit_statistics
from credit.data.store.store_reader import is_store_from_sources, open_store
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
# Six-hourly from 2000-01-01 to 2000-01-10. The split train has 16 of 40 times, and the splits extend over 32.
HOURS = np.arange(40) * 6


@pytest.fixture
def conf(tmp_path: Path) -> DataConfig:
    """Write a file with levels, a mask, a static field and packed values, and return its config."""
    sst = random_fields(40, H, W, seed=2)
    sst[:, 1, 3:6] = np.nan
    fields = {
        "t": random_fields(40, 2, H, W),
        "t2m": np.round(random_fields(40, H, W, seed=1) * 2) / 2,
        "sst": sst,
        "ground": random_fields(H, W),
    }
    write_file(tmp_path / "a.nc", fields, HOURS, levels=[500, 850], packed={"t2m": 0.5})
    return make_conf(tmp_path)


def make_conf(tmp_path: Path, **options: object) -> DataConfig:
    """Return the config of `conf` with other options."""
    settings = {
        "p3": ["t"],
        "p2": ["t2m"],
        "forcing": ["sst"],
        "static": ["ground"],
        "levels": [850, 500],
        "variable_options": {"sst": {"missing": "fill_mean"}},
        "store": str(tmp_path / "store.zarr"),
    }
    return make_config(tmp_path / "a.nc", **(settings | options))


def require_equal_statistics(statistics: Statistics, expected: Statistics) -> None:
    """Require equal statistics up to rounding, because a store adds its moments in another order than the sources."""
    values, expected_values = statistics.to_dict(), expected.to_dict()
    assert values.keys() == expected_values.keys()
    for key, value in expected_values.items():
        is_exact = key == "names" or not value
        assert values[key] == (value if is_exact else pytest.approx(value, rel=1e-12)), key


def test_store_equals_the_sources(conf: DataConfig) -> None:
    path = write_training_store(conf)
    sources = open_sources(conf)
    store_reader = open_reader(conf)
    assert len(store_reader.times) == 32
    assert store_reader.calendar == sources.calendar
    assert store_reader.channels == sources.channels
    for index, time in enumerate(store_reader.times):
        np.testing.assert_array_equal(store_reader.read(index), sources.read(sources.index_of(int(time))))
    np.testing.assert_array_equal(store_reader.static(), sources.static())
    np.testing.assert_array_equal(store_reader.masks["sst"], sources.masks["sst"])
    assert store_reader.attributes == sources.attributes
    assert store_reader.grid.describe_mismatch(sources.grid) is None
    np.testing.assert_array_equal(store_reader.grid.lat_bounds, sources.grid.lat_bounds)
    first = sources.calendar.parse("2000-01-01")
    last = sources.calendar.parse_period_end("2000-01-04")
    source_statistics = fit_statistics(sources, first, last, 360)
    require_equal_statistics(store_reader.statistics, source_statistics)
    assert source_statistics.count.tolist() == [16 * H * W] * 3 + [16 * (H * W - 3), H * W]
    assert open_store(path).channels == conf.channel_map()
    assert store_reader.index_of(int(store_reader.times[5])) == 5
    assert store_reader.index_of(0) is None
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(store_reader)).read(3), store_reader.read(3))


def test_other_tools_open_the_store(conf: DataConfig) -> None:
    write_training_store(conf)
    with xr.open_zarr(conf.store, consolidated=False, chunks=None) as dataset:
        assert dataset["fields"].dims == ("time", "channel", "latitude", "longitude")
        assert str(dataset["time"].values[1]) == "2000-01-01T06:00:00.000000000"
        assert dataset["fields"].attrs["channel"] == ["t850", "t500", "t2m", "sst"]
        assert dataset["channel"].values.tolist() == ["t850", "t500", "t2m", "sst"]
        assert dataset["static_channel"].values.tolist() == ["ground"]
        selected = dataset["fields"].sel(channel="t2m", time="2000-01-03T12:00")
        np.testing.assert_array_equal(selected, open_reader(conf).read(10)[2])


def test_store_without_names_of_channels_is_read(conf: DataConfig) -> None:
    """Versions up to 0.14 wrote no names of channels."""
    path = write_training_store(conf)
    expected = open_reader(conf).read(7)
    for name in ("channel", "static_channel"):
        shutil.rmtree(path / name)
    np.testing.assert_array_equal(open_reader(conf).read(7), expected)
    assert write_training_store(conf) == path
    np.testing.assert_array_equal(open_reader(conf).read(7), expected)


def test_missing_store_is_an_error(tmp_path: Path, conf: DataConfig) -> None:
    with pytest.raises(DataError, match="does not exist; run credit preprocess"):
        open_reader(conf)
    Path(conf.store).mkdir()
    with pytest.raises(DataError, match="is not a training store"):
        open_reader(conf)
    with pytest.raises(DataError, match="is not a training store"):
        write_training_store(conf)
    with pytest.raises(DataError, match="data.store: not set"):
        write_training_store(make_conf(tmp_path, store=None))
    assert isinstance(open_reader(make_conf(tmp_path, store=None)), SourceReader)


def test_writing_continues_after_a_full_disk(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    num_written = 0

    def raise_if_full(array: object, file: Path, fields_CHW: np.ndarray) -> None:
        nonlocal num_written
        num_written += 1
        if num_written > 7:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_chunk(array, file, fields_CHW)

    write_chunk = store_writer.write_chunk
    with monkeypatch.context() as patch:
        patch.setattr(store_writer, "write_chunk", raise_if_full)
        with pytest.raises(
            DataError, match=r"store\.zarr: the disk is full .* free\); free some space and run the same"
        ):
            write_training_store(conf)
    with pytest.raises(DataError, match="not complete"):
        open_reader(conf)
    write_training_store(conf)
    assert len(open_reader(conf).times) == 32


def test_missing_disk_space_is_detected_before_writing(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 2**20))
    with pytest.raises(DataError, match=r"needs up to 16\.1 MiB more, but only 1\.0 MiB are free"):
        write_training_store(conf)
    assert not Path(conf.store).exists()


def test_path_that_cannot_be_written_is_an_error(tmp_path: Path, conf: DataConfig) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_training_store(make_conf(tmp_path, store=str(tmp_path / "file" / "store.zarr")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"p2": []}, "channels: prognostic: without t2m"),
        ({"levels": [500]}, "channels: prognostic: without t850"),
        ({"levels": [500, 850]}, "in a different order"),
        ({"variable_options": {}}, "data.variable_options.sst.missing: fill_mean in the store, error in the config"),
        ({"timestep": "12h"}, "data.timestep: 360 min in the store, 720 min in the config"),
        ({"sources": [{"path": "elsewhere/*.nc"}]}, r"data.sources: .*a\.nc.* in the store, .*elsewhere/\*\.nc"),
    ],
)
def test_a_store_of_another_config_is_refused(tmp_path: Path, conf: DataConfig, options: dict, words: str) -> None:
    write_training_store(conf)
    other_conf = make_conf(tmp_path, **options)
    for action in (open_reader, write_training_store):
        with pytest.raises(DataError, match=words) as error_info:
            action(other_conf)
        text = str(error_info.value)
        assert "name another data.store and run credit preprocess, which does not change this store" in text


def test_settings_that_do_not_affect_the_store_may_change(tmp_path: Path, conf: DataConfig) -> None:
    write_training_store(conf)
    other_conf = make_conf(
        tmp_path, forcing=["sst", "sin_year"], input_order=["static", "prognostic", "dynamic_forcing"]
    )
    reader = open_reader(other_conf)
    assert reader.channels == other_conf.channel_map()
    assert reader.read(0).shape[0] == 4


def test_another_training_period_needs_new_statistics_only(
    tmp_path: Path, conf: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_training_store(conf)
    splits = {"train": ["2000-01-01", "2000-01-03"], "valid": ["2000-01-06"] * 2, "test": ["2000-01-08"] * 2}
    other_conf = make_conf(tmp_path, splits=splits)
    with pytest.raises(DataError, match=r"statistics of .* 2000-01-01T00:00\.\.2000-01-04T23:59.*keeps the fields"):
        open_reader(other_conf)
    monkeypatch.setattr(SourceReader, "read", None)
    write_training_store(other_conf)
    assert open_reader(other_conf).statistics.count[0] == 12 * H * W


def test_a_transform_needs_new_statistics_only(
    tmp_path: Path, conf: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_training_store(conf)
    old_reader = open_reader(conf)
    other_conf = make_conf(tmp_path, transforms={"t2m": {"kind": "sqrt"}})
    with pytest.raises(DataError, match=r"data.transforms are none, but the config has .*sqrt.*keeps the fields"):
        open_reader(other_conf)
    monkeypatch.setattr(SourceReader, "read", None)
    write_training_store(other_conf)
    reader = open_reader(other_conf)
    row = [channel.name for channel in reader.channels.time_varying_stored].index("t2m")
    np.testing.assert_array_equal(reader.read(0), old_reader.read(0))
    values = np.sqrt(np.stack([reader.read(index)[row] for index in range(16)]).astype(np.float64))
    statistics = reader.statistics.select(["t2m"])
    assert statistics.mean[0] == pytest.approx(values.mean(), rel=1e-6)
    assert statistics.tendency_std[0] == pytest.approx(np.diff(values, axis=0).std(), rel=1e-4)
    require_equal_statistics(reader.statistics.select(["t850"]), old_reader.statistics.select(["t850"]))


def test_splits_beyond_the_store_are_refused(tmp_path: Path, conf: DataConfig) -> None:
    write_training_store(conf)
    splits = {"train": ["2000-01-01", "2000-01-04"], "valid": ["2000-01-06"] * 2, "test": ["2000-01-09"] * 2}
    other_conf = make_conf(tmp_path, splits=splits)
    with pytest.raises(DataError, match=r"contains 2000-01-01T00:00\.\.2000-01-08T23:59, but data.splits need"):
        open_reader(other_conf)
    with pytest.raises(
        DataError, match=r"in the store 2000-01-01T00:00\.\.2000-01-08T18:00 \(32 times\), in the splits"
    ):
        write_training_store(other_conf)


def test_changed_sources_are_refused(tmp_path: Path, conf: DataConfig) -> None:
    write_training_store(conf)
    os.utime(tmp_path / "a.nc", ns=(0, 0))
    assert open_reader(conf) is not None
    with pytest.raises(DataError, match=r"new or changed since then: 1 source file \(.*a\.nc\)"):
        write_training_store(conf)


def test_sources_on_a_different_grid_are_refused(tmp_path: Path, conf: DataConfig) -> None:
    write_training_store(conf)
    fields = {"t": random_fields(40, 2, 4, 8), "t2m": random_fields(40, 4, 8), "sst": random_fields(40, 4, 8)}
    write_file(tmp_path / "a.nc", fields | {"ground": random_fields(4, 8)}, HOURS, levels=[500, 850])
    with pytest.raises(DataError, match="does not match the sources: 8 x 16 cells against 4 x 8"):
        write_training_store(conf)


def test_splits_without_data_are_refused(tmp_path: Path, conf: DataConfig) -> None:
    splits = {"train": ["1990-01-01", "1990-01-04"], "valid": ["1990-01-06"] * 2, "test": ["1990-01-08"] * 2}
    with pytest.raises(DataError, match=r"the sources have no time in them; 2000-01-01T00:00\.\.2000-01-10T18:00"):
        write_training_store(make_conf(tmp_path, splits=splits))
    assert not Path(conf.store).exists()


def test_bad_value_in_the_sources_leaves_the_store_incomplete(tmp_path: Path) -> None:
    t = random_fields(40, H, W)
    t[20, 0, 0] = np.nan
    write_file(tmp_path / "a.nc", {"t": t}, HOURS)
    conf = make_config(tmp_path / "a.nc", p2=["t"], store=str(tmp_path / "store.zarr"))
    with pytest.raises(DataError, match="t at 2000-01-06T00:00: 1 of 128 values are missing"):
        write_training_store(conf)
    with pytest.raises(DataError, match="not complete"):
        open_reader(conf)


def test_lost_and_damaged_chunks_are_errors(conf: DataConfig) -> None:
    write_training_store(conf)
    chunks = Path(conf.store) / "fields" / "c"
    shutil.rmtree(chunks / "3")
    (damaged_chunk,) = [path for path in (chunks / "4").rglob("*") if path.is_file()]
    damaged_chunk.write_bytes(damaged_chunk.read_bytes()[:100])
    reader = open_reader(conf)
    with pytest.raises(DataError, match=r"the fields of 2000-01-01T18:00 cannot be read \(its chunk is lost\)"):
        reader.read(3)
    with pytest.raises(DataError, match="the fields of 2000-01-02T00:00 cannot be read"):
        reader.read(4)
    assert np.isfinite(reader.read(5)[:3]).all()


def test_store_with_a_tilde_in_its_sources_is_read(
    conf: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions up to 0.14 kept `~` in the description of the store."""
    monkeypatch.setenv("HOME", str(tmp_path))
    store = write_training_store(conf)
    group = zarr.open_group(store, mode="r+")
    description = dict(group.attrs)["credit"]
    for source in description["identity"]["data.sources"]:
        source["path"] = str(source["path"]).replace(str(tmp_path), "~")
    assert "~" in str(description["identity"])
    group.attrs["credit"] = description
    assert is_store_from_sources(conf)
    open_store(store)
