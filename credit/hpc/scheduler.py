"""What the two schedulers' commands have in common: how they are called, and what their answers mean."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from credit.errors import CreditError


def call(command: Sequence[str], folder: Path | None = None, allowed: Collection[int] = ()) -> tuple[int, str]:
    """Run a scheduler's command, without a shell, and return its exit code and what it printed.

    Args:
        command: its words.
        folder: where it runs.
        allowed: exit codes besides 0 that are answers, not failures.

    Raises:
        CreditError: if it is not there, or fails, with what it said.
    """
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise CreditError(
            f"{command[0]} is not on this machine; submit from a login node of the cluster, or look at the script with "
            "--dry-run"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CreditError(f"{command[0]} gave no answer in five minutes; is the scheduler well?") from error
    if done.returncode and done.returncode not in allowed:
        said = (done.stderr or done.stdout).strip() or "it said nothing"
        raise CreditError(f"{' '.join(command)}: failed with {done.returncode}: {said}")
    return done.returncode, done.stdout.strip()


def plain_name(text: str, longest: int) -> str:
    """Return `text` as a name for a job: letters, digits, dot, dash and underscore, a letter first."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_.-")
    if not name or not name[0].isalpha():
        name = f"credit_{name}".rstrip("_")
    return name[:longest]
