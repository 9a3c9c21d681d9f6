"""Write compare.html: one self-contained page with the results of a comparison."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2
import torch

from credit import __version__
from credit.compare.budget import NUM_VALIDATIONS, Budget
from credit.compare.costs import RunCosts
from credit.compare.figures import draw_figures
from credit.compare.results import ComparisonScores, SeedRange
from credit.compare.runs import list_differences
from credit.compare.stability import MAX_RATIO, MIN_RATIO, StabilityCurve
from credit.compare.workflow import CompareOutcome
from credit.config import dump_config
from credit.utils.atomic import atomic_write_text
from credit.verify.report.html import embed_figures

# Title of a column of the table of costs -> function that formats the value of a run and seed.
_COST_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "Parameters": ("parameters", lambda value: f"{value:,}"),
    "Steps": ("steps", lambda value: f"{value:,}"),
    "Samples": ("samples", lambda value: f"{value:,}"),
    "Time of steps": ("step_hours", lambda value: _format_hours(value)),
    "Time in all": ("wall_hours", lambda value: _format_hours(value)),
    "Median step": ("step_seconds", lambda value: f"{value:.3g} s"),
    "Operations": ("tflop", lambda value: f"{value:.4g} TFLOP"),
    "Memory": ("peak_memory_gb", lambda value: f"{value:.3g} GB"),
    "Energy": ("energy_kwh", lambda value: f"{value:.3g} kWh"),
    "Forecasts": ("forecast_seconds", lambda value: f"{value:.3g} s"),
}


def write_comparison_page(
    outcome: CompareOutcome, budget: Budget | None, document: Mapping[str, Any], folder: Path
) -> Path:
    """Write ``compare.html`` and its figures into a folder, and return the path of the page.

    Args:
        outcome: results of the comparison.
        budget: training budget of every run; None for finished runs.
        document: content of compare.json.
        folder: folder of the comparison.

    Raises:
        CreditError: if a file cannot be written.
    """
    scores = outcome.scores
    figures: dict[str, list[tuple[str, Path]]] = {}
    if scores is not None:
        (folder / "figures").mkdir(exist_ok=True)
        figures = draw_figures(scores, outcome.curves, folder / "figures")
    trains_runs = budget is not None
    # The page uses the style sheet of the report of a verification.
    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("credit.compare", ""), jinja2.PackageLoader("credit.verify.report", "")]
    )
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = environment.get_template("compare.html.j2").render(
        title=", ".join(run.name for run in outcome.runs),
        names=[] if scores is None else scores.names,
        cases="" if scores is None else _describe_cases(scores),
        failures=outcome.failures,
        warnings=document["warnings"],
        results=[] if scores is None else tabulate_results(scores),
        significance=_describe_significance(scores),
        figures={section: embed_figures(images) for section, images in figures.items()},
        short_waves=[] if scores is None else _tabulate_short_waves(scores),
        cost_columns=list(_COST_COLUMNS),
        costs=_tabulate_costs(outcome),
        stability=_tabulate_stability(outcome.curves),
        long_run_days=max((curve.days[-1] for curve in outcome.curves), default=0),
        bounds=(MIN_RATIO, MAX_RATIO),
        equal=_describe_equal_conditions(outcome, budget),
        differences=list_differences(outcome.runs, trains_runs),
        run_names=[run.name for run in outcome.runs],
        configs=[(run.name, run.source, dump_config(run.config)) for run in outcome.runs],
        versions=_describe_versions(outcome),
        version=__version__,
    )
    return atomic_write_text(folder / "compare.html", text)


def tabulate_results(scores: ComparisonScores) -> list[dict[str, Any]]:
    """Return the rows of the table of results for the template of the page.

    Each row is a dict with the keys ``channel``, ``lead``, ``is_first`` (True for the first row of a channel) and
    ``cells``. ``cells`` contains a tuple for each run: mean over the seeds as a string, range over the seeds as a
    string, and True if the run is significantly the best.
    """
    rows = []
    previous_channel = None
    for row in scores.result_rows():
        cells = []
        for name in scores.names:
            ratio = row.ratio[name]
            cells.append((_format_number(ratio.mean, ".3f"), _format_range(ratio, ".3f"), name == row.best))
        is_first = row.channel != previous_channel
        previous_channel = row.channel
        rows.append({"channel": row.channel, "lead": f"{row.lead_hours:g} h", "is_first": is_first, "cells": cells})
    return rows


def _format_range(values: SeedRange, format_spec: str) -> str:
    """Return the range over the seeds as a string, such as ``0.51 to 0.55``; "" for one seed."""
    if len(values.values) < 2:
        return ""
    return f"{_format_number(values.low, format_spec)} to {_format_number(values.high, format_spec)}"


def _format_number(value: float, format_spec: str) -> str:
    """Return a number formatted with a Python format specification, "" if the number is not finite."""
    return format(value, format_spec) if math.isfinite(value) else ""


def _describe_cases(scores: ComparisonScores) -> str:
    """Return a phrase with the number of forecasts, their initial times and the number of seeds."""
    table = scores.first_table
    seeds = max(len(scores.seeds_of(name)) for name in scores.names)
    text = f"{table.n_cases} forecasts from {table.dataset.attrs['initial_times']}"
    return f"{text}, {seeds} seeds" if seeds > 1 else text


def _describe_significance(scores: ComparisonScores | None) -> str:
    """Return sentences that explain the significance of the comparison to readers of the page."""
    if scores is None or not scores.pairs:
        return ""
    (first, second), table = next(iter(scores.pairs.items()))
    text = table.describe_significance(first)
    num_seeds = min(len(scores.seeds_of(first)), len(scores.seeds_of(second)))
    if num_seeds == 1:
        return f"{text} Each run has one seed, so the variation between training runs is unknown: repeat with --seeds."
    return (
        f"{text} A difference between runs is significant only if it has the same sign and is significant for each of "
        "the seeds, and is larger than the variation between seeds (t-test)."
    )


def _tabulate_short_waves(scores: ComparisonScores) -> list[tuple[str, str, list[str]]]:
    """Return the rows of the table of short-wave power.

    Each row is (channel, lead time, cell of each run). A cell is the power of short waves in the forecast divided by
    their power in the truth, "" if it is unknown.
    """
    data = scores.first_table.dataset
    if "short_wave_power" not in data:
        return []
    rows = []
    for channel in data["spectrum_channel"].values.tolist():
        for hours in data["spectrum_lead"].values.tolist():
            cells = []
            for name in scores.names:
                cells.append(_format_number(scores.score(name, channel, hours, "short_wave_power").mean, ".3f"))
            rows.append((channel, f"{hours:g} h", cells))
    return rows


def _tabulate_costs(outcome: CompareOutcome) -> list[tuple[str, list[str]]]:
    """Return the rows of the table of costs, each (name of the run, cell of each of `_COST_COLUMNS`).

    A cell is the mean over the seeds.
    """
    rows = []
    for run in outcome.runs:
        trials = [costs for (name, _), costs in outcome.costs.items() if name == run.name]
        if trials:
            rows.append((run.name, [_format_cost(trials, *column) for column in _COST_COLUMNS.values()]))
    return rows


def _format_cost(trials: Sequence[RunCosts], attribute: str, format_value: Callable[[Any], str]) -> str:
    """Return the mean of a cost over the seeds as a string, "unknown" if the cost of any seed is unknown.

    Args:
        trials: costs of the training run of each seed.
        attribute: name of the cost, an attribute of `RunCosts`.
        format_value: function that formats the mean.
    """
    values = [getattr(costs, attribute) for costs in trials]
    if None in values:
        return "unknown"
    value = mean(values)
    # Costs that are integers, such as steps, are the same for all seeds.
    if all(isinstance(number, int) for number in values):
        value = round(value)
    return format_value(value)


def _format_hours(hours: float) -> str:
    """Return a duration in hours as a string with the unit s, min or h."""
    if hours < 1 / 30:
        return f"{hours * 3600:.3g} s"
    if hours < 2:
        return f"{hours * 60:.3g} min"
    return f"{hours:.3g} h"


def _tabulate_stability(curves: Sequence[StabilityCurve]) -> tuple[list[str], list[list[str]]]:
    """Return the channels and the rows of the table of stability, one row for each run, seed and measure.

    A row consists of strings: run, seed, measure, and for each channel the first day outside the accepted range.
    """
    channels = list(dict.fromkeys(curve.channel for curve in curves))
    by_row: dict[tuple[str, str, str], dict[str, str]] = {}
    for curve in curves:
        text = "never" if curve.exit_day is None else f"day {curve.exit_day:g}"
        if curve.nonfinite_day is not None:
            text += f" (not finite: day {curve.nonfinite_day:g})"
        key = curve.name, curve.seed.replace("_", " "), curve.measure
        by_row.setdefault(key, {})[curve.channel] = text
    rows = []
    for key, texts in by_row.items():
        rows.append([*key, *[texts.get(channel, "") for channel in channels]])
    return channels, rows


def _describe_equal_conditions(outcome: CompareOutcome, budget: Budget | None) -> list[str]:
    """Return sentences that describe which conditions were equal for all runs, and the length of each run."""
    sentences = ["All forecasts are scored on the same initial times, lead times and grid, against the same truth."]
    if budget is None:
        sentences.append("The runs were finished before; their lengths may differ. The table of costs lists them.")
        return sentences
    sentences.insert(0, budget.describe())
    for name, steps in outcome.steps.items():
        cost = outcome.step_costs.get(name)
        measured = "" if cost is None else f", measured step {cost.seconds:.4g} s"
        sentences.append(f"{name}: {steps} steps{measured}.")
    if outcome.step_costs:
        sentences.append("Step times are medians over rounds; each round timed all runs one after the other.")
    sentences.append(
        f"All runs have the same seeds, {NUM_VALIDATIONS} validations at equal intervals of steps, and no early stop. "
        "Learning-rate schedule and rollout length are scaled to the length of the run. Forecasts use the weights of "
        "the checkpoint inference.checkpoint."
    )
    return sentences


def _describe_versions(outcome: CompareOutcome) -> str:
    """Return a line with the versions of the software and the devices on which the runs were trained."""
    devices = sorted({costs.device for costs in outcome.costs.values() if costs.device})
    text = f"credit {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return f"{text}, trained on {', '.join(devices)}" if devices else text
