"""``credit runs``: list the runs in a folder with their state, progress and remaining time."""

from credit.cli.runs.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
