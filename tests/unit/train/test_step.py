"""A step that is not finite, in loss or gradient, leaves the weights alone."""

from __future__ import annotations

import pytest
import torch

from credit.parallel.mesh import RunMesh
from tests.parallel import cases


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped(what: str) -> None:
    case = cases.Case(spectral_norm=False)
    model, autocast = cases.build(case, RunMesh(), "none")
    step, *_ = cases.build_step(case, model, autocast, RunMesh())
    pointwise = step._loss
    # an infinite loss with a finite gradient, and the other way round
    broken = {
        "loss": lambda a, b: pointwise(a, b) + torch.tensor(torch.inf),
        "gradient": lambda a, b: pointwise(a, b) + (0 * a).abs().sqrt().sum(),
    }
    step._loss = broken[what]
    before = [p.detach().clone() for p in model.parameters()]
    result = step(cases.batches(case, RunMesh()), 0, 1e-3)
    assert torch.isfinite(result.loss) == (what == "gradient")
    assert torch.isfinite(result.grad_norm) == (what == "loss")
    assert result.bad == 1
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    step._loss = pointwise
    assert step(cases.batches(case, RunMesh()), 1, 1e-3).bad == 0
    assert not all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
