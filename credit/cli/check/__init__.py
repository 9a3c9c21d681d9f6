"""``credit check``: find what would go wrong before a job is queued."""

from credit.cli.check.command import HELP, add_arguments, check_config, run_command

__all__ = ["HELP", "add_arguments", "check_config", "run_command"]
