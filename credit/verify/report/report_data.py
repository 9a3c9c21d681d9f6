"""The scores as report.html holds them: rounded, compressed, and no more of them than a page can carry.

A curve is a score by lead time, kept as ``[power, first, step, step, ...]``: whole numbers that, summed up to a lead
and times ten to the power, are the values there; null where a value is missing, and for a curve without values.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from credit.data.formats.units import plain
from credit.verify.plots.scores import styles_of
from credit.verify.plots.style import label
from credit.verify.report.score_descriptions import EVENT_MEANINGS, MEANINGS, SEEPS_MEANING, ScoreDescription
from credit.verify.significance.bootstrap import ENDS, LEAST_BLOCKS, WITH_INTERVAL
from credit.verify.significance.comparison import ENOUGH_BLOCKS
from credit.verify.statistics.seasons import ALL
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import SEEPS, SHORT_WAVES, WIND_NAMES, ScoreTable

MOST_VALUES = 2_300_000  # measured: 2.1 bytes each, so less than 5 MB
_LEAST_LEADS = 10  # before anything else is left out
_DIGITS = 5  # of the largest value of a curve
_DASHES = {"-": "", "--": "7 4", "-.": "9 3 2 3", ":": "2 4"}
_INTERVALS = ("rmse", "bias", "acc", "crps", "spread_skill", SEEPS, *EVENT_MEANINGS)
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class PageBudget:
    """What a page holds of a table.

    Attributes:
        every: every how many-th lead time, the first and the last in any case.
        seasons: whether single seasons, too.
        season_intervals: whether intervals of single seasons.
    """

    every: int = 1
    seasons: bool = True
    season_intervals: bool = True

    def leads(self, count: int) -> list[int]:
        """Return which of `count` lead times."""
        return sorted({0, *range(count - 1, -1, -self.every)})


@dataclass(frozen=True)
class ReportScore:
    """A score that can be chosen in the page.

    Attributes:
        variable: of the table's dataset.
        meaning: in words.
        name: in the page and in scores.csv.
        rows: of the page that have it; None for all.
        event: number of its event, None for a score of channels.
    """

    variable: str
    meaning: ScoreDescription
    name: str
    rows: Sequence[int] | None = None
    event: int | None = None

    def plane(self, end: str = "") -> str:
        """Return the name of the score or of an end of its interval: ``rmse_low``, ``brier_low:EVENT``."""
        metric, colon, event = self.name.partition(":")
        return f"{metric}{end}{colon}{event}"

    def to_dict(self) -> dict[str, Any]:
        """Return it as the page has it."""
        return {"name": self.name, "rows": self.rows, **asdict(self.meaning)}


def shown_scores(table: ScoreTable) -> list[ReportScore]:
    """Return the scores that can be chosen in the page."""
    data = table.dataset
    shown = [ReportScore(name, meaning, name) for name, meaning in MEANINGS.items() if name in data]
    if SEEPS in data:
        known = np.isfinite(data[SEEPS].values).any(axis=(0, 1, 3, 4))
        shown.append(ReportScore(SEEPS, SEEPS_MEANING, SEEPS, np.flatnonzero(known).tolist()))
    for number, event in enumerate(table.events):
        row = table.channels.index(str(data["event_channel"].values[number]))
        definition = str(data["event_definition"].values[number])
        for name, meaning in EVENT_MEANINGS.items():
            own = replace(meaning, label=f"{meaning.label}: {event}", what=f"The event: {definition}. {meaning.what}")
            shown.append(ReportScore(name, own, f"{name}:{event}", [row], number))
    return shown


def encode(scores: dict[str, Any]) -> str:
    """Return what `page_scores` found as base64 of deflated JSON: safe in any HTML."""
    text = json.dumps(scores, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def page_scores(table: ScoreTable, channel: str, most_values: int = MOST_VALUES) -> tuple[dict[str, Any], str]:
    """Return what the page holds, for `encode`, and in words what it leaves out.

    Args:
        table: the scores.
        channel: name of the channel that the page shows first.
        most_values: as many numbers it may have about.
    """
    extent = _choose_extent(table, most_values)
    leads = extent.leads(len(table.lead_hours))
    seasons = range(len(table.seasons) if extent.seasons else 1)
    data, shown = table.dataset, shown_scores(table)
    curves = {
        own.plane(end): [None if bare and season else _nested(table, own, end, season, leads) for season in seasons]
        for own, end, bare in _planes(shown, extent)
    }
    card = scorecard_rows(table)
    compared = {
        what: [_pack_nested(own[:, season][:, :, leads] * scale) for season in seasons]
        for what, own, scale in (
            (what, scorecard_values(table, card, what), scale)
            for what, scale in (("difference", 100.0), ("significant", 1.0))
        )
    }
    return {
        "forecasts": _forecasts(table),
        "references": [{"name": name, "label": label(name)} for name in data["reference"].values.tolist()],
        "regions": [{"name": name, "label": label(name)} for name in table.regions],
        "seasons": [
            {
                "name": table.seasons[season],
                "cases": int(data["n_cases"][season]),
                "blocks": data["n_blocks"].values[season, leads].tolist(),
            }
            for season in seasons
        ],
        "leads": [table.lead_hours[lead] for lead in leads],
        "rows": list(_rows(table)),
        "card": [{"name": own.name, "score": own.score, "row": own.row} for own in card],
        "level_units": str(data.attrs["level_units"]),
        "metrics": [own.to_dict() for own in shown],
        "least_blocks": LEAST_BLOCKS,
        "enough_blocks": ENOUGH_BLOCKS,
        "first_reference": str(data.attrs.get("compared_with", data["reference"].values[0])),
        "first_row": table.channels.index(channel),
        "curves": curves | compared,
    }, _left_out(table, extent, sorted({own.variable for own in shown}))


def _planes(shown: Sequence[ReportScore], extent: PageBudget) -> Iterator[tuple[ReportScore, str, bool]]:
    """Yield scores and the ends of their intervals, as "" or what a name ends in; and whether seasons have none."""
    for own in shown:
        yield own, "", False
        if own.variable in _INTERVALS:
            yield from ((own, end, not extent.season_intervals) for end in ENDS)


def _choose_extent(table: ScoreTable, most: int) -> PageBudget:
    """Return the first that is small enough: all, no intervals of seasons, fewer leads, no seasons."""
    count = len(table.lead_hours)
    halved = [2**power for power in range(count.bit_length())]
    thinned = [every for every in halved if len(PageBudget(every).leads(count)) >= min(_LEAST_LEADS, count)]
    choices = [PageBudget(), *(PageBudget(every, True, False) for every in thinned)]
    choices += [PageBudget(every, False, False) for every in halved]
    return next((own for own in choices if _count(table, own) <= most), choices[-1])


def _count(table: ScoreTable, extent: PageBudget) -> int:
    """Return about how many numbers a page would hold."""
    data = table.dataset
    rows = data.sizes["channel"] + data.sizes.get("wind", 0)
    others = len(table.seasons) - 1 if extent.seasons else 0
    curves = (1 + others) * 2 * data.sizes["reference"] * len(scorecard_rows(table))
    for own, _, bare in _planes(shown_scores(table), extent):
        number = rows if own.rows is None else len(own.rows)
        curves += (1 if bare else 1 + others) * len(table.forecasts) * number
    return curves * len(table.regions) * len(extent.leads(len(table.lead_hours)))


def _nested(table: ScoreTable, shown: ReportScore, end: str, season: int, leads: Sequence[int]) -> list:
    """Return the curves of a score, or of an end of its interval, by forecast, row and region."""
    name = shown.variable + end
    if shown.rows is None:
        return _curves_of_rows(table, name, season, leads)
    places = shown.rows if shown.event is None else [shown.event]
    count = table.dataset.sizes["channel"] + table.dataset.sizes.get("wind", 0)
    packed = _pack_nested(table.dataset[name].values[:, season, places][:, :, leads])
    by_forecast = (dict(zip(shown.rows, own, strict=True)) for own in packed)
    return [[own.get(row) for row in range(count)] for own in by_forecast]


def _curves_of_rows(table: ScoreTable, name: str, season: int, leads: Sequence[int]) -> list:
    """Return the curves of what all rows have, by forecast, row and region."""
    data = table.dataset
    parts = [data[name].values[:, season]]
    wind = WIND_NAMES[name]
    if wind in data:
        parts.append(data[wind].values[:, season])
    return _pack_nested(np.concatenate(parts, axis=1)[:, :, leads].astype(np.float64))


def _pack_nested(values: np.ndarray) -> list:
    """Return the packed curves of values (F, X, L, R) in nested lists by F, X and R."""
    values = np.moveaxis(values, 2, -1)
    curves = pack_curves(values.reshape(-1, values.shape[-1]))
    first, rows, regions = values.shape[:-1]
    by_row = [curves[start : start + regions] for start in range(0, len(curves), regions)]
    return [by_row[start : start + rows] for start in range(0, first * rows, rows)]


def pack_curves(curves: np.ndarray) -> list[list[int | None] | None]:
    """Return curves, given as (N, L) with NaN where a value is missing, as the page has them."""
    known = np.isfinite(curves)
    values = np.where(known, curves, 0.0)
    largest = np.abs(values).max(axis=1, initial=0.0)
    power = np.floor(np.log10(np.where(largest > 0, largest, 1.0))).astype(int) - _DIGITS + 1
    power = np.where((values % 1.0).any(axis=1), power, np.maximum(power, 0))  # whole numbers need no more
    whole = np.rint(values * 10.0 ** -power[:, None]).astype(np.int64)
    # a missing value repeats the one before it, so that the step to the next is right
    before = np.maximum.accumulate(np.where(known, np.arange(curves.shape[1]), -1), axis=1)
    filled = np.where(before >= 0, np.take_along_axis(whole, np.maximum(before, 0), axis=1), 0)
    packed = np.concatenate([power[:, None], np.diff(filled, axis=1, prepend=0)], axis=1).tolist()
    for number in np.flatnonzero(~known.all(axis=1)).tolist():
        own = packed[number]
        steps = [step if there else None for step, there in zip(own[1:], known[number].tolist(), strict=True)]
        packed[number] = [own[0], *steps] if known[number].any() else None
    return packed


def _forecasts(table: ScoreTable) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "label": label(name),
            "colour": style["color"],
            "dash": _DASHES[style.get("linestyle", "-")],
            "width": style["linewidth"],
            "layer": style.get("zorder", 2),
        }
        for name, style in styles_of(table).items()
    ]


def _rows(table: ScoreTable) -> Iterator[dict[str, Any]]:
    """Yield the channels and the wind vectors."""
    data = table.dataset
    for prefix in ("", "wind_"):
        if f"{prefix}variable" not in data:
            continue
        columns = (data[prefix + what].values.tolist() for what in ("variable", "level", "units"))
        for number, (variable, level, units) in enumerate(zip(*columns, strict=True)):
            there = level == level
            yield {
                "name": f"{variable} {level:g}" if prefix and there else variable if prefix else table.channels[number],
                "variable": f"{variable} (vector)" if prefix else variable,
                "level": f"{level:g}" if there else "",
                "units": "" if plain(units) == "1" else superscript_units(units),
                "wind": bool(prefix),
            }


def superscript_units(units: str) -> str:
    """Return units with raised exponents: ``m2 s-2``, also ``m**2 s**-2``, becomes m² s⁻²."""
    return re.sub(r"(?<=[A-Za-z])(?<!\d[eE])-?\d+", lambda found: found[0].translate(_RAISED), plain(units))


def _left_out(table: ScoreTable, extent: PageBudget, metrics: Sequence[str]) -> str:
    """Return a sentence on what is only in scores.nc."""
    kept = (*metrics, *WIND_NAMES.values())
    # of spectra the page has a figure and a table
    has = [name for name, own in table.dataset.data_vars.items() if own.dims[0] == "forecast" and own.ndim > 1]
    has = [name for name in has if name != SHORT_WAVES and "wavenumber" not in table.dataset[name].dims]
    more = [name for name in has if name not in kept and not name.endswith(ENDS)]
    parts = [f"the scores {', '.join(more)}"] if more else []
    count = len(table.lead_hours)
    if len(extent.leads(count)) < count:
        parts.append(f"{count - len(extent.leads(count))} of the {count} lead times")
    parts += [f"the intervals of {name}" for name in metrics if name in WITH_INTERVAL and name not in _INTERVALS]
    if len(table.seasons) > 1 and not extent.seasons:
        parts.append(f"single seasons ({', '.join(name for name in table.seasons if name != ALL)})")
    elif len(table.seasons) > 1 and not extent.season_intervals:
        parts.append("the intervals of single seasons")
    return f"Not on this page, but in scores.nc and scores.csv beside it: {'; '.join([*parts, 'more digits'])}."
