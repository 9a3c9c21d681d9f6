"""Writer of forecasts to netCDF or GRIB2 files.

A forecast is a single file, or a file for each day or month of the valid time, each lead time, or each member.

Shape suffixes: C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np

from credit.errors import CreditError
from credit.forecast.io.files.base import FileFormat, OpenFile
from credit.forecast.io.files.names import PREFIX, FilePart, build_file_stem, plan_files
from credit.forecast.io.schema import (
    HISTORY,
    INITIAL_FIELDS,
    MADE_BY,
    WRITE_HINT,
    ForecastSchema,
    select_run_attributes,
)
from credit.utils.page_cache import start_writeback
from credit.utils.temporary import find_stale_files, process_exists, temporary_path

# Name of the global attribute with the lead times of the complete forecast, which is in each file of the forecast.
LEADS = "lead_minutes"
# Name of the global attribute with the number of members, in files with one member each.
MEMBERS = "members"
# A temporary file of another host is stale if it was not changed for this time. A model may need hours per lead time.
_STALE_SECONDS = 86400.0


class FileForecastWriter:
    """Writer of forecasts to netCDF or GRIB2 files; see `credit.forecast.io.forecast_writer.ForecastWriter`.

    Args:
        folder: existing folder of the files; stale temporary files are removed from this folder.
        schema: content of each forecast.
        file_format: format of the files.
        split: ``day``, ``month``, ``lead`` or ``member``: each forecast has a file per day, month, lead time or member.
            None for one file per forecast.
        initial_state_checksum: function that takes an initial time in minutes and returns the checksum of the initial
            fields of the forecast; None to write no checksums.
    """

    def __init__(
        self,
        folder: Path,
        schema: ForecastSchema,
        file_format: FileFormat,
        split: str | None = None,
        initial_state_checksum: Callable[[int], str] | None = None,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._format = file_format
        self._split = split
        # Computing a checksum reads fields, so each checksum is cached.
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
        pattern = f"{PREFIX}*{file_format.extension}*"
        for path in find_stale_files(folder, pattern, process_exists, _STALE_SECONDS):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def is_complete(self, initial_minutes: int) -> bool:
        """Return True if all files of a forecast exist with the content that would be written.

        A file has its final name only if it is complete. If there are also files of this initial time with a different
        split, the result is False, because readers would treat them as part of the forecast.

        Args:
            initial_minutes: initial time in minutes.
        """
        parts = self._plan_files(initial_minutes)
        if self._find_replaced_files(initial_minutes, parts):
            return False
        return all(self._file_matches(self._folder / name, initial_minutes, part) for name, part in parts.items())

    def _plan_files(self, initial_minutes: int) -> dict[str, FilePart]:
        """Return the name of each file of a forecast -> lead times and member in the file."""
        return plan_files(self._schema, initial_minutes, self._split, self._format.extension)

    def _find_replaced_files(self, initial_minutes: int, names: Collection[str]) -> list[Path]:
        """Return the existing files of an initial time that are not in `names`, from a run with a different split."""
        pattern = f"{build_file_stem(self._schema, initial_minutes)}_*{self._format.extension}"
        return [path for path in self._folder.glob(pattern) if path.name not in names]

    def _file_matches(self, path: Path, initial_minutes: int, part: FilePart) -> bool:
        """Return True if a file exists with the content, run attributes and initial state that would be written."""
        if not path.exists():
            return False
        attributes = self._format.read_matching_attributes(path, initial_minutes, part)
        if attributes is None:
            return False
        checksum = attributes.pop(INITIAL_FIELDS, None)
        if select_run_attributes(attributes) != select_run_attributes(self._attributes):
            return False
        # The checksum is compared last, because computing it reads the initial fields.
        return self._initial_state_checksum is None or checksum == self._initial_state_checksum(initial_minutes)

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member.

        When all lead times and members of a file are written, the file is flushed to disk and renamed to its final
        name.

        Args:
            initial_minutes: initial time in minutes.
            member: number of the member; 0 for a single forecast.
            lead_index: index of the lead time in ``lead_minutes`` of the schema.
            fields_CHW: float32 in physical units, NaN where missing.

        Raises:
            CreditError: if the file cannot be written; the message names the file. The incomplete forecast is removed.
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
        if not any(file.unwritten for file in files):
            del self._open_files[initial_minutes]

    def _begin_forecast(self, initial_minutes: int) -> None:
        """Remove the files that a new forecast replaces, and prepare the files of the new forecast for writing."""
        attributes = {**self._attributes, HISTORY: MADE_BY}
        if self._initial_state_checksum is not None:
            attributes[INITIAL_FIELDS] = self._initial_state_checksum(initial_minutes)
        parts = self._plan_files(initial_minutes)
        replaced_paths = self._find_replaced_files(initial_minutes, parts)
        # Files of an older forecast are removed first; otherwise a killed run would leave a mixture of two forecasts.
        # This is not needed for a single file, which is replaced in one rename. Files with the right content are kept,
        # because another run may be writing the same forecast at the same time.
        if len(parts) > 1:
            for name, part in parts.items():
                path = self._folder / name
                if not self._file_matches(path, initial_minutes, part):
                    replaced_paths.append(path)
        for path in replaced_paths:
            try:
                self._format.remove(path)
            except OSError as error:
                raise _build_write_error(path, error) from error
        files = []
        for name, part in parts.items():
            files.append(_ForecastFile(self._folder / name, self._format, self._schema.members, part, attributes))
        self._open_files[initial_minutes] = files

    def discard(self, initial_minutes: int) -> None:
        """Remove the files of the incomplete forecast that starts at an initial time (in minutes)."""
        for file in self._open_files.pop(initial_minutes, ()):
            file.discard()

    def close(self) -> None:
        """Remove the files of all incomplete forecasts."""
        for initial_minutes in list(self._open_files):
            self.discard(initial_minutes)

    def find_path(self, initial_minutes: int) -> Path:
        """Return the path of the first file of the forecast that starts at an initial time (in minutes)."""
        return self._folder / next(iter(self._plan_files(initial_minutes)))


class _ForecastFile:
    """File of a forecast, written under a temporary name until it is complete.

    Args:
        path: final path of the file.
        file_format: format of the file.
        members: number of ensemble members of the forecast; None for a single forecast.
        part: lead times and member that are in this file.
        attributes: global attributes of the file.

    Attributes:
        path: final path of the file.
        unwritten: pairs (index of the lead time, member) whose fields were not written yet.
    """

    def __init__(
        self,
        path: Path,
        file_format: FileFormat,
        members: int | None,
        part: FilePart,
        attributes: dict[str, str | int],
    ) -> None:
        self.path = path
        self._format = file_format
        self._part = part
        self._attributes = attributes
        part_members = range(members or 1)
        if part.member is not None:
            part_members = [part.member]
        self._content = frozenset(itertools.product(part.lead_indices, part_members))
        self.unwritten = set(self._content)
        # The name is unique, because another run may write the same forecast into this folder.
        self._temporary_path = temporary_path(path)
        # Inode and modification time of the complete file, if it did not replace an older file.
        self._new_file_identity: tuple[int, int] | None = None
        self._file: OpenFile | None = None

    def contains(self, lead_index: int, member: int) -> bool:
        """Return True if this file contains the lead time with index `lead_index` of a member."""
        return (lead_index, member) in self._content

    def put(self, initial_minutes: int, member: int, lead_index: int, fields_CHW: np.ndarray) -> None:
        """Write one lead time of one member; see `FileForecastWriter.put`."""
        if self._file is None:
            self._file = self._format.create(self._temporary_path, initial_minutes, self._part, self._attributes)
        self._file.put(lead_index, member, fields_CHW)
        self.unwritten.discard((lead_index, member))
        if not self.unwritten:
            self._publish_complete_file(self._file)
            return
        start_writeback(self._temporary_path)
        # Compressed fields may stay in memory, so the file may not change. Update its modification time, so that other
        # runs do not treat the file as stale.
        with suppress(OSError):
            os.utime(self._temporary_path)

    def _publish_complete_file(self, file: OpenFile) -> None:
        """Flush the file to disk and give it its final name."""
        file.close()
        identity = _build_file_identity(self._temporary_path.stat())
        is_new = not self.path.exists()
        file.publish(self.path)
        self._new_file_identity = identity if is_new else None

    def discard(self) -> None:
        """Remove the file, even if it is complete, because other files of its forecast are incomplete.

        A file with the final name is kept if another run wrote it, because the other run needs this file.
        """
        if self._file is not None:
            self._file.discard()
        with suppress(OSError):
            if (
                self._new_file_identity is not None
                and _build_file_identity(self.path.stat()) == self._new_file_identity
            ):
                self._format.remove(self.path)


def _build_file_identity(status: os.stat_result) -> tuple[int, int]:
    """Return the inode and modification time (ns), which identify a file even if it is replaced under the same name."""
    return status.st_ino, status.st_mtime_ns


def _build_write_error(path: Path, error: Exception) -> CreditError:
    """Return an error that names the file, the reason in `error` and a remedy."""
    reason = getattr(error, "strerror", None) or error
    return CreditError(f"{path}: cannot be written ({reason}); {WRITE_HINT}")
