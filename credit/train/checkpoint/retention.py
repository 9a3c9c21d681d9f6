"""Rule for the checkpoints that a run keeps, and functions that remove or rename checkpoints."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from credit.train.checkpoint.checkpoint import list_checkpoints, parse_step


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints that are kept, in addition to the targets of the links ``latest`` and ``best``.

    Attributes:
        last: number of newest checkpoints that are kept.
        every: checkpoints whose step is a multiple of this number are kept; None to keep no further checkpoints.
        steps: steps whose checkpoints are kept.
    """

    last: int
    every: int | None = None
    steps: tuple[int, ...] = ()


def prune_checkpoints(folder: Path, keep: Retention, dry_run: bool = False) -> list[Path]:
    """Remove the checkpoints that `keep` does not retain, and return their paths, oldest first.

    Args:
        folder: the run's ``checkpoints`` folder.
        keep: rule for the checkpoints to retain.
        dry_run: True to return the paths without removing anything.
    """
    linked_paths = {(folder / name).resolve() for name in ("latest", "best")}
    removed = []
    # The list is sorted from the oldest to the newest checkpoint, and the newest checkpoints are always kept.
    for path in list_checkpoints(folder)[: -keep.last]:
        step = parse_step(path)
        is_milestone = keep.every is not None and step % keep.every == 0
        if is_milestone or step in keep.steps or path.resolve() in linked_paths:
            continue
        removed.append(path)
        if not dry_run:
            # If a folder cannot be removed, the next save tries again.
            with suppress(OSError):
                remove_checkpoint(path)
    return removed


def remove_checkpoints_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step` and the links to them, because a rollback repeats these steps.

    Args:
        folder: the run's ``checkpoints`` folder.
        step: largest step whose checkpoint is kept.
    """
    for path in list_checkpoints(folder):
        if parse_step(path) > step:
            remove_checkpoint(path)
    _remove_dangling_links(folder)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint.

    The folder is hidden first, see `hide_checkpoint`. If the process is killed during the removal, the remaining files
    are therefore not treated as a damaged checkpoint.

    Files that cannot be removed yet, such as files that another process has open on NFS, are removed by the next save.

    Args:
        path: folder of the checkpoint.

    Raises:
        OSError: if the folder cannot be renamed.
    """
    shutil.rmtree(hide_checkpoint(path), ignore_errors=True)


def hide_checkpoint(path: Path) -> Path:
    """Rename a checkpoint so that it is no longer listed, and return its new path; the next save removes its files.

    Args:
        path: folder of the checkpoint.

    Raises:
        OSError: if the folder cannot be renamed.
    """
    # The name is random, because an earlier hidden folder of this step may contain files that cannot be removed.
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    path.rename(hidden)
    return hidden


def rename_damaged_checkpoints(folder: Path) -> None:
    """Rename all checkpoints of a run, which must be damaged, so that a new run in the folder does not use them.

    ``step_00000002`` becomes ``damaged_step_00000002``, with a number appended if that name exists already. The links
    ``latest`` and ``best`` are removed.

    Args:
        folder: the run's ``checkpoints`` folder.
    """
    for path in list_checkpoints(folder):
        name = f"damaged_{path.name}"
        number = 1
        while (folder / name).exists():
            number += 1
            name = f"damaged_{path.name}.{number}"
        path.rename(folder / name)
    _remove_dangling_links(folder)


def _remove_dangling_links(folder: Path) -> None:
    """Remove the links ``latest`` and ``best`` if their checkpoints no longer exist."""
    for name in ("latest", "best"):
        link = folder / name
        # `exists` follows the link, and is False if its target does not exist.
        if not link.exists():
            link.unlink(missing_ok=True)
