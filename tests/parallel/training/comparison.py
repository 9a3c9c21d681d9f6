"""Comparison of the results of `cases.train` on several ranks with those on one process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, stack


def require_equal_training(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], double: bool) -> None:
    """Require that outputs, losses, norms and first gradients of several ranks are those of one process.

    Args:
        results: result of `cases.train` on several ranks.
        expected: result on one process.
        double: True for training in float64, which is compared to 1e-9 instead of 1e-5.
    """
    assert results.keys() == expected.keys()
    limit = 1e-9 if double else 1e-5
    for key in ("output", "loss"):
        error = (results[key] - expected[key]).abs().max() / expected[key].abs().max()
        assert error < limit, f"{key}: {error}"
    # Rounding errors grow from step to step. With the CRPS they grow faster, on every mesh, because its gradient jumps
    # where a member equals the truth. The logged norm is float32 in every case.
    norm_errors = (results["norm"] - expected["norm"]).abs() / expected["norm"]
    assert norm_errors[0] < 1e-5 and norm_errors.max() < 1e-3, norm_errors
    gradient_keys = [key for key in expected if key.startswith("gradient/")]
    total = stack([expected[key].norm() for key in gradient_keys]).norm()
    for key in gradient_keys:
        error = (results[key] - expected[key]).norm()
        assert error < limit * expected[key].norm() + limit / 100 * total, f"{key}: {error}"


def require_equal_weights(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Require that the weights after training in float64 are those of one process, to 1e-9."""
    names = [key.removeprefix("weight/") for key in expected if key.startswith("weight/")]
    # Do not compare parameters whose gradient is zero in exact arithmetic: position biases of windows of one cell, and
    # biases that a norm removes. Adam turns the rounding errors of such a gradient into steps of full size.
    names_without_gradient = [name for name in names if expected[f"gradient/{name}"].norm() < 1e-12]
    assert all("position_bias" in name or "refine" in name for name in names_without_gradient)
    assert len(names_without_gradient) < len(names) / 3
    for name in names:
        if name in names_without_gradient:
            continue
        weight, expected_weight = results[f"weight/{name}"], expected[f"weight/{name}"]
        error = (weight - expected_weight).abs().max() / expected_weight.abs().max()
        assert error < 1e-9, f"{name}: {error}"
