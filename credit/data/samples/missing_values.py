"""Checks of missing values. Only declared variables may have missing values, always in the same cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.grid import LatLonGrid


def find_masks(fields: np.ndarray, channels: Sequence[Channel], declared: Sequence[str]) -> dict[str, np.ndarray]:
    """Return a mapping from each declared variable to its mask (H, W), True in cells with missing values.

    Args:
        fields: (C, H, W) fields of one time, with missing values as NaN.
        channels: (C,) channels of the fields.
        declared: names of the variables that may have missing values.

    Raises:
        DataError: if two levels of a variable have different missing cells, or all cells of a level are missing.
    """
    masks: dict[str, np.ndarray] = {}
    for field, channel in zip(fields, channels, strict=True):
        if channel.variable not in declared:
            continue
        # The first level of a variable defines its mask; all other levels must have the same mask.
        missing = np.isnan(field)
        mask = masks.setdefault(channel.variable, missing)
        if not np.array_equal(missing, mask):
            raise DataError(
                f"{channel.variable}: {missing.sum()} cells are missing at level {channel.level:g}, {mask.sum()} at "
                "another level; all levels must have the same mask: list fewer levels, or fill the values beforehand"
            )
        if missing.all():
            raise DataError(
                f"{channel.name}: all values of the first field, which defines the mask, are NaN; correct the file, "
                "name files in data.sources that begin later, or take the variable out of data.variables"
            )
    return masks


def require_valid_values(
    fields: np.ndarray,
    channels: Sequence[Channel],
    masks: Mapping[str, np.ndarray],
    grid: LatLonGrid,
    describe_time: Callable[[], str],
) -> None:
    """Raise DataError unless values are missing in all masked cells and finite in all other cells.

    Args:
        fields: (C, H, W) float32 fields of one time, with missing values as NaN.
        channels: (C,) channels of the fields.
        masks: name of a variable -> mask (H, W), True in cells that are always missing.
        grid: grid of the fields, for the location in the error message.
        describe_time: function that returns the time as a string, for the error message.

    Raises:
        DataError: if there are wrong values. The message contains the first channel with wrong values, their number and
            the location of the first wrong value.
    """
    for field, channel in zip(fields, channels, strict=True):
        mask = masks.get(channel.variable)
        # Usually all values of a variable without a mask are finite, so no other check is needed.
        if mask is None and np.isfinite(field).all():
            continue
        # A field without valid values is an error, even if missing values are declared.
        is_missing = np.isnan(field)
        if is_missing.all():
            raise DataError(
                f"{_describe_channel(channel)} at {describe_time()}: the whole field is missing (NaN); correct the "
                "file, leave such times out (data.on_bad_time: skip with a data.store, or other data.splits), or take "
                "the variable out of data.variables"
            )
        # An infinite value is an error in any variable, and is not treated as missing.
        is_infinite = np.isinf(field)
        if is_infinite.any():
            raise DataError(_describe_wrong_values(field, is_infinite, channel, grid, describe_time()))
        # The missing cells must be exactly the cells of the mask.
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
        is_wrong: mask (H, W), True at wrong values; these values are all missing or all infinite.
        channel: channel of the field.
        grid: grid of the field.
        when: string with the time and the file.
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
    """Return a string with the variable of a channel, and the level if the channel has a level."""
    if channel.level is None:
        return channel.variable
    return f"{channel.variable}, level {channel.level:g}"
