"""Optimizer of a training run, and schedules of learning rate and rollout length."""

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

    The optimizer is fused AdamW, or `Muon`, which updates the matrices inside the network by Muon and all other
    parameters by AdamW.

    Weight decay applies only to matrices and convolution kernels. It does not apply to gains, biases and other vectors,
    or to the parameters of modules whose attribute `has_weight_decay` is False. The training step multiplies the
    learning rate of a parameter group by the entry ``lr_factor`` of the group.

    Args:
        model: the model, sharded or not.
        conf: the trainer section of the config.
    """
    # Parameters are identified by `id`, because `in` for a list or set of tensors may compare their elements. The keys
    # of a dict do not have this problem.
    ids_without_decay = set()
    for module in model.modules():
        if not getattr(module, "has_weight_decay", True):
            ids_without_decay |= {id(parameter) for parameter in module.parameters(recurse=False)}
    matrices = find_muon_matrices(model) if conf.optimizer == "muon" else {}
    # (has weight decay, factor on the learning rate, device mesh, output dimension of a Muon matrix) -> parameters.
    # All matrices of a group are exchanged over the same mesh.
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

    The rate rises linearly over the first ``warmup * total`` steps. After the warm-up, it depends on the schedule kind:

    - ``constant``: the rate stays at its peak;
    - ``cosine``: the rate falls as a half cosine to ``final * peak``;
    - ``warmup_stable_decay``: the rate stays at its peak. In the last ``decay * total`` steps, it falls to
      ``final * peak`` in proportion to 1 - sqrt(x), with x from 0 to 1 (Hägele et al. 2024, arXiv 2405.18392).

    Args:
        step: the optimizer step.
        total: number of optimizer steps of the run.
        peak: the learning rate after the warm-up.
        conf: the section ``trainer.schedule``.
    """
    warmup_steps = conf.warmup * total
    if step < warmup_steps:
        # Steps are counted from 1 here, so that the first step has a rate above 0.
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
        forecast_len: number of forecast steps if `ramp` is None.
        ramp: fraction of the run (0 to 1) -> number of forecast steps from this point on; the smallest fraction is 0.
            None for the same number in the complete run.
    """
    if ramp is None:
        return forecast_len
    # The smallest fraction is 0, so the list is never empty.
    reached_fractions = [fraction for fraction in ramp if step >= fraction * total]
    return ramp[max(reached_fractions)]


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer state, without a copy.

    Returns:
        Name ``PARAMETER/KEY``, such as ``head.weight/exp_avg`` -> tensor.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, tensor in optimizer.state.get(parameter, {}).items():
            tensors[f"{strip_wrapper_prefixes(name)}/{key}"] = tensor
    return tensors
