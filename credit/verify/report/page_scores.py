"""Encode the scores for report.html: rounded, compressed, and reduced if they would make the page too large.

A curve is a score at all lead times, stored as integers ``[power, first, step, step, ...]``. The value at a lead time
is 10**power times the sum of ``first`` and the steps up to this lead time. Missing values and empty curves are null.
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

from credit.data.formats.units import normalise_units
from credit.verify.plots.scores import forecast_styles
from credit.verify.report.score_descriptions import (
    EVENT_DESCRIPTIONS,
    SCORE_DESCRIPTIONS,
    SEEPS_DESCRIPTION,
    ScoreDescription,
)
from credit.verify.significance.bootstrap import INTERVAL_SUFFIXES, METRICS_WITH_INTERVAL, MIN_BLOCKS_FOR_INTERVALS
from credit.verify.significance.comparison import MIN_BLOCKS_FOR_SIGNIFICANCE
from credit.verify.statistics.seasons import ALL_SEASONS
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.table import SEEPS, SHORT_WAVES, WIND_NAMES, ScoreTable

# Largest number of values in a page. A value uses 2.1 bytes (measured), so a page is smaller than 5 MB.
MAX_VALUES = 2_300_000
# Smallest number of lead times in a page that contains scores of single seasons.
_MIN_LEADS = 10
# Number of digits of the largest value of a curve.
_DIGITS = 5
# Line style of matplotlib -> dash pattern of SVG.
_DASHES = {"-": "", "--": "7 4", "-.": "9 3 2 3", ":": "2 4"}
# Scores whose intervals are in the page; scores.nc contains more intervals.
_SCORES_WITH_INTERVAL = ("rmse", "bias", "acc", "crps", "spread_skill", SEEPS, *EVENT_DESCRIPTIONS)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class PageBudget:
    """Choice of the scores of a table that a page contains.

    Attributes:
        lead_stride: every `lead_stride`-th lead time is kept; the first and the last lead time are always kept.
        seasons: True if the page has scores of single seasons, False if it only has scores of all seasons together.
        season_intervals: True if the page has the confidence intervals of single seasons.
    """

    lead_stride: int = 1
    seasons: bool = True
    season_intervals: bool = True

    def lead_indices(self, num_leads: int) -> list[int]:
        """Return the indices of the lead times that are kept, increasing, out of `num_leads`."""
        return sorted({0, *range(num_leads - 1, -1, -self.lead_stride)})


@dataclass(frozen=True)
class ReportScore:
    """Score that the reader can select in the page.

    Attributes:
        variable: name of the score in the dataset of the table.
        description: label, definition and other texts for readers.
        name: name of the score in the page and in scores.csv.
        rows: indices of the rows (channels, then winds) of the page that have the score; None if all rows have it.
        event: index of the event of the score; None for a score of channels.
    """

    variable: str
    description: ScoreDescription
    name: str
    rows: Sequence[int] | None = None
    event: int | None = None

    def curve_name(self, suffix: str = "") -> str:
        """Return the name of the score or, with a suffix, of an end of its interval, such as ``brier_low:EVENT``."""
        metric, colon, event = self.name.partition(":")
        return f"{metric}{suffix}{colon}{event}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the score in the page's list of scores, as a dict for JSON."""
        return {"name": self.name, "rows": self.rows, **asdict(self.description)}


def list_report_scores(table: ScoreTable) -> list[ReportScore]:
    """Return the scores of a table that can be selected in the page, in the order of the menu."""
    data = table.dataset
    # Scores of all channels come first, then scores of single channels and of events.
    scores = []
    for name, description in SCORE_DESCRIPTIONS.items():
        if name in data:
            scores.append(ReportScore(name, description, name))
    if SEEPS in data:
        has_seeps = np.isfinite(data[SEEPS].values).any(axis=(0, 1, 3, 4))
        scores.append(ReportScore(SEEPS, SEEPS_DESCRIPTION, SEEPS, np.flatnonzero(has_seeps).tolist()))
    for number, event in enumerate(table.events):
        row = table.channels.index(str(data["event_channel"].values[number]))
        definition = str(data["event_definition"].values[number])
        for name, description in EVENT_DESCRIPTIONS.items():
            event_description = replace(
                description,
                label=f"{description.label}: {event}",
                definition=f"The event: {definition}. {description.definition}",
            )
            scores.append(ReportScore(name, event_description, f"{name}:{event}", [row], number))
    return scores


