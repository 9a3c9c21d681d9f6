"""Reading of one variable from one file, with messages that name the file, the variable and the time."""

from __future__ import annotations

import numpy as np

from credit.data.formats.files import OpenFiles
from credit.data.formats.zarr.fetching_store import FetchError
from credit.data.sources.file_scanner import FileVariable
from credit.errors import CreditError, DataError, UnavailableError


def read_file_variable(
    files: OpenFiles, file_variable: FileVariable, position: int | slice, on_file_grid: bool = False
) -> np.ndarray:
    """Return a variable read from a file: (levels or 1, H, W) for one time, (T, levels or 1, H, W) for T times.

    Args:
        files: cache that opens the file.
        file_variable: the variable in its file.
        position: index of a time in the file, or a slice of T times.
        on_file_grid: True to return fields (..., h, w) on the grid of the file in SI units, as inputs of formulas;
            False to return fields on the grid and in the units of the run.

    Raises:
        DataError: if the file cannot be read, or its values are implausible.
        UnavailableError: if a chunk of a remote store could not be fetched.
    """
    layout = file_variable.layout
    try:
        dataset = files.get(file_variable.path, file_variable.source_number)
        if on_file_grid:
            return layout.read_on_file_grid(dataset, position)
        return layout.read(dataset, position)
    except CreditError:
        raise
    except FetchError as error:
        raise UnavailableError(
            f"{file_variable.path}: {layout.name} cannot be fetched{_describe_times(file_variable, position)} "
            f"({error}); check the network, the server and your access to it, and run the same command again (credit "
            "preprocess continues where it stopped)"
        ) from error
    except Exception as error:
        # netCDF, HDF5 and zarr raise many kinds of errors for damaged data.
        time_range = position
        if isinstance(position, slice):
            time_range = f"{position.start} to {position.stop - 1}"
        raise DataError(
            f"{file_variable.path}: {layout.name} cannot be read at position {time_range} in time "
            f"({error}); the file is damaged or truncated: copy it again"
        ) from error


def read_static_variable(
    files: OpenFiles, name: str, file_variable: FileVariable, on_file_grid: bool = False
) -> np.ndarray:
    """Return a static variable read from a file, (levels or 1, H, W); for arguments see `read_file_variable`.

    If the file has several times, the fields at the first, the middle and the last used time must be equal.

    Raises:
        DataError: if these fields differ or cannot be read, or if no time of the file is used.
    """
    positions = np.zeros(1, dtype=np.int64)
    if "time" in file_variable.layout.dims:
        positions = file_variable.positions
    if not len(positions):
        raise DataError(
            f"{file_variable.path}: period and every of data.sources.{file_variable.source_number}, and the attributes "
            f"valid_time_start and valid_time_stop of the file, exclude all times of {name}; lengthen the period"
        )
    first, *others = sorted({positions[0], positions[len(positions) // 2], positions[-1]})
    fields = read_file_variable(files, file_variable, int(first), on_file_grid)
    for position in others:
        other_fields = read_file_variable(files, file_variable, int(position), on_file_grid)
        if not np.array_equal(fields, other_fields, equal_nan=True):
            raise DataError(
                f"{file_variable.path}: {name} is listed as static but varies in time (positions {first} and "
                f"{position} differ); list it under dynamic_forcing"
            )
    return fields


def _describe_times(file_variable: FileVariable, position: int | slice) -> str:
    """Return `` at TIME`` or `` at some time from TIME to TIME`` for a position; empty if the file has no times."""
    layout = file_variable.layout
    if layout.times is None or layout.calendar is None:
        return ""
    if isinstance(position, int):
        return f" at {layout.calendar.format(layout.times[position])}"
    first = layout.calendar.format(layout.times[position.start])
    last = layout.calendar.format(layout.times[position.stop - 1])
    return f" at {first}" if first == last else f" at some time from {first} to {last}"
