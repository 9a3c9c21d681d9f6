"""Reader of the time windows of means and sums in forecast files, from the bounds of the time coordinates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from credit.forecast.io.archive.stored_variables import StoredVariables


def read_windows(
    source: StoredVariables, name: str, leading: tuple[str, ...], lead_minutes: np.ndarray,
    minutes_per_unit: Mapping[str, float],
) -> dict[int, int]:  # fmt: skip
    """Return the length of the window that ends at each lead time, for a variable that is a mean or sum over time.

    Args:
        source: variables of the file or store.
        name: name of the variable.
        leading: names of the time dimensions of the fields; the last is the dimension of lead times.
        lead_minutes: (N,) lead times in minutes.
        minutes_per_unit: unit of time -> its length in minutes.

    Returns:
        Lead time in minutes -> length of the window in minutes; empty if the time coordinate has no bounds, or if a
        window does not end at the valid time.
    """
    # If variables have different windows, the file has a time coordinate for each window. A variable lists the time
    # coordinate of its window as an auxiliary coordinate, which takes precedence over the coordinate of the dimension.
    for coordinate in [*source.auxiliary_names(name), leading[-1]]:
        if coordinate not in source.names:
            continue
        attributes = source.variable_attributes(coordinate)
        bounds_name = attributes.get("bounds")
        if bounds_name not in source.names:
            continue
        ends = source.values(coordinate)
        bounds = source.values(bounds_name)
        # A store has a row for each initial time; all rows have the same windows.
        if source.dims(coordinate) == leading and len(leading) == 2:
            ends = ends[0]
            bounds = bounds[0]
        if ends.shape != lead_minutes.shape or not np.array_equal(bounds[..., 1], ends):
            continue
        differences = bounds[..., 1] - bounds[..., 0]
        if differences.dtype.kind == "m":
            # In a dataset in memory, times are already decoded.
            minutes = differences / np.timedelta64(1, "m")
        else:
            unit = str(attributes.get("units", "")).partition(" since ")[0]
            if unit not in minutes_per_unit:
                continue
            minutes = differences * minutes_per_unit[unit]
        lengths = np.rint(minutes).astype(np.int64)
        return dict(zip(lead_minutes.tolist(), lengths.tolist(), strict=True))
    return {}
