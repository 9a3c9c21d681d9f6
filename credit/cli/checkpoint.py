"""``credit checkpoint``: list, verify and prune the checkpoints of a run."""

from __future__ import annotations

import argparse
from datetime import UTC
from pathlib import Path

from credit.cli.common import parse_path
from credit.cli.console.terminal import format_table

HELP = """List, verify or remove the checkpoints in SAVE_LOC/checkpoints.

list    print step, size, time of writing and best validation score so far, and the links `latest` and `best`
verify  compare every file with its checksum
prune   remove checkpoints, except the newest --keep-last checkpoints, the checkpoints of steps that are multiples of
        --keep-every, and the targets of `latest` and `best`. While a run is active in SAVE_LOC, prune is an error.

example:
  credit checkpoint verify runs/quickstart
  credit checkpoint prune runs/quickstart --keep-last 1 --dry-run

exit code: 0 done, 1 no checkpoints or an active run, 2 wrong arguments, or damaged checkpoints (verify)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ACTION, SAVE_LOC and the options of ``prune``."""
    parser.add_argument("action", choices=("list", "verify", "prune"), metavar="ACTION", help="list, verify or prune")
    parser.add_argument(
        "save_loc", metavar="SAVE_LOC", type=lambda text: Path(parse_path(text)), help="folder of the run"
    )
    parser.add_argument(
        "--keep-last", type=int, default=2, metavar="N", help="prune: number of newest checkpoints to keep (default 2)"
    )
    parser.add_argument(
        "--keep-every", type=int, metavar="N", help="prune: keep checkpoints of steps that are multiples of N"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="prune: list the checkpoints that would be removed, without removing them",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """List, verify or prune the checkpoints of a run; return the exit status that the help text lists.

    Raises:
        ConfigError: if an option is below 1, or the action is ``prune`` while a run is active in the folder.
        CheckpointError: if the folder has no checkpoints.
    """
    from credit.errors import CheckpointError, ConfigError
    from credit.train.checkpoint.checkpoint import list_checkpoints

    for option, value in (("--keep-last", arguments.keep_last), ("--keep-every", arguments.keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{option}: {value} must be at least 1")
    folder = arguments.save_loc / "checkpoints"
    paths = list_checkpoints(folder)
    if not paths:
        raise CheckpointError(f"{folder}: there are no checkpoints; SAVE_LOC is the folder of a run (save_loc)")
    actions = {"list": _list_checkpoints, "verify": _verify_checkpoints, "prune": _prune_checkpoints}
    return actions[arguments.action](folder, paths, arguments)


def _list_checkpoints(folder: Path, paths: list[Path], arguments: argparse.Namespace) -> int:
    """Print a table of the checkpoints; return the exit status 0.

    Args:
        folder: the folder ``checkpoints``, which has the links ``latest`` and ``best``.
        paths: checkpoints in the folder.
        arguments: not used; all actions have the same parameters.
    """
    from datetime import datetime

    from credit.train.checkpoint.checkpoint import parse_step

    # Name of a link -> path of the checkpoint to which it points.
    links = {name: (folder / name).resolve() for name in ("latest", "best")}
    # The table has one row for each checkpoint.
    rows = []
    for path in paths:
        num_bytes = 0
        for file in path.rglob("*"):
            if file.is_file():
                num_bytes += file.stat().st_size
        time_written = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).strftime("%Y-%m-%d %H:%M")
        link_names = [name for name, target in links.items() if target == path.resolve()]
        rows.append(
            [
                str(parse_step(path)),
                f"{num_bytes / 1e6:.1f} MB",
                time_written,
                _format_best_score(path),
                ", ".join(link_names),
            ]
        )
    header = ["step", "size", "written (UTC)", "best so far", "links"]
    print(format_table(header, rows, right_aligned=["step", "size", "best so far"]))
    return 0


def _format_best_score(path: Path) -> str:
    """Return the best validation score of the run up to a checkpoint, as text; ``unreadable`` if it is damaged.

    Args:
        path: folder of the checkpoint.
    """
    import json

    try:
        meta = json.loads((path / "meta.json").read_text())
        best_score = meta["progression"]["best"]
        return f"{best_score:.4g}"
    except (OSError, ValueError, KeyError, TypeError):
        # The file is missing, is not JSON, or does not have the contents that training writes.
        return "unreadable"


def _verify_checkpoints(folder: Path, paths: list[Path], arguments: argparse.Namespace) -> int:
    """Compare the files of each checkpoint with their checksums; return 2 if a checkpoint is damaged, otherwise 0.

    The parameters are the same as in `_list_checkpoints`.
    """
    from credit.train.checkpoint.checkpoint import verify_checkpoint

    num_damaged = 0
    for path in paths:
        damage = verify_checkpoint(path)
        if damage is not None:
            num_damaged += 1
        print(f"{path}: {damage or 'intact'}")
    return 2 if num_damaged else 0


def _prune_checkpoints(folder: Path, paths: list[Path], arguments: argparse.Namespace) -> int:
    """Remove old checkpoints, or with ``--dry-run`` only print their paths; return the exit status 0.

    The parameters are the same as in `_list_checkpoints`.
    """
    from contextlib import nullcontext

    from credit.train.checkpoint.retention import Retention, prune_checkpoints
    from credit.train.monitor.run_lock import RunLock

    retention = Retention(arguments.keep_last, arguments.keep_every)
    # The lock raises an error while a run is active. A dry run removes nothing and needs no lock.
    lock = nullcontext() if arguments.dry_run else RunLock(arguments.save_loc)
    with lock:
        removed_paths = prune_checkpoints(folder, retention, arguments.dry_run)
    action = "would be removed" if arguments.dry_run else "removed"
    for path in removed_paths:
        print(f"{action}: {path}")
    print(f"{len(paths) - len(removed_paths)} are kept")
    return 0
