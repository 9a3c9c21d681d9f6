"""Names of the files of a forecast, and the lead times and members in each file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from credit.forecast.io.schema import ForecastSchema

PREFIX = "forecast_"
# Format -> extension of its file names.
EXTENSIONS = {"netcdf": ".nc", "grib2": ".grib2"}
# Split -> regular expression of the suffix that follows the initial time in a file name.
SPLITS = {
    "day": r"\d{4}-\d{2}-\d{2}",
    "month": r"\d{4}-\d{2}",
    "lead": r"\d{3,}h(\d{2})?",
    "member": r"member\d{3,}",
}


def build_file_stem(schema: ForecastSchema, initial_minutes: int) -> str:
    """Return the beginning of the names of all files of a forecast, for example ``forecast_2001-04-01T00``.

    If the initial time is not a full hour, the minutes follow the hour, as in ``T0030``.

    Args:
        schema: content of the forecasts.
        initial_minutes: initial time in minutes.
    """
    date = schema.calendar.datetime(initial_minutes)
    date_format = "%Y-%m-%dT%H"
    if date.minute:
        date_format += "%M"
    return date.strftime(f"{PREFIX}{date_format}")


@dataclass(frozen=True)
class FilePart:
    """Lead times and members of a forecast that one file contains.

    Attributes:
        lead_indices: indices of the file's lead times in ``lead_minutes`` of the schema.
        member: number of the member if the file contains a single member; None for a file that contains all members or
            a single forecast.
    """

    lead_indices: list[int]
    member: int | None = None


def plan_files(schema: ForecastSchema, initial_minutes: int, split: str | None, extension: str) -> dict[str, FilePart]:
    """Return the names of the files of a forecast, with the lead times and members in each file.

    The suffix of a name depends on `split`. The suffix is the day or month of the valid time
    (``forecast_2001-04-01T00_2001-05.nc``), the lead time in hours (``_024h``, or ``_000h30`` for half an hour), or the
    number of the member (``_member003``).

    Args:
        schema: content of the forecasts.
        initial_minutes: initial time in minutes.
        split: ``day``, ``month``, ``lead`` or ``member``; None for one file.
        extension: extension of the names, for example ``.nc``.

    Returns:
        Name of each file -> lead times and member in the file.
    """
    stem = build_file_stem(schema, initial_minutes)
    all_leads = list(range(len(schema.lead_minutes)))
    if split is None:
        return {f"{stem}{extension}": FilePart(all_leads)}
    if split == "member":
        members = range(schema.members or 1)
        return {f"{stem}_member{member:03d}{extension}": FilePart(all_leads, member) for member in members}
    # Lead times with the same suffix share a file.
    parts: dict[str, FilePart] = {}
    for lead_index, lead in enumerate(schema.lead_minutes.tolist()):
        if split == "lead":
            hours, minutes = divmod(lead, 60)
            suffix = f"{hours:03d}h"
            if minutes:
                suffix += f"{minutes:02d}"
        else:
            valid_time = schema.calendar.datetime(initial_minutes + lead)
            suffix = valid_time.strftime("%Y-%m-%d" if split == "day" else "%Y-%m")
        part = parts.setdefault(f"{stem}_{suffix}{extension}", FilePart([]))
        part.lead_indices.append(lead_index)
    return parts


def infer_split(path: Path) -> str | None:
    """Return the split of a forecast, inferred from the name of one of its files.

    Returns:
        ``day``, ``month``, ``lead`` or ``member``; None for a forecast in one file; ``other`` for a name that this
        package does not write.
    """
    _, _, suffix = path.stem.removeprefix(PREFIX).partition("_")
    for split, pattern in SPLITS.items():
        if re.fullmatch(pattern, suffix):
            return split
    return "other" if suffix else None
