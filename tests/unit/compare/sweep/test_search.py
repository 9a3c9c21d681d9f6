"""Tests of the trials of a sweep: grids, and random values that do not depend on the length of the search."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from credit.compare.sweep.search import list_grid_combinations, parse_ranges, sample_trials
from credit.errors import ConfigError


def test_a_grid_has_all_combinations() -> None:
    assert list_grid_combinations(["trainer.learning_rate=1e-4,3e-4", "model.dim=[32, 64],[64,128]", "seed=1"]) == [
        ("trainer.learning_rate=1e-4", "model.dim=[32, 64]", "seed=1"),
        ("trainer.learning_rate=1e-4", "model.dim=[64, 128]", "seed=1"),
        ("trainer.learning_rate=3e-4", "model.dim=[32, 64]", "seed=1"),
        ("trainer.learning_rate=3e-4", "model.dim=[64, 128]", "seed=1"),
    ]
    assert list_grid_combinations(["loss={kind: mse},{kind: mae}", "a=null,true"])[-1] == ("loss={kind: mae}", "a=true")
    # A value that is written twice is one trial.
    assert list_grid_combinations(["seed=1,1"]) == [("seed=1",)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["seed"], "--grid seed: write a key and its values"),
        (["seed="], "write a key and its values"),
        (["seed=[1"], "not valid YAML"),
        (["seed=1", "seed=2"], "seed is given twice"),
        (["save_loc=a,b"], "save_loc must be the same"),
        (["slurm.nodes=1,2"], r"slurm\.nodes must be the same"),
    ],
)
def test_wrong_grids_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list_grid_combinations(texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=1,2", "write log:LOW,HIGH"),
        ("a=normal:1,2", "write log:LOW,HIGH"),
        ("a=log:2,1", "two numbers, the lower one first"),
        ("a=uniform:1,2,3", "two numbers"),
        ("a=uniform:x,2", "two numbers"),
        ("a=log:0,1", "log needs positive numbers"),
        ("a=choice:", "has no values"),
    ],
)
def test_wrong_ranges_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_ranges([text])


def test_random_values_have_the_distribution_of_their_range() -> None:
    ranges = parse_ranges(["a=log:1e-5,1e-1", "b=uniform:-2,4", "c=choice:x,[1, 2]"])
    trials = sample_trials(ranges, 2000, seed=3)
    values = [dict(override.split("=", 1) for override in trial) for trial in trials]
    exponents = np.log10([float(value["a"]) for value in values])
    numbers = np.array([float(value["b"]) for value in values])
    # Kolmogorov-Smirnov test; the seed is fixed.
    assert stats.kstest(exponents, stats.uniform(-5, 4).cdf).pvalue > 0.01
    assert stats.kstest(numbers, stats.uniform(-2, 6).cdf).pvalue > 0.01
    assert abs(np.corrcoef(exponents, numbers)[0, 1]) < 4 / np.sqrt(2000)
    count = sum(value["c"] == "[1, 2]" for value in values)
    assert abs(count - 1000) < 4 * np.sqrt(500) and {value["c"] for value in values} == {"x", "[1, 2]"}


def test_random_trials_are_reproducible_and_can_be_extended() -> None:
    ranges = parse_ranges(["a=log:1e-5,1e-1", "b=uniform:0,1"])
    trials = sample_trials(ranges, 5, seed=3)
    assert sample_trials(ranges, 9, seed=3)[:5] == trials
    assert sample_trials(ranges, 5, seed=4) != trials
    # The values of a key do not depend on the other keys.
    trials_of_one_key = sample_trials(ranges[1:], 5, seed=3)
    assert [trial[0] for trial in trials_of_one_key] == [trial[1] for trial in trials]
    # Four digits, and never outside the range.
    narrow = sample_trials(parse_ranges(["a=uniform:0.123456,0.123457"]), 3, seed=1)
    assert narrow == [("a=0.123457",)]
