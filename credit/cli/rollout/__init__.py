"""``credit rollout``: make forecasts from a list of initial times."""

from credit.cli.rollout.command import HELP, add_arguments, build_shared_forecast_function, run_command

__all__ = ["HELP", "add_arguments", "build_shared_forecast_function", "run_command"]
