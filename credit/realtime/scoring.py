"""Scores of earlier forecasts against a new analysis.

Shape suffixes: M members, C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from credit.calendar import Calendar
from credit.errors import DataError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.files.names import PREFIX
from credit.forecast.io.forecast_reader import open_forecasts
from credit.realtime.json_lines import append_json_lines, read_json_lines
from credit.train.build.assets import ModelAssets


def has_forecast(folder: Path, minutes: int) -> bool:
    """Return True if a folder contains a complete forecast from the initial time `minutes` (minutes since 1900)."""
    stem = Calendar().datetime(minutes).strftime(f"{PREFIX}%Y-%m-%dT%H")
    try:
        # In a folder of files, only the files of this forecast are opened.
        return minutes in open_forecasts(folder, stems=[stem]).initial_minutes
    except DataError:
        return False


def score_earlier_forecasts(
    save_loc: Path, folder_name: str, assets: ModelAssets, analysis_CHW: np.ndarray, minutes: int
) -> int:
    """Score all forecasts that are valid at the time of an analysis, and append a line for each to ``scores.jsonl``.

    A line contains the initial time, the valid time, the name of the folder, the lead time in hours and the number of
    members. For each channel, it contains the area-weighted RMSE and bias (forecast minus analysis), and the units. For
    an ensemble, the ensemble mean is scored. Forecasts that are already in ``scores.jsonl`` are skipped.

    Args:
        save_loc: folder of the run.
        folder_name: folder of the forecasts, relative to `save_loc`.
        assets: channels and grid of the model.
        analysis_CHW: prognostic channels of the analysis in physical units, with NaN for missing values.
        minutes: time of the analysis in minutes since 1900.

    Returns:
        Number of forecasts that were scored.

    Raises:
        DataError: if a forecast cannot be read, or its grid differs from the grid of the model.
    """
    folder = save_loc / folder_name
    scores_path = save_loc / "realtime" / "scores.jsonl"
    forecasts = open_forecasts(folder)
    difference = assets.grid.describe_mismatch(forecasts.grid)
    if difference is not None:
        raise DataError(f"{folder}: the forecasts and the model are on different grids: {difference}")
    valid_time = forecasts.calendar.format(minutes)
    scored_times = set()
    for record in read_json_lines(scores_path):
        if record["valid_time"] == valid_time and record["folder"] == folder_name:
            scored_times.add(record["initial_time"])
    records = []
    lead_minutes = forecasts.lead_minutes.tolist()
    for initial_minutes in forecasts.initial_minutes.tolist():
        lead = minutes - initial_minutes
        initial_time = forecasts.calendar.format(initial_minutes)
        if lead not in lead_minutes or initial_time in scored_times:
            continue
        fields_MCHW = forecasts.read_members(initial_minutes, lead_minutes.index(lead))
        records.append(
            {
                "initial_time": initial_time,
                "valid_time": valid_time,
                "folder": folder_name,
                "lead_hours": lead / 60,
                "members": len(fields_MCHW),
                "channels": _score_channels(forecasts, fields_MCHW, assets, analysis_CHW),
            }
        )
    append_json_lines(scores_path, records)
    return len(records)


def _score_channels(
    forecasts: ForecastSource, fields_MCHW: np.ndarray, assets: ModelAssets, analysis_CHW: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Return a mapping from the name of each channel in both forecast and analysis to its scores and units."""
    scores = {}
    area_HW = assets.grid.area_weights()
    for channel, truth_HW in zip(assets.channels.group("prognostic"), analysis_CHW, strict=True):
        if channel.name not in forecasts.channel_names:
            continue
        index = list(forecasts.channel_names).index(channel.name)
        error_HW = fields_MCHW[:, index].mean(axis=0, dtype=np.float64) - truth_HW
        is_valid_HW = np.isfinite(error_HW)
        if not is_valid_HW.any():
            continue
        weights = area_HW[is_valid_HW] / area_HW[is_valid_HW].sum()
        error = error_HW[is_valid_HW]
        scores[channel.name] = {
            "rmse": float(np.sqrt((weights * error**2).sum())),
            "bias": float((weights * error).sum()),
            "units": assets.attributes.get(channel.variable, {}).get("units", ""),
        }
    return scores
