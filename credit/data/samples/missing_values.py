"""Checks of missing values; only declared variables may have them, and only in cells that are the same at all times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.grid import LatLonGrid


def find_masks(fields: np.ndarray, channels: Sequence[Channel], declared: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the mask of each declared variable, by name: (H, W) bool, True in cells that are missing.

    Args:
        fields: (C, H, W) fields of one time, with missing values as NaN.
        channels: (C,) the channel of each field.
        declared: names of the variables that may have missing values.

    Raises:
        DataError: if different cells are missing on two levels of a variable, or all cells of a level are missing.
    """
    masks: dict[str, np.ndarray] = {}
    for field, channel in zip(fields, channels, strict=True):
        if channel.variable not in declared:
            continue
        # The first level of a variable sets its mask, with which the others must agree.
        missing = np.isnan(field)
        mask = masks.setdefault(channel.variable, missing)
        if not np.array_equal(missing, mask):
            raise DataError(
                f"{channel.variable}: {missing.sum()} cells are missing at level {channel.level:g}, {mask.sum()} at "
                "another; all levels must have the same mask: list fewer levels, or fill the values beforehand"
            )
        if missing.all():
            raise DataError(
                f"{channel.name}: all values of the first field, which defines the mask, are NaN; correct the file, "
                "name files in data.sources that begin later, or take the variable out of data.variables"
            )
    return masks


def check_values(
    fields: np.ndarray,
    channels: Sequence[Channel],
    masks: Mapping[str, np.ndarray],
    grid: LatLonGrid,
    describe_time: Callable[[], str],
) -> None:
    """Require that all values are finite, except those of masked cells, which must be missing.

    Args:
        fields: (C, H, W) float32 fields of one time, with missing values as NaN.
        channels: (C,) the channel of each field.
        masks: mapping from the name of a variable to its mask, (H, W) bool, True in cells that are always missing.
        grid: grid of the fields, for the location in the error message.
        describe_time: function that returns the time as text, for the error message.

    Raises:
        DataError: if there are wrong values. The message names the first channel that has any, their number and the
            location of the first one.
    """
    for field, channel in zip(fields, channels, strict=True):
        mask = masks.get(channel.variable)
        # Nearly always all values of a variable without a mask are finite, and this single check suffices.
        if mask is None and np.isfinite(field).all():
            continue
        # A field without any value is an error even if missing values are declared.
        is_missing = np.isnan(field)
        if is_missing.all():
            raise DataError(
                f"{_describe_channel(channel)} at {describe_time()}: the whole field is missing (NaN); correct the "
                "file, leave such times out (data.on_bad_time: skip with a data.store, or other data.splits), or take "
                "the variable out of data.variables"
            )
        # An infinite value is wrong in any variable, and is not a missing one.
        is_infinite = np.isinf(field)
        if is_infinite.any():
            raise DataError(_describe_wrong_values(field, is_infinite, channel, grid, describe_time()))
        # The cells that are missing must be those of the mask, no more and no fewer.
        if mask is None and is_missing.any():
            raise DataError(_describe_wrong_values(field, is_missing, channel, grid, describe_time()))
        if mask is not None and not np.array_equal(is_missing, mask):
            raise DataError(
                f"{_describe_channel(channel)} at {describe_time()}: {int(is_missing.sum())} cells are missing, "
                f"{int(mask.sum())} in the first field, {int((is_missing != mask).sum())} differ; a mask that changes "
                "in time is not supported: fill the values beforehand, or leave the variable out"
            )


def _describe_wrong_values(
    field: np.ndarray, is_wrong: np.ndarray, channel: Channel, grid: LatLonGrid, when: str
) -> str:
    """Return the error message about wrong values of a field.

    Args:
        field: (H, W) values.
        is_wrong: (H, W) bool, True for the wrong values, which are either all missing or all infinite.
        channel: channel of the field.
        grid: grid of the field.
        when: time and file as text.
    """
    row, column = np.argwhere(is_wrong)[0]
    kind = "infinite"
    advice = "correct the file"
    if np.isnan(field[row, column]):
        kind = "missing (NaN)"
        advice = (
            "if it is always missing in the same cells (over land), declare "
            f"data.variable_options.{channel.variable}.missing: "
            "fill_mean, else correct the file or leave these times out (data.on_bad_time: skip with a data.store, or "
            "other data.splits)"
        )
    return (
        f"{_describe_channel(channel)} at {when}: {int(is_wrong.sum())} of {field.size} values are {kind}, the first "
        f"at latitude {grid.lat[row]:g}, longitude {grid.lon[column]:g}; {advice}"
    )


def _describe_channel(channel: Channel) -> str:
    """Return the variable of a channel as text, followed by the level if it has one."""
    if channel.level is None:
        return channel.variable
    return f"{channel.variable}, level {channel.level:g}"
