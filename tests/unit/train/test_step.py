"""Tests of the training step: clipping inside the optimizer, and steps that are not finite."""

from __future__ import annotations

import pytest
import torch

from credit.config.sections.trainer import TrainerConfig
from credit.parallel.mesh import DeviceGrid
from tests.parallel.training import cases


@pytest.mark.parametrize("non_finite", ["loss", "gradient"])
def test_a_non_finite_step_is_skipped(non_finite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.Case(spectral_norm=False)
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, *_ = cases.build_step(case, model, autocast, DeviceGrid())
    finite_loss = step._objective.loss

    def infinite_loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return finite_loss(prediction, target) + torch.tensor(torch.inf)

    def infinite_gradient(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # The square root has no finite derivative at 0.
        return finite_loss(prediction, target) + (0 * prediction).abs().sqrt().sum()

    parameters_before = [parameter.detach().clone() for parameter in model.parameters()]

    def is_unchanged() -> bool:
        pairs = zip(model.parameters(), parameters_before, strict=True)
        return all(torch.equal(parameter, before) for parameter, before in pairs)

    with monkeypatch.context() as patch:
        patch.setattr(step._objective, "loss", infinite_loss if non_finite == "loss" else infinite_gradient)
        result = step(cases.batches(case, DeviceGrid()), 0, 1e-3)
    assert torch.isfinite(result.loss) == (non_finite == "gradient")
    assert torch.isfinite(result.grad_norm) == (non_finite == "loss")
    assert result.skipped == 1
    assert is_unchanged()
    assert step(cases.batches(case, DeviceGrid()), 1, 1e-3).skipped == 0
    assert not is_unchanged()


@pytest.mark.parametrize("max_norm", [0.3, 1e6, torch.inf])
def test_clipping_matches_torch_and_plain_adamw(max_norm: float) -> None:
    case = cases.Case(accumulation=2)
    model, autocast = cases.build(case, DeviceGrid(), "none")
    step, optimizer, _ = cases.build_step(case, model, autocast, DeviceGrid())
    step._max_norm = max_norm
    parameters = list(model.parameters())
    references = [torch.nn.Parameter(parameter.detach().double()) for parameter in parameters]
    matrices = [reference for reference in references if reference.dim() > 1]
    vectors = [reference for reference in references if reference.dim() <= 1]
    reference_optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=TrainerConfig.model_fields["betas"].default,
        fused=False,
    )
    reference_norms = []

    def step_reference(*_: object) -> None:
        for reference, parameter in zip(references, parameters, strict=True):
            reference.grad = parameter.grad.double()
        reference_norms.append(torch.nn.utils.clip_grad_norm_(references, max_norm))
        for group in reference_optimizer.param_groups:
            group["lr"] = 1e-3
        reference_optimizer.step()

    optimizer.register_step_pre_hook(step_reference)
    batches = cases.batches(case, DeviceGrid())
    norms = [step(batches, number, 1e-3).grad_norm.double() for number in range(3)]
    assert torch.allclose(torch.stack(norms), torch.stack(reference_norms), rtol=1e-6)
    assert max_norm > 0.3 or all(norm > 0.3 for norm in reference_norms), "nothing was clipped"
    for reference, parameter in zip(references, parameters, strict=True):
        # Adam turns the rounding of tiny gradients into a fraction of a step of 1e-3.
        assert torch.allclose(parameter.double(), reference, rtol=1e-5, atol=2e-6)
        # A step of Adam hardly depends on the size of the gradients, but their running mean does.
        mean = optimizer.state[parameter]["exp_avg"].double()
        reference_mean = reference_optimizer.state[reference]["exp_avg"]
        assert (mean - reference_mean).norm() < 1e-4 * reference_mean.norm() + 1e-9
