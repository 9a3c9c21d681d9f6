"""Names of the netCDF files of a forecast, and the part of the forecast in each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from credit.forecast.io.schema import ForecastSchema

PREFIX = "forecast_"
# Split -> pattern of what follows the initial time in a file name.
SPLITS = {
    "day": r"\d{4}-\d{2}-\d{2}",
    "month": r"\d{4}-\d{2}",
    "lead": r"\d{3,}h(\d{2})?",
    "member": r"member\d{3,}",
}


def file_name(layout: ForecastSchema, initial_minutes: int) -> str:
    """Return for example ``forecast_2001-04-01T00.nc``; minutes are added where they are not 0."""
    date = layout.calendar.datetime(initial_minutes)
    return date.strftime(f"{PREFIX}%Y-%m-%dT%H{'%M' if date.minute else ''}.nc")


@dataclass(frozen=True)
class FilePart:
    """The part of a forecast in one file.

    Attributes:
        numbers: indices of its lead times.
        member: the only member in the file; None for all members or a single forecast.
    """

    numbers: list[int]
    member: int | None = None


def plan_files(layout: ForecastSchema, initial_minutes: int, split: str | None) -> dict[str, FilePart]:
    """Return file name -> part of the forecast in it, for all files of a forecast.

    Split by ``day`` or ``month`` of the valid time, names end in it (``forecast_2001-04-01T00_2001-05.nc``), by
    ``lead`` in hours (``_024h``, ``_000h30`` for half an hour), by ``member`` in its number (``_member003``).
    """
    name = file_name(layout, initial_minutes)
    stem = name.removesuffix(".nc")
    all_numbers = list(range(len(layout.lead_minutes)))
    if split is None:
        return {name: FilePart(all_numbers)}
    if split == "member":
        members = range(layout.members or 1)
        return {f"{stem}_member{member:03d}.nc": FilePart(all_numbers, member) for member in members}
    parts: dict[str, FilePart] = {}
    for number, lead in enumerate(layout.lead_minutes.tolist()):
        if split == "lead":
            hours, minutes = divmod(lead, 60)
            suffix = f"{hours:03d}h"
            if minutes:
                suffix += f"{minutes:02d}"
        else:
            date = layout.calendar.datetime(initial_minutes + lead)
            suffix = date.strftime("%Y-%m-%d" if split == "day" else "%Y-%m")
        part = parts.setdefault(f"{stem}_{suffix}.nc", FilePart([]))
        part.numbers.append(number)
    return parts


def split_of(path: Path) -> str | None:
    """Return the split that a file name tells of; ``other`` for a name that this package does not give."""
    _, _, suffix = path.stem.removeprefix(PREFIX).partition("_")
    for split, pattern in SPLITS.items():
        if re.fullmatch(pattern, suffix):
            return split
    return "other" if suffix else None
