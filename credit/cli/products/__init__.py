"""``credit products``: make products from existing forecasts."""

from credit.cli.products.command import HELP, add_arguments, run_command

__all__ = ["HELP", "add_arguments", "run_command"]
