"""A file that cannot be replaced stays as it was, and the error names it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from credit.config import build_config
from credit.data.store.store_writer import _write_notes
from credit.errors import CheckpointError, CreditError
from credit.hpc.chain import JOBS, record_jobs
from credit.train.checkpoint import checkpoint, convert
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.resume import write_config
from credit.train.monitor.metrics_log import _remove_rows_after, write_status
from credit.train.monitor.summary import write_summary
from credit.utils.atomic import atomic_write, atomic_write_text
from tests.unit.cli.world import CONFIG

ROWS = '{"step": 1}\n{"step": 2}\n{"st'
WRITERS: dict[str, Callable[[Path], object]] = {
    "some.txt": lambda folder: atomic_write_text(folder / "some.txt", "new\u00e9"),
    "config.yml": lambda folder: write_config(build_config(CONFIG), folder),
    "metrics.jsonl": lambda folder: _remove_rows_after(folder / "metrics.jsonl", 1),
    JOBS: lambda folder: record_jobs(folder, "train", "slurm", ["12"]),
    "000003.json": lambda folder: _write_notes(folder / "000003.json", {5: "lost"}),
}
OLD = {"metrics.jsonl": ROWS, JOBS: "{}"}


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Fills the disk."""

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(os, "replace", no_room)


@pytest.mark.parametrize("name", WRITERS)
def test_the_old_file_stays_where_there_is_no_room(tmp_path: Path, full: Callable[[], None], name: str) -> None:
    old = OLD.get(name, "old")
    (tmp_path / name).write_text(old)
    full()
    with pytest.raises(CreditError, match=rf"{name}: cannot be written \(No space left on device\); is the disk full"):
        WRITERS[name](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: old}


@pytest.mark.parametrize("name", WRITERS)
def test_the_new_file_stands_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OLD.get(name, "old"))
    WRITERS[name](tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") != OLD.get(name, "old")


def test_a_status_that_finds_no_room_ends_nothing(
    tmp_path: Path, full: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_status(tmp_path, "running", 1, "", "7")
    full()
    with caplog.at_level(logging.WARNING):
        write_status(tmp_path, "done", 2, "", "7")
    assert "STATUS: cannot be written (No space left on device)" in caplog.text
    assert json.loads((tmp_path / "STATUS").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["STATUS"]


def test_a_summary_that_finds_no_room_ends_nothing(
    tmp_path: Path, full: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_summary(tmp_path, {"steps": 1})
    full()
    with caplog.at_level(logging.WARNING):
        write_summary(tmp_path, {"steps": 2})
    assert "summary.json: cannot be written (No space left on device); is the disk full" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_place_that_cannot_be_is_no_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CreditError, match=r"file/a: cannot be written \(Not a directory\)$"):
        atomic_write_text(tmp_path / "file" / "a", "new")


def test_the_disk_has_the_file_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, done = tmp_path / "a", []
    fsync, replace = os.fsync, os.replace

    def noting_fsync(number: int) -> None:
        fsync(number)
        done.append(("on the disk", os.fstat(number).st_ino, os.fstat(number).st_size))

    def noting_replace(temporary: Path, target: Path) -> None:
        done.append(("named", temporary.stat().st_ino, temporary.stat().st_size))
        replace(temporary, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "replace", noting_replace)
    atomic_write_text(path, "new")
    held = (path.stat().st_ino, 3)
    assert done == [("on the disk", *held), ("named", *held)]


def test_a_link_to_nothing_is_put_in_place(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", lambda temporary: temporary.symlink_to("gone"))
    assert (tmp_path / "a").readlink() == Path("gone")


def test_what_a_killed_process_has_left_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("link", "file"):
        (tmp_path / f".{name}.part").symlink_to("gone")
    checkpoint.move_link(tmp_path, "link", tmp_path / "step_00000002")
    atomic_write_text(tmp_path / "file", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "link").readlink() == Path("step_00000002") and (tmp_path / "file").read_text() == "new"


def test_a_link_that_cannot_be_moved_stays(tmp_path: Path, full: Callable[[], None]) -> None:
    checkpoint.move_link(tmp_path, "latest", tmp_path / "step_00000001")
    full()
    with pytest.raises(CheckpointError, match=r"latest: cannot be written \(No space .* is the disk full"):
        checkpoint.move_link(tmp_path, "latest", tmp_path / "step_00000002")
    assert [(path.name, str(path.readlink())) for path in tmp_path.iterdir()] == [("latest", "step_00000001")]


def test_an_export_that_cannot_be_written(tmp_path: Path, full: Callable[[], None]) -> None:
    """The run is one of a checkpoint with a single tensor."""
    with AsyncCheckpointer(tmp_path / "checkpoints") as store:
        path = store.save(3, {"forecast": {"x": torch.arange(3.0)}}, {}, {"note": "its own"}, links=("latest",))
    config = SimpleNamespace(save_loc=str(tmp_path))
    target = convert.export_weights(config, "latest", tmp_path / "out.safetensors")
    with safe_open(target, "pt") as file:
        assert file.get_tensor("x").tolist() == [0, 1, 2] and json.loads(file.metadata()["credit"])["step"] == 3
    old = target.read_bytes()
    with pytest.raises(CreditError, match=r"none/out.safetensors: cannot be written \(.*No such file"):
        convert.export_weights(config, "latest", tmp_path / "none" / "out.safetensors")
    full()
    with pytest.raises(CreditError, match=r"out.safetensors: cannot be written \(No space"):
        convert.export_weights(config, "latest", target)
    assert target.read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "out.safetensors"] and path.is_dir()


def test_what_is_no_fault_of_the_disk_is_not_called_one(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        atomic_write(tmp_path / "a", lambda temporary: 1 / 0)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_a_file_has_the_mode_that_the_umask_gives(tmp_path: Path, umask: int) -> None:
    """The weights' library writes files that their owner alone can read."""
    before = os.umask(umask)
    try:
        path = atomic_write(tmp_path / "a.safetensors", lambda temporary: save_file({"x": torch.ones(2)}, temporary))
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(before)
