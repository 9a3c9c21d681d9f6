"""Splits are apart, and no sample leaves its split or crosses a gap."""

from __future__ import annotations

import numpy as np
import pytest

from credit.config.schema_data import DataConfig
from credit.data.splits import build_splits, initial_times, require_samples
from credit.errors import ConfigError, DataError
from credit.times import Clock

CLOCK = Clock()


def conf(**changes: object) -> DataConfig:
    base = {
        "sources": [{"path": "x.nc"}],
        "variables": {"prognostic": {"vars_2D": ["t2m"]}},
        "splits": {
            "train": ["2000-01-01", "2000-01-31"],
            "valid": ["2000-02-10", "2000-02-20"],
            "test": ["2000-03-01", "2000-03-10"],
        },
        "split_gap": "9d",
    }
    return DataConfig.model_validate({**base, **changes})


def test_whole_days_and_the_gap() -> None:
    splits = build_splits(conf(), CLOCK)
    assert CLOCK.format(splits["train"].last) == "2000-01-31T23:59"
    with pytest.raises(ConfigError, match="split_gap 10d"):
        build_splits(conf(split_gap="10d"), CLOCK)


def test_backward_period() -> None:
    backward = {"train": ["2000-02-01", "2000-01-01"], "valid": ["2000-03-01", "2000-03-02"],
                "test": ["2000-05-01", "2000-05-02"]}  # fmt: skip
    with pytest.raises(ConfigError, match="data.splits.train"):
        build_splits(conf(splits=backward), CLOCK)


def test_a_sample_lies_inside_its_split_and_crosses_no_gap() -> None:
    split = build_splits(conf(), CLOCK)["train"]
    first = CLOCK.parse("1999-12-25")
    times = first + 360 * np.arange(400)
    times = np.delete(times, 100)  # one six-hourly field is missing
    found = initial_times(times, split, 360, history_len=2, forecast_len=3)
    inside = set(times[(times >= split.first) & (times <= split.last)].tolist())
    for initial in found.tolist():
        assert {initial + k * 360 for k in range(-1, 4)} <= inside
    # brute force over all times
    expected = [t for t in times.tolist() if {t + k * 360 for k in range(-1, 4)} <= inside]
    assert found.tolist() == expected
    assert 0 < len(expected) < len(inside)


def test_no_sample_says_why() -> None:
    split = build_splits(conf(), CLOCK)["train"]
    times = split.first + 720 * np.arange(30)
    with pytest.raises(DataError, match=r"need 2 times in a row.*29 gaps: 2000-01-01T00:00 to 2000-01-01T12:00"):
        require_samples(times, split, CLOCK, 360, 1, 1)
    with pytest.raises(DataError, match="no data in this period; the data have 1999"):
        require_samples(np.array([CLOCK.parse("1999-01-01")]), split, CLOCK, 360, 1, 1)
