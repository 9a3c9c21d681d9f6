"""FSDP2: every marked block is a sharding unit, the model around them is one more.

The functions here are the package's binding interface to other programs; `credit.parallel.apply` composes them with
tensor parallelism for our own trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from credit.errors import ConfigError, did_you_mean
from credit.parallel.activation import checkpoint_blocks, plain_name

logger = logging.getLogger(__name__)

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_fsdp2(model: nn.Module, dp_mesh: DeviceMesh | None, conf: Mapping[str, Any]) -> nn.Module:
    """Shard `model` over `dp_mesh`: each block marked ``_fsdp2_shard``, then the rest; in place, returns the model.

    Args:
        model: plain, or split by tensor parallelism over another axis of the mesh that `dp_mesh` belongs to.
        dp_mesh: the data-parallel axis (two axes: replicate, shard); None for all ranks, also if this process is the
            only one.
        conf: a whole config as nested dicts; ``trainer.activation_checkpoint``, ``trainer.amp``,
            ``trainer.fsdp2_mp_policy`` and ``model.use_spectral_norm`` are read.
    """
    checkpointing = conf.get("trainer", {}).get("activation_checkpoint", False)
    if checkpointing:
        checkpoint_blocks(model, checkpointing)
    if dp_mesh is None and not dist.is_initialized():
        logger.info("no process group: one of this process alone is made")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = _build_mp_policy(conf)
    if policy is not None and policy.param_dtype is not None:
        _fix_spectral_norm_dtype(model, policy.param_dtype)
    shard_units(model, dp_mesh, dp_mesh, policy)
    return model


def shard_units(
    model: nn.Module,
    whole_mesh: DeviceMesh | None,
    split_mesh: DeviceMesh | None,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Apply ``fully_shard`` to the marked blocks and to the model around them, in place.

    Args:
        model: its blocks may be wrapped for checkpointing.
        whole_mesh: of units without split weights; their tensor-parallel peers have equal gradients, so the mean over
            all ranks is that over the data-parallel ones.
        split_mesh: of units with weights that tensor parallelism has split.
        policy: of mixed precision; only the model as a whole casts its output.
        reshard_after_forward: free whole weights after the forward and gather them again for the backward.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.
    """
    wrapped = _has_wrappers(model)
    units = [m for m in model.modules() if m is not model and _is_shardable(m, wrapped)]
    inside = {id(p) for unit in units for p in unit.parameters()}
    rest = [p for p in model.parameters() if id(p) not in inside]
    options: dict[str, Any] = {}
    if cpu_offload:
        # a CPU has no memory to pin
        pin = next(model.parameters()).device.type == "cuda" or torch.cuda.is_available()
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
    policy = policy or MixedPrecisionPolicy()
    for unit in units:
        mesh = split_mesh if _is_split(unit.parameters()) else whole_mesh
        # the backward pass begins with the last unit: gathered weights would be freed only to be gathered again
        free = reshard_after_forward and unit is not units[-1]
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=free, mp_policy=replace(policy, output_dtype=None), **options
        )
    mesh = split_mesh if _is_split(rest) else whole_mesh
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy, **options)
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        for unit in (model, *units):
            unit.register_forward_pre_hook(partial(_cast_dataclasses, policy.param_dtype), with_kwargs=True)
    for module in model.modules():
        for name in getattr(module, "_fsdp2_forward_methods", ()):
            register_fsdp_forward_method(module, name)
    for unit, following in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])


def fsdp2_is_applied(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to `model`; the config may ask for it and a caller skip it."""
    return isinstance(model, FSDPModule)


def fsdp2_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole state on the CPU of rank 0, an empty dict elsewhere; collective."""
    return get_model_state_dict(model, options=_WHOLE)


def fsdp2_load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Load a whole state dict that rank 0 has; the other ranks' arguments are not read. Collective.

    Raises:
        RuntimeError: on missing or unexpected names.
    """
    # set_model_state_dict turns the dict that it is given into DTensors
    set_model_state_dict(model, dict(state_dict), options=_BROADCAST)


def fsdp2_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the whole optimizer state on the CPU of rank 0, by parameter name; an empty dict elsewhere. Collective."""
    state = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
    # on the CPU, steps are the live optimizer's own tensors
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, state)


