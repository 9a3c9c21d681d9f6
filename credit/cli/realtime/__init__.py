"""``credit realtime``: make a forecast from the newest operational analysis."""

from credit.cli.realtime.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
