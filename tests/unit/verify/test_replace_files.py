"""Tests that files of a folder are replaced after all of them have been written."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from credit.errors import CreditError
from credit.verify.replace_files import replace_files

NAMES = ("figures/maps.png", "report.html", "scores.csv", "scores.nc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with old versions of all files except `scores.csv`, and with one file that is not replaced."""
    (tmp_path / "figures").mkdir()
    for name in ("figures/maps.png", "figures/loss.png", "report.html", "scores.nc"):
        (tmp_path / name).write_text(f"old {name}")
    return tmp_path


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)


def write_all(temporary_folder: Path) -> None:
    (temporary_folder / "figures").mkdir()
    for name in NAMES:
        (temporary_folder / name).write_text(f"new {name}")


def read_all(folder: Path) -> dict[str, str]:
    texts = {}
    for path in (*folder.iterdir(), *(folder / "figures").iterdir()):
        if path.is_file():
            texts[str(path.relative_to(folder))] = path.read_text()
    return texts


def fail_replace(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    """Make `os.replace` raise an error at the call with this number."""
    calls = []
    replace = os.replace

    def failing_replace(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == call:
            raise error
        replace(*arguments)

    monkeypatch.setattr(os, "replace", failing_replace)


def test_files_are_replaced_at_the_end(folder: Path) -> None:
    before = read_all(folder)
    with replace_files(folder) as temporary_folder:
        write_all(temporary_folder)
        assert read_all(folder) == before
    assert read_all(folder) == before | {name: f"new {name}" for name in NAMES}
    assert {path.name for path in folder.iterdir()} == {"figures", "report.html", "scores.csv", "scores.nc"}


@pytest.mark.parametrize("error", [CreditError("the disk is full"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_old_files_stay_if_writing_fails(folder: Path, error: BaseException) -> None:
    before = read_all(folder)
    listing = sorted(folder.iterdir())
    with pytest.raises(type(error)), replace_files(folder, old_patterns=["figures/*.png"]) as temporary_folder:
        write_all(temporary_folder)
        raise error
    assert read_all(folder) == before
    assert sorted(folder.iterdir()) == listing


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["io", "ctrl-c"])
def test_every_file_is_complete_if_a_rename_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    before = read_all(folder)
    fail_replace(monkeypatch, call, error)
    expected_error = CreditError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected_error) as caught, replace_files(folder) as temporary_folder:
        write_all(temporary_folder)
    if expected_error is CreditError:
        assert f"{NAMES[call - 1]}: cannot be written (Input" in str(caught.value)
    after = read_all(folder)
    for number, name in enumerate(NAMES, 1):
        assert after.get(name) == (f"new {name}" if number < call else before.get(name))
    assert not list(folder.glob(".unfinished.*"))


def test_a_folder_in_the_place_of_a_file_stays(folder: Path) -> None:
    (folder / "scores.csv").mkdir()
    (folder / "scores.csv" / "mine").write_text("")
    before = read_all(folder)
    with pytest.raises(CreditError, match="scores.csv: cannot be written"), replace_files(folder) as temporary_folder:
        write_all(temporary_folder)
    assert read_all(folder) == before
    assert (folder / "scores.csv" / "mine").exists()


def test_two_verifications_at_once(folder: Path) -> None:
    with replace_files(folder) as first:
        write_all(first)
        with replace_files(folder) as second:
            write_all(second)
            (second / "scores.nc").write_text("second")
        assert read_all(folder)["scores.nc"] == "second"
    assert read_all(folder)["scores.nc"] == "new scores.nc"


def test_figures_on_another_file_system(folder: Path, other_file_system: Path) -> None:
    for path in (folder / "figures").iterdir():
        (other_file_system / path.name).write_text(path.read_text())
        path.unlink()
    (folder / "figures").rmdir()
    (folder / "figures").symlink_to(other_file_system)
    before = read_all(folder)
    with replace_files(folder) as temporary_folder:
        write_all(temporary_folder)
    assert read_all(folder) == before | {name: f"new {name}" for name in NAMES}
    assert (folder / "figures").is_symlink()


def test_figures_of_the_last_verification_are_removed(folder: Path) -> None:
    (folder / "figures/early_rmse.png").write_text("a figure of training")
    with replace_files(folder, old_patterns=["figures/maps*.png", "figures/loss.png"]) as temporary_folder:
        write_all(temporary_folder)
    expected = {name: f"new {name}" for name in NAMES} | {"figures/early_rmse.png": "a figure of training"}
    assert read_all(folder) == expected
