"""Numerical results of a comparison in two files: ``compare.csv`` in long format, and ``compare.json``."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from credit import __version__
from credit.compare.budget import Budget
from credit.compare.results import ComparisonScores, SeedRange
from credit.compare.runs import ComparedRun, list_differences
from credit.compare.stability import StabilityCurve
from credit.compare.workflow import CompareOutcome
from credit.utils.atomic import atomic_write, atomic_write_text
from credit.verify.statistics.seasons import ALL_SEASONS
from credit.verify.table.scorecard import scorecard_rows, scorecard_values
from credit.verify.table.summary import finite_or_none
from credit.verify.table.table import CSV_COLUMNS, ScoreTable

# Version of the format of compare.json; it is increased when a key changes its meaning.
DOCUMENT_VERSION = 1
# Values of the column `seed` in rows with a statistic over all seeds.
MEAN = "mean"
LOWEST = "lowest"
HIGHEST = "highest"
# Fraction of the time budget by which the total time of the steps may deviate without a warning.
_TIME_TOLERANCE = 0.2
_SCORE_COLUMNS = (
    "variable", "level", "level_units", "region", "season", "lead_hours", "metric", "value", "units", "n_cases", "low",
    "high",
)  # fmt: skip
COLUMNS = ("run", "seed", "reference", *_SCORE_COLUMNS, "p_adjusted", "significant")


def write_csv(outcome: CompareOutcome, path: Path) -> None:
    """Write all scores, comparisons and costs to a CSV file in long format.

    For each seed, the file contains the scores over all seasons. Rows with the seed ``mean``, ``lowest`` or ``highest``
    contain statistics over all seeds. Rows with a reference contain relative differences, see
    `credit.compare.results.combine_pair`.

    Raises:
        CreditError: if the file cannot be written.
    """

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, COLUMNS, restval="")
            writer.writeheader()
            if outcome.scores is not None:
                writer.writerows(_score_rows(outcome.scores))
                writer.writerows(_comparison_rows(outcome.scores))
            writer.writerows(_cost_rows(outcome))

    atomic_write(path, write)


def _score_rows(scores: ComparisonScores) -> Iterator[dict[str, Any]]:
    """Yield the score rows of each run and seed, rows with statistics over all seeds, and the rows of the baselines."""
    for name in scores.names:
        seeds = scores.seeds_of(name)
        # key of a score -> the row of each seed
        rows_by_key: dict[tuple, list[dict[str, Any]]] = {}
        for seed in seeds:
            for row in _rows_of_forecast(scores.tables[name, seed], ("model",)):
                score = {column: row[column] for column in _SCORE_COLUMNS}
                yield {"run": name, "seed": strip_seed_prefix(seed), **score}
                key = tuple(row[column] for column in ("variable", "level", "region", "season", "lead_hours", "metric"))
                rows_by_key.setdefault(key, []).append(score)
        for rows in rows_by_key.values():
            values = [float(row["value"]) for row in rows]
            # Intervals belong to a single seed, so they are left empty.
            common = {**rows[0], "low": "", "high": ""}
            numbers = {MEAN: np.mean(values), LOWEST: min(values), HIGHEST: max(values)}
            for label, value in numbers.items():
                yield {"run": name, "seed": label, **common, "value": f"{value:.8g}"}
    example = scores.first_table
    baselines = [name for name in example.forecasts if name not in example.candidates]
    for row in _rows_of_forecast(example, baselines):
        yield {"run": row["forecast"], **{column: row[column] for column in _SCORE_COLUMNS}}


def _rows_of_forecast(table: ScoreTable, forecasts: tuple[str, ...] | list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of scores.csv for some forecasts and for all seasons together, each as column -> value."""
    for values in table.csv_rows():
        row = dict(zip(CSV_COLUMNS, values, strict=True))
        # Single seasons would make the file five times as large; scores.csv of each run contains them.
        if row["forecast"] in forecasts and row["season"] == ALL_SEASONS:
            yield row


