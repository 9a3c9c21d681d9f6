"""Function `score`, which computes the scores of ``credit verify`` for forecasts in memory or in files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from credit.api.datasets import find_valid_times, open_dataset_reader
from credit.api.forecast_archive import DatasetArchive
from credit.calendar import Calendar, format_duration
from credit.config import Config, build_config
from credit.config.sections.verification import BEST_BASELINE
from credit.data.formats.plugin.fields import encode_times
from credit.data.splits import Split
from credit.errors import ConfigError, DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.forecast_reader import open_forecasts
from credit.utils.progress import show_progress
from credit.verify.scorer import score_period

# Beginnings of the names of scores, and names of baselines, that need a climatology.
_CLIMATOLOGY_SCORES = ("acc", "wind_vector_acc", "activity", "wind_vector_activity", "brier_skill", "seeps")
_CLIMATOLOGY_FORECASTS = ("damped_persistence", "climatology", BEST_BASELINE)
# Names of horizontal dimensions; all other dimensions of a field except time are levels.
_HORIZONTAL_DIMS = ("latitude", "longitude", "lat", "lon")
# Beginning of the CF attribute ``cell_methods`` -> value of ``data.variable_options.NAME.temporal``.
_TEMPORAL = {"time: sum": "accumulate", "time: mean": "mean"}
# A config must define splits, but scores do not use them.
_UNUSED_SPLITS = {
    "train": ["1900-01-01", "1900-12-31"],
    "valid": ["1902-01-01", "1902-12-31"],
    "test": ["1904-01-01", "1904-12-31"],
}


def score(
    forecast: xr.Dataset | Sequence[xr.Dataset] | str | os.PathLike,
    truth: xr.Dataset,
    *,
    climatology_period: tuple[str, str] | None = None,
    level_units: str = "hPa",
    progress: bool = False,
    **verification: Any,
) -> xr.Dataset:
    """Return the scores of ``credit verify`` for all variables that are in both the forecasts and the truth.

    Args:
        forecast: dataset that `credit.Model.forecast` returns, a list of these datasets with different initial times, a
            dataset with dimensions of initial time and lead time, or the folder or store of forecast files.
        truth: dataset with the dimension ``time`` and the true fields at all valid and initial times, on the grid and
            levels of the forecasts.
        climatology_period: first and last date (strings) of the period of `truth` from which the climatology is
            computed; it must not contain times of the forecasts. None omits the anomaly correlation and the baselines
            that need a climatology, unless ``climatology={"method": "file", "path": ...}`` names a file.
        level_units: units of the levels of `truth`: hPa, Pa or model_level.
        progress: True to show progress bars.
        **verification: other keys of the section ``verification``, such as ``regions=["global", "europe"]``. With
            ``allow_seen=True``, the forecasts may overlap the training or validation period.

    Returns:
        Dataset of scores in physical units, such as ``rmse``, ``bias`` and ``mae``, and for an ensemble ``crps_fair``
        and ``spread_skill``. The dimensions are forecast (``model``, ``persistence``, ...), season, channel (such as
        z500), lead (hours) and region. If there are enough cases, the dataset also contains the 95 % intervals
        (``rmse_low``, ``rmse_high``).

    Raises:
        DataError: if forecast and truth cannot be compared; the message lists all reasons.
        ConfigError: if a key of `verification` is invalid, or the climatology cannot be computed.

    Example:
        >>> scores = credit.score(model.forecast(analyses, "5d"), analyses)
        >>> scores.rmse.sel(forecast="model", channel="z500", region="global")
    """
    if isinstance(forecast, str | os.PathLike):
        archive: ForecastArchive = open_forecasts(forecast, level_units=level_units)
    else:
        datasets = [forecast] if isinstance(forecast, xr.Dataset) else list(forecast)
        archive = DatasetArchive(datasets, "forecast", level_units)
    has_climatology = climatology_period is not None or _has_climatology_file(verification)
    _require_supported_settings(verification, has_climatology)
    # Without a climatology, the fit uses the first times of the forecasts, and all results that depend on it are
    # dropped.
    first_initial = int(archive.initial_minutes[0])
    scored_period = Split("forecasts", first_initial, int(archive.initial_minutes[-1] + archive.lead_minutes[-1]))
    fitted_period = Split("climatology", first_initial, first_initial + int(archive.lead_minutes[0]))
    if climatology_period is not None:
        fitted_period = _parse_climatology_period(climatology_period, archive, truth)
    truth = _select_times(truth, (scored_period, fitted_period))
    config = _build_config(archive, truth, level_units, verification, has_climatology)
    reader = open_dataset_reader(config.data, truth, "truth", with_outputs=True)
    with show_progress(progress):
        scores = score_period(config, reader, archive, fitted_period, scored_period).table.dataset
    return _select_defined_scores(scores, has_climatology, climatology_period is not None)


def _select_defined_scores(scores: xr.Dataset, has_climatology: bool, has_fit: bool) -> xr.Dataset:
    """Return the scores without those that need a climatology, or a fit to a period of truth, that does not exist.

    Args:
        scores: dataset of the scores.
        has_climatology: True if there is a climatology.
        has_fit: True if the climatology was fitted to a period of truth.
    """
    if not has_climatology:
        return _remove_climatology_scores(scores, _CLIMATOLOGY_FORECASTS, _CLIMATOLOGY_SCORES)
    # Damped persistence needs a fit to a period of truth, which a climatology from a file does not provide.
    if not has_fit:
        return _remove_climatology_scores(scores, ("damped_persistence", BEST_BASELINE), ())
    return scores


def _has_climatology_file(verification: Mapping[str, Any]) -> bool:
    """Return True if the settings of the section ``verification`` name a file with a climatology."""
    section = verification.get("climatology")
    return isinstance(section, Mapping) and section.get("method") == "file"


def _require_supported_settings(verification: Mapping[str, Any], has_climatology: bool) -> None:
    """Raise ConfigError for settings that give several tables, or that need a climatology if there is none.

    Args:
        verification: keys of the section ``verification``.
        has_climatology: True if there is a climatology.

    Raises:
        ConfigError: if a setting is not supported; the message names the key.
    """
    if verification.get("all_pairs"):
        raise ConfigError("all_pairs: credit.score returns one table; score each pair in a separate call")
    if has_climatology:
        return
    for name, event in (verification.get("events") or {}).items():
        if isinstance(event, Mapping) and {"above_quantile", "below_quantile"} & event.keys():
            raise ConfigError(f"events.{name}: a quantile needs a climatology; give climatology_period")
    if verification.get("seeps"):
        raise ConfigError(f"seeps: {verification['seeps']} needs a climatology; give climatology_period")


def _select_times(truth: xr.Dataset, periods: Sequence[Split]) -> xr.Dataset:
    """Return the truth at the times of the periods, so that missing values at other times have no effect.

    Raises:
        DataError: if the truth has no time in the periods.
    """
    name, times = find_valid_times(truth, "truth")
    minutes, _ = encode_times(times.values)
    is_needed = np.zeros(len(minutes), dtype=bool)
    for period in periods:
        is_needed |= (minutes >= period.first) & (minutes <= period.last)
    if not is_needed.any():
        raise DataError("truth has no time of the forecasts; it must contain their initial and valid times")
    return truth.isel({name: np.flatnonzero(is_needed)})


def _parse_climatology_period(period: tuple[str, str], archive: ForecastArchive, truth: xr.Dataset) -> Split:
    """Return the period to which the climatology is fitted, with its ends in minutes.

    Args:
        period: first and last date.
        archive: reader of the forecasts.
        truth: dataset of the truth.

    Raises:
        DataError: if the truth has no time in the period, or the period contains times of the forecasts.
    """
    minutes, calendar_name = encode_times(find_valid_times(truth, "truth")[1].values)
    calendar = Calendar(calendar_name)
    first = calendar.parse(period[0], "climatology_period")
    last = calendar.parse_period_end(period[1], "climatology_period")
    if not ((minutes >= first) & (minutes <= last)).any():
        raise DataError(
            f"climatology_period: truth has no time from {period[0]} to {period[1]}; it has "
            f"{calendar.format(int(minutes.min()))} to {calendar.format(int(minutes.max()))}"
        )
    for initial in archive.initial_minutes.tolist():
        if first <= initial + int(archive.lead_minutes[-1]) and initial <= last:
            raise DataError(
                f"climatology_period: {period[0]} to {period[1]} contains times of the forecast from "
                f"{calendar.format(initial)}; choose a different period of truth"
            )
    return Split("climatology", first, last)


def _build_config(
    archive: ForecastArchive,
    truth: xr.Dataset,
    level_units: str,
    verification: Mapping[str, Any],
    has_climatology: bool,
) -> Config:
    """Return a config for scores of the variables that are in both the forecasts and the truth.

    Args:
        archive: reader of the forecasts.
        truth: dataset of the truth.
        level_units: units of the levels.
        verification: keys of the section ``verification``.
        has_climatology: True if there is a climatology.

    Raises:
        DataError: if forecasts and truth have no variable in common.
        ConfigError: if a key of `verification` is invalid.
    """
    levels_of = _find_common_variables(archive, truth)
    lead_times = [format_duration(lead) for lead in archive.lead_minutes.tolist()]
    # Lead times of spectra: one and three days, or the longest lead time.
    spectra_leads = [lead for lead in ("24h", "72h") if lead in lead_times] or lead_times[-1:]
    settings = {"draw_figures": False, "figure_leads": spectra_leads, **verification}
    if not has_climatology:
        settings |= {"climatology": {"method": "harmonic", "harmonics": 0}, "seeps": []}
    raw = {
        "experiment": "score",
        "save_loc": ".",
        "data": {
            "sources": [{"path": "truth"}],
            "levels": sorted({level for levels in levels_of.values() for level in levels}),
            "level_units": level_units,
            "variables": {
                "prognostic": {
                    "vars_3D": [name for name, levels in levels_of.items() if levels],
                    "vars_2D": [name for name, levels in levels_of.items() if not levels],
                }
            },
            "variable_options": _build_variable_options(archive, truth, levels_of),
            "timestep": format_duration(int(np.gcd.reduce(archive.lead_minutes))),
            "splits": _UNUSED_SPLITS,
        },
        "model": {"type": "unet"},
        "trainer": {"max_steps": 1},
        "inference": {"lead_time": lead_times[-1], "lead_times": lead_times},
        "verification": settings,
    }
    return build_config(raw, origin="score")


def _build_variable_options(
    archive: ForecastArchive, truth: xr.Dataset, levels_of: Mapping[str, list[float]]
) -> dict[str, dict[str, Any]]:
    """Return ``data.variable_options`` of the scored variables: levels, missing values, and means or sums over a step.

    Args:
        archive: reader of the forecasts.
        truth: dataset of the truth.
        levels_of: name of each scored variable -> its levels.
    """
    time_name, _ = find_valid_times(truth, "truth")
    options: dict[str, dict[str, Any]] = {}
    for name, levels in levels_of.items():
        variable_options: dict[str, Any] = {}
        if levels:
            variable_options["levels"] = levels
        # A cell must be missing at all times or never (the reader checks this), so one field is enough. The variable
        # is copied, because a lazy variable would keep the values that are read here in memory.
        first_field = truth.variables[name].isel({time_name: 0}).copy(deep=False)
        if np.isnan(first_field.values).any():
            variable_options["missing"] = "fill_mean"
        for beginning, temporal in _TEMPORAL.items():
            if archive.cell_methods.get(name, "").startswith(beginning):
                variable_options["temporal"] = temporal
        options[name] = variable_options
    return options


def _find_common_variables(archive: ForecastArchive, truth: xr.Dataset) -> dict[str, list[float]]:
    """Return the levels, by name, of each variable that is in both the forecasts and the truth.

    The list of levels is empty for a variable without levels.

    Raises:
        DataError: if forecasts and truth have no variable in common.
    """
    levels_of: dict[str, list[float]] = {}
    for variable, level in archive.channel_levels.values():
        if variable in truth.data_vars:
            levels = levels_of.setdefault(variable, [])
            if level is not None:
                levels.append(level)
    # Levels that are not in the truth are not scored. If no level is equal, the units of the levels differ, and the
    # reader converts the levels.
    for variable, levels in levels_of.items():
        truth_levels = [truth[dim].values for dim in truth[variable].dims if str(dim) not in _HORIZONTAL_DIMS]
        in_truth = [level for level in levels if any(level in values for values in truth_levels)]
        levels_of[variable] = in_truth or levels
    if not levels_of:
        raise DataError(
            f"forecast and truth have no variable in common; the forecast has {', '.join(archive.channel_names)}, the "
            f"truth {', '.join(map(str, truth.data_vars))}"
        )
    return levels_of


def _remove_climatology_scores(scores: xr.Dataset, forecasts: Sequence[str], beginnings: tuple[str, ...]) -> xr.Dataset:
    """Return a copy of the scores without the baselines and scores that need a climatology.

    Args:
        scores: dataset of the scores.
        forecasts: names of forecasts and references to remove.
        beginnings: beginnings of the names of scores to remove.
    """
    scores = scores.drop_vars([name for name in scores.data_vars if str(name).startswith(beginnings)])
    for dim in ("forecast", "reference"):
        if dim in scores.dims:
            names = [name for name in scores[dim].values.tolist() if name not in forecasts]
            scores = scores.sel({dim: names})
    if beginnings:
        del scores.attrs["climatology"]
    # Remove comparisons that have no values because their references were removed.
    return scores.drop_vars([name for name, values in scores.data_vars.items() if values.size == 0])
