"""``credit check``: find errors in a config and its data before a job is submitted."""

from credit.cli.check.command import HELP, add_arguments, check_config, run_command

__all__ = ["HELP", "add_arguments", "check_config", "run_command"]
