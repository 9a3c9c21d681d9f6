"""One position along a further dimension (ensemble member, step, height), chosen by the value of its coordinate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import xarray as xr

from credit.errors import DataError, did_you_mean

Value = float | int | str
_MOST_LISTED = 40


def select_positions(dataset: xr.Dataset, select: Mapping[str, Value], origin: str) -> xr.Dataset:
    """Return the dataset cut to one value of each selected coordinate; variables without it stay as they are.

    Args:
        dataset: a file, nothing of it read.
        select: coordinate -> value.
        origin: the file, for messages.

    Raises:
        DataError: for a coordinate or a value that is not there.
    """
    for name, wanted in select.items():
        coordinate = dataset.variables.get(name)
        if coordinate is None or coordinate.ndim > 1:
            lacking = "its dimension has no coordinate" if name in dataset.dims else "it is no coordinate of the file"
            hint = did_you_mean(name, [str(key) for key, value in dataset.variables.items() if value.ndim <= 1])
            raise DataError(f"{origin}: data.sources.N.select names {name}, but {lacking}{hint}")
        values = np.atleast_1d(coordinate.values)
        positions = [place for place, value in enumerate(values) if same_value(value, wanted)]
        if len(positions) != 1:
            problem = "not there" if not positions else f"there {len(positions)} times"
            raise DataError(
                f"{origin}: data.sources.N.select: {name} {wanted} is {problem}; the file has {listing(values)}"
            )
        if coordinate.ndim == 1:
            dataset = dataset.isel({coordinate.dims[0]: positions[0]})
    return dataset


def same_value(have: object, wanted: Value) -> bool:
    """Whether two values are equal as numbers where both are, else as text."""
    have = have.decode() if isinstance(have, bytes) else have
    try:
        return bool(np.isclose(float(have), float(wanted), rtol=1e-6, atol=0.0))
    except (TypeError, ValueError):
        return str(have).strip() == str(wanted).strip()


def listing(values: Iterable[object]) -> str:
    """Return values for a message, the middle left out where they are many."""
    texts = [f"{value:g}" if isinstance(value, float | np.floating) else _text(value) for value in values]
    if len(texts) > _MOST_LISTED:
        texts = [*texts[: _MOST_LISTED // 2], "...", *texts[-_MOST_LISTED // 2 :]]
    return ", ".join(texts)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
