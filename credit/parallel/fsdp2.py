"""FSDP2: every marked block is a sharding unit, the model around them is one more.

The functions here are the package's binding interface to other programs; `credit.parallel.apply` composes them with
tensor parallelism for our own trainer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError, ConfigError, did_you_mean
from credit.parallel.activation import checkpoint_blocks, plain_name, wrapped_modules
from credit.parallel.entries import copy_returned_views, custom_entries
from credit.parallel.launch import read_launch
from credit.parallel.optimizer_state import gather_state, scatter_state
from credit.parallel.reduce import local_part
from credit.parallel.verdict import on_main, rank_of

logger = logging.getLogger(__name__)

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_POLICY = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def apply_fsdp2(model: nn.Module, dp_mesh: DeviceMesh | None, conf: Mapping[str, Any]) -> nn.Module:
    """Shard `model` over `dp_mesh`: each block marked ``_fsdp2_shard``, then the rest; in place, returns the model.

    Args:
        model: plain, or split by tensor parallelism over another axis of the mesh that `dp_mesh` belongs to.
        dp_mesh: the data-parallel axis (two axes: replicate, shard); None for all ranks, also if this process is the
            only one.
        conf: a whole config as nested dicts; ``trainer.activation_checkpoint``, ``trainer.amp``,
            ``trainer.fsdp2_mp_policy`` and ``model.use_spectral_norm`` are read.

    Raises:
        ConfigError: for a value in `conf` that is none of its choices, or a model that cannot be sharded.
    """
    checkpointing = _section(conf, "trainer").get("activation_checkpoint", False)
    if checkpointing:
        checkpoint_blocks(model, checkpointing)
    policy = _build_mp_policy(conf)
    if policy is not None:
        _fix_spectral_norm_dtype(model, policy.param_dtype)
    dp_mesh = _all_ranks() if dp_mesh is None else dp_mesh
    shard_units(model, dp_mesh, dp_mesh, policy)
    return model


def shard_units(
    model: nn.Module,
    whole_mesh: DeviceMesh,
    split_mesh: DeviceMesh,
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

    Raises:
        ConfigError: for parameters that FSDP2 cannot shard.
    """
    _require_shardable(model)
    policy = policy or MixedPrecisionPolicy()
    # a CPU has no memory to pin
    offload = CPUOffloadPolicy(pin_memory=whole_mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    units = _units(model)
    taken: set[int] = set()
    for unit in units:
        # the backward pass begins with the last unit: gathered weights would be freed only to be gathered again
        free = reshard_after_forward and unit is not units[0] and unit is not model
        for module in (*_of_other_dtype(unit, taken), unit):
            own = [p for p in module.parameters() if id(p) not in taken]
            copy_returned_views(module)
            fully_shard(
                module,
                mesh=split_mesh if _is_split(own) else whole_mesh,
                reshard_after_forward=free,
                mp_policy=policy if module is model else replace(policy, output_dtype=None),
                offload_policy=offload,
            )
            taken.update(map(id, module.parameters()))
        for name in custom_entries(unit):
            register_fsdp_forward_method(unit, name)


def fsdp2_is_applied(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to `model`; the config may ask for it and a caller skip it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def fsdp2_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the whole state on the CPU of rank 0, an empty dict elsewhere; collective."""
    state = get_model_state_dict(model, options=_WHOLE)
    # what is not sharded, a buffer say, would be the live one where the model is on the CPU
    live = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and _memory(value) in live else value
        for name, value in state.items()
    }


def fsdp2_load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Load a whole state dict that rank 0 has; the other ranks' arguments are not read. Collective.

    Raises:
        CheckpointError: on every rank, for missing or unexpected names and other shapes; the model is as it was.
    """
    # torch would load another shape without a word, and raise for names when it has loaded the rest
    wrong = on_main(lambda: _differences(model, state_dict))
    if wrong:
        raise CheckpointError(f"state dict: {'; '.join(wrong[:5])}{'; ...' if wrong[5:] else ''}; is it of this model?")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())
    # set_model_state_dict turns the dict that it is given into DTensors
    set_model_state_dict(model, dict(state_dict) if rank_of() == 0 else {}, options=options)


def fsdp2_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a copy of the whole optimizer state on the CPU of rank 0, an empty dict elsewhere; collective.

    Returns:
        ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [name, ...]}, ...]}``.
    """
    reshard(model)
    return gather_state(model, optimizer)


def fsdp2_load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load a whole optimizer state that rank 0 has; the other ranks' arguments are not read. Collective.

    A parameter without saved state, because it never had a gradient, gets zeros, which is how it would start.

    Raises:
        CheckpointError: on every rank, if the state is of other parameters.
    """
    reshard(model)
    scatter_state(model, optimizer, state_dict)


def _has_fsdp2_shard(module: nn.Module) -> bool:
    """Whether a module opted in as a sharding unit, as an instance or as a class."""
    return bool(getattr(module, "_fsdp2_shard", False))