def _comparison_rows(scores: ComparisonScores) -> Iterator[dict[str, Any]]:
    """Yield a row for each finite relative difference in the scorecard of each pair of runs, over all seasons."""
    for (first, second), table in scores.pairs.items():
        rows = scorecard_rows(table)
        results = {name: scorecard_values(table, rows, name)[0, 0] for name in ("difference", "p_adjusted")}
        significant = scorecard_values(table, rows, "significant")[0, 0]
        for number, row in enumerate(rows):
            for lead, hours in enumerate(table.lead_hours):
                for region_number, region in enumerate(table.regions):
                    index = number, lead, region_number
                    difference = results["difference"][index]
                    if not math.isfinite(difference):
                        continue
                    p_value = results["p_adjusted"][index]
                    yield {
                        "run": second,
                        "seed": MEAN,
                        "reference": first,
                        # Names of rows contain the level, and the score if it is not RMSE.
                        "variable": row.name,
                        "region": region,
                        "season": table.seasons[0],
                        "lead_hours": f"{hours:g}",
                        "metric": f"{row.score}_difference",
                        "value": f"{difference:.8g}",
                        "units": "1",
                        "p_adjusted": f"{p_value:.4g}" if math.isfinite(p_value) else "",
                        "significant": int(significant[index]),
                    }


def _cost_rows(outcome: CompareOutcome) -> Iterator[dict[str, Any]]:
    """Yield a row for each known cost of each run and seed, and a row for each stability curve of a long forecast."""
    for (name, seed), costs in outcome.costs.items():
        for metric, value in dataclasses.asdict(costs).items():
            if isinstance(value, int | float):
                yield {"run": name, "seed": strip_seed_prefix(seed), "metric": metric, "value": f"{value:.8g}"}
    for curve in outcome.curves:
        # An empty value means that the channel never left the range.
        value = "" if curve.exit_day is None else f"{curve.exit_day:g}"
        yield {
            "run": curve.name,
            "seed": strip_seed_prefix(curve.seed),
            "variable": curve.channel,
            "metric": f"long_run_exit_day:{curve.measure}",
            "value": value,
            "units": "d",
        }


def build_document(outcome: CompareOutcome, budget: Budget | None) -> dict[str, Any]:
    """Return the content of compare.json; missing numbers are None.

    Args:
        outcome: results of the comparison.
        budget: training budget of every run; None for finished runs.
    """
    scores = outcome.scores
    document: dict[str, Any] = {
        "version": DOCUMENT_VERSION,
        "credit": __version__,
        "equal": None if budget is None else {"kind": budget.kind, "amount": budget.amount, "text": budget.text},
        "runs": [_describe_run(run, outcome) for run in outcome.runs],
        "results": [],
        "comparisons": [],
        "stability": [_describe_curve(curve) for curve in outcome.curves],
        "differences": dict(list_differences(outcome.runs, trains_runs=budget is not None)),
        "warnings": list_warnings(outcome, budget),
        "failures": outcome.failures,
    }
    if scores is None:
        return document
    document["n_cases"] = scores.first_table.n_cases
    document["first_case"] = str(scores.first_table.dataset.attrs["first_case"])
    document["last_case"] = str(scores.first_table.dataset.attrs["last_case"])
    for row in scores.result_rows():
        document["results"].append(
            {
                "channel": row.channel,
                "units": row.units,
                "lead_hours": row.lead_hours,
                "rmse": {name: _describe_range(row.rmse[name]) for name in scores.names},
                "rmse_over_persistence": {name: _describe_range(row.ratio[name]) for name in scores.names},
                "significantly_best": row.best,
            }
        )
    for row in _comparison_rows(scores):
        if row["region"] == "global":
            document["comparisons"].append(
                {
                    "run": row["run"],
                    "reference": row["reference"],
                    "row": row["variable"],
                    "lead_hours": float(row["lead_hours"]),
                    "difference": float(row["value"]),
                    "p_adjusted": float(row["p_adjusted"]) if row["p_adjusted"] else None,
                    "significant": bool(row["significant"]),
                }
            )
    return document


