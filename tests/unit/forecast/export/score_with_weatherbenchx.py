"""Score a folder of ``credit convert --weatherbench`` with WeatherBench-X, and write ``weatherbenchx_scores.csv``.

    python score_with_weatherbenchx.py FOLDER weatherbenchx_scores.csv

The script needs WeatherBench-X (commit 2047a84d of August 2026), which is not on a package index. It uses nothing of
this package. `test_weatherbench.py` explains how to create FOLDER.
"""

from __future__ import annotations

import csv
import sys

import numpy as np
import xarray as xr
from weatherbenchX import aggregation, weighting
from weatherbenchX.data_loaders import xarray_loaders
from weatherbenchX.metrics import base, deterministic, probabilistic

VARIABLES = ["geopotential", "temperature", "2m_temperature", "mean_sea_level_pressure"]


def compute_scores(folder: str) -> dict[tuple[str, str, str, int], float]:
    """Return (score, variable, level, lead time in hours) -> value, global and over all initial times."""
    forecasts = xarray_loaders.PredictionsFromXarray(path=f"{folder}/forecasts.zarr", variables=VARIABLES)
    truth = xarray_loaders.TargetsFromXarray(path=f"{folder}/truth.zarr", variables=VARIABLES)
    climatology = xr.open_zarr(f"{folder}/climatology.zarr")[VARIABLES].load()
    store = xr.open_zarr(f"{folder}/forecasts.zarr")
    times = (store["time"].values, store["prediction_timedelta"].values)
    # In float32 the sums would have fewer digits than the table.
    members = forecasts.load_chunk(*times).astype(np.float64)
    targets = truth.load_chunk(*times).astype(np.float64)
    mean_scores = {
        "rmse": deterministic.RMSE(),
        "bias": deterministic.Bias(),
        "mae": deterministic.MAE(),
        "acc": deterministic.ACC(climatology.astype(np.float64)),
    }
    ensemble_scores = {
        "crps_fair": probabilistic.CRPSEnsemble(ensemble_dim="number"),
        "spread": probabilistic.EnsembleRootMeanVariance(ensemble_dim="number"),
    }
    table = {}
    for fields, metrics in ((members.mean("number"), mean_scores), (members, ensemble_scores)):
        statistics = base.compute_unique_statistics_for_all_metrics(metrics, fields, targets)
        aggregator = aggregation.Aggregator(
            reduce_dims=["init_time", "latitude", "longitude"], weigh_by=[weighting.GridAreaWeighting()]
        )
        values = aggregator.aggregate_statistics(statistics).metric_values(metrics)
        for key, array in values.data_vars.items():
            score, variable = key.split(".", 1)
            for lead_time in array["lead_time"].values:
                hours = int(lead_time / np.timedelta64(1, "h"))
                levels = array["level"].values if "level" in array.dims else [None]
                for level in levels:
                    value = array.sel(lead_time=lead_time)
                    if level is not None:
                        value = value.sel(level=level)
                    # A variable is missing on levels that only another variable has.
                    if np.isfinite(value):
                        table[score, variable, "" if level is None else str(level), hours] = float(value)
    return table


if __name__ == "__main__":
    with open(sys.argv[2], "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["score", "variable", "level", "lead_hours", "value"])
        for key, value in sorted(compute_scores(sys.argv[1]).items()):
            writer.writerow([*key, f"{value:.12g}"])
