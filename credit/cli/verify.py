"""``credit_verify``: scores forecasts and writes the scores, the figures and the report."""

from __future__ import annotations

import argparse

from credit.cli.arguments import add_config_arguments as add_arguments

HELP = """Score the forecasts in save_loc/forecasts (inference.folder) against the data of the test period.

The model, persistence, damped persistence, climatology and verification.other_forecasts are scored on the same initial
times. Writes scores.csv, scores.nc, figures/ and report.html into save_loc and prints a table."""

__all__ = ["HELP", "add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    from credit.config import load_config
    from credit.data.reader import open_reader
    from credit.forecast.archive import open_forecasts
    from credit.parallel.launch import require_one_process
    from credit.verify.verification import verify

    require_one_process("verify")
    config = load_config(arguments.config, arguments.overrides)
    folder = Path(config.save_loc)
    archive = open_forecasts(folder / config.inference.folder)
    table = verify(config, open_reader(config.data), archive, folder)
    print(table.format())
    print(f"\nscores   {folder / 'scores.csv'}, {folder / 'scores.nc'}")
    print(f"figures  {folder / 'figures'}")
    print(f"report   {folder / 'report.html'}")
    return 0
