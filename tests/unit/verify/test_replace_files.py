"""Files that are replaced together or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from credit.errors import CreditError
from credit.verify.replace_files import replace_files_atomically

NAMES = ("figures/maps.png", "report.html", "scores.csv", "scores.nc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an old version of all files but one, and with one that is not replaced."""
    (tmp_path / "figures").mkdir()
    for name in ("figures/maps.png", "figures/loss.png", "report.html", "scores.nc"):
        (tmp_path / name).write_text(f"old {name}")
    return tmp_path


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def _write(beside: Path) -> None:
    (beside / "figures").mkdir()
    for name in NAMES:
        (beside / name).write_text(f"new {name}")


def _content(folder: Path) -> dict[str, str]:
    parts = folder, folder / "figures"
    return {str(p.relative_to(folder)): p.read_text() for part in parts for p in part.iterdir() if p.is_file()}


def _refuse(monkeypatch: pytest.MonkeyPatch, numbers: set[int], error: BaseException) -> None:
    """Let the calls of `os.replace` with these numbers fail."""
    calls, replace = [], os.replace

    def refusing(*args: object) -> None:
        calls.append(args)
        if len(calls) in numbers:
            raise error
        replace(*args)

    monkeypatch.setattr(os, "replace", refusing)


def test_all_take_their_places(folder: Path) -> None:
    before = _content(folder)
    with replace_files_atomically(folder) as beside:
        _write(beside)
        assert _content(folder) == before
    assert _content(folder) == before | {name: f"new {name}" for name in NAMES}
    assert {path.name for path in folder.iterdir()} == {"figures", "report.html", "scores.csv", "scores.nc"}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["io", "ctrl-c"])
def test_what_was_replaced_is_put_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    before, listed = _content(folder), sorted(folder.iterdir())
    _refuse(monkeypatch, {number}, error)
    named = rf"{NAMES[number - 1]}: cannot be written \(Input" if isinstance(error, OSError) else None
    with (
        pytest.raises(CreditError if named else KeyboardInterrupt, match=named),
        replace_files_atomically(folder) as beside,
    ):
        _write(beside)
    assert _content(folder) == before and sorted(folder.iterdir()) == listed


def test_a_folder_in_a_files_place_stays(folder: Path) -> None:
    (folder / "scores.csv").mkdir()
    (folder / "scores.csv" / "mine").write_text("")
    before = _content(folder)
    with pytest.raises(CreditError, match="scores.csv: cannot be written"), replace_files_atomically(folder) as beside:
        _write(beside)
    assert _content(folder) == before and (folder / "scores.csv" / "mine").exists()


def test_old_files_that_cannot_be_put_back_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _content(folder)
    _refuse(monkeypatch, {3, 4, 5}, OSError(errno.EIO, "Input/output error"))
    with (
        pytest.raises(CreditError, match="old cannot be put back") as caught,
        replace_files_atomically(folder) as beside,
    ):
        _write(beside)
    old = beside.parent / "old"
    assert str(old) in str(caught.value) and "scores.csv: cannot be written" in str(caught.value)
    assert {name: text for name, text in before.items() if name != "figures/loss.png"} == _content(old)


def test_two_at_once_leave_each_other_alone(folder: Path) -> None:
    with replace_files_atomically(folder) as first:
        _write(first)
        with replace_files_atomically(folder) as second:
            _write(second)
            (second / "scores.nc").write_text("second")
        assert _content(folder)["scores.nc"] == "second"
    assert _content(folder)["scores.nc"] == "new scores.nc"


@pytest.mark.parametrize("fails", [False, True])
def test_figures_on_another_disk(folder: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    for path in (folder / "figures").iterdir():
        (other_disk / path.name).write_text(path.read_text())
        path.unlink()
    (folder / "figures").rmdir()
    (folder / "figures").symlink_to(other_disk)
    before = _content(folder)
    if not fails:
        with replace_files_atomically(folder) as beside:
            _write(beside)
        assert _content(folder) == before | {name: f"new {name}" for name in NAMES}
        return
    _refuse(monkeypatch, {4}, OSError(errno.EIO, "Input/output error"))  # figures take two calls
    with pytest.raises(CreditError, match="scores.csv: cannot"), replace_files_atomically(folder) as beside:
        _write(beside)
    assert _content(folder) == before and (folder / "figures").is_symlink()


def test_what_is_left_of_the_last_time_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _content(folder) | {"figures/early_rmse.png": "a run's"}
    (folder / "figures/early_rmse.png").write_text("a run's")
    last = ("figures/maps*.png", "figures/loss.png")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", _stuck)
        with pytest.raises(CreditError, match="loss.png"), replace_files_atomically(folder, last) as beside:
            _write(beside)
    assert _content(folder) == before, "all or nothing"
    with replace_files_atomically(folder, last) as beside:
        _write(beside)
    assert _content(folder) == {name: f"new {name}" for name in NAMES} | {"figures/early_rmse.png": "a run's"}


def _stuck(path: Path, missing_ok: bool = False) -> None:
    if path.name == "loss.png":
        raise PermissionError(errno.EACCES, "Permission denied")
    os.unlink(path)
