"""Compiled sums are the same to the last bit in the process that compiles them and in those that load them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from credit.verify.statistics import ensemble_kernels, kernels

REPOSITORY = Path(__file__).parents[4]
CELLS, MEMBERS = 2500, 5  # more than one block, and a rest that fills no vector of the processor


def compute_sums() -> dict[str, np.ndarray]:
    """Return the results of every compiled function, of random fields of two channels that make a vector."""
    random = np.random.default_rng(7)
    truth, normal, forecast, first = random.normal(3.0, 1.0, (4, 2, CELLS)).astype(np.float32)
    members = random.normal(3.0, 1.0, (MEMBERS, 2, CELLS)).astype(np.float32)
    valid = random.random((2, CELLS)) < 0.8
    stretches = np.array([0, 1001]), np.array([1001, CELLS])
    scale, damping = np.float32(0.25), np.array([0.7, 0.9])
    rows = kernels.TRUTH_SUMS + kernels.FORECAST_SUMS + kernels.DAMPED_SUMS
    out = {
        "error_sums": np.empty((2, rows, 2)),
        "lengths": np.empty((3 * kernels.LENGTH_SUMS, 2)),
        "plain_sums": np.empty((1, 2)),
        "product_sums": np.empty((1, 2)),
        "anomaly_sums": np.empty((2, 2)),
        "weighted_sums": np.empty((2, 3)),
        "member_sums": np.empty((ensemble_kernels.MEMBER_SUMS + MEMBERS + 1, 2)),
        "vector_member_sums": np.empty((2, 2)),
    }
    masked = np.array([True, True])
    kernels.error_sums(
        np.arange(2), truth, np.ones(1, np.float32), (normal,), (forecast,), first, damping, valid, masked, scale,
        *stretches, out["error_sums"], out["lengths"],
    )  # fmt: skip
    kernels.plain_sums(truth[0], *stretches, out["plain_sums"])
    kernels.product_sums(truth[0], forecast[0], *stretches, out["product_sums"])
    kernels.anomaly_sums(truth[0], normal[0], *stretches, out["anomaly_sums"])
    kernels.weighted_sums(out["anomaly_sums"], random.random((2, 3)), out["weighted_sums"])
    ensemble_kernels.member_sums(members, 0, truth[0], valid[0], *stretches, out["member_sums"])
    ensemble_kernels.vector_member_sums(members, (0, 1), *truth, valid[0], scale, *stretches, out["vector_member_sums"])
    return out


def print_digests() -> None:
    """Print the name and the digest of each result."""
    for name, values in compute_sums().items():
        assert np.isfinite(values).all(), name
        print(name, hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest())


@pytest.mark.slow
def test_code_from_the_cache_adds_up_in_the_order_of_the_code_that_was_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NUMBA_CACHE_DIR": str(tmp_path)}
    code = f"from {__name__} import print_digests; print_digests()"
    digests = []
    for _ in range(2):
        finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        digests.append(finished.stdout.splitlines())
    assert list(tmp_path.rglob("*.nbc"))
    compiled, loaded = digests
    assert len(compiled) == 8
    assert loaded == compiled
