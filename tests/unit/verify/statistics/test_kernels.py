"""Tests that compiled sums are equal to the last bit in the process that compiles and in one that loads them."""

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
# The cells fill more than one block, and a remainder that does not fill a vector register.
CELLS, MEMBERS = 2500, 5


def compute_sums() -> dict[str, np.ndarray]:
    """Return the result of every compiled function for random fields of two channels, which form a vector."""
    random = np.random.default_rng(7)
    truth, climatology, forecast, initial_anomaly = random.normal(3.0, 1.0, (4, 2, CELLS)).astype(np.float32)
    members = random.normal(3.0, 1.0, (MEMBERS, 2, CELLS)).astype(np.float32)
    valid = random.random((2, CELLS)) < 0.8
    segments = np.array([0, 1001]), np.array([1001, CELLS])
    scale = np.float32(0.25)
    damping = np.array([0.7, 0.9])
    num_sums = kernels.NUM_TRUTH_SUMS + kernels.NUM_FORECAST_SUMS + kernels.NUM_DAMPED_SUMS
    out = {
        "error_sums": np.empty((2, num_sums, 2)),
        "lengths": np.empty((3 * kernels.NUM_LENGTH_SUMS, 2)),
        "field_sums": np.empty((1, 2)),
        "product_sums": np.empty((1, 2)),
        "anomaly_sums": np.empty((2, 2)),
        "weighted_sums": np.empty((2, 3)),
        "member_sums": np.empty((ensemble_kernels.NUM_MEMBER_SUMS + MEMBERS + 1, 2)),
        "vector_member_sums": np.empty((2, 2)),
    }
    inputs = kernels.ErrorInputs(
        truth=truth,
        climatology_weights=np.ones(1, np.float32),
        climatology_terms=(climatology,),
        forecasts=(forecast,),
        initial_anomaly=initial_anomaly,
        damping=damping,
        valid=valid,
        is_masked=np.array([True, True]),
    )
    kernels.error_sums(inputs, np.arange(2), scale, segments, out["error_sums"], out["lengths"])
    kernels.field_sums(truth[0], segments, out["field_sums"])
    kernels.product_sums(truth[0], forecast[0], segments, out["product_sums"])
    kernels.anomaly_sums(truth[0], climatology[0], segments, out["anomaly_sums"])
    kernels.weighted_sums(out["anomaly_sums"], random.random((2, 3)), out["weighted_sums"])
    ensemble_kernels.member_sums(members, 0, truth[0], valid[0], segments, out["member_sums"])
    ensemble_kernels.vector_member_sums(members, (0, 1), *truth, valid[0], scale, segments, out["vector_member_sums"])
    return out


def print_digests() -> None:
    """Print the name and the digest of each result."""
    for name, values in compute_sums().items():
        assert np.isfinite(values).all(), name
        print(name, hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest())


@pytest.mark.slow
def test_cached_code_computes_equal_sums_to_the_last_bit(tmp_path: Path) -> None:
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
