"""Subprocesses for the commands of a scheduler, and job names that schedulers accept."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from credit.errors import CreditError


def run_command(command: Sequence[str], folder: Path | None = None, allowed: Collection[int] = ()) -> tuple[int, str]:
    """Run a command of a scheduler without a shell, and return its exit status and standard output.

    Args:
        command: words of the command.
        folder: working folder; None for the current folder.
        allowed: exit statuses other than 0 that are not treated as failures.

    Raises:
        CreditError: if the command is missing, fails, or takes longer than five minutes. The message contains the
            output of a failed command.
    """
    try:
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise CreditError(
            f"{command[0]} is not on this machine; submit from a login node of the cluster, or print the script with "
            "--dry-run"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CreditError(
            f"{command[0]} did not respond within five minutes; check that the scheduler is running"
        ) from error
    if completed.returncode and completed.returncode not in allowed:
        # Some commands print their errors to standard output.
        output = completed.stderr or completed.stdout
        message = output.strip() or "the command printed nothing"
        raise CreditError(f"{' '.join(command)}: failed with exit status {completed.returncode}: {message}")
    return completed.returncode, completed.stdout.strip()


def sanitize_name(text: str, max_length: int) -> str:
    """Convert `text` to a job name of at most `max_length` characters.

    The name starts with a letter, followed by letters, digits, dots, dashes and underscores. Other characters are
    replaced with underscores.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_.-")
    if not name or not name[0].isalpha():
        # If the text has no valid characters, for example a Chinese text, the name is `credit`.
        name = f"credit_{name}".rstrip("_")
    return name[:max_length]
