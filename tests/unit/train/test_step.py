"""Clipping in the optimizer is clipping before it; a step that is not finite leaves the weights alone."""

from __future__ import annotations

import pytest
import torch

from credit.parallel.mesh import DeviceGrid
from tests.parallel.training import cases


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped(what: str) -> None:
    case = cases.Case(spectral_norm=False)
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, *_ = cases.build_step(case, model, autocast, DeviceGrid())
    pointwise = step._objective.loss
    # an infinite loss with a finite gradient, and the other way round
    broken = {
        "loss": lambda a, b: pointwise(a, b) + torch.tensor(torch.inf),
        "gradient": lambda a, b: pointwise(a, b) + (0 * a).abs().sqrt().sum(),
    }
    step._objective.loss = broken[what]
    before = [p.detach().clone() for p in model.parameters()]
    result = step(cases.batches(case, DeviceGrid()), 0, 1e-3)
    assert torch.isfinite(result.loss) == (what == "gradient")
    assert torch.isfinite(result.grad_norm) == (what == "loss")
    assert result.bad == 1
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    step._objective.loss = pointwise
    assert step(cases.batches(case, DeviceGrid()), 1, 1e-3).bad == 0
    assert not all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("max_norm", [0.3, 1e6, torch.inf])
def test_clipped_steps_are_those_of_torch_clipping_and_plain_adamw(max_norm: float) -> None:
    case = cases.Case(accumulation=2)
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, optimizer, _ = cases.build_step(case, model, autocast, DeviceGrid())
    step._max_norm = max_norm
    parameters = list(model.parameters())
    copies = [torch.nn.Parameter(p.detach().double()) for p in parameters]
    decays = [[c for c in copies if c.dim() > 1], [c for c in copies if c.dim() <= 1]]
    groups = [{"params": ps, "weight_decay": decay} for ps, decay in zip(decays, (0.1, 0.0), strict=True)]
    plain = torch.optim.AdamW(groups, betas=optimizer.param_groups[0]["betas"], fused=False)
    norms = []

    def follow(*_: object) -> None:
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.grad = parameter.grad.double()
        norms.append(torch.nn.utils.clip_grad_norm_(copies, max_norm))
        for group in plain.param_groups:
            group["lr"] = 1e-3
        plain.step()

    optimizer.register_step_pre_hook(follow)
    source = cases.batches(case, DeviceGrid())
    told = [step(source, number, 1e-3).grad_norm.double() for number in range(3)]
    assert torch.allclose(torch.stack(told), torch.stack(norms), rtol=1e-6)
    assert max_norm > 0.3 or all(norm > 0.3 for norm in norms), "nothing was clipped"
    for copy, parameter in zip(copies, parameters, strict=True):
        # Adam turns rounding of tiny gradients into parts of a step of 1e-3
        assert torch.allclose(parameter.double(), copy, rtol=1e-5, atol=2e-6)
        # which hardly know the gradients' size, unlike their mean
        mean, expected = optimizer.state[parameter]["exp_avg"].double(), plain.state[copy]["exp_avg"]
        assert (mean - expected).norm() < 1e-4 * expected.norm() + 1e-9
