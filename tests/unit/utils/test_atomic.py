"""Atomic writes: a file that cannot be replaced stays unchanged, and the error names it."""

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
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that makes every later write fail as on a full disk."""

    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(os, "replace", raise_disk_full)


@pytest.mark.parametrize("name", WRITERS)
def test_old_file_stays_if_disk_is_full(tmp_path: Path, fill_disk: Callable[[], None], name: str) -> None:
    old = OLD.get(name, "old")
    (tmp_path / name).write_text(old)
    fill_disk()
    with pytest.raises(CreditError, match=rf"{name}: cannot be written \(No space left on device\); is the disk full"):
        WRITERS[name](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: old}


@pytest.mark.parametrize("name", WRITERS)
def test_no_other_file_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(OLD.get(name, "old"))
    WRITERS[name](tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text(encoding="utf-8") != OLD.get(name, "old")


def test_status_on_full_disk_is_only_a_warning(
    tmp_path: Path, fill_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_status(tmp_path, "running", 1, "", "7")
    fill_disk()
    with caplog.at_level(logging.WARNING):
        write_status(tmp_path, "done", 2, "", "7")
    assert "STATUS: cannot be written (No space left on device)" in caplog.text
    assert json.loads((tmp_path / "STATUS").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["STATUS"]


def test_summary_on_full_disk_is_only_a_warning(
    tmp_path: Path, fill_disk: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    write_summary(tmp_path, {"steps": 1})
    fill_disk()
    with caplog.at_level(logging.WARNING):
        write_summary(tmp_path, {"steps": 2})
    assert "summary.json: cannot be written (No space left on device); is the disk full" in caplog.text
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_invalid_path_is_not_reported_as_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CreditError, match=r"file/a: cannot be written \(Not a directory\)$"):
        atomic_write_text(tmp_path / "file" / "a", "new")


def test_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "a", []
    fsync, replace = os.fsync, os.replace

    def record_fsync(number: int) -> None:
        fsync(number)
        events.append(("on the disk", os.fstat(number).st_ino, os.fstat(number).st_size))

    def record_replace(temporary: Path, target: Path) -> None:
        events.append(("named", temporary.stat().st_ino, temporary.stat().st_size))
        replace(temporary, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    atomic_write_text(path, "new")
    expected_file = (path.stat().st_ino, 3)
    assert events == [("on the disk", *expected_file), ("named", *expected_file)]


def test_dangling_link_can_be_written(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", lambda temporary: temporary.symlink_to("gone"))
    assert (tmp_path / "a").readlink() == Path("gone")


def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path) -> None:
    for name in ("link", "file"):
        (tmp_path / f".{name}.part").symlink_to("gone")
    checkpoint.move_link(tmp_path, "link", tmp_path / "step_00000002")
    atomic_write_text(tmp_path / "file", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
    assert (tmp_path / "link").readlink() == Path("step_00000002") and (tmp_path / "file").read_text() == "new"


def test_old_link_stays_if_disk_is_full(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    checkpoint.move_link(tmp_path, "latest", tmp_path / "step_00000001")
    fill_disk()
    with pytest.raises(CheckpointError, match=r"latest: cannot be written \(No space .* is the disk full"):
        checkpoint.move_link(tmp_path, "latest", tmp_path / "step_00000002")
    assert [(path.name, str(path.readlink())) for path in tmp_path.iterdir()] == [("latest", "step_00000001")]


def test_export_on_full_disk_leaves_old_file(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    """The run has one checkpoint with a single tensor."""
    with AsyncCheckpointer(tmp_path / "checkpoints") as store:
        path = store.save(3, {"forecast": {"x": torch.arange(3.0)}}, {}, {"note": "its own"}, links=("latest",))
    config = SimpleNamespace(save_loc=str(tmp_path))
    target = convert.export_weights(config, "latest", tmp_path / "out.safetensors")
    with safe_open(target, "pt") as file:
        assert file.get_tensor("x").tolist() == [0, 1, 2] and json.loads(file.metadata()["credit"])["step"] == 3
    old = target.read_bytes()
    with pytest.raises(CreditError, match=r"none/out.safetensors: cannot be written \(.*No such file"):
        convert.export_weights(config, "latest", tmp_path / "none" / "out.safetensors")
    fill_disk()
    with pytest.raises(CreditError, match=r"out.safetensors: cannot be written \(No space"):
        convert.export_weights(config, "latest", target)
    assert target.read_bytes() == old
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "out.safetensors"] and path.is_dir()


def test_other_errors_are_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        atomic_write(tmp_path / "a", lambda temporary: 1 / 0)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_file_has_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    """The library safetensors writes files that only their owner can read, so the mode must be corrected."""
    previous_umask = os.umask(umask)
    try:
        path = atomic_write(tmp_path / "a.safetensors", lambda temporary: save_file({"x": torch.ones(2)}, temporary))
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    finally:
        os.umask(previous_umask)
