"""FSDP2: every marked block is a sharding unit, the model around them is one more.

The functions here are the package's binding interface to other programs; `credit.parallel.parallelize` composes them
with tensor parallelism for our own trainer.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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

from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.entry_points import copy_returned_views, custom_entries
from credit.parallel.blocks.sharding_units import (
    _has_fsdp2_shard,
    _is_shardable,
    find_units,
    fsdp2_is_applied,
    require_shardable,
    split_by_dtype,
)
from credit.parallel.precision import _build_mp_policy, _fix_spectral_norm_dtype, read_section, read_switch
from credit.parallel.process_info import read_process_info
from credit.parallel.state.full_state import gather_state, gather_weights, scatter_state, scatter_weights

# names of the binding interface that are defined elsewhere
__all__ = [
    "_apply_activation_checkpointing",
    "_build_mp_policy",
    "_fix_spectral_norm_dtype",
    "_has_fsdp2_shard",
    "_is_shardable",
    "apply_fsdp2",
    "fsdp2_is_applied",
    "fsdp2_load_optimizer_state_dict",
    "fsdp2_load_state_dict",
    "fsdp2_optimizer_state_dict",
    "fsdp2_state_dict",
    "logger",
    "set_gradient_sync",
    "reshard",
    "shard_units",
]

logger = logging.getLogger(__name__)


def apply_fsdp2(model: nn.Module, dp_mesh: DeviceMesh | None, conf: Mapping[str, Any]) -> nn.Module:
    """Shard `model` over `dp_mesh`: each block marked ``_fsdp2_shard``, then the rest; in place, returns the model.

    Args:
        model: plain, or split by tensor parallelism over another axis of the mesh that `dp_mesh` belongs to.
        dp_mesh: the data-parallel axis (two axes: replicate, shard); None for all ranks, also if this process is the
            only one.
        conf: a whole config as nested dicts, of which these keys are read: in ``trainer`` ``activation_checkpoint``,
            ``amp``, ``fsdp2_mp_policy``, ``parallelism.cpu_offload`` and ``parallelism.reshard_after_forward``, in
            ``model`` ``use_spectral_norm``.

    Raises:
        ConfigError: for a value in `conf` that is none of its choices, or a model that cannot be sharded.
    """
    trainer = read_section(conf, "trainer")
    parallelism = read_section(trainer, "parallelism", "trainer.")
    reshard_after_forward = read_switch(parallelism, "trainer.parallelism.reshard_after_forward", default=True)
    cpu_offload = read_switch(parallelism, "trainer.parallelism.cpu_offload", default=False)
    policy = _build_mp_policy(conf)
    require_shardable(model)
    checkpointing = trainer.get("activation_checkpoint")
    if checkpointing not in (None, False):
        checkpoint_blocks(model, checkpointing)
    if policy is not None:
        _fix_spectral_norm_dtype(model, policy.param_dtype)
    dp_mesh = _all_ranks() if dp_mesh is None else dp_mesh
    shard_units(model, dp_mesh, dp_mesh, policy, reshard_after_forward, cpu_offload)
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
        reshard_after_forward: free whole weights after the forward and gather them again for the backward. After a
            forward without gradients all are freed in any case.
        cpu_offload: keep parameters, gradients and optimizer state in host memory.

    Raises:
        ConfigError: for a module or parameter that FSDP2 cannot shard.
    """
    require_shardable(model)
    _make_contiguous(model)
    policy = policy or MixedPrecisionPolicy()
    # a CPU has no memory to pin
    offload = CPUOffloadPolicy(pin_memory=whole_mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    units = find_units(model)
    taken: set[int] = set()
    resharding = _ReshardWithoutGradients()
    for unit in units:
        # the backward pass begins with the last unit: gathered weights would be freed only to be gathered again
        free = reshard_after_forward and unit is not units[0] and unit is not model
        for module in split_by_dtype(unit, taken):
            parameters = [p for p in module.parameters() if id(p) not in taken]
            copy_returned_views(module)
            fully_shard(
                module,
                mesh=split_mesh if _is_split(parameters) else whole_mesh,
                reshard_after_forward=free,
                mp_policy=policy if module is model else replace(policy, output_dtype=None),
                offload_policy=offload,
            )
            taken.update(map(id, module.parameters()))
            if not free:
                resharding.watch(module)
        for name in custom_entries(unit):
            register_fsdp_forward_method(unit, name)
            if not free:
                setattr(unit, name, resharding.wrap_entry_point(getattr(unit, name)))


class _ReshardWithoutGradients:
    """Reshard the weights that FSDP2 keeps gathered for a backward pass after calls without gradients, which have none.

    An optimizer that is built while weights are whole would not train them: after the backward pass the model's
    parameters are the sharded ones. Where gradients are on, a call is counted and nothing else is done.

    The outermost call counts: a forward may call entry points of the same module, which need its weights afterwards.
    """

    def __init__(self) -> None:
        self._kept: list[FSDPModule] = []
        self._depth = 0

    def watch(self, module: FSDPModule) -> None:
        """Register a module whose weights stay gathered after a forward."""
        self._kept.append(module)
        module.register_forward_pre_hook(lambda *_: self._enter(), prepend=True)
        # A forward that raises must count as ended, too.
        module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def wrap_entry_point(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return an entry point of such a module that counts as a forward."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return method(*args, **kwargs)
            finally:
                self._leave()

        return call

    def _enter(self) -> None:
        self._depth += 1

    def _leave(self) -> None:
        self._depth -= 1
        if not self._depth and not torch.is_grad_enabled():
            for module in self._kept:
                module.reshard()


def fsdp2_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: return a copy of the whole state on the CPU of rank 0, an empty dict elsewhere."""
    return gather_weights(model)


def fsdp2_load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Collective: load a whole state dict that rank 0 has; the other ranks' arguments are not read.

    Names may have what wrappers put into them: ``module.`` (also repeated), ``_orig_mod.``,
    ``_checkpoint_wrapped_module.``, ``_fsdp_wrapped_module.``.

    Raises:
        CheckpointError: on every rank, for missing, unexpected or doubled names, other shapes, and tensors that are
            not whole, such as those of ``model.state_dict()`` of a sharded model; the model is as it was.
    """
    scatter_weights(model, state_dict)


def fsdp2_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collective: return a copy of the whole optimizer state on the CPU of rank 0, an empty dict elsewhere.

    Returns:
        ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [name, ...]}, ...]}``.
    """
    reshard(model)
    return gather_state(model, optimizer)


def fsdp2_load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Collective: load a whole optimizer state that rank 0 has; the other ranks' arguments are not read.

    A parameter without saved state, because it never had a gradient, gets zeros, which is how it would start.

    Raises:
        CheckpointError: on every rank, if the state is of other parameters or not whole.
    """
    reshard(model)
    scatter_state(model, optimizer, state_dict)


