"""Settings of the config on which a training store depends, and their comparison with the settings in the store.

The fields depend on the identity (`config_identity`): sources, time step, levels and treatment of values. The
statistics also depend on the training period and the transforms (`describe_statistics`). The description of a store
contains both, so a store is never used with a config that would result in different values.
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

# Advice about a store that does not match the config, for many messages.
OTHER_STORE_ADVICE = "name another data.store and run credit preprocess, which does not change this store"


def config_identity(conf: DataConfig) -> dict[str, Any]:
    """Return the settings on which the content of a store depends, as a mapping from dotted config keys to values.

    A key that earlier versions of the package did not have is omitted if it has its default value, so that stores of
    these versions remain valid.
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
    if conf.coefficients and conf.has_vertical_interpolation:
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
    """Return the settings of a source on which its fields depend, as a JSON-serialisable dictionary."""
    # The options of a remote file system do not change the fields, and may contain credentials.
    excluded_keys = {"storage_options"}
    # Stores of earlier versions do not have these keys, so the keys are omitted if they have their default value.
    for key in ("select", "times", "vertical", "type", "options", "period", "every"):
        if getattr(source, key) == SourceConfig.model_fields[key].default:
            excluded_keys.add(key)
    return source.model_dump(mode="json", exclude=excluded_keys)


def require_same_identity(path: Path, meta: Mapping[str, Any], conf: DataConfig) -> None:
    """Raise DataError if the channels or the identity (see `config_identity`) of a store differ from the config.

    Args:
        path: folder of the store, for the error message.
        meta: description of the store.
        conf: the ``data`` section of the config.

    Raises:
        DataError: if the channels or the identity differ; the message lists the differences.
    """
    stored_channels = ChannelMap.from_dict(meta["channels"])
    channels = conf.channel_map()
    has_same_channels = (
        stored_channels.time_varying_stored == channels.time_varying_stored
        and stored_channels.static_stored == channels.static_stored
    )
    # Earlier versions had different names for some keys.
    renamed_identity = {rename_dotted_key(key): value for key, value in meta["identity"].items()}
    stored_identity = expand_homes(renamed_identity)
    required_identity = config_identity(conf)
    differences = []
    if has_same_channels:
        keys = set(stored_identity) | set(required_identity)
    else:
        differences.append(f"channels: {stored_channels.describe_mismatch(channels)}")
        # Keys of a variable that is only in the store, or only in the config, would repeat the channel difference.
        keys = set(stored_identity) & set(required_identity)
    # A setting that is only in the store, or only in the config, is compared with None.
    for key in sorted(keys):
        stored_value = stored_identity.get(key)
        required_value = required_identity.get(key)
        if stored_value != required_value:
            differences.append(
                f"{key}: {_format_value(stored_value)} in the store, {_format_value(required_value)} in the config"
            )
    if differences:
        raise DataError(
            f"data.store: {path} was written from a different config; {'; '.join(differences)}; {OTHER_STORE_ADVICE}"
        )


def expand_homes(value: Any) -> Any:
    """Return a value of the identity in which ``~`` at the beginning of all strings is replaced with the home folder.

    The replacement is needed because earlier versions stored paths in the form in which the config contains them.
    """
    if isinstance(value, Mapping):
        return {key: expand_homes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [expand_homes(item) for item in value]
    if isinstance(value, str):
        return os.path.expanduser(value)
    return value


def describe_statistics(conf: DataConfig, train: Split) -> dict[str, Any]:
    """Return the settings on which the statistics depend in addition to the fields: training period and transforms.

    The result is JSON-serialisable; the period is the first and the last time in minutes since 1900.
    """
    return {
        "statistics_period": [train.first, train.last],
        "statistics_transforms": describe_transforms(conf),
    }


def describe_transforms(conf: DataConfig) -> dict[str, Any]:
    """Return a JSON-serialisable mapping from variable to kind and unit of its transform (``data.transforms``)."""
    return {name: transform.model_dump(mode="json") for name, transform in sorted(conf.transforms.items())}


def describe_statistics_changes(meta: Mapping[str, Any], required: Mapping[str, Any]) -> list[str]:
    """Return the differences between the settings of a store's statistics (period, transforms) and the required ones.

    Args:
        meta: description of the store.
        required: period and transforms of the required statistics, from `describe_statistics`.

    Returns:
        One phrase for each difference; empty if there is no difference.
    """
    changes = []
    stored_period = meta["statistics_period"]
    required_period = required["statistics_period"]
    if stored_period != required_period:
        changes.append(
            f"their period is {format_period(meta, stored_period)}, but data.splits.train is "
            f"{format_period(meta, required_period)}"
        )
    # Stores of versions without transforms do not have this entry.
    stored_transforms = meta.get("statistics_transforms", {})
    required_transforms = required["statistics_transforms"]
    if stored_transforms != required_transforms:
        changes.append(
            f"their data.transforms are {stored_transforms or 'none'}, but the config has "
            f"{required_transforms or 'none'}"
        )
    return changes


def format_period(meta: Mapping[str, Any], period: Sequence[int]) -> str:
    """Return a period (first and last time in minutes since 1900) as the string ``FIRST..LAST``.

    Args:
        meta: description of a store, which contains the calendar.
        period: first and last time in minutes since 1900.
    """
    calendar = Calendar(meta["calendar"])
    first, last = period
    return f"{calendar.format(first)}..{calendar.format(last)}"


def _format_value(value: object) -> str:
    """Return a value of the identity as a string; for sources, empty and automatic settings are omitted."""
    is_list_of_sources = isinstance(value, list) and all(isinstance(source, dict) for source in value)
    if not is_list_of_sources:
        return str(value)
    texts = []
    for source in value:
        settings = {key: setting for key, setting in source.items() if setting not in (None, {}, "auto")}
        texts.append(str(settings))
    return ", ".join(texts)
