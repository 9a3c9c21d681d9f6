"""Test of the example of docs/use_the_sharding.md: a U-Net trains equally on one process and on 2 x 2 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.torchrun import REPOSITORY

pytestmark = pytest.mark.slow

EXAMPLE = REPOSITORY / "docs" / "examples" / "denoising_unet.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4")
# Relative tolerance. Several ranks add in another order than one process.
TOLERANCE = 1e-5


def run_example(*arguments: str, ranks: int = 1) -> dict[str, list[list[float]]]:
    """Run the example and return [loss, gradient norm] of each step, for ``trained`` and ``resumed`` steps."""
    launcher = TORCHRUN if ranks > 1 else ()
    command = [sys.executable, *launcher, str(EXAMPLE), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr[-8000:]
    return json.loads(result.stdout)


def test_example_trains_equally_on_one_process_and_four_ranks(tmp_path: Path) -> None:
    one_process = run_example(str(tmp_path / "one"))
    four_ranks = run_example(str(tmp_path / "four"), "--tensor-ranks", "2", ranks=4)
    for result in (one_process, four_ranks):
        assert result["resumed"] == result["trained"][3:]
    losses = [loss for loss, _ in one_process["trained"]]
    assert losses[-1] < 0.9 * losses[0]
    require_equal(four_ranks["trained"], one_process["trained"])
    # One process continues from the checkpoint of four ranks, and four ranks from that of one process.
    resumed_by_one = run_example(str(tmp_path / "four"), "--resume-only")
    require_equal(resumed_by_one["resumed"], one_process["resumed"])
    resumed_by_four = run_example(str(tmp_path / "one"), "--resume-only", "--tensor-ranks", "2", ranks=4)
    require_equal(resumed_by_four["resumed"], one_process["resumed"])


def require_equal(steps: list[list[float]], expected_steps: list[list[float]]) -> None:
    assert len(steps) == len(expected_steps)
    for step, expected in zip(steps, expected_steps, strict=True):
        assert step == pytest.approx(expected, rel=TOLERANCE)
