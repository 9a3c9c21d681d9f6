"""Files that are replaced all of them together."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from credit.errors import CreditError
from credit.utils.atomic import atomic_write

_UNFINISHED = ".unfinished."


@contextmanager
def replace_files_atomically(folder: Path, last: Iterable[str] = ()) -> Iterator[Path]:
    """Yield a folder to write into; when all is written, each file takes its place in `folder`, or none does.

    Files that one of the patterns `last` fits and that were not written again are of the last time, and removed. The
    old files are copied before the first is replaced, and put back if one cannot be. Every run has an own folder
    ``.unfinished.*`` in `folder`, so two at once leave each other's alone: of a file the last stays. It is removed at
    the end; that of a run that was killed is left, as none can tell it from one that is being written, or from one with
    the only copies of old files. It can be deleted when nothing writes there.

    Raises:
        CreditError: if a folder cannot be made, or a file not be copied or put in its place.
    """
    with _named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    new, old = beside / "new", beside / "old"
    lost: list[Path] = []
    try:
        with _named_errors(new):
            new.mkdir()
        yield new
        names = sorted(path.relative_to(new) for path in new.rglob("*") if path.is_file())
        gone = sorted({path.relative_to(folder) for kind in last for path in folder.glob(kind)} - set(names))
        for name in (*names, *gone):
            _keep(folder / name, old / name)
        try:
            for name in names:
                _put(new / name, folder / name)
            for name in gone:
                with _named_errors(folder / name):
                    (folder / name).unlink(missing_ok=True)
        except BaseException as error:
            # what is no longer among the new has taken its place
            changed = [name for name in names if not (new / name).exists()]
            changed += [name for name in gone if not (folder / name).exists()]
            lost += [folder / name for name in changed if not _undo(old, folder, name)]
            if lost:
                raise CreditError(
                    f"{', '.join(map(str, lost))}: new already, and the old cannot be put back; it is in {old} "
                    f"(first came: {error or type(error).__name__})"
                ) from error
            raise
    finally:
        if not lost:
            shutil.rmtree(beside, ignore_errors=True)


def _keep(place: Path, kept: Path) -> None:
    """Copy what is at `place`, if anything."""
    with _named_errors(place):
        place.parent.mkdir(exist_ok=True)
        kept.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(place):
            shutil.copy2(place, kept, follow_symlinks=False)


def _put(path: Path, place: Path) -> None:
    """Let a file take its place, through a copy where that is on another file system."""
    with _named_errors(place):
        try:
            os.replace(path, place)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            atomic_write(place, lambda part: shutil.copy2(path, part, follow_symlinks=False))
            path.unlink()


def _undo(old: Path, folder: Path, name: Path) -> bool:
    """Put an old file back, or remove the new one where there was none; return whether that was possible."""
    try:
        if os.path.lexists(old / name):
            _put(old / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    except (CreditError, OSError):
        return False
    return True


@contextmanager
def _named_errors(name: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CreditError(f"{name}: cannot be written ({reason}); is the folder yours, the disk full?") from error
