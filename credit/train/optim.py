"""AdamW without decay on norms and biases, and a learning rate that knows the run's length."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from credit.config.schema_trainer import ScheduleConfig, TrainerConfig
from credit.parallel.blocks.marks import plain_name


def build_optimizer(model: nn.Module, conf: TrainerConfig) -> torch.optim.AdamW:
    """Return fused AdamW; only matrices and kernels decay, never gains, biases or vectors.

    Parameters are grouped by the mesh that they lie on, as one kernel takes those of one mesh. Their state starts
    as zeros at once, so that every checkpoint has the same names.
    """
    groups: dict[tuple[bool, object], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault((parameter.dim() > 1, getattr(parameter, "device_mesh", None)), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": ps, "weight_decay": conf.weight_decay if decays else 0.0} for (decays, _), ps in groups.items()],
        lr=conf.learning_rate,
        betas=conf.betas,
        fused=True,
    )
    for parameter in (p for ps in groups.values() for p in ps):
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, total: int, peak: float, conf: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0) in a run of `total` steps.

    Linear warm-up over ``warmup * total`` steps, then constant, or a half cosine down to ``final * peak``.
    """
    warmup = conf.warmup * total
    if step < warmup:
        return peak * (step + 1) / (math.ceil(warmup) or 1)
    if conf.kind == "constant":
        return peak
    progress = (step - warmup) / max(total - warmup, 1)
    return peak * (conf.final + (1 - conf.final) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def forecast_len_at(step: int, total: int, forecast_len: int, ramp: Mapping[float, int] | None) -> int:
    """Return the length of the training rollout at optimizer step `step` (from 0) of `total`.

    Args:
        step: the step.
        total: steps of the run.
        forecast_len: the length without a ramp.
        ramp: share of the run -> length from there on, beginning with 0.
    """
    if ramp is None:
        return forecast_len
    return [length for share, length in sorted(ramp.items()) if step >= share * total][-1]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's live state as ``PARAMETER/KEY`` -> tensor."""
    return {
        f"{plain_name(name)}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
