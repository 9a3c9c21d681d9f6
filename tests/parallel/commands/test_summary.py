"""Test that the summary of a run on two ranks has the sums of their hours and of their energy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.commands.test_train_command import train_on_ranks

pytestmark = pytest.mark.slow


def test_summary_adds_hours_and_energy_of_two_ranks(small_run: Path) -> None:
    overrides = ("trainer.max_steps=6", "trainer.log_every=2", "trainer.validate_every=6", "trainer.checkpoint_every=6")
    summaries = {}
    for ranks, rank_options in (
        (1, ()),
        (2, ("trainer.parallelism.tensor=2", "plugins=[tests.parallel.commands.fake_energy_meter]")),
    ):
        train_on_ranks(small_run, ranks, *overrides, *rank_options, f"save_loc={small_run}/{ranks}")
        summaries[ranks] = json.loads((small_run / str(ranks) / "summary.json").read_text())
    summary_of_one, summary_of_two = summaries[1], summaries[2]
    assert summary_of_two["tflop_per_step"] == pytest.approx(summary_of_one["tflop_per_step"]), (
        "the network of one sample, whoever computes"
    )
    assert summary_of_two["samples"] == summary_of_one["samples"] == 24 and summary_of_two["processes"] == 2
    assert summary_of_two["process_hours"] == pytest.approx(2 * summary_of_two["wall_hours"])
    # Energy is read for three rows of the log and at the end.
    assert summary_of_two["energy_kwh"] == pytest.approx(4 * (100 + 200) / 3.6e6)
    assert "energy_kwh" not in summary_of_one
    for ranks, summary in summaries.items():
        achieved = summary["tflop_per_step"] * summary["samples_per_s_mean"] / 4 / ranks
        # A step has 4 samples. The rollout has two steps in both runs.
        assert summary["tflops"] == pytest.approx(achieved)
