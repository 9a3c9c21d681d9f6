"""``credit sweep``: train a config with many values of some keys, and list the results."""

from credit.cli.sweep.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
