"""Comparison of what `cases.train` returns on many ranks and on one process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, stack


def require_equal_training(results: Mapping[str, Tensor], expected: Mapping[str, Tensor], double: bool) -> None:
    """Require outputs, losses, norms and the first gradients of many ranks to be those of one process.

    Args:
        results: result of `cases.train` on many ranks.
        expected: result on one process.
        double: True for training in float64, which is compared to 1e-9 instead of 1e-5.
    """
    assert results.keys() == expected.keys()
    limit = 1e-9 if double else 1e-5
    for key in ("output", "loss"):
        error = (results[key] - expected[key]).abs().max() / expected[key].abs().max()
        assert error < limit, f"{key}: {error}"
    # Rounding grows from step to step. With the CRPS it grows faster, on every mesh, because its gradient jumps where
    # members tie with the truth. The logged norm is float32 in every case.
    norm_errors = (results["norm"] - expected["norm"]).abs() / expected["norm"]
    assert norm_errors[0] < 1e-5 and norm_errors.max() < 1e-3, norm_errors
    gradient_keys = [key for key in expected if key.startswith("gradient/")]
    total = stack([expected[key].norm() for key in gradient_keys]).norm()
    for key in gradient_keys:
        error = (results[key] - expected[key]).norm()
        assert error < limit * expected[key].norm() + limit / 100 * total, f"{key}: {error}"


def require_equal_weights(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Require the weights after training in float64 to be those of one process, to 1e-9."""
    names = [key.removeprefix("weight/") for key in expected if key.startswith("weight/")]
    # In exact arithmetic, the gradient of these is zero: position biases of windows of one cell, and biases that a norm
    # removes. Adam makes whole steps of its rounding.
    without_gradient = [name for name in names if expected[f"gradient/{name}"].norm() < 1e-12]
    assert all("position_bias" in name or "refine" in name for name in without_gradient)
    assert len(without_gradient) < len(names) / 3
    for name in names:
        if name in without_gradient:
            continue
        weight, expected_weight = results[f"weight/{name}"], expected[f"weight/{name}"]
        error = (weight - expected_weight).abs().max() / expected_weight.abs().max()
        assert error < 1e-9, f"{name}: {error}"
