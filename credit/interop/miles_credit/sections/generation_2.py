"""Conversion of the sections ``data`` (with ``data.source``) and ``validation_data`` of configs of generation 2."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from typing import Any

from credit.calendar import parse_duration
from credit.errors import ConfigError
from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.sections.data_parts import (
    GROUPS,
    ORDER_STATIC_LAST,
    DataParts,
    replace_solar_forcing,
    write_data_section,
)
from credit.interop.miles_credit.sections.generation_1 import write_periods
from credit.interop.miles_credit.sections.periods import derive_periods

_ARCO = "gs://gcp-public-data-arco-era5/ar"
_ARCO_PRESSURE = f"{_ARCO}/full_37-1h-0p25deg-chunk-1.zarr-v3"
_ARCO_MODEL = f"{_ARCO}/model-level-1h-0p25deg.zarr-v1"
_WEATHERBENCH = "gs://weatherbench2/datasets/era5"
_WEATHERBENCH_STORES = {
    "1440x721": f"{_WEATHERBENCH}/1959-2023_01_10-wb13-6h-1440x721_with_derived_variables.zarr",
    "240x121": f"{_WEATHERBENCH}/1959-2023_01_10-6h-240x121_equiangular_with_poles_conservative.zarr",
    "64x32": f"{_WEATHERBENCH}/1959-2023_01_10-6h-64x32_equiangular_conservative.zarr",
    "full": f"{_WEATHERBENCH}/1959-2023_01_10-full_37-1h-0p25deg-chunk-1.zarr",
}
_PUBLIC = {"storage_options": {"token": "anon"}}
# Kinds of sources that consist of local files.
_LOCAL_TYPES = ("local",)


def convert_data_2(config: MilesConfig, draft: ConfigDraft) -> DataParts:
    """Convert the ``data`` section of a config of generation 2.

    Returns:
        Variables, files and levels of the config.
    """
    parts = DataParts()
    for name, source in config.peek_section("data.source").items():
        _convert_source(config, parts, f"data.source.{name}", source)
    replace_solar_forcing(parts, config.report, "data.source")
    _add_validation_files(config, parts)
    write_data_section(config, draft, parts, ORDER_STATIC_LAST)
    config.report.record_derived("data.input_order", f"`{list(ORDER_STATIC_LAST)}`, the order of generation 2")
    _convert_steps(config, draft)
    _convert_periods(config, draft)
    scaler_type = config.get("data.scaler_type", "std_new")
    if scaler_type not in ("std", "std_new"):
        config.report.record_refused("data.scaler_type", f"`{scaler_type}` is not a mean and a standard deviation")
    return parts


def _convert_source(config: MilesConfig, parts: DataParts, key: str, source: Any) -> None:
    """Add the variables, files and levels of a source to the parts of the data section.

    Args:
        config: config to convert.
        parts: variables, files and levels of the data section, which are extended in place.
        key: dotted key of the source.
        source: contents of the source.
    """
    if not isinstance(source, Mapping):
        config.report.record_refused(key, "must be a section with `variables`")
        return
    dataset_type = config.get(f"{key}.dataset_type", "local")
    levels = config.get(f"{key}.levels")
    level_coord = str(config.get(f"{key}.level_coord", "") or "")
    # In this package, the 3-D variables of all sources have the same levels.
    if levels:
        numbers = [to_number(level) for level in levels] if isinstance(levels, list) else [None]
        if None in numbers or (parts.levels and parts.levels != numbers):
            config.report.record_refused(
                f"{key}.levels", f"`{levels}`: all sources must have the same levels, as numbers"
            )
        else:
            parts.levels = numbers
            parts.level_coord = level_coord
    for group in GROUPS:
        vars_3d = config.get_names(f"{key}.variables.{group}.vars_3D")
        vars_2d = config.get_names(f"{key}.variables.{group}.vars_2D")
        path = config.get(f"{key}.variables.{group}.path")
        if not (vars_3d or vars_2d):
            continue
        if vars_3d and not levels:
            config.report.record_refused(
                f"{key}.levels", "missing, but there are variables in `vars_3D`; list the levels"
            )
        parts.add_group(group, vars_3d, vars_2d)
        _add_files(config, parts, key, str(dataset_type), (vars_3d, vars_2d, path))


def _add_files(
    config: MilesConfig,
    parts: DataParts,
    key: str,
    dataset_type: str,
    group: tuple[list[str], list[str], Any],
) -> None:
    """Add the files, or the public zarr store, of a group of variables to the parts of the data section.

    Args:
        config: config to convert.
        parts: parts of the data section, to which files are added.
        key: dotted key of the source.
        dataset_type: kind of the source.
        group: (names of 3-D variables, names of 2-D variables, path of the files).
    """
    vars_3d, vars_2d, path = group
    if dataset_type in _LOCAL_TYPES:
        if path:
            parts.add_source(str(path), [*vars_3d, *vars_2d])
        else:
            config.report.record_refused(f"{key}.variables", f"no `path` for {', '.join([*vars_3d, *vars_2d])}")
    elif dataset_type == "tisr":
        # The radiation is computed, so there are no files.
        return
    elif dataset_type == "arco_era5":
        # The public store of model levels has no 2-D fields; they are in the store of pressure levels.
        is_on_model_levels = parts.level_coord == "hybrid"
        if vars_3d:
            parts.add_source(_ARCO_MODEL if is_on_model_levels else _ARCO_PRESSURE, vars_3d, _PUBLIC)
        if vars_2d:
            parts.add_source(_ARCO_PRESSURE, vars_2d, _PUBLIC)
        config.report.record_derived(f"{key}.dataset_type", "the public zarr store of ARCO-ERA5 in `data.sources`")
    elif dataset_type == "weatherbench2_era5":
        resolution = str(config.get(f"{key}.resolution", "240x121"))
        if resolution not in _WEATHERBENCH_STORES:
            config.report.record_refused(
                f"{key}.resolution", f"`{resolution}` is not one of {', '.join(_WEATHERBENCH_STORES)}"
            )
            return
        parts.add_source(_WEATHERBENCH_STORES[resolution], [*vars_3d, *vars_2d], _PUBLIC)
        config.report.record_derived(f"{key}.dataset_type", "the public zarr store of WeatherBench 2 in `data.sources`")
    else:
        config.report.record_refused(
            f"{key}.dataset_type",
            f"`{dataset_type}` is not a supported global data set; list files in `data.sources`",
        )


def _find_validation_section(config: MilesConfig) -> str:
    """Return the name of the section with the validation data: `validation_data`, or the older name `data_valid`."""
    if config.has("validation_data") or not config.has("data_valid"):
        return "validation_data"
    return "data_valid"


def _add_validation_files(config: MilesConfig, parts: DataParts) -> None:
    """Add the files of the validation data, and compare its variables, levels and steps with the training data.

    A difference is recorded as refused.
    """
    section = _find_validation_section(config)
    if config.peek_section(f"{section}.source"):
        other_parts = DataParts()
        for name, source in config.peek_section(f"{section}.source").items():
            _convert_source(config, other_parts, f"{section}.source.{name}", source)
        replace_solar_forcing(other_parts, config.report, f"{section}.source")
        if other_parts.variables != parts.variables or other_parts.levels != parts.levels:
            config.report.record_refused(
                f"{section}.source", "variables and levels must be the same as in `data.source`"
            )
        # Files that contain only the validation period are additional sources of the same variables.
        for path, names in other_parts.sources.items():
            parts.add_source(path, names, other_parts.source_options.get(path))
        config.get(f"{section}.source")
    for name, default in (("timestep", None), ("history_len", 1)):
        expected = config.get(f"data.{name}", default)
        if config.get(f"{section}.{name}", expected) != expected:
            config.report.record_refused(f"{section}.{name}", f"must be equal to `data.{name}`, `{expected}`")


def _convert_steps(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write the timestep and the numbers of steps in samples; generation 2 counts forecast steps from 1."""
    timestep = str(config.get("data.timestep", "6h"))
    try:
        parse_duration(timestep)
    except ConfigError:
        config.report.record_refused("data.timestep", f"`{timestep}` is not a duration; an example is 6h")
    draft.set("data.timestep", timestep)
    draft.set("data.history_len", config.get_integer("data.history_len", 1))
    forecast_len = config.get_integer("data.forecast_len", 1)
    draft.set("data.forecast_len", forecast_len)
    default_len = config.get_integer("data.valid_forecast_len", forecast_len)
    section = _find_validation_section(config)
    draft.set("data.valid_forecast_len", config.get_integer(f"{section}.forecast_len", default_len))


def _convert_periods(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `data.splits` from the first and last times of the training and validation data."""
    section = _find_validation_section(config)
    train = _read_period(config, "data")
    if train is None:
        return
    # Without dates for the validation, miles-credit validates on the training period.
    valid = None
    if config.has(f"{section}.start_datetime") or config.has(f"{section}.end_datetime"):
        valid = _read_period(config, section)
        if valid is None:
            return
    write_periods(config, draft, derive_periods(train, valid), "data.start_datetime", f"{section}.start_datetime")


def _read_period(config: MilesConfig, section: str) -> tuple[date, date] | None:
    """Return the days of the first and last time of a section.

    If a time is not valid, record its key as refused and return None.
    """
    days = []
    for name in ("start_datetime", "end_datetime"):
        key = f"{section}.{name}"
        value = config.get(key)
        try:
            days.append(datetime.fromisoformat(str(value)).date())
        except ValueError:
            config.report.record_refused(key, f"`{value}` is not a date; write for example 1979-01-01")
            return None
    if days[1] < days[0]:
        config.report.record_refused(f"{section}.end_datetime", f"`{days[1]}` is before `{days[0]}`")
        return None
    return days[0], days[1]
