"""``credit completion``: print the script with which a shell completes the words of a command line."""

from credit.cli.completion.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
