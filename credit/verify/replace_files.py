"""Replace several files of a folder after all new files have been written."""

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
def replace_files(folder: Path, old_patterns: Iterable[str] = ()) -> Iterator[Path]:
    """Context manager that yields a temporary folder for new files, and moves the files into `folder` at the end.

    If the ``with`` block raises an error or is interrupted, no file of `folder` changes. After the block, the new files
    are moved into `folder` one by one, which takes milliseconds. Each file is therefore always complete. If a file
    cannot be moved, the error names the file; files that were moved before the error remain replaced.

    The temporary folder ``.unfinished.*`` is created in `folder` and is removed at the end. If the process is killed,
    the temporary folder remains, and the user can delete it.

    Args:
        folder: folder that receives the new files; it is created if necessary.
        old_patterns: glob patterns of old files, relative to `folder`. Old files that match are deleted if the block
            did not write them again.

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
        # Subfolders are left out; they are created in `folder` when their files are moved.
        files = [path for path in temporary_folder.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(temporary_folder) for path in files)
        # A folder with the name of a new file raises an error before any file is replaced.
        for name in names:
            if (folder / name).is_dir():
                raise CreditError(f"{folder / name}: cannot be written, it is a folder; rename or remove it")
        for name in names:
            with _describe_errors(folder / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                _rename(temporary_folder / name, folder / name)
        # Files of an earlier run that were not written again are removed last.
        for pattern in old_patterns:
            for path in folder.glob(pattern):
                if path.relative_to(folder) not in names:
                    with _describe_errors(path):
                        path.unlink(missing_ok=True)
    finally:
        # Errors of this removal are ignored, because they must not hide an error of the block.
        shutil.rmtree(temporary_folder, ignore_errors=True)


def _rename(source: Path, target: Path) -> None:
    """Move a file; copy it instead if the folder of the target is a link to another file system."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        # The copy is first written next to the target and then renamed, so readers never find an incomplete file.
        atomic_write(target, lambda temporary: shutil.copyfile(source, temporary))


@contextmanager
def _describe_errors(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError in its ``with`` block to a CreditError that names `path`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CreditError(
            f"{path}: cannot be written ({reason}); check that you own the folder and that the disk is not full"
        ) from error
