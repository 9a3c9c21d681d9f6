"""Writer of forecasts as netCDF files with CF metadata.

A forecast is one file, or several: one for each day or month of the valid time, each lead time or each member.
Shape suffixes: C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import netCDF4
import numpy as np

from credit.errors import CreditError
from credit.forecast.io.netcdf_names import PREFIX, FilePart, build_file_name, plan_files
from credit.forecast.io.netcdf_variables import (
    MISSING_VALUE,
    define_coordinates,
    define_variable,
    is_as_defined,
    schema_of_file,
)
from credit.forecast.io.schema import (
    HISTORY,
    INITIAL_FIELDS,
    MADE_BY,
    MEMBER,
    WRITE_HINT,
    ForecastSchema,
    run_attributes,
    with_stored_level_dims,
)
from credit.utils.page_cache import start_writeback
from credit.utils.temporary import find_stale_files, process_exists, temporary_path

# Global attribute with the lead times of the complete forecast, in each of its files.
LEADS = "lead_minutes"
# Global attribute with the number of members, in files of one member each.
MEMBERS = "members"
# A temporary file of another host is stale after this time without writing. A model may need hours for a lead time.
_STALE_SECONDS = 86400.0


class NetcdfForecastWriter:
    """Writer of forecasts as netCDF files; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    Args:
        folder: existing folder of the files; stale temporary files in it are removed.
        schema: content of each forecast.
        split: ``day``, ``month``, ``lead`` or ``member`` for a file for each of these; None for one file per forecast.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the fields
            that the forecast starts from; None to write no checksums.
    """

    def __init__(
        self,
        folder: Path,
        schema: ForecastSchema,
        split: str | None = None,
        initial_state_checksum: Callable[[int], str] | None = None,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._split = split
        # Computing a checksum reads fields, so each one is computed once.
        self._initial_state_checksum = None
        if initial_state_checksum is not None:
            self._initial_state_checksum = functools.cache(initial_state_checksum)
        # Initial time -> files of an incomplete forecast.
        self._open_files: dict[int, list[_ForecastFile]] = {}
        leads_text = ", ".join(str(lead) for lead in schema.lead_minutes.tolist())
        self._attributes = {**schema.global_attributes, LEADS: leads_text}
        if split == "member":
            assert schema.members is not None, "the config requires an ensemble for this split"
            self._attributes[MEMBERS] = schema.members
        for path in find_stale_files(folder, f"{PREFIX}*.nc", process_exists, _STALE_SECONDS):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if all files of a forecast exist with the content that would be written.

        A file has its final name only if it is complete. If the folder has a further file of this initial time, from a
        run with another split, the result is False, because a reader would take that file for a part of the forecast.

        Args:
            initial_minutes: initial time in minutes.
        """
        parts = plan_files(self._schema, initial_minutes, self._split)
        if self._other_files(initial_minutes, parts):
            return False
        return all(self._file_matches(self._folder / name, initial_minutes, part) for name, part in parts.items())

    def _other_files(self, initial_minutes: int, names: Collection[str]) -> list[Path]:
        """Return the files of an initial time that are not in `names`; a run with another split has written them."""
        stem = build_file_name(self._schema, initial_minutes).removesuffix(".nc")
        return [path for path in self._folder.glob(f"{stem}_*.nc") if path.name not in names]

    def _file_matches(self, path: Path, initial_minutes: int, part: FilePart) -> bool:
        """Return True if a file exists with the content of `part`; False also if it cannot be read."""
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._dataset_matches(dataset, initial_minutes, part)
        except (OSError, RuntimeError):
            return False

    def _dataset_matches(self, dataset: netCDF4.Dataset, initial_minutes: int, part: FilePart) -> bool:
        """Return True if variables, attributes, lead times, member and checksum are those that would be written."""
        stored_dims = {name: variable.dimensions for name, variable in dataset.variables.items()}
        schema = with_stored_level_dims(schema_of_file(self._schema, part), stored_dims)
        stored_fields = {name for name, dims in stored_dims.items() if dims[-1:] == ("longitude",)}
        stored_fields.discard("longitude")
        if stored_fields != {variable.name for variable in schema.variables}:
            return False
        if "forecast_period" not in dataset.variables:
            return False
        attributes = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        checksum = attributes.pop(INITIAL_FIELDS, None)
        if run_attributes(attributes) != run_attributes(self._attributes):
            return False
        if not np.array_equal(dataset["forecast_period"][:], schema.lead_hours[part.lead_indices]):
            return False
        if part.member is not None and (MEMBER not in dataset.variables or dataset[MEMBER][...] != part.member):
            return False
        if not all(is_as_defined(dataset, schema, variable, part) for variable in schema.variables):
            return False
        # The checksum comes last, because it reads the fields that the forecast starts from.
        return self._initial_state_checksum is None or checksum == self._initial_state_checksum(initial_minutes)

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member.

        When all lead times and members of a file are written, the file is flushed to disk and gets its final name.

        Args:
            initial_minutes: initial time in minutes.
            member: number of the member, 0 for a single forecast.
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            fields_CHW: float32 in physical units, NaN where missing.

        Raises:
            CreditError: naming the file, if it cannot be written; the incomplete forecast is removed.
        """
        if initial_minutes not in self._open_files:
            self._begin_forecast(initial_minutes)
        files = self._open_files[initial_minutes]
        file = next(file for file in files if file.contains(lead_index, member))
        try:
            file.put(initial_minutes, member, lead_index, fields_CHW)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            self.discard(initial_minutes)
            raise _build_write_error(file.path, error) from error
        except BaseException:
            self.discard(initial_minutes)
            raise
        if not any(file.missing for file in files):
            del self._open_files[initial_minutes]

    def _begin_forecast(self, initial_minutes: int) -> None:
        """Remove the files that a new forecast replaces, and prepare the writing of its files."""
        attributes = {**self._attributes, HISTORY: MADE_BY}
        if self._initial_state_checksum is not None:
            attributes[INITIAL_FIELDS] = self._initial_state_checksum(initial_minutes)
        parts = plan_files(self._schema, initial_minutes, self._split)
        replaced_paths = self._other_files(initial_minutes, parts)
        # Files of an older forecast are removed first, because a killed run would leave a mixture of two forecasts.
        # A single file is replaced in one rename. Files with the right content may be of another run that writes the
        # same forecast at the same time; they stay.
        if len(parts) > 1:
            for name, part in parts.items():
                path = self._folder / name
                if not self._file_matches(path, initial_minutes, part):
                    replaced_paths.append(path)
        for path in replaced_paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _build_write_error(path, error) from error
        files = []
        for name, part in parts.items():
            files.append(_ForecastFile(self._folder / name, self._schema, part, attributes))
        self._open_files[initial_minutes] = files

    def discard(self, initial_minutes: int) -> None:
        """Remove the files of the incomplete forecast from an initial time, in minutes."""
        for file in self._open_files.pop(initial_minutes, ()):
            file.discard()

    def close(self) -> None:
        """Remove the files of all incomplete forecasts."""
        for initial_minutes in list(self._open_files):
            self.discard(initial_minutes)

    def find_path(self, initial_minutes: int) -> Path:
        """Return the path of the file of a forecast, of the first file if there are several."""
        return self._folder / next(iter(plan_files(self._schema, initial_minutes, self._split)))


class _ForecastFile:
    """One file of a forecast, written under a temporary name until it is complete.

    Args:
        path: final path of the file.
        schema: content of the forecast.
        part: lead times and member that are in this file.
        attributes: global attributes of the file.

    Attributes:
        path: final path of the file.
        missing: pairs (index of the lead time, member) that are not written yet.
    """

    def __init__(self, path: Path, schema: ForecastSchema, part: FilePart, attributes: dict[str, str | int]) -> None:
        self.path = path
        self._part = part
        self._attributes = attributes
        self._schema = schema_of_file(schema, part)
        members = range(schema.members or 1)
        if part.member is not None:
            members = [part.member]
        self._content = frozenset(itertools.product(part.lead_indices, members))
        self.missing = set(self._content)
        # The name is unique, because another run may write the same forecast into this folder.
        self._temporary_path = temporary_path(path)
        # Inode and modification time of the complete file, if it did not replace an older one.
        self._new_file_identity: tuple[int, int] | None = None
        self._dataset: netCDF4.Dataset | None = None

    def contains(self, lead_index: int, member: int) -> bool:
        """Return True if a lead time of a member belongs to this file."""
        return (lead_index, member) in self._content

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; see `NetcdfForecastWriter.put`."""
        if self._dataset is None:
            self._create(initial_minutes)
        schema = self._schema
        row = self._part.lead_indices.index(lead_index)
        position = (row,) if schema.members is None else (row, member)
        for variable in schema.variables:
            values = schema.select(variable, fields_CHW)
            is_missing = np.isnan(values)
            if is_missing.any():
                values = np.where(is_missing, MISSING_VALUE, values)
            self._dataset[variable.name][position] = values
        self.missing.discard((lead_index, member))
        if not self.missing:
            self._complete()
            return
        start_writeback(self._temporary_path)
        # Compressed fields may stay in memory. The time of the file shows other runs that it is still in use.
        with suppress(OSError):
            os.utime(self._temporary_path)

    def _create(self, initial_minutes: int) -> None:
        """Create the file under its temporary name, with coordinates and without fields."""
        self._dataset = netCDF4.Dataset(self._temporary_path, "w", format="NETCDF4")
        # A complete file has all values, so filling it with missing values first would write it twice.
        self._dataset.set_fill_off()
        self._dataset.setncatts(self._attributes)
        define_coordinates(self._dataset, self._schema, initial_minutes, self._part)
        for variable in self._schema.variables:
            define_variable(self._dataset, self._schema, variable, self._part)

    def _complete(self) -> None:
        """Flush the file to disk and give it its final name."""
        self._dataset.close()
        with open(self._temporary_path, "rb") as handle:
            os.fsync(handle.fileno())
            identity = _file_identity(os.fstat(handle.fileno()))
        is_new = not self.path.exists()
        os.replace(self._temporary_path, self.path)
        self._new_file_identity = identity if is_new else None

    def discard(self) -> None:
        """Remove the file, even if it is complete itself, because other files of its forecast are not.

        A file under the final name that another run has written is not removed, because that run relies on it.
        """
        if self._dataset is not None and self._dataset.isopen():
            with suppress(OSError, RuntimeError):  # A full disk fails here a second time.
                self._dataset.close()
        with suppress(OSError):  # A read-only file system refuses this even if there is no file.
            self._temporary_path.unlink(missing_ok=True)
        with suppress(OSError):
            if self._new_file_identity is not None and _file_identity(self.path.stat()) == self._new_file_identity:
                self.path.unlink()


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    """Return inode and modification time in ns, which differ for another file of the same name."""
    return status.st_ino, status.st_mtime_ns


def _build_write_error(path: Path, error: Exception) -> CreditError:
    """Convert an error of the operating system or the netCDF library to an error of this package."""
    reason = getattr(error, "strerror", None) or error
    return CreditError(f"{path}: cannot be written ({reason}); {WRITE_HINT}")
