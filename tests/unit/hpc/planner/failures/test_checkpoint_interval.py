"""Best checkpoint interval and run time with failures, compared with Daly's numbers, formulas and a simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import lambertw

from credit.hpc.planner.failures.checkpoint_interval import compute_best_interval, compute_run_time

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("mtbf", "minutes"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15 * MINUTE, 9.1)])
def test_intervals_of_the_paper(mtbf: float, minutes: float) -> None:
    """The numbers are from the captions of Daly's figures 3 to 5, in which writing a checkpoint takes 5 minutes."""
    assert compute_best_interval(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, abs=0.5 if minutes > 50 else 0.05)


@pytest.mark.parametrize(("stall", "accuracy"), [(1e-4, 1e-6), (1e-2, 1e-4), (0.1, 3e-3), (0.5, 0.02)])
def test_interval_is_near_exact_optimum(stall: float, accuracy: float) -> None:
    """The derivative of the run time vanishes at 1 + W0(-exp(-1 - stall)), for a mean time between failures of 1."""
    exact = 1 + lambertw(-math.exp(-1 - stall)).real
    assert compute_best_interval(stall, 1.0) == pytest.approx(exact, rel=accuracy)
    best_time = compute_run_time(1.0, exact, stall, 0.0, 0.0, 1.0)
    for factor in (0.8, 1.25):
        assert compute_run_time(1.0, factor * exact, stall, 0.0, 0.0, 1.0) > best_time
    # For a stall of at least twice the mean time between failures, the interval is that mean time.
    assert compute_best_interval(3.0, 1.0) == 1.0


def test_rare_and_frequent_failures() -> None:
    # For rare failures, the formulas of Young hold.
    assert compute_best_interval(1.0, 1e9) == pytest.approx(math.sqrt(2e9), rel=1e-4)
    assert compute_run_time(1e6, 1e3, 2.0, 0.0, 10.0, 1e12) == pytest.approx(1e6 * (1 + 2e-3), rel=1e-6)
    rare = compute_run_time(1e6, 1e3, 2.0, 40.0, 10.0, 1e7)
    # Each failure costs the restart, the write and half an interval, to first order.
    first_order = 1e6 * 1.002 * (1 + (10.0 + 40.0 + 501.0) / 1e7)
    assert rare == pytest.approx(first_order, rel=1e-7)
    assert math.isinf(compute_run_time(1.0, 1.0, 1.0, 0.0, 0.0, 1e-3))


def simulate(num_intervals: int, interval: float, stall: float, write: float, restart: float, mtbf: float) -> float:
    """Simulate a run with random failures, and return the time until `num_intervals` intervals are saved."""
    generator = np.random.default_rng(28)
    time, next_failure = 0.0, generator.exponential(mtbf)
    saved = 0
    # Number of trained intervals, and their copies: number and time at which the write is complete.
    trained, copies = 0, []
    restart_end = 0.0
    while saved < num_intervals:
        # The next event of training: the end of the restart, or of an interval with its copy.
        event = restart_end if time < restart_end else time + interval + stall
        if next_failure < event:
            time = next_failure
            saved = max([saved, *(number for number, end in copies if end <= time)])
            trained, copies = saved, []
            restart_end = time + restart
            next_failure = time + generator.exponential(mtbf)
            continue
        if time >= restart_end:
            trained += 1
            copies.append((trained, event + write))
        time = event
        saved = max([saved, *(number for number, end in copies if end <= time)])
        copies = [(number, end) for number, end in copies if number > saved]
    return time


@pytest.mark.parametrize("mtbf", [20 * HOUR, 3 * HOUR, HOUR])
@pytest.mark.parametrize("write", [0.0, 5 * MINUTE])
def test_run_time_equals_that_of_simulation(mtbf: float, write: float) -> None:
    interval, stall, restart = 20 * MINUTE, 20.0, 6 * MINUTE
    num_intervals = 60_000
    expected = compute_run_time(num_intervals * interval, interval, stall, write, restart, mtbf)
    assert simulate(num_intervals, interval, stall, write, restart, mtbf) == pytest.approx(expected, rel=0.02)


def test_best_interval_is_fastest_in_simulation() -> None:
    """A third and three times Daly's interval are slower, also if writes overlap with training."""
    stall, write, restart, mtbf = 30.0, 4 * MINUTE, 5 * MINUTE, 2 * HOUR
    best = compute_best_interval(stall, mtbf)
    work = 20_000 * best
    times = [simulate(round(work / interval), interval, stall, write, restart, mtbf)
             for interval in (best / 3, best, 3 * best)]  # fmt: skip
    assert times[1] < 0.97 * min(times[0], times[2])
