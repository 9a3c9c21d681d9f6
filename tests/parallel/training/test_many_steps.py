"""Properties that only many steps show: bfloat16 follows float32 as on one process; tensor peers stay equal."""

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
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two ranks."""
    folder = tmp_path_factory.mktemp("long")
    launch("tests.parallel.training.many_steps_worker", 2, str(folder))
    return json.loads((folder / "facts.json").read_text())


def test_bfloat16_trains_as_on_one_process(two_ranks: dict[str, Any]) -> None:
    """Sharded, weights and activations are bfloat16; on one process autocast is. Both are as far from float32."""
    sharded_losses = torch.tensor(two_ranks["losses"])
    autocast_losses = cases.train(LOW_PRECISION, DeviceGrid())["loss"]
    float32_losses = cases.train(replace(LOW_PRECISION, amp=False), DeviceGrid())["loss"]
    autocast_error = (autocast_losses - float32_losses).abs() / float32_losses
    assert ((sharded_losses - float32_losses).abs() / float32_losses).mean() < 2 * autocast_error.mean() + 1e-4
    assert ((sharded_losses - float32_losses).abs() / float32_losses).max() < 3 * autocast_error.max() + 1e-3


def test_what_is_whole_on_tensor_peers_stays_equal_on_them(two_ranks: dict[str, Any]) -> None:
    assert len(two_ranks["equal"]) > 20
    assert all(two_ranks["equal"].values()), two_ranks["equal"]
