"""Tests of properties that only many steps show: errors of bfloat16, and equality of tensor peers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from credit.parallel.mesh import DeviceGrid
from tests.parallel.forked import launch
from tests.parallel.training import cases
from tests.parallel.training.many_steps_worker import LOW_PRECISION

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses of two sharded ranks, and a comparison of two tensor peers."""
    folder = tmp_path_factory.mktemp("long")
    launch("tests.parallel.training.many_steps_worker", 2, str(folder))
    return json.loads((folder / "facts.json").read_text())


def test_bfloat16_errors_of_sharded_ranks_are_those_of_autocast(results_of_two_ranks: dict[str, Any]) -> None:
    """Sharded ranks have weights and activations in bfloat16, and one process uses autocast.

    The errors of their losses, relative to float32, are of the same size.
    """
    sharded_losses = torch.tensor(results_of_two_ranks["losses"])
    autocast_losses = cases.train(LOW_PRECISION, DeviceGrid())["loss"]
    float32_losses = cases.train(replace(LOW_PRECISION, amp=False), DeviceGrid())["loss"]
    autocast_error = (autocast_losses - float32_losses).abs() / float32_losses
    assert ((sharded_losses - float32_losses).abs() / float32_losses).mean() < 2 * autocast_error.mean() + 1e-4
    assert ((sharded_losses - float32_losses).abs() / float32_losses).max() < 3 * autocast_error.max() + 1e-3


def test_parameters_that_are_not_split_stay_equal_on_tensor_peers(results_of_two_ranks: dict[str, Any]) -> None:
    assert len(results_of_two_ranks["equal"]) > 20
    assert all(results_of_two_ranks["equal"].values()), results_of_two_ranks["equal"]
