"""Verification and repair of a training store: what is lost is found, and written again, and nothing else is."""

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
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)


@pytest.fixture
def conf(tmp_path: Path) -> DataConfig:
    """Write two files of 20 times, with a mask and a static field; 32 times are in the splits."""
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


def chunk_states(conf: DataConfig) -> dict[str, tuple[int, bytes]]:
    """Return the time of change and the bytes of every chunk of fields."""
    paths = {index: chunk_path(conf, index) for index in range(TIMES)}
    return {index: (path.stat().st_mtime_ns, path.read_bytes()) for index, path in paths.items()}


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("compression", ["lz4", "none"])
def test_lost_chunks_are_found_and_only_their_parts_written_again(conf: DataConfig, compression: str) -> None:
    path = write_training_store(conf, PreprocessConfig(compression=compression))
    assert not find_damage(path) and not find_damage(path, deep=True)
    before = chunk_states(conf)
    meta = read_description(path)
    shutil.rmtree(chunk_path(conf, 3).parents[2])
    short = chunk_path(conf, 21)
    short.write_bytes(short.read_bytes()[:-7])
    damage = find_damage(path)
    assert damage.parts == [0, 2] and list(damage.times) == [3, 21]
    assert damage.times[3] == "its chunk is lost"
    assert damage.times[21].startswith("its chunk has")
    with pytest.raises(DataError) as caught:
        require_undamaged(path)
    assert "2 of 32 times are lost or damaged, the first is 2000-01-01T18:00 (its chunk is lost)" in str(caught.value)
    assert "they are in 2 parts of 8 times (0, 2); run credit preprocess CONFIG," in str(caught.value)
    write_training_store(conf)
    assert not find_damage(path, deep=True)
    after = chunk_states(conf)
    assert {index: raw for index, (_, raw) in after.items()} == {index: raw for index, (_, raw) in before.items()}
    rewritten = {index for index in after if after[index][0] != before[index][0]}
    assert rewritten == {*range(8), *range(16, 24)}
    assert read_description(path) == meta


