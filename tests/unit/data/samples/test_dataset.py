"""Tests of the samples that the model receives, mostly with fields whose value is their own time."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.data.climatology.fit import fit_climatology
from credit.data.samples.cached_reader import CachedReader
from credit.data.samples.dataset import SampleDataset
from credit.data.samples.frames import FrameReader
from credit.errors import DataError
from tests.unit.analytic_reader import AnalyticReader, make_grid

GROUPS = {"prognostic": ["a"], "diagnostic": ["d"], "dynamic_forcing": ["f"]}
CHANNELS = ChannelMap.build({name: {"vars_3D": [], "vars_2D": members} for name, members in GROUPS.items()}, [])
SPLITS = {
    "train": ["2000-01-01", "2000-12-30"],
    "valid": ["2001-01-11", "2001-02-28"],
    "test": ["2001-03-15", "2001-04-30"],
}


def build_config(**fields: object) -> DataConfig:
    return DataConfig.model_validate(
        {
            "sources": [{"path": "x.nc"}],
            "variables": {
                "prognostic": {"vars_2D": ["a"]},
                "diagnostic": {"vars_2D": ["d"]},
                "dynamic_forcing": {"vars_2D": ["f"]},
            },
            "splits": SPLITS,
            "variable_options": {"f": fields},
        }
    )


def build_reader(
    times: np.ndarray, value=lambda minutes: minutes / 60, calendar_name: str = "standard"
) -> AnalyticReader:
    """Return a reader whose channels are a function of time, by default the time itself in hours."""

    def function(minutes: int, channel: int) -> np.ndarray:
        return np.float64(value(minutes))

    return AnalyticReader(CHANNELS, make_grid(8, 16), Calendar(calendar_name), times, function)


def read_first_cells(field: np.ndarray) -> list[float]:
    return field[..., 0, 0].tolist()


@pytest.mark.parametrize(
    ("calendar_name", "day"),
    [("standard", "2000-02-28T12:00"), ("noleap", "2001-02-28T12:00"), ("360_day", "2000-02-30T12:00")],
)
def test_sample_has_its_times_in_order(calendar_name: str, day: str) -> None:
    """A sample has history 2 and forecast 3, across the end of February. float32 represents these hours exactly."""
    calendar = Calendar(calendar_name)
    start = calendar.parse(day)
    reader = build_reader(start + 360 * np.arange(-10, 10), calendar_name=calendar_name)
    dataset = SampleDataset(FrameReader(reader, build_config(), None), [start], 360, history_len=2, forecast_len=3)
    batch = dataset.__getitems__([0])
    start_hours = start / 60
    assert batch.history_BCTHW[0, 0, :, 0, 0].tolist() == [start_hours - 6, start_hours]
    assert batch.forcing_BCTHW[0, 0, :, 0, 0].tolist() == [
        start_hours - 6,
        start_hours,
        start_hours + 6,
        start_hours + 12,
    ]
    assert batch.target_BCTHW[0, 0, :, 0, 0].tolist() == [start_hours + 6, start_hours + 12, start_hours + 18]
    assert batch.target_BCTHW[0, 1, :, 0, 0].tolist() == [start_hours + 6, start_hours + 12, start_hours + 18]
    # The date 18 hours later depends on the calendar.
    expected = {"standard": "2000-02-29T06:00", "noleap": "2001-03-01T06:00", "360_day": "2000-03-01T06:00"}
    assert calendar.format(start + 18 * 60) == expected[calendar_name]


@pytest.mark.parametrize("as_forecast", [False, True])
@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.parametrize(
    "field", [{}, {"in_forecast": "observed"}, {"temporal": "mean", "window": "next", "in_forecast": "persist"}]
)
def test_batches_equal_the_fields_of_the_frame_reader(field: dict, cache: str, as_forecast: bool) -> None:
    """Fields differ in time, channel and cell. Samples are not in order of time, and some share times."""
    variables = {"prognostic": ["a"], "diagnostic": ["d"], "dynamic_forcing": ["sin_year", "f"]}
    settings = build_config(**field).model_copy(update={"cache": cache})
    groups = {name: {"vars_3D": [], "vars_2D": members} for name, members in variables.items()}
    pattern = np.random.default_rng(0).normal(size=(3, 8, 16))
    reader = AnalyticReader(
        ChannelMap.build(groups, []), make_grid(8, 16), Calendar(), 360 * np.arange(12),
        lambda minutes, channel: minutes / 360 * pattern[channel],
    )  # fmt: skip
    frames = FrameReader(CachedReader(reader) if cache == "memory" else reader, settings, None)
    starts = [1440, 360, 720]
    batch = SampleDataset(frames, starts, 360, 2, 3, as_forecast).__getitems__([2, 0, 1])
    for row, start in enumerate([720, 1440, 360]):
        initial = start if as_forecast else None
        inputs = [start + 360 * k for k in (-1, 0, 1, 2)]
        expected = [
            np.stack([frames.prognostic(t) for t in inputs[:2]], axis=1),
            np.stack([frames.forcing(t, initial) for t in inputs], axis=1),
            np.stack([frames.state(t) for t in (start + 360, start + 720, start + 1080)], axis=1),
        ]
        batch_fields = [getattr(batch, f"{name}_BCTHW")[row].numpy() for name in ("history", "forcing", "target")]
        for actual, desired in zip(batch_fields, expected, strict=True):
            np.testing.assert_array_equal(actual, desired)


@pytest.mark.parametrize("as_forecast", [True, False])
def test_hidden_cells_are_missing_in_samples(as_forecast: bool) -> None:
    hidden = np.zeros((8, 16), dtype=bool)
    hidden[2, 3:5] = True
    frames = FrameReader(build_reader(360 * np.arange(10)), build_config(), None, {"a": hidden, "f": hidden})
    batch = SampleDataset(frames, [720], 360, 2, 2, as_forecast).__getitems__([0])
    for fields_THW in (batch.history_BCTHW[0, 0], batch.target_BCTHW[0, 0], batch.forcing_BCTHW[0, 0]):
        for field in fields_THW.numpy():
            np.testing.assert_array_equal(np.isnan(field), hidden)
    # The variable without hidden cells keeps its values.
    assert np.isfinite(batch.target_BCTHW[0, 1].numpy()).all()


def test_next_window_uses_the_following_value() -> None:
    reader = build_reader(360 * np.arange(10))
    past = FrameReader(reader, build_config(temporal="mean", window="past"), None)
    following = FrameReader(reader, build_config(temporal="mean", window="next"), None)
    assert read_first_cells(past.forcing(720)) == [12.0]
    assert read_first_cells(following.forcing(720)) == [18.0]


def test_forecast_does_not_use_later_analyses() -> None:
    reader = build_reader(360 * np.arange(10))
    persist = FrameReader(reader, build_config(in_forecast="persist"), None)
    assert read_first_cells(persist.forcing(1440, initial=720)) == [12.0]
    assert read_first_cells(persist.forcing(360, initial=720)) == [6.0]  # observed before the initial time
    observed = FrameReader(reader, build_config(in_forecast="observed"), None)
    assert read_first_cells(observed.forcing(1440, initial=720)) == [24.0]
    # A window that ends after the initial time is in the future, too.
    windowed = FrameReader(reader, build_config(in_forecast="persist", temporal="mean", window="next"), None)
    assert read_first_cells(windowed.forcing(720, initial=720)) == [12.0]
    with pytest.raises(DataError, match="use persist"):
        FrameReader(reader, build_config(in_forecast="climatology"), None).forcing(1440, initial=720)


def test_persistence_keeps_the_anomaly() -> None:
    """Values are an annual cycle plus 2. The forecast follows the cycle and keeps the anomaly of 2."""
    calendar = Calendar()
    first = calendar.parse("2000-01-01")
    times = first + 1440 * np.arange(366)

    def cycle(minutes: int) -> float:
        return float(10 * np.cos(2 * np.pi * calendar.year_fraction(np.array([minutes]))[0]))

    reader = build_reader(times, cycle)
    climatology = fit_climatology(reader, ["f"], int(times[0]), int(times[-1]))
    later_reader = build_reader(times, lambda minutes: cycle(minutes) + 2)
    frames = FrameReader(later_reader, build_config(in_forecast="persist"), climatology)
    start = int(times[50])
    valid = int(times[120])
    assert frames.forcing(valid, initial=start)[0, 0, 0] == pytest.approx(cycle(valid) + 2, abs=0.01)
    assert abs(cycle(valid) - cycle(start)) > 2  # plain persistence would be far off


@pytest.mark.parametrize("in_forecast", ["persist", "climatology"])
def test_bounds_apply_to_forcing_that_is_not_read(in_forecast: str) -> None:
    """Sea ice stays between 0 and 1, even if the climatology leaves these bounds."""
    calendar = Calendar()
    first = calendar.parse("2000-01-01")
    times = first + 1440 * np.arange(366)

    def cycle(minutes: int) -> float:
        return float(0.5 + 0.6 * np.cos(2 * np.pi * calendar.year_fraction(np.array([minutes]))[0]))

    climatology = fit_climatology(build_reader(times, cycle), ["f"], int(times[0]), int(times[-1]))
    start, summer, winter = (int(times[day]) for day in (90, 183, 365))
    for value in (0.0, 1.0):
        constant_reader = build_reader(times, lambda minutes, value=value: value)
        unbounded = FrameReader(constant_reader, build_config(in_forecast=in_forecast), climatology)
        bounded = FrameReader(constant_reader, build_config(in_forecast=in_forecast, minimum=0, maximum=1), climatology)
        for valid in (summer, winter):
            expected = np.clip(unbounded.forcing(valid, initial=start), 0, 1)
            np.testing.assert_array_equal(bounded.forcing(valid, initial=start), expected)
            assert bounded.forcing(valid, initial=start).dtype == np.float32
    assert unbounded.forcing(summer, initial=start).min() < 1
    assert unbounded.forcing(winter, initial=start).max() > 1
    observed = FrameReader(build_reader(times, lambda minutes: -1.0), build_config(minimum=0), climatology)
    assert observed.forcing(start, initial=start).max() == observed.forcing(summer).max() == -1


def test_missing_time_is_an_error() -> None:
    frames = FrameReader(build_reader(360 * np.arange(4)), build_config(), None)
    with pytest.raises(DataError, match="no fields at 1900-01-02T00:00"):
        frames.state(1440)


def test_cached_reader_reads_a_time_once() -> None:
    reader = build_reader(360 * np.arange(10))
    cached_reader = CachedReader(reader)
    assert cached_reader.grid is reader.grid
    assert cached_reader.index_of(720) == reader.index_of(720)
    first = cached_reader.read(np.int64(3))
    target = np.empty(reader.grid.shape, np.float32)
    cached_reader.read_into(3, [target, *[None] * (len(first) - 1)])
    np.testing.assert_array_equal(target, reader.read(3)[0])
    assert reader.reads == 2
    assert cached_reader.read(3) is first
    with pytest.raises(ValueError, match="read-only"):
        first += 1
    assert getattr(cached_reader, "statistics", None) is None


class PicklableReader:
    """Reader without fields that can be sent to another process."""

    num_channels = 3


def test_cached_reader_can_be_sent_to_another_process() -> None:
    """Loader workers unpickle their reader if they are spawned instead of forked."""
    restored = pickle.loads(pickle.dumps(CachedReader(PicklableReader())))
    assert restored.num_channels == 3 and not hasattr(restored, "missing_attribute")