def encode_page_scores(scores: dict[str, Any]) -> str:
    """Encode the data from `build_page_scores` as JSON, compress it with zlib, and return it as a base64 string."""
    text = json.dumps(scores, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def build_page_scores(table: ScoreTable, channel: str, max_values: int = MAX_VALUES) -> tuple[dict[str, Any], str]:
    """Return the scores that the page contains, and a sentence that lists the omitted scores.

    Args:
        table: the scores.
        channel: name of the channel that the page shows first.
        max_values: approximate limit of the number of values in the page.

    Returns:
        (data for `encode_page_scores`, sentence). The script of the page reads the entries of the data by their names.

    Raises:
        ValueError: if the table does not have the channel.
    """
    data = table.dataset
    scores = list_report_scores(table)
    budget = _choose_budget(table, max_values)
    leads = budget.lead_indices(len(table.lead_hours))
    season_index = range(1)
    if budget.seasons:
        season_index = range(len(table.seasons))
    seasons = []
    for season in season_index:
        seasons.append(
            {
                "name": table.seasons[season],
                "cases": int(data["n_cases"][season]),
                "blocks": data["n_blocks"].values[season, leads].tolist(),
            }
        )
    references = data["reference"].values.tolist()
    card = []
    for row in scorecard_rows(table):
        card.append({"name": row.name, "score": row.score, "row": row.row})
    page = {
        "forecasts": _build_forecast_entries(table),
        "references": _label_names(table, references),
        "regions": _label_names(table, table.regions),
        "seasons": seasons,
        "leads": [table.lead_hours[lead] for lead in leads],
        "rows": list(_build_row_entries(table)),
        "card": card,
        "level_units": str(data.attrs["level_units"]),
        "metrics": [score.to_dict() for score in scores],
        "least_blocks": MIN_BLOCKS_FOR_INTERVALS,
        "enough_blocks": MIN_BLOCKS_FOR_SIGNIFICANCE,
        "first_reference": str(data.attrs.get("compared_with", references[0])),
        "first_row": table.channels.index(channel),
        "curves": _pack_all_curves(table, scores, budget, season_index),
    }
    variables = sorted({score.variable for score in scores})
    return page, _describe_left_out(table, budget, variables)


def _label_names(table: ScoreTable, names: Sequence[str]) -> list[dict[str, str]]:
    """Return {"name": ..., "label": ...} of each reference or region; the page shows the label."""
    return [{"name": name, "label": table.display_name(name)} for name in names]


def _pack_all_curves(
    table: ScoreTable, scores: Sequence[ReportScore], budget: PageBudget, season_index: Sequence[int]
) -> dict[str, list]:
    """Return curve name -> packed curves, for the scores, the ends of their intervals and the scorecard.

    The curves are nested lists with the levels season, forecast (in the scorecard: reference), row and region.
    """
    leads = budget.lead_indices(len(table.lead_hours))
    curves = {}
    for score, suffix, all_seasons_only in _list_scores_and_bounds(scores, budget):
        curves_by_season = []
        for season in season_index:
            if all_seasons_only and season > 0:
                curves_by_season.append(None)
            else:
                curves_by_season.append(_pack_score(table, score, suffix, season, leads))
        curves[score.curve_name(suffix)] = curves_by_season
    # The differences in the scorecard are in percent.
    card_rows = scorecard_rows(table)
    for result, factor in (("difference", 100.0), ("significant", 1.0)):
        values = scorecard_values(table, card_rows, result)
        curves[result] = []
        for season in season_index:
            curves[result].append(_pack_nested(values[:, season][:, :, leads] * factor))
    return curves


def _list_scores_and_bounds(
    scores: Sequence[ReportScore], budget: PageBudget
) -> Iterator[tuple[ReportScore, str, bool]]:
    """Yield (score, suffix of an interval end or "", True if the curve is only for all seasons together)."""
    for score in scores:
        yield score, "", False
        if score.variable in _SCORES_WITH_INTERVAL:
            for suffix in INTERVAL_SUFFIXES:
                yield score, suffix, not budget.season_intervals


def _choose_budget(table: ScoreTable, max_values: int) -> PageBudget:
    """Return the largest budget within the limit; omit intervals of seasons first, then lead times, then seasons."""
    # Strides are powers of two; with the largest stride, only the first and the last lead time remain.
    num_leads = len(table.lead_hours)
    strides = [2**power for power in range(num_leads.bit_length())]
    budgets = [PageBudget()]
    for stride in strides:
        if len(PageBudget(stride).lead_indices(num_leads)) >= min(_MIN_LEADS, num_leads):
            budgets.append(PageBudget(stride, seasons=True, season_intervals=False))
    budgets += [PageBudget(stride, seasons=False, season_intervals=False) for stride in strides]
    for budget in budgets:
        if _count_values(table, budget) <= max_values:
            return budget
    return budgets[-1]


def _count_values(table: ScoreTable, budget: PageBudget) -> int:
    """Return the approximate number of values in a page with this budget."""
    # The first season is all seasons together. The scorecard has two curves: differences and their significance.
    all_seasons = len(table.seasons) if budget.seasons else 1
    num_curves = all_seasons * 2 * table.dataset.sizes["reference"] * len(scorecard_rows(table))
    for score, _, all_seasons_only in _list_scores_and_bounds(list_report_scores(table), budget):
        num_seasons = 1 if all_seasons_only else all_seasons
        num_score_rows = _count_rows(table) if score.rows is None else len(score.rows)
        num_curves += num_seasons * len(table.forecasts) * num_score_rows
    return num_curves * len(table.regions) * len(budget.lead_indices(len(table.lead_hours)))


def _count_rows(table: ScoreTable) -> int:
    """Return the number of rows of a page: the channels and the wind vectors."""
    return table.dataset.sizes["channel"] + table.dataset.sizes.get("wind", 0)


def _pack_score(table: ScoreTable, score: ReportScore, suffix: str, season: int, leads: Sequence[int]) -> list:
    """Return the packed curves of a score or of an interval end (`suffix`), nested by forecast, row and region."""
    data = table.dataset
    variable = score.variable + suffix
    if score.rows is None:
        values = [data[variable].values[:, season]]
        wind_variable = WIND_NAMES[variable]
        if wind_variable in data:
            values.append(data[wind_variable].values[:, season])
        return _pack_nested(np.concatenate(values, axis=1)[:, :, leads].astype(np.float64))
    # If only some rows have the score, the other rows of the page have no curve.
    index = score.rows
    if score.event is not None:
        index = [score.event]
    packed = _pack_nested(data[variable].values[:, season, index][:, :, leads])
    curves = []
    for forecast_curves in packed:
        curves_by_row = dict(zip(score.rows, forecast_curves, strict=True))
        curves.append([curves_by_row.get(row) for row in range(_count_rows(table))])
    return curves


def _pack_nested(values_FXLR: np.ndarray) -> list:
    """Pack curves of L lead times, and return nested lists by forecast (F), row (X: channels, winds), region (R)."""
    values_FXRL = np.moveaxis(values_FXLR, 2, -1)
    num_forecasts, num_rows, num_regions, num_leads = values_FXRL.shape
    curves = iter(pack_curves(values_FXRL.reshape(-1, num_leads)))
    nested = []
    for _ in range(num_forecasts):
        rows = []
        for _ in range(num_rows):
            rows.append([next(curves) for _ in range(num_regions)])
        nested.append(rows)
    return nested


def pack_curves(curves_NL: np.ndarray) -> list[list[int | None] | None]:
    """Pack N curves of L lead times (NaN: missing) in the format that the module docstring describes."""
    # The power of ten is chosen so that the largest value of a curve has `_DIGITS` digits.
    num_leads = curves_NL.shape[1]
    is_finite = np.isfinite(curves_NL)
    values = np.where(is_finite, curves_NL, 0.0)
    largest = np.abs(values).max(axis=1, initial=0.0)
    power = np.floor(np.log10(np.where(largest > 0, largest, 1.0))).astype(int) - _DIGITS + 1
    # Curves of integers need no decimal places.
    power = np.where((values % 1.0).any(axis=1), power, np.maximum(power, 0))
    integers = np.rint(values * 10.0 ** -power[:, None]).astype(np.int64)
    # A missing value is replaced with the previous value, so that the step to the next value is correct. `last_finite`
    # is the index of the last finite value up to each lead time, -1 before the first finite value.
    last_finite = np.maximum.accumulate(np.where(is_finite, np.arange(num_leads), -1), axis=1)
    filled = np.take_along_axis(integers, np.maximum(last_finite, 0), axis=1)
    filled = np.where(last_finite >= 0, filled, 0)
    steps = np.diff(filled, axis=1, prepend=0)
    packed = np.concatenate([power[:, None], steps], axis=1).tolist()
    # Missing values, and curves without values, become null.
    for number in np.flatnonzero(~is_finite.all(axis=1)).tolist():
        if not is_finite[number].any():
            packed[number] = None
            continue
        for lead in np.flatnonzero(~is_finite[number]).tolist():
            packed[number][1 + lead] = None
    return packed


def _build_forecast_entries(table: ScoreTable) -> list[dict[str, Any]]:
    """Return name, label and line style of each forecast and baseline, as dicts for JSON."""
    entries = []
    for name, style in forecast_styles(table).items():
        entry = {
            "name": name,
            "label": table.display_name(name),
            "colour": style["color"],
            "dash": _DASHES[style.get("linestyle", "-")],
            "width": style["linewidth"],
            "layer": style.get("zorder", 2),
        }
        entries.append(entry)
    return entries


def _build_row_entries(table: ScoreTable) -> Iterator[dict[str, Any]]:
    """Yield name, variable, level and units of each row of the page as a dict: the channels, then the wind vectors."""
    data = table.dataset
    for prefix in ("", "wind_"):
        if f"{prefix}variable" not in data:
            continue
        is_wind = prefix == "wind_"
        variables = data[f"{prefix}variable"].values.tolist()
        levels = data[f"{prefix}level"].values.tolist()
        units = data[f"{prefix}units"].values.tolist()
        for number, (variable, level, row_units) in enumerate(zip(variables, levels, units, strict=True)):
            level_text = ""
            if not np.isnan(level):
                level_text = f"{level:g}"
            units_text = ""
            if normalise_units(row_units) != "1":
                units_text = superscript_units(row_units)
            if is_wind:
                name = f"{variable} {level_text}".rstrip()
                variable_text = f"{variable} (vector)"
            else:
                name = table.channels[number]
                variable_text = variable
            yield {
                "name": name,
                "variable": variable_text,
                "level": level_text,
                "units": units_text,
                "wind": is_wind,
            }


def superscript_units(units: str) -> str:
    """Return units with superscript exponents; for ``m2 s-2`` and ``m**2 s**-2``, the result is m² s⁻²."""
    plain_units = normalise_units(units)
    return re.sub(r"(?<=[A-Za-z])(?<!\d[eE])-?\d+", lambda match: match[0].translate(_SUPERSCRIPTS), plain_units)


def _describe_left_out(table: ScoreTable, budget: PageBudget, metrics: Sequence[str]) -> str:
    """Return a sentence that lists the contents of scores.nc and scores.csv that a page with `metrics` omits."""
    data = table.dataset
    page_variables = (*metrics, *WIND_NAMES.values(), SHORT_WAVES)
    left_out_scores = []
    for name, variable in data.data_vars.items():
        is_score = variable.dims[0] == "forecast" and variable.ndim > 1
        # The page has a figure and a table of spectra.
        is_spectrum = "wavenumber" in variable.dims
        is_on_page = is_spectrum or name in page_variables or name.endswith(INTERVAL_SUFFIXES)
        if is_score and not is_on_page:
            left_out_scores.append(name)
    # Lead times, intervals and seasons are omitted because of the budget and of the choice of intervals.
    left_out = []
    if left_out_scores:
        left_out.append(f"the scores {', '.join(left_out_scores)}")
    num_leads = len(table.lead_hours)
    num_missing_leads = num_leads - len(budget.lead_indices(num_leads))
    if num_missing_leads:
        left_out.append(f"{num_missing_leads} of the {num_leads} lead times")
    for name in metrics:
        if name in METRICS_WITH_INTERVAL and name not in _SCORES_WITH_INTERVAL:
            left_out.append(f"the intervals of {name}")
    if len(table.seasons) > 1 and not budget.seasons:
        single_seasons = [name for name in table.seasons if name != ALL_SEASONS]
        left_out.append(f"single seasons ({', '.join(single_seasons)})")
    elif len(table.seasons) > 1 and not budget.season_intervals:
        left_out.append("the intervals of single seasons")
    left_out.append("more digits")
    return f"Only in scores.nc and scores.csv: {'; '.join(left_out)}."
