"""Helpers for reading some times of a variable: the files and positions to read, and the memory for reading."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from credit.data.sources.accumulation import TimeAggregation
from credit.data.sources.derived_series import DerivedSeries
from credit.data.sources.file_scanner import FileVariable
from credit.data.sources.series import JoinedSeries, VariableSeries

# Approximate number of copies of a variable while it is unpacked and reordered to the orientation of the grid.
_COPIES = 3


def list_additional_inputs(series: VariableSeries) -> list[VariableSeries]:
    """Return the inputs of a derived or interpolated variable without the main input; empty for any other variable."""
    if not isinstance(series, DerivedSeries):
        return []
    return [input_series for input_series, _ in series.inputs.values()]


def list_file_variables(series: VariableSeries) -> list[FileVariable]:
    """Return a `FileVariable` for each file from which a variable or one of its inputs is read."""
    if isinstance(series, JoinedSeries):
        return [file_variable for inner in series.source_series for file_variable in list_file_variables(inner)]
    file_variables = list(series.file_variables)
    for input_series in list_additional_inputs(series):
        file_variables += list_file_variables(input_series)
    return file_variables


def estimate_read_memory(series: VariableSeries) -> int:
    """Return the memory in bytes that is needed to read one time of a variable."""
    if isinstance(series, JoinedSeries):
        return max(estimate_read_memory(inner) for inner in series.source_series)
    # Packed values are unpacked as float64. All inputs of a derived variable are in memory at once, as float32.
    num_input_values = sum(inputs.file_variables[0].layout.values_per_time for inputs in list_additional_inputs(series))
    num_values = series.file_variables[0].layout.values_per_time
    return 8 * _COPIES * num_values + 4 * num_input_values


def count_file_times_per_time(series: VariableSeries, times: np.ndarray) -> int:
    """Return the largest number of times in a file that are read to get one time of the run, at least 1.

    The number exceeds 1 if chunks contain several times, and the file has additional times between those of the run.

    Args:
        series: series of a variable.
        times: (N,) times of the run in minutes since 1900.
    """
    if isinstance(series, JoinedSeries):
        return max(count_file_times_per_time(inner, times) for inner in series.source_series)
    max_file_times = 1
    for read_series in (series, *list_additional_inputs(series)):
        for file_variable in read_series.file_variables:
            layout = file_variable.layout
            if layout.times_per_chunk == 1 or layout.times is None or min(len(times), len(layout.times)) < 2:
                continue
            # If the interval of the file is shorter than that of the run, the times in between are also read.
            file_interval = int(np.diff(layout.times).min())
            interval_ratio = int(np.diff(times).min()) // file_interval
            max_file_times = max(max_file_times, min(interval_ratio, layout.times_per_chunk))
    return max_file_times


def list_series_indices(aggregation: TimeAggregation, window_indices: np.ndarray) -> np.ndarray:
    """Return the indices of all values of a series that are needed for some times of its aggregation.

    The indices are increasing, without duplicates.

    Args:
        aggregation: weighted sums that combine the values of the series.
        window_indices: indices of the times in ``aggregation.times``.
    """
    needed = [np.zeros(0, dtype=np.int64)]
    for weights, indices in aggregation.terms:
        is_needed = weights[window_indices] != 0
        needed.append(indices[window_indices][is_needed])
    return np.unique(np.concatenate(needed))


def list_file_reads(series: VariableSeries, indices: np.ndarray) -> Iterator[tuple[FileVariable, np.ndarray]]:
    """Yield the variable in each file from which some times are read, with the positions of the times in the file.

    The inputs of a derived variable are included.

    Args:
        series: series of the variable.
        indices: indices of the times in the series.
    """
    if isinstance(series, JoinedSeries):
        for number, inner in enumerate(series.source_series):
            is_in_series = series.series_index[indices] == number
            yield from list_file_reads(inner, series.index_in_series[indices][is_in_series])
        return
    file_index = series.file_index[indices]
    position = series.position[indices]
    for number in np.unique(file_index).tolist():
        yield series.file_variables[number], position[file_index == number]
    if isinstance(series, DerivedSeries):
        for input_series, input_index in series.inputs.values():
            yield from list_file_reads(input_series, input_index[indices])
