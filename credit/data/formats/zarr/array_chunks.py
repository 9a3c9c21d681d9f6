"""Chunks of a remote zarr store that contain given values, and the keys of these chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
import zarr

from credit.data.formats.zarr.fetching_store import FetchingStore

# Key in the encoding of a dataset that was opened from a remote store; its value is a `RemoteArrays`.
REMOTE_ARRAYS = "remote_arrays"
# Key in the encoding of a variable that is part of an array of the store; its value is an `ArrayPart`.
ARRAY_PART = "array_part"


@dataclass(frozen=True)
class ArrayPart:
    """Part of an array of a store that forms one variable of a dataset.

    Attributes:
        array_name: name of the array, whose dimensions are named ``time``, ``variable`` and otherwise.
        times: (N,) index in the array of each time of the variable.
        rows: (L,) index along ``variable`` of each level of the variable; one index for a variable without levels.
    """

    array_name: str
    times: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class ArrayChunks:
    """Chunks of one array of a remote store.

    Attributes:
        name: name of the array in the store.
        dims: names of its dimensions.
        array: the array.
    """

    name: str
    dims: tuple[str, ...]
    array: zarr.Array

    @property
    def values_per_chunk(self) -> int:
        """Number of values of a chunk."""
        return math.prod(self.array.chunks)

    @property
    def bytes_per_value(self) -> int:
        """Size of a value in bytes, not compressed."""
        return self.array.dtype.itemsize

    def find_chunks(self, indices: Mapping[str, np.ndarray]) -> set[tuple[int, ...]]:
        """Return the positions in the grid of chunks of the chunks that contain given values.

        Args:
            indices: mapping from the name of a dimension to the indices along it; all indices along other dimensions.
        """
        numbers_along_dims = []
        for dim, length, chunk_length in zip(self.dims, self.array.shape, self.array.chunks, strict=True):
            if dim in indices:
                numbers = np.unique(np.asarray(indices[dim]) // chunk_length)
            else:
                numbers = np.arange(math.ceil(length / chunk_length))
            numbers_along_dims.append(numbers.tolist())
        return set(itertools.product(*numbers_along_dims))

    def list_keys(self, chunks: set[tuple[int, ...]]) -> list[str]:
        """Return the keys of chunks in the store, in ascending order of their positions.

        For a sharded array the list is empty, because its chunks are parts of larger objects and have no keys.

        Args:
            chunks: positions of the chunks, see `find_chunks`.
        """
        if self.array.shards is not None:
            return []
        return [f"{self.name}/{self.array.metadata.encode_chunk_key(chunk)}" for chunk in sorted(chunks)]


class RemoteArrays:
    """The arrays of a remote store, by the variables of the dataset that was opened from it.

    Args:
        store: the store.
        group: its root group.

    Attributes:
        fixed_positions: mapping from the name of a dimension to the only index along it that is read
            (``data.sources.N.select``).
    """

    def __init__(self, store: FetchingStore, group: zarr.Group) -> None:
        self.store = store
        self.fixed_positions: dict[str, int] = {}
        self._group = group
        self._arrays: dict[str, ArrayChunks] = {}

    def find_chunks(
        self,
        dataset: xr.Dataset,
        variable_name: str,
        dims: Mapping[str, str],
        times: np.ndarray,
        level_rows: Sequence[int] | None,
    ) -> tuple[ArrayChunks, set[tuple[int, ...]]]:
        """Return the array with the values of a variable, and the positions of its chunks that contain some values.

        Args:
            dataset: the dataset that was opened from the store.
            variable_name: name of a variable of the dataset.
            dims: mapping from the role (``time``, ``level``) to the name of the dimension of the variable.
            times: indices of the times in the dataset; ignored for a variable without a dimension for times.
            level_rows: indices of the levels; None for a variable without levels.
        """
        part = dataset.variables[variable_name].encoding.get(ARRAY_PART)
        indices = {dim: np.array([position]) for dim, position in self.fixed_positions.items()}
        if part is not None:
            rows = part.rows if level_rows is None else part.rows[list(level_rows)]
            indices |= {"time": part.times[times], "variable": rows}
            array = self._find_array(part.array_name, ())
        else:
            if "time" in dims:
                indices[dims["time"]] = times
            if "level" in dims and level_rows is not None:
                indices[dims["level"]] = np.array(level_rows)
            array = self._find_array(variable_name, dataset.variables[variable_name].dims)
        return array, array.find_chunks(indices)

    def _find_array(self, name: str, dims: Sequence[Hashable]) -> ArrayChunks:
        """Return an array of the store; `dims` names its dimensions if the store does not."""
        if name not in self._arrays:
            array = self._group[name]
            # Format 3 names the dimensions in the metadata, format 2 in an attribute that xarray defines.
            names = array.attrs.get("_ARRAY_DIMENSIONS") or getattr(array.metadata, "dimension_names", None) or dims
            self._arrays[name] = ArrayChunks(name, tuple(map(str, names)), array)
        return self._arrays[name]