def test_a_damaged_chunk_of_the_right_size_needs_the_deep_check(conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = chunk_states(conf)
    flip_a_bit(chunk_path(conf, 9))
    # a whole chunk with its checksum, in the place of another
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
    after = chunk_states(conf)
    assert {index: raw for index, (_, raw) in after.items()} == {index: raw for index, (_, raw) in before.items()}


@pytest.mark.parametrize("name", ["done", "digest", "moments"])
@pytest.mark.parametrize("how", ["lost", "cut"])
def test_what_belongs_to_a_part(conf: DataConfig, name: str, how: str) -> None:
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


def test_lost_marks_are_no_gap(conf: DataConfig) -> None:
    path = write_training_store(conf)
    (path / "done" / "c" / "1").unlink()
    with pytest.raises(DataError, match=r"8 of its times have lost their marks; run credit preprocess CONFIG"):
        open_reader(conf)


@pytest.mark.parametrize("name", ["time", "static_fields", "masks"])
@pytest.mark.parametrize("how", ["lost", "cut", "altered"])
def test_arrays_without_parts(conf: DataConfig, name: str, how: str) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    before = chunk_states(conf)
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
    assert chunk_states(conf) == before


def test_chunks_that_zarr_does_not_write_are_no_damage(tmp_path: Path) -> None:
    """A static field of zeros and a mask without a masked cell are the fill value throughout."""
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
    for lost in (2, 18):
        chunk_path(conf, lost).unlink()
        write_training_store(conf)
        assert not find_damage(path) and read_description(path) == meta


def test_a_lost_description(conf: DataConfig) -> None:
    path = write_training_store(conf)
    (path / "fields" / "zarr.json").unlink()
    for action in (lambda: find_damage(path), lambda: open_reader(conf), lambda: write_training_store(conf)):
        with pytest.raises(DataError, match=r"description of its array fields is lost .*; restore .*fields/zarr.json"):
            action()


def test_repair_goes_on_after_a_kill(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    for lost in (3, 9):
        chunk_path(conf, lost).unlink()

    def die(self: SourceReader, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SourceReader, "read_each", die)
        write_training_store(conf)
    with pytest.raises(DataError, match="is not complete"):
        open_reader(conf)
    write_training_store(conf)
    assert not find_damage(path, deep=True) and read_description(path) == meta


def test_processes_look_for_damage_side_by_side(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_training_store(conf)
    look = integrity._check_chunks
    lock = store_writer.build_lock_folder_path(path) / "create.lock"
    program = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    is_free: list[bool] = []

    def look_and_try_the_lock(*arguments: object) -> dict[int, str]:
        # A lock of this process holds off another one only.
        tried = lock.exists() and subprocess.run([sys.executable, "-c", program, str(lock)], check=False).returncode
        is_free.append(not tried)
        return look(*arguments)

    monkeypatch.setattr(integrity, "_check_chunks", look_and_try_the_lock)
    write_training_store(conf, deep=True)
    assert is_free == [True]
    # What is damaged is looked at again by the process that marks it.
    chunk_path(conf, 3).unlink()
    write_training_store(conf, deep=True)
    assert is_free == [True, True, False] and not find_damage(path, deep=True)


def test_a_kill_while_marking_forgets_nothing_that_a_deep_look_found(
    conf: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_training_store(conf)
    meta = read_description(path)
    describe = SourceReader.fingerprint_files
    flip_a_bit(chunk_path(conf, 9))
    calls: list[int] = []

    def die_at_the_second_call(self: SourceReader) -> dict:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return describe(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SourceReader, "fingerprint_files", die_at_the_second_call)
        write_training_store(conf, deep=True)
    with pytest.raises(DataError, match="8 of its times have lost their marks"):
        open_reader(conf)
    write_training_store(conf)
    assert not find_damage(path, deep=True) and read_description(path) == meta


def test_fields_of_an_unfinished_store_are_not_compared(conf: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise AssertionError("stopped")

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="stopped"):
        patch.setattr(store_writer.Moments, "of_fields", die)
        write_training_store(conf)
    monkeypatch.setattr(integrity, "_build_deep_check", die)
    assert write_training_store(conf, deep=True) == Path(conf.store)


def test_a_store_of_format_1(conf: DataConfig) -> None:
    """It had all marks in one chunk, no checksums and no moments: sizes are all that can be checked."""
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
def test_changed_sources_of_a_store_of_format_1(tmp_path: Path, conf: DataConfig, redo_changed: bool) -> None:
    """Its parts cannot be written again, so the message does not say that --redo-changed does it."""
    group = zarr.open_group(write_training_store(conf), mode="r+")
    group.attrs["credit"] = dict(group.attrs)["credit"] | {"format": 1}
    write_file(tmp_path / "ground.nc", {"ground": random_fields(H, W, seed=4)}, None)
    with pytest.raises(DataError) as caught:
        write_training_store(conf, redo_changed=redo_changed)
    assert "new or changed since then: 1 source file" in str(caught.value)
    assert str(caught.value).split("ground.nc)")[1] == (
        "; a store of format 1 cannot be written in parts: name another data.store and run credit preprocess, which "
        "does not change this store"
    )


def test_changed_sources_are_written_again_when_asked(tmp_path: Path, conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = chunk_states(conf)
    content = read_description(path)["content"]
    t = random_fields(20, H, W, seed=7)
    sst = random_fields(20, H, W, seed=8)
    sst[:, 1, 3:6] = np.nan
    write_file(tmp_path / "1.nc", {"t": t, "sst": sst}, HOURS[20:])
    with pytest.raises(DataError, match=r"new or changed since then: 1 source file \(.*1\.nc\); run .* --redo-changed"):
        write_training_store(conf)
    assert chunk_states(conf) == before and read_description(path)["complete"]
    write_training_store(conf, redo_changed=True)
    after = chunk_states(conf)
    sources = open_sources(conf)
    stored = open_reader(conf)
    # the second file begins with the time 20, in the third part
    assert {index for index in after if after[index][0] != before[index][0]} == set(range(16, 32))
    for index, time in enumerate(stored.times):
        np.testing.assert_array_equal(stored.read(index), sources.read(sources.index_of(int(time))))
    assert read_description(path)["content"] != content
    fresh = conf.model_copy(update={"store": str(tmp_path / "fresh.zarr")})
    write_training_store(fresh)
    assert stored.statistics.to_dict() == open_reader(fresh).statistics.to_dict()
    assert not find_damage(path, deep=True)
    write_training_store(conf)


def test_changed_static_fields(tmp_path: Path, conf: DataConfig) -> None:
    path = write_training_store(conf)
    before = chunk_states(conf)
    ground = random_fields(H, W, seed=9)
    write_file(tmp_path / "ground.nc", {"ground": ground}, None)
    with pytest.raises(DataError, match="--redo-changed"):
        write_training_store(conf)
    write_training_store(conf, redo_changed=True)
    np.testing.assert_array_equal(open_reader(conf).static()[0], ground)
    assert chunk_states(conf) == before and not find_damage(path)


def test_a_file_that_gives_nothing_to_the_store_may_change(tmp_path: Path, conf: DataConfig) -> None:
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


def test_a_climatology_of_other_fields_does_not_stay(tmp_path: Path, conf: DataConfig) -> None:
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
def test_blocks_of_a_climatology_are_fitted_again(conf: DataConfig, how: str) -> None:
    path = write_training_store(conf)
    climatology_config = ClimatologyConfig(harmonics=0, by_hour=True)
    preprocess_climatology(conf, PreprocessConfig(), climatology_config, progress=False)
    folder = path / "climatology"
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert find_damaged_blocks(path) == find_damaged_blocks(path, deep=True) == []
    file = folder / "fields" / "c" / "2" / "0" / "0" / "0" / "0"
    deep = how == "flipped"
    if deep:
        flip_a_bit(file)
    else:
        file.unlink()
    assert find_damaged_blocks(path, deep) == [2]
    preprocess_climatology(conf, PreprocessConfig(), climatology_config, progress=False, deep=deep)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
