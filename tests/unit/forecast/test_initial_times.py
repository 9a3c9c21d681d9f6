"""Selection of initial times, and parts of them for job arrays."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig, InitialTimesConfig
from credit.data.splits import Split
from credit.errors import ConfigError, DataError
from credit.forecast.distribution import group_initial_times, select_items_of_job, select_round_robin
from credit.forecast.initial_times import InitialTimes, choose_initial_times, find_initial_times, list_output_leads


@pytest.mark.parametrize("count", [0, 1, 5, 24, 97])
@pytest.mark.parametrize("parts", [1, 2, 7, 30])
def test_parts_are_an_exact_partition(count: int, parts: int) -> None:
    times = [60 * 24 * n for n in range(count)]
    selected_parts = [select_items_of_job(times, f"{k}/{parts}") for k in range(1, parts + 1)]
    assert sorted(sum(selected_parts, [])) == times
    lengths = [len(part) for part in selected_parts]
    assert max(lengths) - min(lengths) <= 1
    assert all(part == sorted(part) for part in selected_parts)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "1/3 ", ""])
def test_invalid_parts_are_refused(part: str) -> None:
    with pytest.raises(ConfigError, match="write I/N with I from 1 to N"):
        select_items_of_job([1, 2, 3], part)


@pytest.mark.parametrize(("members", "batch_size", "sizes"), [(1, 3, [3, 3, 1]), (2, 5, [2, 2, 2, 1]), (9, 4, [1] * 7)])
def test_groups_fill_batches(members: int, batch_size: int, sizes: list[int]) -> None:
    groups = group_initial_times(range(7), members, batch_size)
    assert [len(group) for group in groups] == sizes and sum(groups, []) == list(range(7))
    assert sorted(sum((select_round_robin(groups, rank, 3) for rank in range(3)), [])) == groups


CALENDAR = Calendar()
DAY = 1440
TEST = Split("test", CALENDAR.parse("2001-01-01"), CALENDAR.parse("2001-01-10"))
TIMES = np.arange(TEST.first - DAY, TEST.last + 1, 360)  # the data begin a day before the period

SPLIT_YEARS = {"train": 1990, "valid": 1995, "test": 2001}


def _choose_minutes(conf: InferenceConfig, times: np.ndarray = TIMES, history_len: int = 1, **sst: str) -> list[int]:
    return _find_times(conf, times, history_len, **sst).minutes


def _find_times(
    conf: InferenceConfig, times: np.ndarray = TIMES, history_len: int = 1, test: Split = TEST, **sst: str
) -> InitialTimes:
    return find_initial_times(conf, _build_data_config(history_len, **sst), times, CALENDAR, test)


def _build_data_config(history_len: int = 1, **sst: str) -> DataConfig:
    return DataConfig(
        sources=[{"path": "none.nc"}],
        variables={"prognostic": {"vars_2D": ["t2m"]}, "dynamic_forcing": {"vars_2D": ["sst"]}},
        variable_options={"sst": sst} if sst else {},
        history_len=history_len,
        splits={name: [f"{year}-01-01", f"{year}-01-10"] for name, year in SPLIT_YEARS.items()},
    )


@pytest.mark.parametrize(
    ("ensemble", "first_day"),
    [
        (None, 0),
        ({"members": 3, "lagged": "6h"}, 0),  # analyses up to 12 h earlier, each with a frame before it
        ({"members": 3, "lagged": "24h"}, 2),
        ({"members": 2, "perturbation": {"kind": "bred", "cycles": 3, "cycle": "24h"}}, 3),
        ({"members": 2, "perturbation": {"kind": "correlated"}}, 0),
    ],
)
def test_analyses_of_an_ensemble_must_be_in_the_data(ensemble: dict | None, first_day: int) -> None:
    conf = InferenceConfig(lead_time="24h", ensemble=ensemble)
    chosen = _choose_minutes(conf, history_len=2)
    assert chosen[0] == TEST.first + (first_day or 1) * DAY  # the first time of the period has no earlier frame in it
    assert chosen[-1] == TEST.last - DAY
    if first_day:
        named = conf.model_copy(update={"initial_times": ["2001-01-02"]})
        with pytest.raises(DataError, match="2001-01-02T00:00 needs the fields of 2000-12-3"):
            _choose_minutes(named, history_len=2)


PERIOD = "data.splits.test 2001-01-01T00:00..2001-01-10T00:00"
ENDS = "1 whose inference.lead_time 24h ends after the period"


def test_message_gives_reasons_for_skipped_times(caplog: pytest.LogCaptureFixture) -> None:
    """The config selects 10 days. The truth of the last one lies after the period, so no data are missing."""
    conf = InferenceConfig(lead_time="24h")
    initial_times = _find_times(conf)
    assert (len(initial_times.minutes), initial_times.has_missing_data) == (9, False)
    assert initial_times.skip_message == f"inference.initial_times: 1 of 10 times are skipped: {ENDS}; {PERIOD}"
    single_time = _find_times(conf.model_copy(update={"initial_times": ["2001-01-02"]}))
    assert single_time.skip_message == "" and not single_time.has_missing_data
    # The data end at 00 UTC of day 5 and lack 06 UTC of day 2.
    times = TIMES[(TEST.first + DAY + 720 <= TIMES) & (TEST.first + 4 * DAY >= TIMES) | (TEST.first + DAY >= TIMES)]
    initial_times = _find_times(conf, times)
    assert initial_times.minutes == [TEST.first + day * DAY for day in (0, 2, 3)] and initial_times.has_missing_data
    assert initial_times.skip_message == (
        "inference.initial_times: 7 of 10 times are skipped: 2 without truth at every step of "
        "inference.lead_time 24h, 5 that are not in the data; "
        f"{PERIOD}: the data cover 2001-01-01T00:00 to 2001-01-05T00:00 of this period"
    )
    initial_times = _find_times(
        conf.model_copy(update={"initial_times": InitialTimesConfig(start="2000-12-30")}), history_len=2
    )
    assert initial_times.skip_message.startswith(
        "inference.initial_times: 4 of 12 times are skipped: 2 before the period, 1 without all 2 input frames in the "
    )
    bred = {"members": 2, "perturbation": {"kind": "bred", "cycles": 3, "cycle": "24h"}}
    initial_times = _find_times(InferenceConfig(lead_time="24h", ensemble=bred))
    assert "2 without the earlier analyses (up to 72h) that inference.ensemble needs" in initial_times.skip_message
    for times, level in ((TIMES, "INFO"), (TIMES[:20], "WARNING")):
        caplog.clear()
        with caplog.at_level("INFO"):
            minutes = choose_initial_times(conf, _build_data_config(), times, CALENDAR, TEST)
        assert minutes == _choose_minutes(conf, times)
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            (level, _find_times(conf, times).skip_message)
        ]


@pytest.mark.parametrize(
    ("conf", "test", "words"),
    [
        ({"lead_time": "240h"}, TEST, "10 whose inference.lead_time 240h ends after .*; shorten inference.lead_time"),
        ({"lead_time": "24h"}, Split("test", TEST.last + DAY, TEST.last + 9 * DAY),
         "9 that are not in the data; .*; choose times that are in the data .*data.splits.test.* more files"),
        ({"lead_time": "24h", "ensemble": {"members": 2, "lagged": "264h"}}, TEST,
         "9 without the earlier analyses .up to 264h.*; begin later .*lagged"),
    ],
)  # fmt: skip
def test_no_possible_time_is_an_error(conf: dict, test: Split, words: str) -> None:
    """The message suggests a remedy for the most frequent reason."""
    with pytest.raises(DataError, match=f"^data.splits.test .*: no forecast can begin .*{words}") as error_info:
        _find_times(InferenceConfig(**conf), test=test)
    assert "the data have 2000-12-31T00:00..2001-01-10T00:00; " in str(error_info.value)


def test_range_after_the_test_period_is_refused() -> None:
    conf = InferenceConfig(initial_times=InitialTimesConfig(start="2001-01-11"))
    with pytest.raises(ConfigError, match=r"initial_times.start: 2001-01-11 is after data.splits.test .*; set .*end"):
        _find_times(conf)


def test_named_times_that_the_data_lack_are_counted() -> None:
    conf = InferenceConfig(initial_times=InitialTimesConfig(start="2001-01-08", end="2001-01-14"))
    message = r"2001-01-11T00:00, which are not in the data; 3 others of 7 .*; the data have 2000-12-31T00:00\.\."
    with pytest.raises(DataError, match=rf"2001-01-11T00:00 needs the fields of {message}"):
        _find_times(conf)


def test_lead_times_to_write() -> None:
    assert list_output_leads(InferenceConfig(lead_time="24h"), 360) == [360, 720, 1080, 1440]
    assert list_output_leads(InferenceConfig(lead_time="24h", output_every="12h"), 360) == [720, 1440]
    assert list_output_leads(InferenceConfig(lead_time="48h", lead_times=["6h", "1d", "36h"]), 360) == [360, 1440, 2160]


def test_latest_is_the_last_time_with_all_frames() -> None:
    """The last time but one is missing. With two input frames, the latest initial time is the one before this gap."""
    conf, times = InferenceConfig(initial_times="latest"), np.delete(TIMES, -2)
    assert _choose_minutes(conf, times) == [times[-1]]
    assert _find_times(conf, times).skip_message == ""
    initial_times = _find_times(conf, times, history_len=2)
    assert initial_times.minutes == [times[-2]] and initial_times.has_missing_data
    last, lacking = (CALENDAR.format(minutes) for minutes in (TIMES[-1], TIMES[-2]))
    assert (
        f"not at the last time of the data, {last}, because the data do not contain the input frame {lacking}"
        in initial_times.skip_message
    )
    with pytest.raises(DataError, match="latest: no time of the data has all input frames of a forecast, .* last 6h"):
        _choose_minutes(conf, TIMES[:1], history_len=2)


def test_named_times_are_sorted() -> None:
    named = ["2001-01-03", "2001-01-01", "2001-01-02T06:00"]
    chosen = _choose_minutes(InferenceConfig(initial_times=named))
    assert chosen == [TEST.first, TEST.first + DAY + 360, TEST.first + 2 * DAY]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [([], r"initial_times: \[\] is empty; list times"), (["2001-01-03", "2001-01-01", "2001-01-03T00:00"],
     "initial_times: 2001-01-03T00:00 is listed twice; list each time once")],
)  # fmt: skip
def test_invalid_lists_are_refused(wanted: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        _choose_minutes(InferenceConfig(initial_times=wanted))


@pytest.mark.parametrize(
    ("forcing", "lead_time"),
    [({}, "24h"), ({"temporal": "mean"}, "24h"), ({"temporal": "mean", "window": "next"}, "18h")],
)
def test_observed_forcing_must_be_in_the_data(forcing: dict, lead_time: str) -> None:
    """The last step begins 6 h before the last lead time; a window that ends later needs the time of its end."""
    end = TEST.last - TEST.last % 360
    named = [CALENDAR.format(end - 18 * 60)]
    assert _choose_minutes(InferenceConfig(initial_times=named, lead_time=lead_time), in_forecast="observed", **forcing)
    for initial_times, lead in (("latest", "12h"), (named, "30h")):
        conf = InferenceConfig(initial_times=initial_times, lead_time=lead)
        assert _choose_minutes(conf, in_forecast="persist", **forcing)
        with pytest.raises(DataError, match=r"initial_times: the forecast from .* needs sst \(in_forecast: observed\)"
                           " at 2001-01-10T06:00.* data.variable_options.sst.in_forecast: persist"):  # fmt: skip
            _choose_minutes(conf, in_forecast="observed", **forcing)


def test_observed_forcing_is_needed_from_the_first_analysis_on() -> None:
    conf = InferenceConfig(initial_times=["2001-01-05"], lead_time="12h", ensemble={"members": 2, "lagged": "24h"})
    hole = CALENDAR.parse("2001-01-04T12:00")
    for forcing, problem in (("persist", None), ("observed", r"needs sst \(in_forecast: observed\) at 2001-01-04T12")):
        with pytest.raises(DataError, match=problem) if problem else nullcontext():
            _find_times(conf, TIMES[hole != TIMES], in_forecast=forcing)
