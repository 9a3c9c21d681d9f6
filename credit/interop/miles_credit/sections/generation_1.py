"""Conversion of the ``data`` section of configs of generation 1, the schema without ``data.source``."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.sections.data_parts import (
    LEVELS_OF_16,
    ORDER_STATIC_FIRST,
    ORDER_STATIC_LAST,
    DataParts,
    replace_solar_forcing,
    write_data_section,
)
from credit.interop.miles_credit.sections.periods import Periods, derive_periods

# Group -> (key of its variables, key of its files).
_KEYS_OF_GROUP = {
    "prognostic": ("surface_variables", "save_loc_surface"),
    "diagnostic": ("diagnostic_variables", "save_loc_diagnostic"),
    "dynamic_forcing": ("dynamic_forcing_variables", "save_loc_dynamic_forcing"),
    "static": ("static_variables", "save_loc_static"),
}


def convert_data_1(config: MilesConfig, draft: ConfigDraft) -> DataParts:
    """Convert the ``data`` section of a config of generation 1.

    Returns:
        Variables, files and levels of the config.
    """
    parts = DataParts()
    upper_air = config.get_names("data.variables")
    parts.add_group("prognostic", upper_air, [])
    parts.add_source(str(config.get("data.save_loc", "")), upper_air)
    for group, (variables_key, path_key) in _KEYS_OF_GROUP.items():
        names = config.get_names(f"data.{variables_key}")
        path = config.get(f"data.{path_key}")
        if not names:
            continue
        parts.add_group(group, [], names)
        if path is None:
            config.report.record_refused(f"data.{path_key}", f"missing, but `data.{variables_key}` has variables")
        else:
            parts.add_source(str(path), names)
    replace_solar_forcing(parts, config.report, "data.dynamic_forcing_variables")
    parts.levels = _find_levels(config)

    # This default is the default of the parser. The class that orders the channels has a different default, which is
    # never used.
    static_first = config.get_flag("data.static_first", True)
    order = ORDER_STATIC_FIRST if static_first else ORDER_STATIC_LAST
    if not config.has("data.static_first"):
        config.report.record_derived("data.static_first", f"hidden default `true`: `data.input_order: {list(order)}`")
    write_data_section(config, draft, parts, order)
    _convert_steps(config, draft)
    _convert_periods(config, draft)
    if str(config.get("data.dataset_type", "")).lower().startswith("ocean"):
        config.report.record_refused("data.dataset_type", "an ocean data set has a separate reader")
    scaler_type = config.get("data.scaler_type", "std_new")
    if scaler_type not in ("std", "std_new", "std_cached"):
        config.report.record_refused("data.scaler_type", f"`{scaler_type}` is not a mean and a standard deviation")
    return parts


def _find_levels(config: MilesConfig) -> list[float]:
    """Return the levels of the 3-D variables.

    If the config has only the number of levels, the levels are read from the file of means. If this is not possible and
    there are 16 levels, the usual 16 levels of NCAR's ERA5 data are returned.
    """
    report = config.report
    num_levels = config.get_integer("data.levels", config.get_integer("model.levels", 0))
    stated_levels = config.get("data.level_ids")
    if stated_levels:
        levels = [to_number(level) for level in stated_levels] if isinstance(stated_levels, list) else [None]
        if None in levels:
            report.record_refused("data.level_ids", f"`{stated_levels}` is not a list of numbers")
            return []
        if config.has("data.levels") and num_levels != len(levels):
            report.record_refused("data.levels", f"`{num_levels}`, but `data.level_ids` has {len(levels)} levels")
        return levels
    # The file of means has a value for each level and a coordinate with the levels.
    mean_path = config.get("data.mean_path")
    if mean_path and Path(str(mean_path)).is_file():
        levels = _read_levels(Path(str(mean_path)))
        if len(levels) == num_levels:
            report.record_derived("data.level_ids", f"missing; the {num_levels} levels of `data.mean_path` are used")
            return levels
    if num_levels == len(LEVELS_OF_16):
        report.record_derived(
            "data.level_ids", "missing; the 16 levels of NCAR's ERA5 data are used: check `data.levels`"
        )
        return list(LEVELS_OF_16)
    report.record_refused(
        "data.level_ids",
        f"missing, and the {num_levels} levels are not known, because the file `data.mean_path` does not exist here; "
        "add the levels of your data, `level_ids: [...]`",
    )
    return []


def _read_levels(path: Path) -> list[float]:
    """Return the values of the level coordinate in a file of means; empty if the file has no level coordinate."""
    import xarray as xr

    try:
        with xr.open_dataset(path, decode_times=False) as data:
            for name in ("level", "lev", "hybrid"):
                if name in data.coords:
                    return [float(level) for level in data[name].values]
    except (OSError, ValueError):
        # A file that is not netCDF is reported when it is imported.
        pass
    return []


def _convert_steps(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the timestep and the numbers of steps in samples; generation 1 counts forecast steps from 0."""
    report = config.report
    draft.set("data.timestep", f"{config.get_integer('data.lead_time_periods', 6)}h")
    history_len = config.get_integer("data.history_len", 1)
    draft.set("data.history_len", history_len)
    if config.get_integer("data.valid_history_len", history_len) != history_len:
        report.record_refused("data.valid_history_len", f"differs from `data.history_len` ({history_len})")
    forecast_len = config.get_integer("data.forecast_len", 0)
    draft.set("data.forecast_len", forecast_len + 1, "miles-credit counts from 0")
    valid_forecast_len = config.get_integer("data.valid_forecast_len", forecast_len)
    draft.set("data.valid_forecast_len", valid_forecast_len + 1)
    if not config.has("data.valid_forecast_len"):
        report.record_derived("data.valid_forecast_len", "hidden default: the value of `data.forecast_len`")


def _convert_periods(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `data.splits` from the periods of generation 1, which do not include their last year."""
    train = _read_years(config, "data.train_years")
    valid = _read_years(config, "data.valid_years")
    if train is None or valid is None:
        return
    write_periods(config, draft, derive_periods(train, valid), "data.train_years", "data.valid_years")


def _read_years(config: MilesConfig, key: str) -> tuple[date, date] | None:
    """Return the first and the last day of a period ``[first year, year after the last]``.

    If the value has a different form, record the key as refused and return None.
    """
    years = config.get(key)
    is_pair = isinstance(years, list) and len(years) == 2 and all(isinstance(year, int) for year in years)
    if not is_pair or years[0] >= years[1]:
        config.report.record_refused(key, f"`{years}`: write [first year, year after the last]")
        return None
    first, end = years
    return date(first, 1, 1), date(end, 1, 1) - timedelta(days=1)


def write_periods(
    config: MilesConfig, draft: ConfigDraft, periods: Periods | None, train_key: str, valid_key: str
) -> None:
    """Write `data.splits` and `data.split_gap`, and record the changes of the periods in the report.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        periods: periods of the run; None if a split would have no days.
        train_key: dotted key of the training period, for the report.
        valid_key: dotted key of the validation period.
    """
    if periods is None:
        config.report.record_refused(
            valid_key, "the periods are too short for training, validation and test; use longer periods"
        )
        return
    draft.set("data.splits", periods.to_splits())
    draft.set("data.split_gap", periods.split_gap)
    if periods.changes:
        draft.comments["data.splits"] = "derived; see the report"
        text = "; ".join(periods.changes)
        config.report.record_derived(valid_key, f"`data.splits: {periods.to_splits()}`: {text}")
    config.report.record_derived(train_key, f"`data.splits.train: {periods.to_splits()['train']}`")
