"""Averages of a sweep over the trials that differ only in their seed."""

from __future__ import annotations

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from credit.compare.sweep.results import TrialResult
from credit.utils.atomic import atomic_write_text

_SEED_KEY = "seed"


@dataclass(frozen=True)
class SeedAverage:
    """Average over the trials that have the same values of all keys except the seed.

    Attributes:
        values: dotted key -> value (a YAML string) of each key that the sweep changes, without the seed.
        num_trials: number of these trials.
        num_done: number of these trials that are done and have a validation; only these are averaged.
        mean: mean of the best values of the monitored metric; None if no trial is done.
        deviation: sample standard deviation of the best values; None with fewer than two done trials.
    """

    values: dict[str, str]
    num_trials: int
    num_done: int
    mean: float | None
    deviation: float | None


def average_over_seeds(results: Sequence[TrialResult]) -> list[SeedAverage]:
    """Return the averages over the seeds, the smallest mean first.

    Averages over fewer done trials than another average has trials come last, because their seeds are not those of the
    others. Trials that do not set the seed are left out.

    Args:
        results: results of all trials.

    Returns:
        The averages; empty if no two trials that set the seed differ only in their seed.
    """
    groups: dict[tuple[tuple[str, str], ...], list[TrialResult]] = defaultdict(list)
    for result in results:
        if _SEED_KEY in result.trial.values:
            other_values = [(key, value) for key, value in result.trial.values.items() if key != _SEED_KEY]
            groups[tuple(sorted(other_values))].append(result)
    if all(len(group) == 1 for group in groups.values()):
        return []
    averages = [_average_group(dict(key), group) for key, group in groups.items()]
    num_seeds = max(average.num_trials for average in averages)
    # False comes before True: first the complete averages, by their means.
    return sorted(averages, key=lambda average: (average.num_done < num_seeds, average.mean is None, average.mean or 0))


def _average_group(values: dict[str, str], group: Sequence[TrialResult]) -> SeedAverage:
    """Return the average over the trials of a group, which have these values of all keys except the seed."""
    best = [result.best for result in group if result.state == "done" and result.best is not None]
    mean = statistics.fmean(best) if best else None
    deviation = statistics.stdev(best) if len(best) > 1 else None
    return SeedAverage(values, len(group), len(best), mean, deviation)


def write_seeds_csv(path: Path, averages: Sequence[SeedAverage], keys: Sequence[str], monitor: str) -> None:
    """Write averages over the seeds to a CSV file, one row for each average.

    Args:
        path: path of the CSV file.
        averages: the averages, in the order of the rows.
        keys: dotted keys of the columns, see `remove_seed`.
        monitor: name of the monitored metric.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*keys, f"mean_{monitor}", f"std_{monitor}", "num_done", "num_trials"])
    for average in averages:
        values = [average.values.get(key, "") for key in keys]
        row = [*values, average.mean, average.deviation, average.num_done, average.num_trials]
        writer.writerow(["" if value is None else value for value in row])
    atomic_write_text(path, text.getvalue())


def remove_seed(keys: Sequence[str]) -> list[str]:
    """Return the keys without the seed."""
    return [key for key in keys if key != _SEED_KEY]
