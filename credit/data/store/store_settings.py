"""Settings of the config on which a training store depends, and their comparison with those it was written with.

The fields depend on the identity (`config_identity`): sources, time step, levels and treatment of values. The
statistics depend also on the training period and the transforms (`describe_statistics`). Both are kept in the
description of a store, so a store is never used with a config that would give other values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.renamed_keys import rename_dotted_key
from credit.config.sections.data import DataConfig
from credit.config.sections.source import SourceConfig
from credit.config.sections.variables import VariableOptions
from credit.data.splits import Split
from credit.errors import DataError

# What a user can do about a store that does not fit the config; part of many messages.
OTHER_STORE_ADVICE = "name another data.store and run credit preprocess, which leaves this one as it is"


def config_identity(conf: DataConfig) -> dict[str, Any]:
    """Return the settings on which the content of a store depends, as a mapping from dotted config keys to values.

    A key that earlier versions of the package did not have is left out if it has its default value, so that stores of
    these versions stay valid.
    """
    channels = conf.channel_map()
    names = sorted({channel.variable for channel in channels.time_varying_stored + channels.static_stored})
    options_by_name = {name: conf.options_of(name) for name in names}
    identity = {
        "data.timestep": f"{conf.step_minutes} min",
        "data.level_units": conf.level_units,
        "data.sources": [_source_identity(source) for source in conf.sources],
    }
    for name, options in options_by_name.items():
        identity |= _variable_identity(name, options)
    if conf.coefficients and conf.has_vertical:
        # Unless a source is interpolated to model levels, the fields do not depend on the coefficients.
        identity["data.coefficients"] = conf.coefficients
    if conf.grid:
        # Without data.grid nothing is regridded, so the options of regridding have no effect.
        identity["data.grid"] = conf.grid.model_dump(mode="json", exclude_none=True)
        identity["data.regrid"] = conf.regrid
        for name, options in options_by_name.items():
            identity[f"data.variable_options.{name}.regrid"] = options.regrid
            identity[f"data.variable_options.{name}.vector"] = options.vector
    return identity


def _variable_identity(name: str, options: VariableOptions) -> dict[str, Any]:
    """Return the options on which the fields of one variable depend, as a mapping from dotted config keys to values."""
    prefix = f"data.variable_options.{name}"
    identity: dict[str, Any] = {f"{prefix}.missing": options.missing, f"{prefix}.temporal": options.temporal}
    if options.valid_range is not None:
        # JSON, in which the description is saved, has lists but no tuples.
        identity[f"{prefix}.valid_range"] = list(options.valid_range)
    for key in ("restarts", "units", "derive", "inputs"):
        value = getattr(options, key)
        if value:
            identity[f"{prefix}.{key}"] = value
    return identity


def _source_identity(source: SourceConfig) -> dict[str, Any]:
    """Return the settings of a source on which its fields depend, ready for JSON."""
    # The options of a remote file system do not change the fields, and may contain credentials.
    excluded_keys = {"storage_options"}
    # Stores of earlier versions do not have these keys, so they are left out if they have their default.
    for key in ("select", "times", "vertical", "type", "options", "period", "every"):
        if getattr(source, key) == SourceConfig.model_fields[key].default:
            excluded_keys.add(key)
    return source.model_dump(mode="json", exclude=excluded_keys)


def require_same_identity(path: Path, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Require that a store has the channels and the identity (see `config_identity`) of a config.

    Args:
        path: folder of the store, for the error message.
        meta: description of the store.
        conf: the ``data`` section of the config.

    Raises:
        DataError: if they differ; the message names the differences.
    """
    stored_channels = ChannelMap.from_dict(meta["channels"])
    channels = conf.channel_map()
    has_same_channels = (
        stored_channels.time_varying_stored == channels.time_varying_stored
        and stored_channels.static_stored == channels.static_stored
    )
    # Earlier versions had other names for some of the keys.
    renamed_identity = {rename_dotted_key(key): value for key, value in meta["identity"].items()}
    stored_identity = expand_homes(renamed_identity)
    required_identity = config_identity(conf)
    differences = []
    if has_same_channels:
        keys = set(stored_identity) | set(required_identity)
    else:
        differences.append(f"channels: {stored_channels.describe_mismatch(channels)}")
        # A key of a variable that only one of the two has would repeat the difference in channels.
        keys = set(stored_identity) & set(required_identity)
    # A setting that only one of the two has is compared with None.
    for key in sorted(keys):
        stored_value = stored_identity.get(key)
        required_value = required_identity.get(key)
        if stored_value != required_value:
            differences.append(
                f"{key}: {_format_value(stored_value)} in the store, {_format_value(required_value)} in the config"
            )
    if differences:
        raise DataError(
            f"data.store: {path} was written from another config; {'; '.join(differences)}; {OTHER_STORE_ADVICE}"
        )


def expand_homes(value: Any) -> Any:
    """Replace ``~`` at the beginning of all texts in a value of the identity by the home folder.

    This is needed because earlier versions stored paths as they were written in the config.
    """
    if isinstance(value, Mapping):
        return {key: expand_homes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_homes(item) for item in value]
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


def describe_statistics(conf: DataConfig, train: Split) -> dict[str, Any]:
    """Return the settings on which the statistics depend besides the fields: training period and transforms.

    The result is ready for JSON; the period is the first and the last time in minutes since 1900.
    """
    return {
        "statistics_period": [train.first, train.last],
        "statistics_transforms": describe_transforms(conf),
    }


def describe_transforms(conf: DataConfig) -> dict[str, Any]:
    """Return kind and unit of the transform of each variable in ``data.transforms``, by name, ready for JSON."""
    return {name: transform.model_dump(mode="json") for name, transform in sorted(conf.transforms.items())}


def describe_statistics_changes(meta: Mapping[str, Any], required: Mapping[str, Any]) -> list[str]:
    """Describe how the settings of a store's statistics (period, transforms) differ from the required ones.

    Args:
        meta: description of the store.
        required: period and transforms of the required statistics, from `describe_statistics`.

    Returns:
        One text for each difference; empty if there is none.
    """
    changes = []
    stored_period = meta["statistics_period"]
    required_period = required["statistics_period"]
    if stored_period != required_period:
        changes.append(
            f"they are of {format_period(meta, stored_period)}, data.splits.train is "
            f"{format_period(meta, required_period)}"
        )
    # Stores that were written before there were transforms do not mention any.
    stored_transforms = meta.get("statistics_transforms", {})
    required_transforms = required["statistics_transforms"]
    if stored_transforms != required_transforms:
        changes.append(
            f"they are with data.transforms {stored_transforms or 'none'}, the config has "
            f"{required_transforms or 'none'}"
        )
    return changes


def format_period(meta: Mapping[str, Any], period: Sequence[int]) -> str:
    """Return a period (first and last time in minutes since 1900) as text ``FIRST..LAST``.

    Args:
        meta: description of a store, of which the calendar is used.
        period: first and last time in minutes since 1900.
    """
    calendar = Calendar(meta["calendar"])
    first, last = period
    return f"{calendar.format(first)}..{calendar.format(last)}"


def _format_value(value: object) -> str:
    """Return a value of the identity as text; for sources, empty and automatic settings are left out."""
    is_list_of_sources = isinstance(value, list) and all(isinstance(source, dict) for source in value)
    if not is_list_of_sources:
        return str(value)
    texts = []
    for source in value:
        settings = {key: setting for key, setting in source.items() if setting not in (None, {}, "auto")}
        texts.append(str(settings))
    return ", ".join(texts)
