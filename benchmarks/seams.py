"""Forecast error / persistence error by column and by row, which shows a seam of the grid and errors at the poles.

    python benchmarks/seams.py RUN_FOLDER [RUN_FOLDER ...] --leads 24 72

A network that treats the first and the last column as an edge has larger errors there. So the table has the larger of
the two columns' ratios over the mean of the six columns on either side, and the larger ratio of the two polar rows over
the ratio of the globe. RUN_FOLDER has config.yml and forecasts/, as `credit train` and `credit rollout` write them;
with several runs of a name, such as the seeds of `credit compare`, give all of them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from credit.config import load_config
from credit.data.reader import open_reader
from credit.forecast.io.forecast_reader import open_forecasts

CHANNELS = ("z500", "t850", "t2m", "msl")
# Number of columns on either side of the seam that the first and the last column are compared with.
NEIGHBOURS = 6


def sum_squared_errors(run: Path, lead_hours: int, names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the squared errors of a run's forecasts and of persistence, summed over the initial times.

    Args:
        run: folder of the run.
        lead_hours: lead time in hours.
        names: names of the channels.

    Returns:
        Two arrays (C, H, W) float64 in squared physical units.
    """
    config = load_config(run / "config.yml")
    reader = open_reader(config.data)
    archive = open_forecasts(run / "forecasts", level_units=config.data.level_units)
    stored_names = [channel.name for channel in reader.channels.time_varying_stored]
    indices = [stored_names.index(name) for name in names]
    forecast_indices = [archive.channel_names.index(name) for name in names]
    lead_minutes = 60 * lead_hours
    lead_index = list(archive.lead_minutes).index(lead_minutes)
    model_errors = np.zeros((len(names), *reader.grid.shape))
    persistence_errors = np.zeros_like(model_errors)
    for start in archive.initial_minutes:
        initial_index = reader.index_of(int(start))
        valid_index = reader.index_of(int(start) + lead_minutes)
        if initial_index is None or valid_index is None:
            continue
        truth_CHW = reader.read(valid_index)[indices].astype(np.float64)
        initial_CHW = reader.read(initial_index)[indices]
        forecast_CHW = archive.read_members(int(start), lead_index)[0, forecast_indices]
        model_errors += (forecast_CHW - truth_CHW) ** 2
        persistence_errors += (initial_CHW - truth_CHW) ** 2
    return model_errors, persistence_errors


def compare_edges(model_errors: np.ndarray, persistence_errors: np.ndarray, area_HW: np.ndarray) -> tuple[float, float]:
    """Return the edge ratio of the columns and the edge ratio of the rows, for one channel.

    Args:
        model_errors: (H, W) squared errors of the forecasts.
        persistence_errors: (H, W) squared errors of persistence.
        area_HW: areas of the cells.

    Returns:
        The largest ratio of the first and the last column over the mean of their neighbours, and the largest ratio of
        the first and the last row over the ratio of the globe.
    """
    weighted_model, weighted_persistence = model_errors * area_HW, persistence_errors * area_HW
    ratio_W = np.sqrt(weighted_model.sum(axis=0) / weighted_persistence.sum(axis=0))
    neighbours = np.concatenate([ratio_W[1 : 1 + NEIGHBOURS], ratio_W[-1 - NEIGHBOURS : -1]])
    column = max(ratio_W[0], ratio_W[-1]) / neighbours.mean()
    ratio_H = np.sqrt(model_errors.sum(axis=1) / persistence_errors.sum(axis=1))
    global_ratio = np.sqrt(weighted_model.sum() / weighted_persistence.sum())
    return float(column), float(max(ratio_H[0], ratio_H[-1]) / global_ratio)


def main() -> None:
    """Print a table with a row for each run, lead time and channel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders with forecasts")
    parser.add_argument("--leads", nargs="+", type=int, default=[24, 72], help="lead times in hours")
    parser.add_argument("--channels", nargs="+", default=list(CHANNELS), help="names of the channels")
    arguments = parser.parse_args()
    print("| run | lead, h | channel | columns at the seam over their neighbours | polar rows over the globe |")
    print("|---|---|---|---|---|")
    for run in arguments.runs:
        area_HW = open_reader(load_config(run / "config.yml").data).grid.area_weights()
        for lead_hours in arguments.leads:
            errors = sum_squared_errors(run, lead_hours, arguments.channels)
            for number, name in enumerate(arguments.channels):
                column, row = compare_edges(errors[0][number], errors[1][number], area_HW)
                print(f"| {run} | {lead_hours} | {name} | {column:.3f} | {row:.3f} |")


if __name__ == "__main__":
    main()
