"""Files that are replaced whole, alone or all of them together."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from credit.errors import CreditError

_UNFINISHED = ".unfinished"


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file beside `path`, then put that in its place.

    Raises:
        CreditError: if it cannot be written.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        write(beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # the netCDF library raises either
        beside.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise CreditError(f"{path}: cannot be written ({reason}); is the disk full?") from error
    return path


@contextmanager
def replaced_together(folder: Path) -> Iterator[Path]:
    """Yield a folder to write into; when all is written, each file takes its place in `folder`, else none does.

    Raises:
        CreditError: if a folder cannot be made or a file not be put in its place.
    """
    beside = folder / _UNFINISHED
    shutil.rmtree(beside, ignore_errors=True)  # of a run that was killed
    try:
        with _named_errors():
            beside.mkdir(parents=True)
        yield beside
        with _named_errors():
            for path in sorted(own for own in beside.rglob("*") if own.is_file()):
                place = folder / path.relative_to(beside)
                place.parent.mkdir(exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = error.filename2 or error.filename
        raise CreditError(f"{name}: cannot be written ({error.strerror}); is the folder yours?") from error