def _apply_activation_checkpointing(model: nn.Module) -> None:
    """Checkpoint every marked block that is not wrapped yet, without reentrance; in place, before sharding."""
    if any(map(_has_fsdp2_shard, model.modules())):
        checkpoint_blocks(model)


def _all_ranks() -> DeviceMesh:
    """Return the mesh of all ranks, for which a process group is made where there is none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if read_process_info().world > 1:
            dist.init_process_group(backend)
        else:
            logger.info("no process group: one of this process alone is made")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif dist.get_backend() == "gloo":
        device = "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def _make_contiguous(model: nn.Module) -> None:
    """Lay out weights of another memory format (channels_last) row by row, in place: FSDP2 shards no others."""
    strided = [parameter for parameter in model.parameters() if not parameter.is_contiguous()]
    for parameter in strided:
        parameter.data = parameter.data.contiguous()
    if strided:
        logger.info(
            "%d weights are in another memory format than FSDP2 shards (channels_last); they are made contiguous, and "
            "inputs may stay in theirs",
            len(strided),
        )


def _is_split(parameters: Iterable[nn.Parameter]) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in parameters)


def reshard(model: nn.Module) -> None:
    """Free whole weights that a forward without backward has left, so that parameters are the sharded ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Say whether the next backward passes reduce the gradients over the ranks or add them up on each."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
