"""``credit_checkpoint``: lists, verifies and prunes the checkpoints of a run."""

from __future__ import annotations

import argparse
from datetime import UTC
from pathlib import Path

from credit.cli.common import path_argument

HELP = """Look after the checkpoints in SAVE_LOC/checkpoints.

list    one line each: step, size, when it was written, the validation that was best by then, what points to it
verify  read every file against its checksum; exit code 2 if any checkpoint is damaged
prune   remove all but the newest --keep-last, those of steps that are multiples of --keep-every, and what `latest` and
        `best` point to; refused while a run is at work in SAVE_LOC. --dry-run only names them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("action", choices=("list", "verify", "prune"), metavar="ACTION", help="list, verify or prune")
    parser.add_argument(
        "save_loc", metavar="SAVE_LOC", type=lambda text: Path(path_argument(text)), help="the run's folder"
    )
    parser.add_argument("--keep-last", type=int, default=2, metavar="N", help="prune: newest ones to keep (default 2)")
    parser.add_argument("--keep-every", type=int, metavar="N", help="prune: keep steps that are multiples of N")
    parser.add_argument("--dry-run", action="store_true", help="prune: remove nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.errors import CheckpointError, ConfigError
    from credit.train.checkpoint.checkpoint import list_checkpoints

    for name in ("keep_last", "keep_every"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} must be at least 1")
    folder = arguments.save_loc / "checkpoints"
    found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(f"{folder}: there are no checkpoints; SAVE_LOC is the folder of a run (save_loc)")
    return {"list": _list, "verify": _verify, "prune": _prune}[arguments.action](folder, found, arguments)


def _list(folder: Path, found: list[Path], arguments: argparse.Namespace) -> int:
    import json
    from datetime import datetime

    from credit.train.checkpoint.checkpoint import step_of

    links = {name: (folder / name).resolve() for name in ("latest", "best")}
    print(f"{'step':>10} {'size':>10}  {'written (UTC)':17} {'best so far':>12}  links")
    for path in found:
        files = [file for file in path.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e6
        when = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC).strftime("%Y-%m-%d %H:%M")
        try:
            best = f"{json.loads((path / 'meta.json').read_text())['progression']['best']:.4g}"
        except (OSError, ValueError, KeyError, TypeError):
            best = "unreadable"
        names = ", ".join(name for name, target in links.items() if target == path.resolve())
        print(f"{step_of(path):>10} {size:>7.1f} MB  {when:17} {best:>12}  {names}")
    return 0


def _verify(folder: Path, found: list[Path], arguments: argparse.Namespace) -> int:
    from credit.train.checkpoint.checkpoint import verify_checkpoint

    damaged = 0
    for path in found:
        problem = verify_checkpoint(path)
        damaged += problem is not None
        print(f"{path}: {problem or 'whole'}")
    return 2 if damaged else 0


def _prune(folder: Path, found: list[Path], arguments: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from credit.train.checkpoint.checkpoint import Retention, prune
    from credit.train.monitor.run_lock import RunLock

    keep = Retention(arguments.keep_last, arguments.keep_every)
    with nullcontext() if arguments.dry_run else RunLock(arguments.save_loc):
        removed = prune(folder, keep, arguments.dry_run)
    for path in removed:
        print(f"{'would be removed' if arguments.dry_run else 'removed'}: {path}")
    print(f"{len(found) - len(removed)} stay")
    return 0
