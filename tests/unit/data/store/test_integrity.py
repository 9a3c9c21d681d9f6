"""Tests of verification and repair of a training store: only lost or damaged parts are found and written again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.config.sections.verification import ClimatologyConfig
from credit.data.climatology.stored import find_damaged_blocks, preprocess_climatology
from credit.data.reader import open_reader
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.store import integrity, store_writer
from credit.data.store.integrity import find_damage, require_undamaged
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import read_description
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W, TIMES, LENGTH = 8, 16, 32, 8
HOURS = np.arange(40) * 6


@pytest.fixture(autouse=True)
def _shorten_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)


@pytest.fixture
def conf(tmp_path: Path) -> DataConfig:
    """Write two files of 20 times with a mask, and a static field. The splits contain 32 times."""
    sst = random_fields(40, H, W, seed=2)
    sst[:, 1, 3:6] = np.nan
    fields = {"t": random_fields(40, H, W), "sst": sst}
    for number in range(2):
        span = slice(20 * number, 20 * number + 20)
        in_file = {name: values[span] for name, values in fields.items()}
        write_file(tmp_path / f"{number}.nc", in_file, HOURS[span])
    write_file(tmp_path / "ground.nc", {"ground": random_fields(H, W, seed=3)}, None)
    return make_config(
        [tmp_path / "0.nc", tmp_path / "1.nc", tmp_path / "ground.nc"],
        p2=["t"],
        forcing=["sst"],
        static=["ground"],
        variable_options={"sst": {"missing": "fill_mean"}},
        store=str(tmp_path / "store.zarr"),
    )


def chunk_path(conf: DataConfig, index: int) -> Path:
    return Path(conf.store) / "fields" / "c" / str(index) / "0" / "0" / "0"


def read_chunks(conf: DataConfig) -> dict[str, tuple[int, bytes]]:
    """Return the modification time and the content of every chunk of fields."""
    paths = {index: chunk_path(conf, index) for index in range(TIMES)}
    return {index: (path.stat().st_mtime_ns, path.read_bytes()) for index, path in paths.items()}


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_only_parts_with_lost_chunks_are_written_again(conf: DataConfig, compression: str) -> None:
    path = write_training_store(conf, PreprocessConfig(compression=compression))
    assert not find_damage(path) and not find_damage(path, deep=True)
    before = read_chunks(conf)
    meta = read_description(path)
    shutil.rmtree(chunk_path(conf, 3).parents[2])
    truncated_chunk = chunk_path(conf, 21)
    truncated_chunk.write_bytes(truncated_chunk.read_bytes()[:-7])
    damage = find_damage(path)
    assert damage.parts == [0, 2] and list(damage.times) == [3, 21]
    assert damage.times[3] == "its chunk is lost"
    assert damage.times[21].startswith("its chunk has")
    with pytest.raises(DataError) as error:
        require_undamaged(path)
    assert "2 of 32 times are lost or damaged, the first is 2000-01-01T18:00 (its chunk is lost)" in str(error.value)
    assert "they are in 2 parts of 8 times (0, 2); run credit preprocess CONFIG," in str(error.value)
    write_training_store(conf)
    assert not find_damage(path, deep=True)
    after = read_chunks(conf)
    assert {index: raw for index, (_, raw) in after.items()} == {index: raw for index, (_, raw) in before.items()}
    rewritten = {index for index in after if after[index][0] != before[index][0]}
    assert rewritten == {*range(8), *range(16, 24)}
    assert read_description(path) == meta


def test_deep_check_finds_damaged_chunks_of_the_correct_size(conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = read_chunks(conf)
    flip_bit(chunk_path(conf, 9))
    # A valid chunk with its checksum replaces another chunk.
    shutil.copyfile(chunk_path(conf, 30), chunk_path(conf, 29))
    assert not find_damage(path)
    damage = find_damage(path, deep=True)
    assert damage.parts == [1, 3] and "checksum" in damage.times[9]
    assert damage.times[29] == "its fields differ from the written fields"
    with pytest.raises(
        DataError, match=r"2000-01-03T06:00 cannot be read .* run credit preprocess CONFIG --deep, which"
    ):
        open_reader(conf).read(9)
    write_training_store(conf, deep=True)
    assert not find_damage(path, deep=True)
    after = read_chunks(conf)
    assert {index: raw for index, (_, raw) in after.items()} == {index: raw for index, (_, raw) in before.items()}


@pytest.mark.parametrize("name", ["done", "digest", "moments"])
@pytest.mark.parametrize("how", ["lost", "cut"])
def test_damaged_marks_digests_and_moments_are_repaired(conf: DataConfig, name: str, how: str) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    (file,) = [item for item in (path / name / "c" / "1").rglob("*") if item.is_file()] or [path / name / "c" / "1"]
    if how == "lost":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:5])
    deep = (name, how) == ("moments", "cut")
    damage = find_damage(path, deep)
    assert damage.parts == [1] and len(damage.times) == LENGTH
    write_training_store(conf, deep=deep)
    assert not find_damage(path, deep=True) and read_description(path) == meta


def test_lost_marks_are_an_error(conf: DataConfig) -> None:
    path = write_training_store(conf)
    (path / "done" / "c" / "1").unlink()
    with pytest.raises(DataError, match=r"8 of its times have lost their marks; run credit preprocess CONFIG"):
        open_reader(conf)


@pytest.mark.parametrize("name", ["time", "static_fields", "masks"])
@pytest.mark.parametrize("how", ["lost", "cut", "altered"])
def test_damaged_arrays_without_parts_are_repaired(conf: DataConfig, name: str, how: str) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    before = read_chunks(conf)
    array = zarr.open_group(path, mode="r+")[name]
    values = array[...]
    (file,) = [item for item in (path / name / "c").rglob("*") if item.is_file()]
    if how == "lost":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:5])
    else:
        array[(0,) * values.ndim] = values[(0,) * values.ndim] + 1
    damage = find_damage(path)
    assert name in damage.arrays and damage.parts == []
    write_training_store(conf)
    assert not find_damage(path) and read_description(path) == meta
    np.testing.assert_array_equal(zarr.open_group(path, mode="r")[name][...], values)
    assert read_chunks(conf) == before


def test_chunks_that_zarr_does_not_write_are_not_damage(tmp_path: Path) -> None:
    """A static field of zeros and a mask without masked cells contain only the fill value."""
    fields = {"t": random_fields(40, H, W), "sst": random_fields(40, H, W), "ground": np.zeros((H, W), np.float32)}
    write_file(tmp_path / "a.nc", fields, HOURS)
    conf = make_config(
        tmp_path / "a.nc",
        p2=["t"],
        forcing=["sst"],
        static=["ground"],
        variable_options={"sst": {"missing": "fill_mean"}},
        store=str(tmp_path / "store.zarr"),
    )
    path = write_training_store(conf)
    assert not (path / "static_fields" / "c").exists() and not (path / "masks" / "c").exists()
    assert not find_damage(path) and not find_damage(path, deep=True)


def test_bad_times_have_no_chunk_and_stay_bad(tmp_path: Path) -> None:
    t = random_fields(40, H, W)
    t[20, 0, 0] = np.nan
    write_file(tmp_path / "a.nc", {"t": t}, HOURS)
    conf = make_config(tmp_path / "a.nc", p2=["t"], store=str(tmp_path / "store.zarr"), on_bad_time="skip")
    path = write_training_store(conf)
    assert not chunk_path(conf, 20).exists() and not find_damage(path, deep=True)
    meta = read_description(path)
    for lost_index in (2, 18):
        chunk_path(conf, lost_index).unlink()
        write_training_store(conf)
        assert not find_damage(path) and read_description(path) == meta


def test_lost_array_description_is_an_error(conf: DataConfig) -> None:
    path = write_training_store(conf)
    (path / "fields" / "zarr.json").unlink()
    for action in (lambda: find_damage(path), lambda: open_reader(conf), lambda: write_training_store(conf)):
        with pytest.raises(DataError, match=r"description of its array fields is lost .*; restore .*fields/zarr.json"):
            action()


def test_repair_continues_after_a_kill(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    for lost_index in (3, 9):
        chunk_path(conf, lost_index).unlink()

    def interrupt(self: SourceReader, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SourceReader, "read_each", interrupt)
        write_training_store(conf)
    with pytest.raises(DataError, match="is not complete"):
        open_reader(conf)
    write_training_store(conf)
    assert not find_damage(path, deep=True) and read_description(path) == meta


def test_processes_check_for_damage_without_the_lock(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_training_store(conf)
    check_chunks = integrity._check_chunks
    lock = store_writer.build_lock_folder_path(path) / "create.lock"
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    is_free: list[bool] = []

    def check_chunks_and_try_lock(*arguments: object) -> dict[int, str]:
        # A lock of this process excludes only other processes.
        busy = lock.exists() and subprocess.run([sys.executable, "-c", program, str(lock)], check=False).returncode
        is_free.append(not busy)
        return check_chunks(*arguments)

    monkeypatch.setattr(integrity, "_check_chunks", check_chunks_and_try_lock)
    write_training_store(conf, deep=True)
    assert is_free == [True]
    # The process that marks damaged parts checks them again, and has the lock meanwhile.
    chunk_path(conf, 3).unlink()
    write_training_store(conf, deep=True)
    assert is_free == [True, True, False] and not find_damage(path, deep=True)


def test_kill_while_marking_does_not_lose_damage_found(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    fingerprint_files = SourceReader.fingerprint_files
    flip_bit(chunk_path(conf, 9))
    calls: list[int] = []

    def interrupt_second_call(self: SourceReader) -> dict:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fingerprint_files(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SourceReader, "fingerprint_files", interrupt_second_call)
        write_training_store(conf, deep=True)
    with pytest.raises(DataError, match="8 of its times have lost their marks"):
        open_reader(conf)
    write_training_store(conf)
    assert not find_damage(path, deep=True) and read_description(path) == meta


def test_fields_of_an_unfinished_store_are_not_compared(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("stopped")

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="stopped"):
        patch.setattr(store_writer.Moments, "of_fields", fail)
        write_training_store(conf)
    monkeypatch.setattr(integrity, "_build_deep_check", fail)
    assert write_training_store(conf, deep=True) == Path(conf.store)


def test_store_of_format_1_is_checked_by_size(conf: DataConfig) -> None:
    """Format 1 has all marks in one chunk, and no checksums or moments, so only sizes can be checked."""
    path = write_training_store(conf)
    group = zarr.open_group(path, mode="r+")
    meta = dict(group.attrs)["credit"]
    marks = group["done"][:]
    for name in ("done", "digest", "moments"):
        del group[name]
    group.create_array("done", data=marks, chunks=marks.shape)
    meta.pop("content")
    group.attrs["credit"] = meta | {"format": 1}
    damage = find_damage(path, deep=True)
    assert not damage and len(damage.unchecked) == 2
    chunk_path(conf, 3).unlink()
    assert list(find_damage(path).times) == [3]
    with pytest.raises(DataError, match="format 1 cannot be written in parts: name another data.store"):
        write_training_store(conf)


@pytest.mark.parametrize("redo_changed", [False, True])
def test_changed_sources_of_format_1_are_refused(tmp_path: Path, conf: DataConfig, redo_changed: bool) -> None:
    """Parts of format 1 cannot be written again, so the message does not recommend --redo-changed."""
    group = zarr.open_group(write_training_store(conf), mode="r+")
    group.attrs["credit"] = dict(group.attrs)["credit"] | {"format": 1}
    write_file(tmp_path / "ground.nc", {"ground": random_fields(H, W, seed=4)}, None)
    with pytest.raises(DataError) as error:
        write_training_store(conf, redo_changed=redo_changed)
    assert "new or changed since then: 1 source file" in str(error.value)
    assert str(error.value).split("ground.nc)")[1] == (
        "; a store of format 1 cannot be written in parts: name another data.store and run credit preprocess, which "
        "does not change this store"
    )


def test_redo_changed_writes_changed_sources_again(tmp_path: Path, conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = read_chunks(conf)
    content = read_description(path)["content"]
    t = random_fields(20, H, W, seed=7)
    sst = random_fields(20, H, W, seed=8)
    sst[:, 1, 3:6] = np.nan
    write_file(tmp_path / "1.nc", {"t": t, "sst": sst}, HOURS[20:])
    with pytest.raises(DataError, match=r"new or changed since then: 1 source file \(.*1\.nc\); run .* --redo-changed"):
        write_training_store(conf)
    assert read_chunks(conf) == before and read_description(path)["complete"]
    write_training_store(conf, redo_changed=True)
    after = read_chunks(conf)
    sources = open_sources(conf)
    store_reader = open_reader(conf)
    # The second file starts at time 20, which is in the third part.
    assert {index for index in after if after[index][0] != before[index][0]} == set(range(16, 32))
    for index, time in enumerate(store_reader.times):
        np.testing.assert_array_equal(store_reader.read(index), sources.read(sources.index_of(int(time))))
    assert read_description(path)["content"] != content
    new_conf = conf.model_copy(update={"store": str(tmp_path / "fresh.zarr")})
    write_training_store(new_conf)
    assert store_reader.statistics.to_dict() == open_reader(new_conf).statistics.to_dict()
    assert not find_damage(path, deep=True)
    write_training_store(conf)


def test_redo_changed_writes_static_fields_again(tmp_path: Path, conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = read_chunks(conf)
    ground = random_fields(H, W, seed=9)
    write_file(tmp_path / "ground.nc", {"ground": ground}, None)
    with pytest.raises(DataError, match="--redo-changed"):
        write_training_store(conf)
    write_training_store(conf, redo_changed=True)
    np.testing.assert_array_equal(open_reader(conf).static()[0], ground)
    assert read_chunks(conf) == before and not find_damage(path)


def test_file_outside_the_splits_may_change(tmp_path: Path, conf: DataConfig) -> None:
    sources = [{"path": str(tmp_path / "*.nc")}]
    conf = DataConfig.model_validate({**conf.model_dump(), "sources": sources})
    path = write_training_store(conf)
    later = {"t": random_fields(4, H, W), "sst": random_fields(4, H, W)}
    later["sst"][:, 1, 3:6] = np.nan
    write_file(tmp_path / "later.nc", later, range(960, 984, 6))
    write_training_store(conf)
    assert str(tmp_path / "later.nc") in read_description(path)["sources"]
    os.utime(tmp_path / "later.nc", ns=(0, 0))
    write_training_store(conf)
    assert read_description(path)["complete"]


def test_climatology_is_removed_if_fields_change(tmp_path: Path, conf: DataConfig) -> None:
    path = write_training_store(conf)
    (path / "climatology").mkdir()
    chunk_path(conf, 3).unlink()
    write_training_store(conf)
    assert (path / "climatology").exists(), "the fields are the same"
    t = random_fields(20, H, W, seed=7)
    sst = random_fields(20, H, W, seed=8)
    sst[:, 1, 3:6] = np.nan
    write_file(tmp_path / "1.nc", {"t": t, "sst": sst}, HOURS[20:])
    write_training_store(conf, redo_changed=True)
    assert not (path / "climatology").exists()


@pytest.mark.parametrize("how", ["lost", "flipped"])
def test_damaged_blocks_of_a_climatology_are_fitted_again(conf: DataConfig, how: str) -> None:
    path = write_training_store(conf)
    climatology_config = ClimatologyConfig(harmonics=0, by_hour=True)
    preprocess_climatology(conf, PreprocessConfig(), climatology_config, progress=False)
    folder = path / "climatology"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert find_damaged_blocks(path) == find_damaged_blocks(path, deep=True) == []
    file = folder / "fields" / "c" / "2" / "0" / "0" / "0" / "0"
    deep = how == "flipped"
    if deep:
        flip_bit(file)
    else:
        file.unlink()
    assert find_damaged_blocks(path, deep) == [2]
    preprocess_climatology(conf, PreprocessConfig(), climatology_config, progress=False, deep=deep)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
