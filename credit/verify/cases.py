"""Which forecasts, lead times and initial times are scored together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from credit.data.splits import Split
from credit.data.units import plain
from credit.errors import DataError
from credit.forecast.forecasts import Forecasts

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

_REAL_CALENDARS = {"standard", "proleptic_gregorian"}  # the same since 1582


def require_comparable(archive: Forecasts, reader: FieldReader, regridded: bool) -> None:
    """Refuse forecasts of other variables, calendar or units or, unless all are `regridded`, on another grid."""
    outputs = [channel.name for channel in reader.channels.output]
    if not {*outputs} & {*archive.channel_names}:
        raise DataError(
            f"{archive.origin}: has none of the outputs of data.variables ({', '.join(outputs)}), but "
            f"{', '.join(archive.channel_names[:20])}; what others call by another name is renamed by "
            "verification.other_forecasts.NAME.rename"
        )
    difference = reader.grid.difference(archive.grid)
    if difference and not regridded:
        raise DataError(
            f"{archive.origin}: its grid is not that of the data: {difference}; verification.grid brings both to one"
        )
    if archive.clock != reader.clock and not {archive.clock.calendar, reader.clock.calendar} <= _REAL_CALENDARS:
        raise DataError(f"{archive.origin}: calendar {archive.clock.calendar}, the data have {reader.clock.calendar}")
    for name, units in archive.units.items():
        ours = reader.attributes.get(name, {}).get("units")
        if ours and plain(ours) != plain(units):
            raise DataError(f"{archive.origin}: {name} is in {units}, the data in {ours}")


def common_leads(archives: Mapping[str, Forecasts]) -> np.ndarray:
    """Return the lead times that every archive has, without 0."""
    common = set.intersection(*(set(own.lead_minutes.tolist()) for own in archives.values()))
    leads = np.array(sorted(lead for lead in common if lead > 0), dtype=np.int64)
    if not len(leads):
        raise DataError(f"{', '.join(str(own.origin) for own in archives.values())}: have no lead time in common")
    return leads


def common_cases(archives: Mapping[str, Forecasts], reader: FieldReader, leads: np.ndarray, test: Split) -> np.ndarray:
    """Return the initial times that every archive has and whose truth, at every lead too, is in the test period."""
    common = set.intersection(*(set(own.initial_minutes.tolist()) for own in archives.values()))
    truth = set(reader.times[(reader.times >= test.first) & (reader.times <= test.last)].tolist())
    cases = sorted(t for t in common if t in truth and all(t + lead in truth for lead in leads.tolist()))
    if not cases:
        raise DataError(
            f"{test.describe(reader.clock)}: of {len(common)} initial times that all forecasts have, none has truth at "
            f"every lead up to {leads[-1] / 60:g} h in this period; forecast from times in it (inference.initial_times)"
        )
    return np.array(cases, dtype=np.int64)
