"""Run commands of a scheduler as subprocesses, and build job names that schedulers accept."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from credit.errors import CreditError


def run_command(command: Sequence[str], folder: Path | None = None, allowed: Collection[int] = ()) -> tuple[int, str]:
    """Run a command of a scheduler without a shell and return its exit status and standard output.

    Args:
        command: words of the command.
        folder: working folder, None for the current one.
        allowed: exit statuses besides 0 that are not failures.

    Raises:
        CreditError: if the command is missing, fails, or takes longer than five minutes. The message has the output of
            a command that failed.
    """
    try:
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise CreditError(
            f"{command[0]} is not on this machine; submit from a login node of the cluster, or look at the script with "
            "--dry-run"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise CreditError(
            f"{command[0]} gave no answer in five minutes; check whether the scheduler is running"
        ) from error
    if completed.returncode and completed.returncode not in allowed:
        # Commands differ in where they print their errors.
        output = completed.stderr or completed.stdout
        message = output.strip() or "it printed nothing"
        raise CreditError(f"{' '.join(command)}: failed with exit status {completed.returncode}: {message}")
    return completed.returncode, completed.stdout.strip()


def sanitize_name(text: str, max_length: int) -> str:
    """Return `text` as a job name of at most `max_length` characters.

    The name starts with a letter; letters, digits, dots, dashes and underscores follow. Other characters become
    underscores.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("_.-")
    if not name or not name[0].isalpha():
        # Nothing may be left of the text, for example of one in Chinese; then the name is `credit`.
        name = f"credit_{name}".rstrip("_")
    return name[:max_length]
