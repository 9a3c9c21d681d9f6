"""Which initial times, and parts of them for job arrays."""

from __future__ import annotations

import numpy as np
import pytest

from credit.config.schema_forecast import InferenceConfig
from credit.data.splits import Split
from credit.errors import ConfigError, DataError
from credit.forecast.initial_times import choose_initial_times, choose_leads, deal, group, take_part
from credit.times import Clock


@pytest.mark.parametrize("count", [0, 1, 5, 24, 97])
@pytest.mark.parametrize("parts", [1, 2, 7, 30])
def test_parts_are_an_exact_partition(count: int, parts: int) -> None:
    times = [60 * 24 * n for n in range(count)]
    taken = [take_part(times, f"{k}/{parts}") for k in range(1, parts + 1)]
    assert sorted(sum(taken, [])) == times
    lengths = [len(part) for part in taken]
    assert max(lengths) - min(lengths) <= 1
    assert all(part == sorted(part) for part in taken)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "1/3 ", ""])
def test_what_is_no_part(part: str) -> None:
    with pytest.raises(ConfigError, match="write I/N with I from 1 to N"):
        take_part([1, 2, 3], part)


@pytest.mark.parametrize(("members", "batch_size", "sizes"), [(1, 3, [3, 3, 1]), (2, 5, [2, 2, 2, 1]), (9, 4, [1] * 7)])
def test_groups_fill_batches_whatever_shares_them(members: int, batch_size: int, sizes: list[int]) -> None:
    groups = group(range(7), members, batch_size)
    assert [len(own) for own in groups] == sizes and sum(groups, []) == list(range(7))
    assert sorted(sum((deal(groups, rank, 3) for rank in range(3)), [])) == groups


CLOCK = Clock()
DAY = 1440
TEST = Split("test", CLOCK.parse("2001-01-01"), CLOCK.parse("2001-01-10"))
TIMES = np.arange(TEST.first - DAY, TEST.last + 1, 360)  # the data begin a day before the period


@pytest.mark.parametrize(
    ("ensemble", "first_day"),
    [
        (None, 0),
        ({"members": 3, "lagged": "6h"}, 0),  # 12 h before, and the frame before that
        ({"members": 3, "lagged": "24h"}, 2),
        ({"members": 2, "perturbation": {"kind": "bred", "cycles": 3, "cycle": "24h"}}, 3),
        ({"members": 2, "perturbation": {"kind": "correlated"}}, 0),
    ],
)
def test_an_ensembles_analyses_must_be_in_the_data(ensemble: dict | None, first_day: int) -> None:
    conf = InferenceConfig(lead_time="24h", ensemble=ensemble)
    chosen = choose_initial_times(conf, TIMES, CLOCK, TEST, 360, history_len=2)
    assert chosen[0] == TEST.first + (first_day or 1) * DAY  # the first frame of the period has none before it
    assert chosen[-1] == TEST.last - DAY
    if first_day:
        named = conf.model_copy(update={"initial_times": ["2001-01-02"]})
        with pytest.raises(DataError, match="2001-01-02T00:00 needs the fields of 2000-12-3"):
            choose_initial_times(named, TIMES, CLOCK, TEST, 360, history_len=2)


def test_lead_times_to_write() -> None:
    assert choose_leads(InferenceConfig(lead_time="24h"), 360) == [360, 720, 1080, 1440]
    assert choose_leads(InferenceConfig(lead_time="24h", output_every="12h"), 360) == [720, 1440]
    assert choose_leads(InferenceConfig(lead_time="48h", lead_times=["6h", "1d", "36h"]), 360) == [360, 1440, 2160]


def test_latest_is_the_last_time_that_has_what_a_forecast_needs() -> None:
    """A hole before the last time: with two input frames the last is the one before the hole."""
    conf, times = InferenceConfig(initial_times="latest"), np.delete(TIMES, -2)
    assert choose_initial_times(conf, times, CLOCK, TEST, 360, history_len=1) == [times[-1]]
    assert choose_initial_times(conf, times, CLOCK, TEST, 360, history_len=2) == [times[-2]]
    with pytest.raises(DataError, match="latest: no time of the data has what a forecast needs: fields of the last 6h"):
        choose_initial_times(conf, TIMES[:1], CLOCK, TEST, 360, history_len=2)
