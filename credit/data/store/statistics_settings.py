"""Settings that the statistics of a training store depend on, as the description of the store holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.data.splits import Split


def describe_statistics(conf: DataConfig, train: Split) -> dict[str, Any]:
    """Return the settings that the statistics depend on besides the fields: period and transforms."""
    return {
        "statistics_period": [train.first, train.last],
        "statistics_transforms": describe_transforms(conf),
    }


def describe_transforms(conf: DataConfig) -> dict[str, Any]:
    """Return variable -> its transform, as the description of a store holds them."""
    return {name: transform.model_dump(mode="json") for name, transform in sorted(conf.transforms.items())}


def describe_statistics_changes(meta: Mapping[str, Any], required: Mapping[str, Any]) -> list[str]:
    """Return in which respects the statistics of a store are not those that `describe_statistics` requires."""
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
    """Return a period as text, in the calendar of a store."""
    calendar = Calendar(meta["calendar"])
    return f"{calendar.format(period[0])}..{calendar.format(period[1])}"
