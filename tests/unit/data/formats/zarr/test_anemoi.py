"""Tests of reading stores of anemoi-datasets, against the fields that anemoi-datasets reads."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.config.sections.source import SourceConfig
from credit.data.formats.files import open_file
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import open_store, read_description
from credit.errors import DataError
from tests.unit.data.archives_on_the_fly import ArchiveServer
from tests.unit.data.files_on_the_fly import make_config

ARCHIVE = Path(__file__).parents[4] / "data" / "anemoi" / "speedy_anemoi.zip"
MISSING_POSITION = 7
SPLITS = {
    "train": ["2000-01-01", "2000-01-02T00:00"],
    "valid": ["2000-01-02T06:00", "2000-01-02T12:00"],
    "test": ["2000-01-03T00:00", "2000-01-03T06:00"],
}

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "speedy_anemoi.zarr"


def open_dataset(path: Path, **options: object) -> xr.Dataset:
    return open_file(path, SourceConfig(path=str(path), **options))


def change_attributes(store: Path, **changes: object) -> None:
    file = store / ".zattrs"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_fields_equal_those_that_anemoi_datasets_reads(store: Path, tmp_path: Path) -> None:
    dataset = open_dataset(store)
    reference = np.load(tmp_path / "read_by_anemoi.npz")
    assert len(reference.files) == 27
    for key in reference.files:
        name, position = key.split()
        index = int(position) - (int(position) > MISSING_POSITION)
        # The surface geopotential has the same parameter name as the geopotential on levels.
        name = "geopotential_at_surface" if name == "z" else name
        values = dataset[name].isel(time=index, number=0).values
        np.testing.assert_array_equal(values.ravel(), reference[key])
    for level in (250, 500, 850):
        on_levels = dataset["z"].isel(number=0).sel(level_z=level)
        np.testing.assert_array_equal(on_levels, dataset[f"z_{level}"].isel(number=0))
    np.testing.assert_array_equal(dataset["t2m"], dataset["2t"])
    assert dataset["t"].attrs == {"units": "K", "standard_name": "air_temperature"}


def test_lazy_indexing_equals_indexing_of_loaded_fields(store: Path) -> None:
    dataset = open_dataset(store)
    fields = dataset["z"].load()
    lazy = open_dataset(store)["z"]
    for index in (
        {"time": 3},
        {"time": slice(2, 6), "level_z": [2, 0]},
        {"time": [5, 1], "number": 0, "level_z": 1},
        {"time": 0, "latitude": 2, "longitude": [3, 1]},
        {"time": slice(0, 2), "number": 0, "latitude": [4, 2], "longitude": 5},
    ):
        np.testing.assert_array_equal(lazy.isel(index), fields.isel(index))


def test_a_missing_time_is_a_gap(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf = make_config(
        store, p3=["z"], p2=["t2m", "t_850"], static=["land_sea_mask"], levels=[500, 850], splits=SPLITS,
        split_gap="6h", store=str(tmp_path / "store.zarr"),
    )  # fmt: skip
    write_training_store(conf, progress=False)
    assert "1 of 10 times are left out, because the store lists them as missing; the first is 2000-01-02T18:00" in (
        caplog.text
    )
    assert read_description(Path(conf.store))["gaps"] == [["2000-01-02T12:00", "2000-01-03T00:00"]]
    reader = open_store(conf.store)
    assert len(reader.times) == 9
    dataset = open_dataset(store).isel(number=0, time=-1)
    expected = [dataset["z_500"], dataset["z_850"], dataset["t2m"], dataset["t_850"]]
    np.testing.assert_array_equal(reader.read(8), expected)


def test_over_http_each_chunk_is_fetched_once(store: Path, tmp_path: Path) -> None:
    with ArchiveServer(tmp_path) as server:
        conf = make_config(
            f"{server.url}/speedy_anemoi.zarr", p3=["z"], p2=["t2m"], levels=[500, 850], splits=SPLITS,
            split_gap="6h", store=str(tmp_path / "store.zarr"),
        )  # fmt: skip
        write_training_store(conf, progress=False)
        assert set(server.count_chunks().values()) == {1}
        assert len(server.count_chunks()) == 9
    np.testing.assert_array_equal(
        open_store(conf.store).read(0)[2], open_dataset(store)["2t"].isel(time=0, number=0).values
    )


def test_names_and_units_do_not_need_metadata_of_variables(store: Path) -> None:
    dataset_with_metadata = open_dataset(store)
    change_attributes(store, variables_metadata={})
    dataset = open_dataset(store)
    assert set(dataset.variables) == set(dataset_with_metadata.variables)
    for name in dataset_with_metadata.data_vars:
        np.testing.assert_array_equal(dataset[name], dataset_with_metadata[name])
    assert dataset["z"].attrs["units"] == "m2 s-2"
    assert dataset["msl"].attrs["units"] == "Pa"


def test_a_member_is_selected(store: Path, tmp_path: Path) -> None:
    group = zarr.open_group(store, mode="r+")
    data = group["data"][:]
    attributes = dict(group["data"].attrs)
    del group["data"]
    members = group.create_array("data", shape=(10, 9, 2, 128), chunks=(1, 9, 1, 128), dtype="f4", fill_value=np.nan)
    members.attrs.update(attributes)
    members[...] = np.concatenate([data, data + 1], axis=2)
    for number in (0, 1):
        conf = make_config([], p2=["msl"], splits=SPLITS, sources=[{"path": str(store), "select": {"number": number}}])
        np.testing.assert_array_equal(open_sources(conf).read(0)[0].ravel(), data[0, 2, 0] + number)
    with pytest.raises(DataError, match=r"number \(2\) of msl is not time.*select: \{number: 0\}"):
        open_sources(make_config(store, p2=["msl"], splits=SPLITS))


def test_other_grids_and_layouts_are_refused(store: Path) -> None:
    change_attributes(store, field_shape=[128], resolution="o96")
    with pytest.raises(DataError, match=r"zarr: its grid \(o96, 128 cells.*reduced Gaussian grid.*regular grid"):
        open_dataset(store)
    # A rotated grid has a shape, but no common latitude in a row.
    change_attributes(store, field_shape=[8, 16])
    group = zarr.open_group(store, mode="r+")
    group["latitudes"][3] = 50.0
    with pytest.raises(DataError, match="is not a regular latitude-longitude grid"):
        open_dataset(store)
    group["data"].attrs["_ARRAY_DIMENSIONS"] = ["time", "variable", "ensemble", "step"]
    with pytest.raises(DataError, match="only gridded stores of anemoi-datasets"):
        open_dataset(store)
