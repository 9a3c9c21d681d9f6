"""Reports of artificial scores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import xarray as xr

from credit.calendar import Calendar
from credit.channels import Channel
from credit.config.sections.verification import EventConfig
from credit.verify.report.report import write_report
from credit.verify.scores.events import EventStatistics
from credit.verify.scores.seeps import SeepsStatistics
from credit.verify.scores.thresholds import Event, Precipitation
from credit.verify.statistics.case_statistics import DeterministicStatistics, EnsembleStatistics
from credit.verify.statistics.seasons import cases_by_season
from credit.verify.table.event_rows import EventResults
from credit.verify.table.table import COMMON_ATTRIBUTES, ScoreTable
from credit.verify.table.table_builder import TableAxes, TableRows, build_table
from tests.unit.analytic_reader import make_grid
from tests.unit.verify.conftest import make_config

LEADS = np.array([6, 12, 24, 48, 72, 240]) * 60
REGIONS = ["global", "tropics", "extratropics_north"]
_CALENDAR = Calendar()
_INITIAL = _CALENDAR.parse("2001-01-01") + 1440 * np.arange(120)
_SIZES = {"model": 1.0, "persistence": 2.0, "damped_persistence": 1.5, "climatology": 3.0}


def _make_sums(size: float, seed: int, rows: int, members: int) -> DeterministicStatistics:
    """Return sums whose squared errors grow with lead time to about `size`."""
    rng = np.random.default_rng(seed)
    kind = EnsembleStatistics if members > 1 else DeterministicStatistics
    shape = len(_INITIAL), len(LEADS), rows, len(REGIONS)
    growth = (np.sqrt(LEADS / LEADS[-1])[:, None] * np.arange(1, rows + 1))[..., None]
    planes = {name: growth * rng.gamma(5.0, 0.2 * size, shape) for name in kind.array_names()}
    planes["covariance"] = 0.8 * np.sqrt(planes["forecast_variance"] * planes["truth_variance"])
    planes["error"] = planes["error"] - 1.0
    return kind(_INITIAL, **planes, num_members=members)


def _make_thresholds(sums: Iterable[str], members: int) -> EventResults:
    """Return results of the event ``high`` and of SEEPS, both of the fourth channel."""
    rng = np.random.default_rng(7)
    events, rain = {}, {}
    for name in sums:
        num_members = members if name == "model" else 1
        shape = len(_INITIAL), len(LEADS), 1, len(REGIONS)
        forecasts = rng.dirichlet(np.ones(num_members + 1), shape)
        occurrences = forecasts * rng.random(forecasts.shape)
        brier, fair, reference = (rng.gamma(5.0, 0.02 * factor, shape) for factor in (1, 0.9, 2))
        events[name] = EventStatistics(
            _INITIAL, forecasts, occurrences, brier, fair, reference, num_members=num_members
        )
        rain[name] = SeepsStatistics(_INITIAL, rng.gamma(5.0, 0.1, shape), np.ones(shape), num_members=num_members)
    event = Event.build("high", EventConfig(channel="z500", above=5e4), 3, "m2 s-2")
    del events["climatology"]
    return EventResults([event], events, [Precipitation(3, 1.0)], rain)


def make_table(
    channels: Sequence[Channel], other: str | None = None, members: int = 1, wind: bool = False, events: bool = False
) -> ScoreTable:
    """Return scores of a model with `members` members and of baselines.

    If `other` is given, another forecast of this name has scores of all rows but the last.
    """
    rows = TableRows(channels, [(0, 1, "wind")] if wind else [], {c.variable: {"units": "m2 s-2"} for c in channels})
    count = len(channels) + wind
    sums = {}
    for seed, (name, size) in enumerate(_SIZES.items()):
        sums[name] = _make_sums(size, seed, count, members if name == "model" else 1), list(range(count))
    if other is not None:
        sums[other] = _make_sums(1.2, 9, count - 1, 1), list(range(count - 1))
    attributes = dict.fromkeys(COMMON_ATTRIBUTES, "x") | {
        "n_cases": len(_INITIAL),
        "level_units": "hPa",
        "initial_times": "2001",
    }
    thresholds = _make_thresholds(sums, members) if events else None
    return build_table(
        sums, TableAxes(rows, LEADS, cases_by_season(_INITIAL, _CALENDAR), REGIONS), attributes, None, thresholds
    )


def remove_score(table: ScoreTable, metric: str) -> ScoreTable:
    """Return a table in which all values of one score are NaN."""
    names = [name for name in table.dataset if str(name).startswith(metric)]
    return ScoreTable(table.dataset.assign({name: xr.full_like(table.dataset[name], np.nan) for name in names}))


def write_page(table: ScoreTable, folder: Path, figures: Sequence[tuple[str, Path]] = ()) -> Path:
    """Write the report of a table with figures, given as (caption, path)."""
    verification = SimpleNamespace(
        table=table,
        grid=make_grid(),
        climatology=SimpleNamespace(short_period_warning="A <short> notice & more", description="made up"),
        num_left_out=0,
        cases=_INITIAL,
        figure_channels=table.channels[-1:],
    )
    archive = SimpleNamespace(attributes={}, calendar=_CALENDAR)
    folder.mkdir()
    return write_report(make_config(folder), verification, archive, None, figures, folder)
