"""Replace several files of a folder only after all new files have been written."""

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


@contextmanager
def replace_files(folder: Path, remove: Iterable[str] = ()) -> Iterator[Path]:
    """Context that yields a temporary folder to write into, and moves its files into `folder` at the end.

    If the ``with`` block raises or is interrupted, no file of `folder` changes. After the block the new files are
    moved into place one by one, which takes milliseconds. Each file is therefore either the old or the new one, never
    half-written. If one move fails, the error names the file; files that were moved before it stay replaced.

    The temporary folder ``.unfinished.*`` lies in `folder` and is removed at the end. If the process is killed, the
    temporary folder remains and can be deleted by hand.

    Args:
        folder: the folder whose files are replaced; it is created if necessary.
        remove: glob patterns, relative to `folder`, of old files that are deleted if the block did not write them.

    Yields:
        The temporary folder.

    Raises:
        CreditError: if a folder or a file cannot be written.
    """
    with _describe_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        temporary_folder = Path(tempfile.mkdtemp(prefix=".unfinished.", dir=folder))
    try:
        yield temporary_folder
        # Folders are left out; they are made in `folder` when their files are moved.
        files = [path for path in temporary_folder.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(temporary_folder) for path in files)
        # A folder in the place of a file is found before anything is replaced.
        for name in names:
            if (folder / name).is_dir():
                raise CreditError(f"{folder / name}: cannot be written, it is a folder; rename or remove it")
        for name in names:
            with _describe_errors(folder / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _rename(temporary_folder / name, folder / name)
        # Files of an earlier run that were not written again are removed last.
        for pattern in remove:
            for path in folder.glob(pattern):
                if path.relative_to(folder) not in names:
                    with _describe_errors(path):
                        path.unlink(missing_ok=True)
    finally:
        # An error of the cleaning must not hide that of the block.
        shutil.rmtree(temporary_folder, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Move a file; copy it instead if the folder of the target is a link to another file system."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # The copy is written beside the target first, so readers never see a part of it.
        atomic_write(target, lambda temporary: shutil.copyfile(source, temporary))


@contextmanager
def _describe_errors(path: Path) -> Iterator[None]:
    """Context that turns an OSError of its ``with`` block into a CreditError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CreditError(
            f"{path}: cannot be written ({reason}); check that you own the folder and that the disk is not full"
        ) from error
