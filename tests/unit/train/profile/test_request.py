"""Tests of the steps of ``--profile``: valid texts, and texts and runs that are refused."""

from __future__ import annotations

import argparse

import pytest

from credit.errors import ConfigError
from credit.train.profile.request import ProfileRequest, parse_rank, parse_steps


@pytest.mark.parametrize(
    ("text", "num_steps", "first_step"), [("20", 20, None), ("1", 1, None), ("100:119", 20, 100), ("7:7", 1, 7)]
)
def test_steps_are_parsed(text: str, num_steps: int, first_step: int | None) -> None:
    assert parse_steps(text) == ProfileRequest(num_steps, first_step)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "1 to 1000 steps"),
        ("1001", "1 to 1000 steps"),
        ("-3", "number of steps"),
        ("ten", "number of steps"),
        ("1.5", "number of steps"),
        ("5:", "number of steps"),
        ("9:5", "must not be before the first"),
        ("0:5", "counted from 1"),
        ("1:2000", "1 to 1000 steps"),
        ("٣", "number of steps"),
        ("trainer.max_steps=9", "write overrides before --profile"),
    ],
)
def test_wrong_steps_are_refused(text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse_steps(text)


@pytest.mark.parametrize("text", ["-1", "x", ""])
def test_wrong_ranks_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="number of a rank"):
        parse_rank(text)


def test_the_first_step_comes_after_the_warm_up() -> None:
    assert ProfileRequest(10).choose_first_step(steps_taken=30, total_steps=100, world=1) == 36
    assert ProfileRequest(10, 40).choose_first_step(steps_taken=30, total_steps=100, world=1) == 40


def test_a_profile_ends_before_the_last_step() -> None:
    # Steps 6 to 15, two steps for the timeline, and one that marks the end of the last.
    assert ProfileRequest(10).choose_first_step(steps_taken=0, total_steps=18, world=1) == 6
    with pytest.raises(ConfigError, match=r"steps 6 to 15 .* the run ends at step 17"):
        ProfileRequest(10).choose_first_step(steps_taken=0, total_steps=17, world=1)


def test_steps_of_the_past_and_missing_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="continues after step 30; begin at 32"):
        ProfileRequest(10, 31).choose_first_step(steps_taken=30, total_steps=100, world=1)
    with pytest.raises(ConfigError, match="--profile-rank 2.* the number of ranks is 2; choose at most 1"):
        ProfileRequest(10, trace_rank=2).choose_first_step(steps_taken=0, total_steps=100, world=2)
