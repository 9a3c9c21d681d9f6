"""Reader of forecasts in a folder of netCDF or GRIB2 files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import netCDF4
import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.errors import DataError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.archive.metadata import ForecastMetadata
from credit.forecast.io.archive.stored_variables import StoredVariables
from credit.forecast.io.files.names import EXTENSIONS
from credit.forecast.io.files.writer import LEADS, MEMBERS
from credit.forecast.io.grib.reader import open_grib_forecast
from credit.forecast.io.schema import INITIAL_FIELDS, MEMBER

# (lead time in minutes, member) -> (file, index along the file's time dimension). The member is 0 for a file that
# contains all members.
_Rows = dict[tuple[int, int], tuple[Path, int]]
_Variables = Mapping[str, netCDF4.Variable] | Mapping[str, xr.Variable]


@dataclass(frozen=True)
class _FileMetadata:
    """Metadata of one file of a forecast.

    Attributes:
        fields: variables, levels, lead times and grid.
        calendar: calendar of the times.
        initial_minutes: initial time in minutes.
        member: number of the member if the file contains a single member; 0 if it contains all members.
        num_members: number of members of the ensemble if each file contains a single member; None if the files contain
            all members.
        lead_minutes: lead times in minutes of the complete forecast, which may consist of several files; None for a
            file of a different program.
        checksum: checksum of the initial fields of the forecast; None if the file contains no checksum.
    """

    fields: ForecastMetadata
    calendar: Calendar
    initial_minutes: int
    member: int
    num_members: int | None
    lead_minutes: list[int] | None
    checksum: object


@contextmanager
def _open_file(path: Path) -> Iterator[tuple[_Variables, Mapping[str, object]]]:
    """Open a forecast file in a context; yield its variables by name, and its global attributes.

    Raises:
        DataError: if a GRIB2 file has no index.
    """
    if path.suffix == EXTENSIONS["grib2"]:
        yield open_grib_forecast(path)
    else:
        with netCDF4.Dataset(path) as dataset:
            yield dataset.variables, dataset.__dict__


def _read_metadata(path: Path, rename: Mapping[str, str], level_units: str | None, warn: bool) -> _FileMetadata:
    """Return the metadata of a forecast file.

    Args:
        path: path of the file.
        rename: name of a variable in this package -> its name in the file.
        level_units: units to which the levels are converted; None to keep the units of the file.
        warn: True to log a warning about skipped variables.

    Raises:
        DataError: if the file cannot be read or is not a forecast.
    """
    try:
        with _open_file(path) as (variables, attributes):
            source = StoredVariables(path, variables, attributes)
            fields = ForecastMetadata(source, ("time",), "forecast_period", rename, level_units, warn=warn)
            # These attributes belong to one forecast, so they may differ between files of the same run.
            checksum = fields.attributes.pop(INITIAL_FIELDS, None)
            lead_text = fields.attributes.pop(LEADS, None)
            has_one_member = MEMBER in source.names and not source.dims(MEMBER)
            num_members = None
            if has_one_member:
                num_members = fields.attributes.get(MEMBERS)
            member = 0
            if num_members is not None:
                member = int(source.values(MEMBER))
            reference = source.find_first(["forecast_reference_time"])
            reference_attributes = source.variable_attributes(reference)
            calendar = Calendar(str(reference_attributes.get("calendar", "standard")))
            if "units" not in reference_attributes:
                raise DataError(
                    f'{path}: forecast_reference_time has no units; set them, for example "hours since 1900-01-01", or '
                    "write the forecast again"
                )
            initial_minutes = int(
                calendar.minutes_from_cf(source.values(reference), str(reference_attributes["units"]))
            )
    except OSError as error:
        raise DataError(f"{path}: is not a readable forecast ({error}); remove it") from error
    lead_minutes = None
    if lead_text is not None:
        lead_minutes = [int(lead) for lead in str(lead_text).split(",")]
    return _FileMetadata(fields, calendar, initial_minutes, member, num_members, lead_minutes, checksum)


class FileArchive(ForecastArchive):
    """Reader of the forecasts of one run in netCDF or GRIB2 files.

    The lead times and members of a forecast may be in several files.

    Args:
        folder: folder of the files.
        paths: paths of the files, at least one.
        rename: name of a variable in this package -> its name in the files.
        level_units: units to which the levels are converted; None to keep the units of the files.

    Raises:
        DataError: if the files belong to different runs, two files have the same lead time of a forecast, or a lead
            time or member of a forecast is missing.
    """

    def __init__(self, folder: Path, paths: list[Path], rename: Mapping[str, str], level_units: str | None) -> None:
        # Initial time in minutes -> file and index of each lead time and member.
        rows: dict[int, _Rows] = {}
        # Initial time -> lead times and members of the complete forecast, if the files contain this information.
        expected_rows: dict[int, set[tuple[int, int]]] = {}
        checksums: dict[int, object] = {}
        first: _FileMetadata | None = None
        for path in paths:
            file = _read_metadata(path, rename, level_units, warn=first is None)
            first = first or file
            initial = file.initial_minutes

            # All files must belong to one run, and all files of a forecast to one analysis.
            mismatch = first.fields.describe_mismatch(file.fields)
            if file.num_members != first.num_members:
                mismatch = "has a different number of members"
            if mismatch:
                raise DataError(f"{path}: {mismatch}, unlike {paths[0]}; remove the files of one of the runs")
            if checksums.setdefault(initial, file.checksum) != file.checksum:
                raise DataError(
                    f"{path}: its analysis differs from the analysis of the forecast's other files; run credit rollout "
                    "again, or remove the forecast's files"
                )

            # Merge the windows of sums, because a file may have only some of the lead times.
            for name, windows in file.fields.windows.items():
                first.fields.windows.setdefault(name, {}).update(windows)

            # Each lead time and member must be in exactly one file.
            forecast_rows = rows.setdefault(initial, {})
            for row, lead in enumerate(file.fields.lead_minutes.tolist()):
                other_path, other_row = forecast_rows.setdefault((lead, file.member), (path, row))
                if (other_path, other_row) != (path, row):
                    raise DataError(f"{path}: has the same lead times as {other_path}; remove one of these files")

            if file.lead_minutes is not None:
                members = range(file.num_members or 1)
                expected_rows.setdefault(initial, set()).update(itertools.product(file.lead_minutes, members))
        assert first is not None
        num_members = first.num_members

        # Every forecast must be complete, and all must have the same lead times and members.
        _require_complete(rows, expected_rows, num_members, file.calendar)
        example_rows = rows[min(rows)]
        for forecast_rows in rows.values():
            if forecast_rows.keys() != example_rows.keys():
                path, _ = next(iter(forecast_rows.values()))
                example_path, _ = next(iter(example_rows.values()))
                raise DataError(
                    f"{path}: the lead times of the forecast differ from the lead times of {example_path}; run credit "
                    "rollout again, or remove the files of one of the runs"
                )
        self._rows = rows
        self._file_members = range(num_members or 1)
        leads = sorted({lead for lead, _ in example_rows})
        super().__init__(folder, np.array(sorted(rows)), np.array(leads, dtype=np.int64), first.fields, file.calendar)
        if num_members is not None:
            self.members = int(num_members)

    def describe_version(self, initial_minutes: int) -> str:
        """Return a string with the names, sizes and modification times (ns) of the files of a forecast."""
        paths = sorted({path for path, _ in self._rows[int(initial_minutes)].values()})
        return ", ".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths)

    def _read_variables(self, initial_minutes: int, lead_index: int, channel: str | None = None) -> list[np.ndarray]:
        """Return the array of each variable at one lead time, ([M,] [L,] H, W), from a file or one file per member."""
        lead = int(self.lead_minutes[lead_index])
        rows = self._rows[initial_minutes]
        # One list of variables for each file.
        variables_by_file = [self._read_file(*rows[lead, member], channel) for member in self._file_members]
        if len(variables_by_file) == 1:
            return variables_by_file[0]
        return [np.stack(members) for members in zip(*variables_by_file, strict=True)]

    def _read_file(self, path: Path, row: int, channel: str | None) -> list[np.ndarray]:
        """Return the arrays ([M,] [L,] H, W) of all variables or of one channel at index `row` of a file's times."""
        try:
            with _open_file(path) as (variables, _):
                return self._read_arrays_at(variables, {"time": row}, path, channel)
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read ({error})") from error


def _require_complete(
    rows: Mapping[int, _Rows],
    expected_rows: Mapping[int, set[tuple[int, int]]],
    num_members: int | None,
    calendar: Calendar,
) -> None:
    """Raise DataError if lead times or members of a forecast are missing, for example after an interrupted run.

    Args:
        rows: initial time in minutes -> lead times and members that are in files.
        expected_rows: initial time in minutes -> (lead time in minutes, member) of the complete forecast.
        num_members: number of members of the ensemble if each file contains a single member; otherwise None.
        calendar: calendar of the times.

    Raises:
        DataError: if a forecast is incomplete; the message names the first missing lead time or member.
    """
    for initial, expected in expected_rows.items():
        missing = sorted(expected - rows[initial].keys())
        if missing:
            lead, member = missing[0]
            first_missing = f"{lead / 60:g} h"
            if num_members is not None:
                first_missing += f" of member {member}"
            path, _ = next(iter(rows[initial].values()))
            raise DataError(
                f"{path}: the forecast from {calendar.format(initial)} lacks {len(missing)} of {len(expected)} lead "
                f"times (first missing: {first_missing}); run credit rollout again to complete the forecast, or remove "
                "its files"
            )
