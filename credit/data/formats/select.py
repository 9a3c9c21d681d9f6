"""Selection of one position along a dimension (ensemble member, step, height) by the value of its coordinate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import xarray as xr

from credit.errors import DataError, did_you_mean

# Value of a coordinate or a GRIB key in a config.
Value = float | int | str
# Largest number of values that a message lists.
_MAX_LISTED = 40


def find_positions(dataset: xr.Dataset, select: Mapping[str, Value], origin: str) -> dict[str, int]:
    """Find the position of each selected coordinate value along its dimension.

    Args:
        dataset: dataset of the file, opened lazily.
        select: ``data.sources.N.select``: name of a coordinate -> value to select.
        origin: name of the file, for error messages.

    Returns:
        Name of a dimension -> position of the selected value. Scalar coordinates are checked, but have no position.

    Raises:
        DataError: if the file does not have the coordinate, or the coordinate does not contain the value exactly once.
    """
    position_of_dim: dict[str, int] = {}
    for name, selected in select.items():
        coordinate = dataset.variables.get(name)
        if coordinate is None or coordinate.ndim > 1:
            problem = "it is not a coordinate of the file"
            if name in dataset.dims:
                problem = "its dimension has no coordinate"
            names = [str(key) for key, variable in dataset.variables.items() if variable.ndim <= 1]
            raise DataError(f"{origin}: data.sources.N.select names {name}, but {problem}{did_you_mean(name, names)}")
        # If a value occurs twice, the position is ambiguous.
        values = np.atleast_1d(coordinate.values)
        positions = [position for position, value in enumerate(values) if is_same_value(value, selected)]
        if len(positions) != 1:
            problem = "not in the file"
            if positions:
                problem = f"in the file {len(positions)} times"
            raise DataError(
                f"{origin}: data.sources.N.select: {name} {selected} is {problem}; the file has {format_values(values)}"
            )
        # A scalar coordinate needs no position.
        if coordinate.ndim == 1:
            position_of_dim[str(coordinate.dims[0])] = positions[0]
    return position_of_dim


def is_same_value(value: object, selected: Value) -> bool:
    """Return True if two values are equal.

    Numbers are equal if their relative difference is at most 1e-6. Other values are compared as strings.

    Args:
        value: value of a coordinate or a GRIB key in the file.
        selected: value in the config.
    """
    if isinstance(value, bytes):
        value = value.decode()
    try:
        # Coordinates are often float32, but numbers in a config are float64.
        return bool(np.isclose(float(value), float(selected), rtol=1e-6, atol=0.0))
    except (TypeError, ValueError):
        return str(value).strip() == str(selected).strip()


def format_values(values: Iterable[object]) -> str:
    """Return a string that lists values for a message: all values, or the first 20 and last 20 if there are over 40."""
    texts = []
    for value in values:
        if isinstance(value, float | np.floating):
            texts.append(f"{value:g}")
        elif isinstance(value, bytes):
            texts.append(value.decode())
        else:
            texts.append(str(value))
    if len(texts) > _MAX_LISTED:
        texts = [*texts[: _MAX_LISTED // 2], "...", *texts[-_MAX_LISTED // 2 :]]
    return ", ".join(texts)
