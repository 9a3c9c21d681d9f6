"""``credit compare``: train, forecast and score several configs at equal cost, and write one HTML page."""

from credit.cli.compare.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