def fsdp2_load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a whole optimizer state that rank 0 has; the other ranks' arguments are not read. Collective.

    A parameter without saved state, because it never had a gradient, gets zeros, which is how it would start.
    """
    saved = dict(state_dict)
    if _is_first_rank():
        saved["state"] = dict(saved["state"]) | _zero_state(model, optimizer, saved)
    set_optimizer_state_dict(model, optimizer, saved, options=_BROADCAST)


def _has_fsdp2_shard(module: nn.Module) -> bool:
    """Whether a module opted in as a sharding unit, as an instance or as a class."""
    return bool(getattr(module, "_fsdp2_shard", False))


def _apply_activation_checkpointing(model: nn.Module) -> None:
    """Checkpoint every marked block that is not wrapped yet, without reentrance; in place, before sharding."""
    checkpoint_blocks(model)


def _is_shardable(module: nn.Module, ac_enabled: bool) -> bool:
    """Whether a module is a sharding unit: with checkpointing the wrapper around a marked block, else the block."""
    if ac_enabled:
        return isinstance(module, CheckpointWrapper) and _has_fsdp2_shard(module._checkpoint_wrapped_module)
    return not isinstance(module, CheckpointWrapper) and _has_fsdp2_shard(module)


def _build_mp_policy(conf: Mapping[str, Any]) -> MixedPrecisionPolicy | None:
    """Return the policy of a config, None where everything is to stay float32.

    Without ``trainer.amp`` there is none; with spectral norm only where ``trainer.fsdp2_mp_policy`` opts in.

    Raises:
        ConfigError: for an unknown dtype.
    """
    trainer = conf.get("trainer", {})
    asked = trainer.get("fsdp2_mp_policy")
    if not trainer.get("amp", False) or (conf.get("model", {}).get("use_spectral_norm", False) and not asked):
        return None
    chosen = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"} | dict(asked or {})
    for key, name in chosen.items():
        if name not in _DTYPES:
            raise ConfigError(f"trainer.fsdp2_mp_policy.{key}: {name!r} is no dtype{did_you_mean(str(name), _DTYPES)}")
    return MixedPrecisionPolicy(**{key: _DTYPES[name] for key, name in chosen.items()})


def _fix_spectral_norm_dtype(model: nn.Module, param_dtype: torch.dtype) -> None:
    """Cast the ``weight_u`` and ``weight_v`` buffers of hook-style spectral norm to `param_dtype`, in place.

    The hook multiplies them with the weight as FSDP2 has cast it. Our own parametrization needs no cast: it computes
    in float32 whatever it is given.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in ("weight_u", "weight_v"):
                setattr(module, name, buffer.to(param_dtype))


def _cast_dataclasses(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Cast floating tensors inside dataclass inputs, which FSDP2 does not look into (it does into dicts and lists)."""

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: tree_map(cast, getattr(value, f.name)) for f in fields(value) if f.init})
        return value

    return tree_map(cast, args), tree_map(cast, kwargs)


def _has_wrappers(model: nn.Module) -> bool:
    return any(_is_shardable(module, True) for module in model.modules())


def _is_split(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _zero_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, dict]:
    """Return zero state of the form that the saved parameters have for those that have none."""
    pattern = next(iter(saved["state"].values()), {})
    ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        plain_name(name): {
            key: torch.zeros((), dtype=value.dtype) if value.dim() == 0 else torch.zeros(p.shape, dtype=value.dtype)
            for key, value in pattern.items()
        }
        for name, p in model.named_parameters()
        if id(p) in ours and plain_name(name) not in saved["state"]
    }


def reshard(model: nn.Module) -> None:
    """Free whole weights that a forward without backward has left, so that parameters are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reduce_gradients(model: nn.Module, on: bool) -> None:
    """Say whether the next backward passes reduce the gradients over the ranks or add them up on each."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)


def each_unit(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the modules of one sharding unit after the other while their weights are whole; collective.

    A model that is not sharded is one unit.
    """
    seen: set[int] = set()
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in reversed(units or [model]):  # inner ones first
        own = [module for module in unit.modules() if id(module) not in seen]
        seen.update(map(id, own))
        if isinstance(unit, FSDPModule):
            unit.unshard()
        yield own
        if isinstance(unit, FSDPModule):
            unit.reshard()
