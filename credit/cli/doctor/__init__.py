"""``credit doctor``: collect the facts that a bug report needs."""

from credit.cli.doctor.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