def _apply_activation_checkpointing(model: nn.Module) -> None:
    """Checkpoint every marked block that is not wrapped yet, without reentrance; in place, before sharding."""
    if any(map(_has_fsdp2_shard, model.modules())):
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
        ConfigError: for an unknown key or dtype.
    """
    trainer = _section(conf, "trainer")
    asked = trainer.get("fsdp2_mp_policy")
    if not trainer.get("amp") or (_section(conf, "model").get("use_spectral_norm") and asked is None):
        return None
    if not isinstance(asked or {}, Mapping):
        raise ConfigError(f"trainer.fsdp2_mp_policy: {asked!r} is no section; its keys are {', '.join(_POLICY)}")
    for key, name in (asked or {}).items():
        if key not in _POLICY:
            raise ConfigError(f"trainer.fsdp2_mp_policy.{key}: there is no such key{did_you_mean(str(key), _POLICY)}")
        if not isinstance(name, str) or name not in _DTYPES:
            raise ConfigError(f"trainer.fsdp2_mp_policy.{key}: {name!r} is no dtype{did_you_mean(str(name), _DTYPES)}")
    return MixedPrecisionPolicy(**{key: _DTYPES[name] for key, name in (_POLICY | dict(asked or {})).items()})


def _fix_spectral_norm_dtype(model: nn.Module, param_dtype: torch.dtype) -> None:
    """Cast the ``weight_u`` and ``weight_v`` buffers of hook-style spectral norm to `param_dtype`, in place.

    The hook multiplies them with the weight as FSDP2 has cast it. Our own parametrization needs no cast: it computes
    in float32 whatever it is given.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in ("weight_u", "weight_v"):
                setattr(module, name, buffer.to(param_dtype))


def _section(conf: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config; one that is missing or empty is an empty one."""
    section = (conf.get(name) if isinstance(conf, Mapping) else conf) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name}: {section!r} is no section; conf is a whole config as nested dicts")
    return section


def _all_ranks() -> DeviceMesh:
    """Return the mesh of all ranks, for which a process group is made where there is none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if read_launch().world > 1:
            dist.init_process_group(backend)
        else:
            logger.info("no process group: one of this process alone is made")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif dist.get_backend() == "gloo":
        device = "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def _units(model: nn.Module) -> list[nn.Module]:
    """Return the sharding units, inner before outer and late before early; the last one is the model."""
    inside = wrapped_modules(model)
    units = [
        module
        for module in model.modules()
        if module is not model and _is_shardable(module, isinstance(module, CheckpointWrapper) or id(module) in inside)
    ]
    return [*reversed(units), model]


def _require_shardable(model: nn.Module) -> None:
    """Refuse what FSDP2 would fail on, some of it not before the first forward.

    Raises:
        ConfigError: naming the parameters.
    """
    if fsdp2_is_applied(model):
        raise ConfigError(f"{type(model).__name__} is sharded already; apply_fsdp2 is called once, on a plain model")
    unit_of: dict[int, int] = {}
    inside: set[int] = set()
    for number, unit in enumerate(_units(model)):
        own = [m for m in unit.modules() if id(m) not in inside]
        inside.update(map(id, own))
        for parameter in (p for module in own for p in module.parameters(recurse=False)):
            if unit_of.setdefault(id(parameter), number) != number:
                raise ConfigError(
                    f"{_names_of(model, parameter)}: one parameter in two units of sharding, but each must have its "
                    "own; call one module from both blocks, or do not mark them with _fsdp2_shard"
                )
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ConfigError(f"{plain_name(name)}: FSDP2 cannot shard a scalar; give it one dimension, torch.ones(1)")
        if parameter.is_complex():
            raise ConfigError(
                f"{plain_name(name)}: FSDP2 cannot be relied upon for complex parameters (bfloat16 loses the imaginary "
                "part); store both parts in a last dimension of 2, and use torch.view_as_complex in forward"
            )


def _names_of(model: nn.Module, parameter: nn.Parameter) -> str:
    names = [plain_name(n) for n, p in model.named_parameters(remove_duplicate=False) if p is parameter]
    return " and ".join(names)


def _of_other_dtype(unit: nn.Module, taken: set[int]) -> list[nn.Module]:
    """Return the submodules whose own weights differ in dtype from most of the unit's.

    FSDP2 reduces the gradients of a unit in one dtype, so they become units of their own.
    """
    counts: Counter[torch.dtype] = Counter()
    for parameter in unit.parameters():
        if parameter.requires_grad and id(parameter) not in taken:
            counts[parameter.dtype] += parameter.numel()
    if len(counts) < 2:
        return []
    usual = counts.most_common(1)[0][0]
    return [
        module
        for module in unit.modules()
        if module is not unit
        and any(p.requires_grad and p.dtype != usual and id(p) not in taken for p in module.parameters(recurse=False))
    ]


def _is_split(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def _differences(model: nn.Module, state_dict: Mapping[str, Any]) -> list[str]:
    """Return in words where a whole state dict does not fit the model."""
    if not isinstance(state_dict, Mapping):
        return [f"{type(state_dict).__name__} in place of a dict from names to tensors"]
    nameless = [f"the key {key!r} is no name" for key in state_dict if not isinstance(key, str)]
    if nameless:
        return nameless
    own_state = model.state_dict()
    tensors = {plain_name(name) for name, value in own_state.items() if isinstance(value, torch.Tensor)}
    strange = [
        name for name, v in state_dict.items() if plain_name(name) in tensors and not isinstance(v, torch.Tensor)
    ]
    if strange:
        return [f"{name} is no tensor" for name in strange]
    own, given = (
        {plain_name(name): tuple(getattr(value, "shape", ())) for name, value in state.items()}
        for state in (own_state, state_dict)
    )
    return (
        [f"{name} is missing" for name in own if name not in given]
        + [f"{name} is unknown" for name in given if name not in own]
        + [f"{name} is {given[name]}, here {own[name]}" for name in own if given.get(name, own[name]) != own[name]]
    )


def _memory(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


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
