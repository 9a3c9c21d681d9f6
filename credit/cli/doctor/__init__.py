"""``credit doctor``: collect what a bug report needs."""

from credit.cli.doctor.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
