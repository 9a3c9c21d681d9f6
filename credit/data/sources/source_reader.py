"""Reader of fields directly from source files (netCDF, zarr, GRIB, plugins), at the times common to all variables."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.error_collector import ErrorCollector
from credit.data.formats.files import OpenFiles, build_file_key
from credit.data.samples.missing_values import find_masks, require_valid_values
from credit.data.sources.accumulation import TimeAggregation, build_time_aggregation
from credit.data.sources.contributions import Contribution, list_contributions, warn_of_unused_files
from credit.data.sources.derived_series import build_variable_series, report_interpolated_static
from credit.data.sources.file_scanner import FileVariable
from credit.data.sources.reading.fetch_plan import FetchPlan
from credit.data.sources.reading.file_reads import read_static_variable
from credit.data.sources.reading.series_reads import (
    count_file_times_per_time,
    estimate_read_memory,
    list_additional_inputs,
)
from credit.data.sources.series import (
    JoinedSeries,
    SourceOverlapError,
    VariableSeries,
    group_by_source,
    merge_attributes,
)
from credit.data.sources.source_index import SourceIndex, scan_sources
from credit.data.sources.time_axis import align_times, find_policy
from credit.data.store.chunk_reader import scatter_fields
from credit.errors import DataError
from credit.grid import LatLonGrid

logger = logging.getLogger(__name__)

# Number of bytes of fields that are read at once. Reading more bytes at once is not faster.
_BYTES_AT_ONCE = 2**25


class SourceReader:
    """Reader of fields from source files; see `credit.data.reader.FieldReader`.

    Args:
        channels: the channels of the run.
        source_index: contents of the files.
        series: time series of every time-varying variable, by name, in the order of the channels.
        aggregations: mapping from the name of each time-varying variable to the weighted sums that compute its values
            for a time step from the values in the files.
        policies: mapping from the name of each time-varying variable to ``exact``, ``persist`` or ``cyclic``, see
            `credit.data.sources.time_axis`.
        attributes: attributes of each variable by name, see `FieldReader`.
        files: cache that opens the files.
        fillable: variables that may have missing values (``data.variable_options.NAME.missing: fill_mean``).

    Attributes:
        packing_steps: mapping from the name of each packed variable to its quantisation step, in the units of the
            variable.
        times_per_chunk: largest number of `times` in one chunk of a file; 1 if the files have no chunks.
        bytes_per_time: memory in bytes that each time needs while several times are read at once.
        fetch_plan: chunks of remote stores that must be fetched for each time.

    Raises:
        DataError: if static fields have missing values, or if there is no time at which all variables have a value.
    """

    is_thread_safe = False

    def __init__(
        self,
        channels: ChannelMap,
        source_index: SourceIndex,
        series: dict[str, VariableSeries],
        aggregations: dict[str, TimeAggregation],
        policies: dict[str, str],
        attributes: dict[str, dict],
        files: OpenFiles,
        fillable: list[str],
    ) -> None:
        self._source_index = source_index
        self.grid: LatLonGrid = source_index.grid
        self.calendar: Calendar = source_index.calendar
        self.channels = channels
        # Name of a variable -> (N,) indices of `times` in the times of its aggregation.
        self.times, self._aggregation_index = align_times(aggregations, policies, source_index.calendar)
        self.attributes = attributes
        # Files with coefficients of hybrid levels also influence the values, so they are treated as source files.
        self._paths = source_index.paths | dict.fromkeys(source_index.coefficient_files, 0)
        self.packing_steps: dict[str, float] = {}
        for name, file_variables in source_index.file_variables.items():
            packing_step = max(file_variable.layout.packing_step for file_variable in file_variables)
            if packing_step > 0:
                self.packing_steps[name] = packing_step
        self.times_per_chunk = 1
        for file_variables in (*source_index.file_variables.values(), *source_index.inputs.values()):
            for file_variable in file_variables:
                num_times = file_variable.layout.count_times_in_chunk(self.times)
                self.times_per_chunk = max(self.times_per_chunk, num_times)
        self._files = files
        self._series = series
        self._aggregations = aggregations
        self.fetch_plan = FetchPlan(files, series, aggregations, self._aggregation_index)
        self._static = self._read_static(source_index)
        self.masks = find_masks(self._static, channels.static_stored, fillable)
        require_valid_values(self._static, channels.static_stored, self.masks, self.grid, lambda: "any time")
        # Memory for the fields of the run, and for the fields that are read from the files for the largest variable.
        largest_variable_bytes = 0
        for name, variable_series in series.items():
            times_read = max(len(aggregations[name].terms), count_file_times_per_time(variable_series, self.times))
            largest_variable_bytes = max(largest_variable_bytes, estimate_read_memory(variable_series) * times_read)
        fields_bytes = len(channels.time_varying_stored) * math.prod(self.grid.shape) * 4
        self.bytes_per_time = fields_bytes + largest_variable_bytes
        # The mask of a variable is read at the first time; `require_valid_values` requires it at all other times.
        masked_channels = [channel for channel in channels.time_varying_stored if channel.variable in fillable]
        first_fields = self._read_unchecked([0], fillable)[0]
        self.masks |= find_masks(first_fields, masked_channels, fillable)

    def read(self, index: int) -> np.ndarray:
        """Return the fields of one time, (C, H, W) float32, with NaN in masked cells.

        The channels are in the order of ``channels.time_varying_stored``.

        Raises:
            DataError: if a field cannot be read, or has a missing value in a cell that is not masked, or an infinite
                value.
        """
        return self._read_variables([index], set(self._series))[0]

    def read_each(self, indices: Sequence[int], memory_limit_bytes: int = _BYTES_AT_ONCE) -> Iterator[np.ndarray]:
        """Yield for each of several times the fields that `read` returns; adjacent times are read at once.

        Args:
            indices: indices of the times in `times`.
            memory_limit_bytes: memory in bytes that may be used to read a complete chunk of the files at once.

        Raises:
            DataError: see `read`.
        """
        times_at_once = self.count_times_at_once(memory_limit_bytes)
        for start in range(0, len(indices), times_at_once):
            yield from self._read_variables(indices[start : start + times_at_once], set(self._series))

    def count_times_at_once(self, memory_limit_bytes: int) -> int:
        """Return the number of times that `read_each` reads at once, at least 1.

        This is the number of times that fit into 32 MiB. If a complete chunk contains more times, and these fit into
        `memory_limit_bytes`, this is the number of times in the chunk.

        Args:
            memory_limit_bytes: memory in bytes that may be used to read a complete chunk of the files at once.
        """
        return max(1, _BYTES_AT_ONCE // self.bytes_per_time, self.count_chunk_times_in_memory(memory_limit_bytes))

    def count_chunk_times_in_memory(self, memory_limit_bytes: int) -> int:
        """Return `times_per_chunk`, limited to the number of times that fit into `memory_limit_bytes` of memory."""
        return min(self.times_per_chunk, memory_limit_bytes // self.bytes_per_time)

    def read_into(self, index: int, targets: Sequence[np.ndarray | None]) -> None:
        """Read the fields of one time into the arrays `targets`.

        Args:
            index: index of the time in `times`.
            targets: for each channel of ``channels.time_varying_stored``, an array (H, W) float32, or None to skip the
                channel.

        Raises:
            DataError: see `read`.
        """
        channels = self.channels.time_varying_stored
        variables = set()
        for channel, target in zip(channels, targets, strict=True):
            if target is not None:
                variables.add(channel.variable)
        # A variable is read with all its levels, and the levels without a target are dropped.
        read_targets = []
        for channel, target in zip(channels, targets, strict=True):
            if channel.variable in variables:
                read_targets.append(target)
        scatter_fields(self._read_variables([index], variables)[0], read_targets)

    def static(self) -> np.ndarray:
        """Return the static fields in physical units, (C, H, W) float32 in the order of ``channels.static_stored``."""
        return self._static.copy()

    def index_of(self, minutes: int) -> int | None:
        """Return the index in `times` of a time in minutes since 1900, None if the files do not have this time."""
        index = int(np.searchsorted(self.times, minutes))
        if index < len(self.times) and self.times[index] == minutes:
            return index
        return None

    def find_indices_covering_files(self) -> np.ndarray:
        """Return indices in `times` such that reading these times reads every file with time-varying fields.

        The indices are increasing.
        """
        indices: set[int] = set()
        # Joined and derived series contain other series, which are appended to the list and visited later.
        remaining_series = list(self._series.values())
        while remaining_series:
            series = remaining_series.pop()
            if isinstance(series, JoinedSeries):
                remaining_series += series.source_series
                continue
            remaining_series += list_additional_inputs(series)
            _, first_of_file = np.unique(series.file_index, return_index=True)
            # If the first time of a file is between two times of the run, the later time is used.
            index = np.searchsorted(self.times, series.times[first_of_file])
            indices.update(np.minimum(index, len(self.times) - 1).tolist())
        return np.array(sorted(indices))

    def fingerprint_files(self) -> dict[str, list[int]]:
        """Return a mapping from the key of every file to its fingerprint; see `OpenFiles.fingerprint`."""
        fingerprints = {}
        for path, number in self._paths.items():
            fingerprints[build_file_key(path)] = self._files.fingerprint(path, number)
        return fingerprints

    def has_static_from_files(self, keys: set[str]) -> bool:
        """Return True if a static field is read from one of the given files.

        Args:
            keys: keys of the files, see `fingerprint_files`.
        """
        for name in {channel.variable for channel in self.channels.static_stored}:
            for file_variable in self._source_index.file_variables[name]:
                if build_file_key(file_variable.path) in keys:
                    return True
        return False

    def find_times_from_files(self, keys: set[str]) -> np.ndarray:
        """Return the times at which any given file provides a time-varying field, (M,) int64 minutes since 1900.

        Args:
            keys: keys of the files, as in `fingerprint_files`.
        """
        # Coefficients of levels affect all interpolated fields.
        if not keys.isdisjoint(map(build_file_key, self._source_index.coefficient_files)):
            return self.times
        is_affected = np.zeros(len(self.times), dtype=bool)
        for name, series in self._series.items():
            is_value_affected = series.is_from_files(keys)
            aggregation = self._aggregations[name]
            # A window is affected if one of its values is affected.
            is_window_affected = np.zeros(len(aggregation.times), dtype=bool)
            for weights, indices in aggregation.terms:
                is_window_affected |= (weights != 0) & is_value_affected[indices]
            is_affected |= is_window_affected[self._aggregation_index[name]]
        return self.times[is_affected]

    def list_contributions(self, conf: DataConfig) -> list[Contribution]:
        """Return the number of files, the variables and the times of each source; `conf` is the ``data`` section."""
        return list_contributions(conf, self._source_index, self._series)

    def _read_variables(self, indices: Sequence[int], names: Collection[str]) -> list[np.ndarray]:
        """Return the result of `_read_unchecked`; raise DataError for undeclared missing values and infinite values."""
        channels = [channel for channel in self.channels.time_varying_stored if channel.variable in names]
        fields = self._read_unchecked(indices, names)
        for index, fields_CHW in zip(indices, fields, strict=True):
            describe_time = partial(self.calendar.format, self.times[index])
            require_valid_values(fields_CHW, channels, self.masks, self.grid, describe_time)
        return fields

    def _read_unchecked(self, indices: Sequence[int], names: Collection[str]) -> list[np.ndarray]:
        """Return the fields of some variables at some times, without checking for missing values.

        Args:
            indices: indices of the times in `times`.
            names: names of the variables.

        Returns:
            For each time, the channels of these variables, (C, H, W) float32, in the order of
            ``channels.time_varying_stored``.
        """
        num_channels = sum(channel.variable in names for channel in self.channels.time_varying_stored)
        fields = [np.empty((num_channels, *self.grid.shape), dtype=np.float32) for _ in indices]
        row = 0
        for name, series in self._series.items():
            if name not in names:
                continue
            # For each time, the weights and the indices in the series of the values that are summed.
            terms_of_time = []
            needed_indices: list[int] = []
            for index in indices:
                window_index = int(self._aggregation_index[name][index])
                weights, term_indices = self._aggregations[name].weights_and_indices_at(window_index)
                terms_of_time.append((weights, term_indices))
                needed_indices += term_indices
            # Windows may share values of the series, but each value is read only once.
            series_indices = np.unique(needed_indices)
            series_fields = series.read(self._files, series_indices)
            fields_of_index = dict(zip(series_indices.tolist(), series_fields, strict=True))
            # All fields have the same levels; if there are no times, there are no fields.
            num_levels = len(next(iter(fields_of_index.values()), ()))
            for (weights, term_indices), fields_CHW in zip(terms_of_time, fields, strict=True):
                values = [fields_of_index[index] for index in term_indices]
                # Sums are computed in float64. A single value, whose weight is 1, is copied unchanged.
                if len(values) > 1:
                    values = [np.tensordot(weights, np.asarray(values, dtype=np.float64), axes=1)]
                fields_CHW[row : row + num_levels] = values[0]
            row += num_levels
        return fields

    def _read_static(self, source_index: SourceIndex) -> np.ndarray:
        """Return the static fields, (C, H, W) float32 in the order of ``channels.static_stored``."""
        names = dict.fromkeys(channel.variable for channel in self.channels.static_stored)
        if not names:
            return np.zeros((0, *self.grid.shape), dtype=np.float32)
        fields = [self._read_static_variable(name, source_index.file_variables[name]) for name in names]
        return np.concatenate(fields, dtype=np.float32, casting="same_kind")

    def _read_static_variable(self, name: str, file_variables: list[FileVariable]) -> np.ndarray:
        """Return a static variable, (levels or 1, H, W); raise DataError if it differs between two sources."""
        first, *others = [source_variables[0] for source_variables in group_by_source(file_variables)]
        fields = read_static_variable(self._files, name, first)
        for other in others:
            if not np.array_equal(fields, read_static_variable(self._files, name, other), equal_nan=True):
                raise DataError(
                    f"{name} is static and differs between {first.path} (data.sources.{first.source_number}) and "
                    f"{other.path} (data.sources.{other.source_number}); list the variables of the other source "
                    f"without {name} in data.sources.N.variables"
                )
        return fields


def open_sources(conf: DataConfig, files: OpenFiles | None = None) -> SourceReader:
    """Open the source files of the ``data`` section of a config.

    Args:
        conf: the ``data`` section.
        files: cache that opens the files; None to open the files that the config names.

    Raises:
        DataError: if there are problems with files, variables, levels, grids, units or times; it lists all problems.
    """
    problems = ErrorCollector()
    files = files or OpenFiles(conf.sources)
    source_index = scan_sources(conf, files, problems)
    if problems.messages and source_index is not None:
        # A file from which nothing is read may be the cause of the problems.
        warn_of_unused_files(list_contributions(conf, source_index))
    problems.raise_any()
    # Attributes, and the series of every time-varying variable.
    channels = conf.channel_map()
    attributes: dict[str, dict] = {}
    for name, file_variables in source_index.file_variables.items():
        with problems.collect():
            attributes[name] = merge_attributes(name, file_variables, conf.options_of(name).temporal)
    series: dict[str, VariableSeries] = {}
    aggregations: dict[str, TimeAggregation] = {}
    policies: dict[str, str] = {}
    # End of the message -> variables with the same overlap of two sources. Often many variables have the same overlap.
    overlaps: dict[str, list[str]] = {}
    predicted_variables = {channel.variable for channel in channels.output}
    for name in dict.fromkeys(channel.variable for channel in channels.time_varying_stored):
        with problems.collect():
            try:
                series[name] = build_variable_series(name, source_index, conf, files)
            except SourceOverlapError as error:
                overlaps.setdefault(error.message_end, []).extend(error.names)
                continue
            aggregations[name] = build_time_aggregation(name, series[name], conf, source_index.calendar)
            number, policies[name] = find_policy(name, source_index, conf)
            if name in predicted_variables and policies[name] != "exact":
                raise DataError(
                    f"data.sources.{number}.times: {policies[name]} is for forcing, but {name} is predicted; set "
                    f"times: exact, or list the forcing in a separate source (data.sources.{number}.variables)"
                )
    for name in dict.fromkeys(channel.variable for channel in channels.static_stored):
        report_interpolated_static(name, source_index.file_variables[name], conf, problems)
    for message_end, names in overlaps.items():
        problems.add(str(SourceOverlapError(names, message_end)))
    warn_of_unused_files(list_contributions(conf, source_index, None if problems.messages else series))
    problems.raise_any()
    fillable = [name for name, options in conf.variable_options.items() if options.missing == "fill_mean"]
    return SourceReader(channels, source_index, series, aggregations, policies, attributes, files, fillable)
