"""Fetching of the chunks of remote stores in advance, while earlier times are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.data.formats.files import OpenFiles
from credit.data.formats.zarr.array_chunks import REMOTE_ARRAYS, ArrayChunks
from credit.data.formats.zarr.fetching_store import FetchingStore
from credit.data.formats.zarr.remote import is_remote
from credit.data.sources.accumulation import TimeAggregation
from credit.data.sources.reading.series_reads import list_file_reads, list_file_variables, list_series_indices
from credit.data.sources.series import VariableSeries

# Key of a remote store of a source: the URL of the store, and the index of the source.
StoreKey = tuple[str, int]


@dataclass(frozen=True)
class NeededChunks:
    """Chunks of one array of a remote store that must be fetched to read some times.

    Attributes:
        store: the store.
        array: the array.
        chunks: positions of the chunks.
    """

    store: FetchingStore
    array: ArrayChunks
    chunks: set[tuple[int, ...]]

    def estimate_chunk_bytes(self) -> float:
        """Return the mean size in bytes of the compressed chunks of the array that have been fetched.

        If no chunk has been fetched, return the uncompressed size.
        """
        num_fetched = self.store.fetched_objects[self.array.name]
        if num_fetched == 0:
            return float(self.array.values_per_chunk * self.array.bytes_per_value)
        return self.store.fetched_bytes[self.array.name] / num_fetched


class FetchPlan:
    """Finder and fetcher of the chunks of remote stores that the times of a run need.

    Args:
        files: cache that opens the files.
        series: time series of every time-varying variable, by name.
        aggregations: mapping from the name of each time-varying variable to the weighted sums that compute its values
            for a time step from the values in the files.
        aggregation_index: mapping from the name of each time-varying variable to the (N,) indices of the N times of the
            run in the times of its aggregation.

    Attributes:
        urls: addresses of the remote stores; empty if all files are on local file systems.
    """

    def __init__(
        self,
        files: OpenFiles,
        series: Mapping[str, VariableSeries],
        aggregations: Mapping[str, TimeAggregation],
        aggregation_index: Mapping[str, np.ndarray],
    ) -> None:
        self._files = files
        self._series = series
        self._aggregations = aggregations
        self._aggregation_index = aggregation_index
        urls: dict[str, None] = {}
        for variable_series in series.values():
            for file_variable in list_file_variables(variable_series):
                if is_remote(file_variable.path):
                    urls[str(file_variable.path)] = None
        self.urls = list(urls)
        # Stores from which chunks have been fetched in advance.
        self._used_stores: dict[StoreKey, FetchingStore] = {}

    def find_chunks(self, indices: Sequence[int]) -> dict[tuple[StoreKey, str], NeededChunks]:
        """Return a mapping from (store, name of the array) to the chunks that must be fetched to read some times.

        Args:
            indices: indices of the times of the run.
        """
        needed_chunks: dict[tuple[StoreKey, str], NeededChunks] = {}
        for name, series in self._series.items():
            window_indices = self._aggregation_index[name][np.asarray(indices, dtype=np.int64)]
            series_indices = list_series_indices(self._aggregations[name], window_indices)
            for file_variable, positions in list_file_reads(series, series_indices):
                if not is_remote(file_variable.path):
                    continue
                layout = file_variable.layout
                store_key = str(file_variable.path), file_variable.source_number
                dataset = self._files.get(*store_key)
                remote_arrays = dataset.encoding[REMOTE_ARRAYS]
                array, chunks = remote_arrays.find_chunks(
                    dataset, layout.name, layout.dims, positions, layout.level_indices
                )
                key = store_key, array.name
                if key not in needed_chunks:
                    needed_chunks[key] = NeededChunks(remote_arrays.store, array, set())
                needed_chunks[key].chunks.update(chunks)
        return needed_chunks

    def fetch_ahead(self, indices: Sequence[int], next_indices: Sequence[int], max_bytes: int) -> None:
        """Begin to fetch the chunks of the current times, and of the next times if their chunks fit into memory.

        Chunks in memory that are not needed for these times are dropped. A chunk that is needed for current and for
        next times is fetched once.

        Args:
            indices: indices of the times that are read now.
            next_indices: indices of the times that are read next; may be empty.
            max_bytes: memory for the compressed chunks of the next times.
        """
        if not self.urls:
            return
        batches = [self.find_chunks(indices)]
        next_chunks = self.find_chunks(next_indices)
        next_bytes = sum(needed.estimate_chunk_bytes() * len(needed.chunks) for needed in next_chunks.values())
        if next_bytes <= max_bytes:
            batches.append(next_chunks)
        keys_of_store: dict[StoreKey, list[str]] = {}
        for needed_chunks in batches:
            for (store_key, _), needed in needed_chunks.items():
                self._used_stores[store_key] = needed.store
                keys_of_store.setdefault(store_key, []).extend(needed.array.list_keys(needed.chunks))
        # A store that is not needed for these times drops all its chunks.
        for store_key, store in self._used_stores.items():
            store.fetch_ahead(keys_of_store.get(store_key, []))

    def stop(self) -> None:
        """Drop the chunks in memory, and cancel the fetches that have not begun."""
        for store in self._used_stores.values():
            store.fetch_ahead([])

    def __getstate__(self) -> dict[str, object]:
        # A process that unpickles this object opens the stores again.
        return self.__dict__ | {"_used_stores": {}}
