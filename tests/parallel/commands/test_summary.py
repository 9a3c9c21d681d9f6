"""The summary of a run on two ranks has the sum of what both have used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.commands.test_train_command import train

pytestmark = pytest.mark.slow


def test_two_ranks_use_what_both_use(small_run: Path) -> None:
    overrides = ("trainer.max_steps=6", "trainer.log_every=2", "trainer.validate_every=6", "trainer.checkpoint_every=6")
    said = {}
    for ranks, own in (
        (1, ()),
        (2, ("trainer.parallelism.tensor=2", "plugins=[tests.parallel.commands.fake_energy_meter]")),
    ):
        train(small_run, ranks, *overrides, *own, f"save_loc={small_run}/{ranks}")
        said[ranks] = json.loads((small_run / str(ranks) / "summary.json").read_text())
    one, two = said[1], said[2]
    assert two["tflop_per_step"] == pytest.approx(one["tflop_per_step"]), "the network of one sample, whoever computes"
    assert two["samples"] == one["samples"] == 24 and two["processes"] == 2
    assert two["process_hours"] == pytest.approx(2 * two["wall_hours"])
    # three times rows, and the end
    assert two["energy_kwh"] == pytest.approx(4 * (100 + 200) / 3.6e6)
    assert "energy_kwh" not in one
    for ranks, summary in said.items():
        achieved = summary["tflop_per_step"] * summary["samples_per_s_mean"] / 4 / ranks
        # the rollout has two steps in all of them
        assert summary["tflops"] == pytest.approx(achieved)
