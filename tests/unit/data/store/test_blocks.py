"""Tests of fields divided into blocks: the values are the same, and a reader of a part reads only its blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.config.sections.data import BlocksConfig, DataConfig, PreprocessConfig
from credit.data.part_reader import GridPartReader
from credit.data.reader import open_reader
from credit.data.store import store_writer
from credit.data.store.integrity import find_damage
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import StoreReader, read_description
from credit.errors import DataError
from credit.parallel.domain.division import divide_field
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

# No number of blocks above 1 divides 37 rows, so the last blocks extend beyond the grid.
H, W, TIMES = 37, 48, 32
HOURS = np.arange(40) * 6


@pytest.fixture(autouse=True)
def _shorten_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", 8)


@pytest.fixture
def conf(tmp_path: Path) -> DataConfig:
    """Write a file of 40 times with two variables, one of them masked. The splits contain 32 times."""
    sst = random_fields(40, H, W, seed=2)
    sst[:, 1, 3:6] = np.nan
    write_file(tmp_path / "0.nc", {"t": random_fields(40, H, W), "sst": sst}, HOURS)
    return make_config(
        [tmp_path / "0.nc"],
        p2=["t"],
        forcing=["sst"],
        variable_options={"sst": {"missing": "fill_mean"}},
        store=str(tmp_path / "store.zarr"),
    )


def write_store(conf: DataConfig, name: str, lat: int, lon: int, compression: str = "none") -> DataConfig:
    """Write a store with blocks next to the store of `conf`, and return a config with the new store."""
    conf = conf.model_copy(update={"store": str(Path(conf.store).parent / name)})
    settings = PreprocessConfig(blocks=BlocksConfig(lat=lat, lon=lon), compression=compression)
    write_training_store(conf, settings)
    return conf


def build_field_path(conf: DataConfig, index: int) -> Path:
    return Path(conf.store) / "fields" / "c" / str(index) / "0" / "0" / "0"


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def read_block_offset(conf: DataConfig, index: int, row: int, column: int) -> int:
    """Return the byte offset of a block in the file of a time, from the index at the start of the file."""
    blocks = open_reader(conf).num_blocks
    entries = np.frombuffer(build_field_path(conf, index).read_bytes()[: 16 * blocks[0] * blocks[1]], dtype="<u8")
    return int(entries.reshape(*blocks, 2)[row, column, 0])


@pytest.fixture
def read_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the sizes in bytes of all reads of fields."""
    sizes: list[int] = []
    original_preadv = os.preadv

    def record_size(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(original_preadv(descriptor, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", record_size)
    yield sizes
    monkeypatch.undo()


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("blocks", [(4, 1), (1, 4), (3, 5)])
def test_values_equal_those_of_a_store_without_blocks(
    conf: DataConfig, blocks: tuple[int, int], compression: str
) -> None:
    """The package, zarr and xarray read the same values. The checksum of the content is the same, too."""
    plain_conf = write_store(conf, "plain.zarr", 1, 1, compression)
    divided_conf = write_store(conf, "divided.zarr", *blocks, compression)
    assert len(list((Path(divided_conf.store) / "fields" / "c" / "3").rglob("*"))) == 3
    plain_reader = open_reader(plain_conf)
    reader = open_reader(divided_conf)
    assert plain_reader.num_blocks == (1, 1) and reader.num_blocks == blocks
    expected = np.stack([plain_reader.read(index) for index in range(TIMES)])
    np.testing.assert_array_equal(np.stack([reader.read(index) for index in range(TIMES)]), expected)
    np.testing.assert_array_equal(zarr.open_group(divided_conf.store, mode="r")["fields"][...], expected)
    np.testing.assert_array_equal(xr.open_zarr(divided_conf.store, consolidated=False)["fields"].values, expected)
    assert read_description(Path(divided_conf.store))["content"] == read_description(Path(plain_conf.store))["content"]
    assert not find_damage(Path(divided_conf.store), deep=True)
    rows, columns = slice(9, 31), slice(5, 26)
    for complete_reader in (reader, plain_reader):
        part = GridPartReader(complete_reader, rows, columns)
        np.testing.assert_array_equal(part.read(7), expected[7][:, rows, columns])
        targets = [None, np.empty((22, 21), dtype=np.float32)]
        part.read_into(8, targets)
        np.testing.assert_array_equal(targets[1], expected[8][1, rows, columns])


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (4, 1), (2, 2), (1, 4)])
def test_a_rank_reads_only_its_blocks(conf: DataConfig, read_sizes: list[int], shape: tuple[int, int]) -> None:
    """If blocks and parts of ranks are the same, each of n ranks reads the index and 1/n of the rest of a file."""
    divided_conf = write_store(conf, "divided.zarr", *shape)
    reader = open_reader(divided_conf)
    complete_fields = reader.read(5)
    division = divide_field((H, W), shape)
    file_bytes = build_field_path(divided_conf, 5).stat().st_size
    index_bytes = 16 * division.num_ranks + 4
    for rank in range(division.num_ranks):
        part = division.owned(rank)
        read_sizes.clear()
        fields = GridPartReader(reader, *part.slices).read(5)
        np.testing.assert_array_equal(fields, complete_fields[:, *part.slices])
        assert sum(read_sizes) == index_bytes + (file_bytes - index_bytes) // division.num_ranks


def test_a_part_across_blocks_reads_those_that_it_overlaps(conf: DataConfig, read_sizes: list[int]) -> None:
    divided_conf = write_store(conf, "divided.zarr", 4, 2)
    reader = open_reader(divided_conf)
    read_sizes.clear()
    # Blocks have 10 x 24 cells: rows 8 to 11 overlap two of four, columns 0 to 23 one of two.
    GridPartReader(reader, slice(8, 12), slice(0, 24)).read(5)
    assert sum(read_sizes) == 16 * 8 + 4 + 2 * (2 * 10 * 24 * 4 + 4)


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_damaged_block_is_found_and_repaired(conf: DataConfig, compression: str) -> None:
    """Only a reader of the block fails. The deep check finds the damage, and preprocess writes the time again."""
    divided_conf = write_store(conf, "divided.zarr", 2, 2, compression)
    reader = open_reader(divided_conf)
    assert isinstance(reader, StoreReader)
    expected = reader.read(9)
    flip_bit(build_field_path(divided_conf, 9), read_block_offset(divided_conf, 9, 1, 0) + 40)
    upper = GridPartReader(reader, slice(0, 19), slice(0, 48))
    np.testing.assert_array_equal(upper.read(9), expected[:, :19])
    lower = GridPartReader(reader, slice(19, 37), slice(0, 24))
    with pytest.raises(DataError, match=r"divided.zarr: the fields of 2000-01-03.*block 1, 0 of rows.*checksum"):
        lower.read(9)
    path = Path(divided_conf.store)
    assert not find_damage(path, deep=False)
    assert list(find_damage(path, deep=True).times) == [9]
    settings = PreprocessConfig(blocks=BlocksConfig(lat=2, lon=2), compression=compression)
    write_training_store(divided_conf, settings, deep=True)
    np.testing.assert_array_equal(open_reader(divided_conf).read(9), expected)
    assert not find_damage(path, deep=True)


def test_quick_check_finds_lost_truncated_and_damaged_files(conf: DataConfig) -> None:
    """Preprocess rewrites the files in which the quick check finds damage."""
    divided_conf = write_store(conf, "divided.zarr", 3, 1)
    reader = open_reader(divided_conf)
    expected = {index: reader.read(index) for index in (2, 11, 20)}
    build_field_path(divided_conf, 2).unlink()
    truncated_file = build_field_path(divided_conf, 11)
    truncated_file.write_bytes(truncated_file.read_bytes()[:-100])
    flip_bit(build_field_path(divided_conf, 20), 3)
    with pytest.raises(DataError, match="index of its blocks: stored and computed checksum"):
        reader.read(20)
    faults = find_damage(Path(divided_conf.store), deep=False).times
    assert set(faults) == {2, 11, 20}
    write_training_store(divided_conf, PreprocessConfig(blocks=BlocksConfig(lat=3)))
    for index, fields in expected.items():
        np.testing.assert_array_equal(open_reader(divided_conf).read(index), fields)


def test_stores_with_other_blocks_have_separate_copies(conf: DataConfig, tmp_path: Path) -> None:
    """Stores with the same values and other blocks have separate copies. A lost file is read from its copy."""
    folders = set()
    for name, blocks in (("a", (1, 1)), ("b", (2, 2))):
        (tmp_path / name).mkdir()
        store_conf = write_store(conf, f"{name}/store.zarr", *blocks)
        cached_conf = store_conf.model_copy(update={"cache": "disk", "cache_folder": str(tmp_path / "copies")})
        part = GridPartReader(open_reader(cached_conf), slice(3, 25), slice(0, 20))
        expected = part.read(4)
        build_field_path(store_conf, 4).unlink()
        np.testing.assert_array_equal(part.read(4), expected)
        folders |= {path.name for path in (tmp_path / "copies").iterdir()}
    assert len(folders) == 2


def test_number_of_blocks_may_exceed_the_rows() -> None:
    assert BlocksConfig(lat=100, lon=3).find_block_and_padded_shape((37, 48)) == ((1, 16), (37, 48))
    assert BlocksConfig(lat=4, lon=1).find_block_and_padded_shape((9, 48)) == ((3, 48), (9, 48))


def test_a_block_without_values_is_written(tmp_path: Path) -> None:
    """If all variables are ocean variables, a block over land has no values."""
    sst = random_fields(40, H, W)
    sst[:, :20] = np.nan
    write_file(tmp_path / "0.nc", {"sst": sst}, HOURS)
    options = {"sst": {"missing": "fill_mean"}}
    conf = make_config([tmp_path / "0.nc"], p2=["sst"], variable_options=options, store=str(tmp_path / "store.zarr"))
    conf = write_store(conf, "blocks.zarr", 4, 1)
    fields_CHW = open_reader(conf).read(0)
    assert np.isnan(fields_CHW[:, :20]).all()
    np.testing.assert_array_equal(fields_CHW[0, 20:], sst[0, 20:])