def list_warnings(outcome: CompareOutcome, budget: Budget | None) -> list[str]:
    """Return a warning for each difference between the runs that makes the comparison less fair.

    Args:
        outcome: results of the comparison.
        budget: training budget of every run; None for finished runs.
    """
    warnings = [] if outcome.scores is None else outcome.scores.first_table.warnings()
    samples = {name: costs.samples for (name, _), costs in outcome.costs.items() if costs.samples}
    if len(set(samples.values())) > 1 and (budget is None or budget.kind == "steps"):
        counts = ", ".join(f"{name} {count:,}" for name, count in samples.items())
        warnings.append(f"The runs were trained on different numbers of samples: {counts}.")
    devices = {name: costs.device for (name, _), costs in outcome.costs.items() if costs.device}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        warnings.append(f"The runs were trained on different devices, so their times are not comparable: {listed}.")
    periods = {run.name: " to ".join(run.config.data.splits.train) for run in outcome.runs}
    if len(set(periods.values())) > 1:
        listed = ", ".join(f"{name} on {period}" for name, period in periods.items())
        warnings.append(f"The runs were trained on different periods: {listed}.")
    if budget is not None and budget.kind == "time":
        for (name, seed), costs in outcome.costs.items():
            if costs.step_hours and abs(costs.step_hours * 3600 / budget.amount - 1) > _TIME_TOLERANCE:
                warnings.append(
                    f"The steps of {name}, {seed.replace('_', ' ')}, took {costs.step_hours * 60:.3g} min instead of "
                    f"{budget.text}, because the load of the machine changed; the number of steps follows from the "
                    "earlier measurement."
                )
    return warnings


def strip_seed_prefix(label: str) -> str:
    """Return the label of a seed without its prefix: ``1000`` for ``seed_1000``; ``finished_run`` is unchanged."""
    return label.removeprefix("seed_")


def write_json(document: Mapping[str, Any], path: Path) -> None:
    """Write compare.json atomically.

    Raises:
        CreditError: if the file cannot be written.
    """
    atomic_write_text(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


def _describe_run(run: ComparedRun, outcome: CompareOutcome) -> dict[str, Any]:
    """Return the entry of a run in compare.json."""
    cost = outcome.step_costs.get(run.name)
    trials = {}
    for (name, seed), costs in outcome.costs.items():
        if name == run.name:
            trials[strip_seed_prefix(seed)] = dataclasses.asdict(costs)
    return {
        "name": run.name,
        "source": run.source,
        "model": run.config.model.type,
        "steps": outcome.steps.get(run.name),
        "measured_step": None if cost is None else dataclasses.asdict(cost),
        "trials": trials,
    }


def _describe_curve(curve: StabilityCurve) -> dict[str, Any]:
    """Return the entry of a `StabilityCurve` in compare.json."""
    return {
        "run": curve.name,
        "seed": strip_seed_prefix(curve.seed),
        "channel": curve.channel,
        "measure": curve.measure,
        "exit_day": curve.exit_day,
        "nonfinite_day": curve.nonfinite_day,
        "days": curve.days,
        "ratios": [finite_or_none(ratio) for ratio in curve.ratios],
    }


def _describe_range(values: SeedRange) -> dict[str, Any]:
    """Return the entry of a `SeedRange` in compare.json: mean, lowest and highest value, and the value of each seed."""
    return {
        "mean": finite_or_none(values.mean),
        "lowest": finite_or_none(values.low),
        "highest": finite_or_none(values.high),
        "seeds": {strip_seed_prefix(seed): finite_or_none(value) for seed, value in values.values.items()},
    }
