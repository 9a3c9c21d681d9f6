"""The optimizer of a run, and schedules of learning rate and rollout length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from credit.config.sections.trainer import ScheduleConfig, TrainerConfig
from credit.models.matrices import find_muon_matrices
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.train.adamw import AdamW
from credit.train.learning_rates import find_learning_rate_factors
from credit.train.muon import Muon


def build_optimizer(model: nn.Module, conf: TrainerConfig) -> AdamW:
    """Return the optimizer of ``trainer.optimizer`` for the trainable parameters of a model.

    It is fused AdamW, or Muon for the matrices inside the network with AdamW for all other parameters.

    Weight decay applies to matrices and convolution kernels only. It applies neither to gains, biases and other
    vectors, nor to the parameters of modules whose attribute `has_weight_decay` is False. The training step multiplies
    the learning rate of a group by its entry ``lr_factor``.

    Args:
        model: the model, sharded or not.
        conf: the trainer section of the config.
    """
    # Identities, because `in` of a list or set of tensors may compare their elements; the keys of a dict are safe.
    ids_without_decay = set()
    for module in model.modules():
        if not getattr(module, "has_weight_decay", True):
            ids_without_decay |= {id(parameter) for parameter in module.parameters(recurse=False)}
    matrices = find_muon_matrices(model) if conf.optimizer == "muon" else {}
    # (has weight decay, factor on the learning rate, mesh, dimension of the outputs of a matrix of Muon) -> parameters.
    # Matrices of one group are exchanged over one mesh.
    groups: dict[tuple[bool, float, object, int | None], list[nn.Parameter]] = {}
    factors = find_learning_rate_factors(model, conf.learning_rate_factors)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            has_decay = parameter.dim() > 1 and id(parameter) not in ids_without_decay
            device_mesh = getattr(parameter, "device_mesh", None)
            key = (has_decay, factors[name], device_mesh, matrices.get(parameter))
            groups.setdefault(key, []).append(parameter)
    param_groups: list[dict[str, Any]] = []
    for (has_decay, factor, _, out_dim), parameters in groups.items():
        weight_decay = conf.weight_decay if has_decay else 0.0
        group = {"params": parameters, "weight_decay": weight_decay, "lr_factor": factor}
        if out_dim is not None:
            group["out_dim"] = out_dim
        param_groups.append(group)
    if conf.optimizer == "muon":
        has_bfloat16_weights = conf.fsdp2_mp_policy is None or conf.fsdp2_mp_policy.param_dtype == "bfloat16"
        dtype = torch.bfloat16 if conf.amp and has_bfloat16_weights else None
        return Muon(param_groups, conf.learning_rate, conf.betas, dtype)
    return AdamW(param_groups, conf.learning_rate, conf.betas)


def learning_rate(step: int, total: int, peak: float, conf: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0) in a run of `total` steps.

    The rate rises linearly over ``warmup * total`` steps. The rest depends on the kind of the schedule:

    - ``constant``: the rate stays at its peak;
    - ``cosine``: it falls as a half cosine to ``final * peak``;
    - ``warmup_stable_decay``: it stays at its peak, and falls in the last ``decay * total`` steps to ``final * peak``,
      like 1 - sqrt(x) with x from 0 to 1 (Hägele et al. 2024, arXiv 2405.18392).

    Args:
        step: the optimizer step.
        total: number of optimizer steps of the run.
        peak: the learning rate after the warm-up.
        conf: the section ``trainer.schedule``.
    """
    warmup_steps = conf.warmup * total
    if step < warmup_steps:
        # Counting from 1 gives the first step a rate above 0.
        return peak * (step + 1) / math.ceil(warmup_steps)
    if conf.kind == "constant":
        return peak
    # `shape` falls from 1 at the start of the decay to 0 at the end of the run.
    if conf.kind == "cosine":
        progress = (step - warmup_steps) / max(total - warmup_steps, 1)
        shape = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        decay_start = (1 - conf.decay) * total
        progress = max(step - decay_start, 0.0) / max(total - decay_start, 1)
        shape = 1 - math.sqrt(min(progress, 1.0))
    return peak * (conf.final + (1 - conf.final) * shape)


def forecast_len_at(step: int, total: int, forecast_len: int, ramp: Mapping[float, int] | None) -> int:
    """Return the number of forecast steps in the training rollout at optimizer step `step` (from 0).

    Args:
        step: the optimizer step.
        total: number of optimizer steps of the run.
        forecast_len: the length if there is no ramp.
        ramp: fraction of the run (0 to 1) -> length from this point on, where the smallest fraction is 0; None for the
            same length in the whole run.
    """
    if ramp is None:
        return forecast_len
    # The smallest fraction is 0, so at least one has been reached.
    reached_fractions = [fraction for fraction in ramp if step >= fraction * total]
    return ramp[max(reached_fractions)]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer's state: ``PARAMETER/KEY`` (for example ``head.weight/exp_avg``) -> tensor, not copied."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{strip_wrapper_prefixes(name)}/{key}"] = tensor
    return tensors
