"""Search for the chunks of a remote zarr store that contain given values, and for the keys of these chunks."""

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
        array_name: name of the array; its dimensions include ``time`` and ``variable``.
        times: (N,) indices in the array of the times of the variable.
        variable_indices: (L,) indices along ``variable`` of the levels of the variable; a single index without levels.
    """

    array_name: str
    times: np.ndarray
    variable_indices: np.ndarray


@dataclass(frozen=True)
class ArrayChunks:
    """Array of a remote store, and the layout of its chunks.

    Attributes:
        name: name of the array in the store.
        dims: names of the dimensions of the array.
        array: zarr array.
    """

    name: str
    dims: tuple[str, ...]
    array: zarr.Array

    @property
    def values_per_chunk(self) -> int:
        """Number of values in a chunk."""
        return math.prod(self.array.chunks)

    @property
    def bytes_per_value(self) -> int:
        """Size of an uncompressed value in bytes."""
        return self.array.dtype.itemsize

    def find_chunks(self, indices: Mapping[str, np.ndarray]) -> set[tuple[int, ...]]:
        """Return the chunks that contain given values, as positions in the grid of chunks.

        Args:
            indices: name of a dimension -> indices of the values along this dimension. Along a dimension that is not
                included, all indices are used.
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

        For a sharded array, the list is empty, because its chunks are stored in larger objects and have no keys.

        Args:
            chunks: positions of the chunks, see `find_chunks`.
        """
        if self.array.shards is not None:
            return []
        return [f"{self.name}/{self.array.metadata.encode_chunk_key(chunk)}" for chunk in sorted(chunks)]


class RemoteArrays:
    """Mapping from the variables of a dataset to the arrays of the remote store from which it was opened.

    Args:
        store: the remote store.
        group: root group of the store.

    Attributes:
        fixed_positions: name of a dimension -> selected index along this dimension (``data.sources.N.select``).
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
        level_indices: Sequence[int] | None,
    ) -> tuple[ArrayChunks, set[tuple[int, ...]]]:
        """Return the array that contains a variable, and the positions of the chunks with the requested values.

        Args:
            dataset: dataset that was opened from the store.
            variable_name: name of a variable of the dataset.
            dims: role (``time``, ``level``) -> name of the dimension of the variable.
            times: indices of the requested times in the dataset; ignored for a variable without a time dimension.
            level_indices: indices of the requested levels; None for a variable without levels.
        """
        part = dataset.variables[variable_name].encoding.get(ARRAY_PART)
        indices = {dim: np.array([position]) for dim, position in self.fixed_positions.items()}
        if part is not None:
            variable_indices = (
                part.variable_indices if level_indices is None else part.variable_indices[list(level_indices)]
            )
            indices |= {"time": part.times[times], "variable": variable_indices}
            array = self._find_array(part.array_name, ())
        else:
            if "time" in dims:
                indices[dims["time"]] = times
            if "level" in dims and level_indices is not None:
                indices[dims["level"]] = np.array(level_indices)
            array = self._find_array(variable_name, dataset.variables[variable_name].dims)
        return array, array.find_chunks(indices)

    def _find_array(self, name: str, dims: Sequence[Hashable]) -> ArrayChunks:
        """Return an array of the store; `dims` names the dimensions if the store does not name them."""
        if name not in self._arrays:
            array = self._group[name]
            # Format 3 names the dimensions in the metadata, format 2 in an attribute that xarray defines.
            names = array.attrs.get("_ARRAY_DIMENSIONS") or getattr(array.metadata, "dimension_names", None) or dims
            self._arrays[name] = ArrayChunks(name, tuple(map(str, names)), array)
        return self._arrays[name]
