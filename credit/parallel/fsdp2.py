"""Sharding of a model over data-parallel ranks with FSDP2, and whole state dicts of sharded models.

A sharding unit is a module whose weights FSDP2 gathers and frees together. Every block marked with ``_fsdp2_shard`` is
one unit, and the rest of the model is the last unit. A whole state dict consists of full, unsharded tensors.

Other programs call the functions in `__all__`. The names and arguments of these functions must not change, even if a
name has a leading underscore. `credit.parallel.parallelize` combines this sharding with tensor parallelism.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
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
from credit.parallel.blocks.entry_points import copy_returned_views, list_custom_entry_points
from credit.parallel.blocks.lazy_chunks import shard_lazily
from credit.parallel.blocks.sharding_units import (
    _has_fsdp2_shard,
    _is_shardable,
    find_sharding_units,
    fsdp2_is_applied,
    require_shardable,
    split_by_dtype,
)
from credit.parallel.precision import _build_mp_policy, _fix_spectral_norm_dtype, read_boolean, read_section
from credit.parallel.process_info import read_process_info
from credit.parallel.state.optimizer_state import gather_optimizer_state, scatter_optimizer_state
from credit.parallel.state.weights import gather_weights, scatter_weights

# The fixed interface. Some of its names are defined in other modules.
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
    """Collective: shard each block of `model` with the mark ``_fsdp2_shard``, then the rest, in place; return `model`.

    Args:
        model: plain model, or a model that tensor parallelism has split. In the second case, the tensor-parallel axis
            and `dp_mesh` belong to the same device mesh.
        dp_mesh: mesh of one data-parallel axis, or of two axes (replicate, shard); None for a mesh of all ranks, even
            on a single rank.
        conf: a whole config as nested dicts. These keys of the section ``trainer`` are read:
            ``activation_checkpoint``, ``amp``, ``fsdp2_mp_policy``, ``parallelism.cpu_offload`` and
            ``parallelism.reshard_after_forward``. In the section ``model``, ``use_spectral_norm`` is read.

    Returns:
        The same object `model`. Its parameters are now DTensors.

    Raises:
        ConfigError: if a value in `conf` is not valid, or the model cannot be sharded, for example because it has
            already been sharded.
    """
    trainer = read_section(conf, "trainer")
    parallelism = read_section(trainer, "parallelism", "trainer.")
    reshard_after_forward = read_boolean(parallelism, "trainer.parallelism.reshard_after_forward", default=True)
    cpu_offload = read_boolean(parallelism, "trainer.parallelism.cpu_offload", default=False)
    policy = _build_mp_policy(conf)
    require_shardable(model)
    # Blocks are wrapped for checkpointing before they are sharded, so that the wrapper becomes the sharding unit. The
    # recomputation then runs inside the unit, while the weights of the unit are gathered.
    checkpoint_mode = trainer.get("activation_checkpoint")
    if checkpoint_mode not in (None, False):
        checkpoint_blocks(model, checkpoint_mode)
    if policy is not None:
        _fix_spectral_norm_dtype(model, policy.param_dtype)
    if dp_mesh is None:
        dp_mesh = _build_mesh_of_all_ranks()
    shard_units(model, dp_mesh, dp_mesh, policy, reshard_after_forward, cpu_offload)
    return model


@shard_lazily()
def shard_units(
    model: nn.Module,
    fsdp_mesh: DeviceMesh,
    fsdp_mesh_of_tp_units: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Collective: apply ``fully_shard`` to the marked blocks and to the model around them, in place.

    Args:
        model: model whose blocks may be wrapped for checkpointing.
        fsdp_mesh: mesh over which units without split weights are sharded. It may include the tensor-parallel axis:
            tensor-parallel ranks have equal gradients of whole weights, so the mean over the ranks is the same.
        fsdp_mesh_of_tp_units: mesh over which units with weights that tensor parallelism has split are sharded.
        policy: mixed precision; None for the dtype of the weights. The output is cast only at the end of the model.
        reshard_after_forward: True to free gathered weights after the forward pass and gather them again for the
            backward pass. After a forward pass without gradients, all weights are always freed.
        cpu_offload: True to keep parameters, gradients and optimizer state in host memory.

    Raises:
        ConfigError: if FSDP2 cannot shard a module or parameter, see `require_shardable`.
    """
    require_shardable(model)
    _make_contiguous(model)
    policy = policy or MixedPrecisionPolicy()
    inner_policy = replace(policy, output_dtype=None)  # activations between the units keep the dtype of computation
    offload = OffloadPolicy()
    if cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=fsdp_mesh.device_type != "cpu")
    units = find_sharding_units(model)
    sharded_parameter_ids: set[int] = set()
    inference_resharder = _InferenceResharder()
    for unit in units:
        # The backward pass begins with the last block, which is the first of `units`, and with the weights outside of
        # the blocks. If these weights were freed, they would be gathered again at once.
        begins_backward = unit is units[0] or unit is model
        reshard_unit = reshard_after_forward and not begins_backward
        # A unit with weights of several dtypes is sharded as several modules.
        for module in split_by_dtype(unit, sharded_parameter_ids):
            # Parameters that FSDP2 has sharded are DTensors. Among the other parameters, the DTensors are those that
            # tensor parallelism has split.
            new_parameters = [p for p in module.parameters() if id(p) not in sharded_parameter_ids]
            mesh = fsdp_mesh
            if any(isinstance(parameter, DTensor) for parameter in new_parameters):
                mesh = fsdp_mesh_of_tp_units
            module_policy = policy if module is model else inner_policy
            copy_returned_views(module)
            fully_shard(
                module, mesh=mesh, reshard_after_forward=reshard_unit, mp_policy=module_policy, offload_policy=offload
            )
            sharded_parameter_ids.update(map(id, module.parameters()))
            if not reshard_unit:
                inference_resharder.watch(module)
        # Weights must also be gathered for calls of other entry points than `forward`.
        for name in list_custom_entry_points(unit):
            register_fsdp_forward_method(unit, name)
            if not reshard_unit:
                setattr(unit, name, inference_resharder.wrap_entry_point(getattr(unit, name)))


class _InferenceResharder:
    """Hooks that free the gathered weights of some modules after a call without gradients.

    FSDP2 keeps the gathered weights of these modules for a backward pass. After a call without gradients there is no
    backward pass, so the weights would stay gathered. An optimizer that is built at this point would refer to the
    gathered weights. It would not train the model, because the next backward pass makes the sharded weights the
    parameters of the model again.

    Weights are freed after the outermost call, because a forward pass may call other entry points of the same module.
    """

    def __init__(self) -> None:
        self._modules: list[FSDPModule] = []
        # Number of calls that have begun but not ended. Calls may be nested.
        self._call_depth = 0

    def watch(self, module: FSDPModule) -> None:
        """Register hooks on a module whose weights FSDP2 keeps gathered after a forward pass."""
        self._modules.append(module)
        module.register_forward_pre_hook(lambda *_: self._begin_call(), prepend=True)
        # The call must also be recorded as ended if the forward pass raises an error.
        module.register_forward_hook(lambda *_: self._end_call(), always_call=True)

    def wrap_entry_point(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that calls `method`, and frees the gathered weights afterwards like a forward pass."""

        @functools.wraps(method)
        def call_and_reshard(*args: Any, **kwargs: Any) -> Any:
            self._begin_call()
            try:
                return method(*args, **kwargs)
            finally:
                self._end_call()

        return call_and_reshard

    def _begin_call(self) -> None:
        self._call_depth += 1

    def _end_call(self) -> None:
        self._call_depth -= 1
        if self._call_depth == 0 and not torch.is_grad_enabled():
            for module in self._modules:
                module.reshard()


def fsdp2_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Collective: return a copy of the whole state dict on the CPU of rank 0, and an empty dict on other ranks.

    The names do not contain prefixes of wrappers. Each tensor has the shape and dtype of the whole parameter or buffer.
    """
    return gather_weights(model)


def fsdp2_load_state_dict(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Collective: load a whole state dict from rank 0; the `state_dict` of other ranks is not read.

    Names may contain the prefixes of wrappers: ``module.`` (also repeated), ``_orig_mod.``,
    ``_checkpoint_wrapped_module.``, ``_fsdp_wrapped_module.``.

    Raises:
        CheckpointError: on every rank, if names are missing, unexpected or repeated, shapes differ, or tensors are not
            whole, such as the tensors in ``model.state_dict()`` of a sharded model. The model is then unchanged.
    """
    scatter_weights(model, state_dict)


def fsdp2_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collective: return a copy of the whole optimizer state on the CPU of rank 0, and an empty dict on other ranks.

    Returns:
        ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [name, ...]}, ...]}``.

    Raises:
        ConfigError: if the optimizer has parameters that do not belong to the model.
    """
    reshard(model)
    return gather_optimizer_state(model, optimizer)


def fsdp2_load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Collective: load a whole optimizer state from rank 0; the `state_dict` of other ranks is not read.

    A parameter has no saved state if it never had a gradient. It gets zeros, the state that it would start with.

    Raises:
        ConfigError: if the optimizer has parameters that do not belong to the model.
        CheckpointError: on every rank, if the state belongs to different parameters, if it has only one rank's parts
            of sharded tensors, or if it has different settings for two parameters that are now in the same group.
    """
    reshard(model)
    scatter_optimizer_state(model, optimizer, state_dict)


def _apply_activation_checkpointing(model: nn.Module) -> None:
    """Wrap every marked block of `model` in place, so that the backward pass recomputes the block.

    Call this function before FSDP2. Blocks that have already been wrapped, and models without marked blocks, are not
    changed. The wrapper uses torch's non-reentrant checkpointing.
    """
    if any(map(_has_fsdp2_shard, model.modules())):
        checkpoint_blocks(model)


def _build_mesh_of_all_ranks() -> DeviceMesh:
    """Collective: return a one-dimensional mesh of all ranks; create a process group first if there is none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        if read_process_info().world > 1:
            dist.init_process_group(backend)
        else:
            logger.info("no process group exists: creating a process group of this single process")
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif dist.get_backend() == "gloo":
        # The caller's process group has no collectives for GPUs.
        device = "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


def _make_contiguous(model: nn.Module) -> None:
    """Make non-contiguous weights (channels_last) contiguous, in place, because FSDP2 shards only contiguous ones."""
    strided_parameters = [parameter for parameter in model.parameters() if not parameter.is_contiguous()]
    for parameter in strided_parameters:
        parameter.data = parameter.data.contiguous()
    if strided_parameters:
        logger.info(
            "%d weights have a memory format that FSDP2 cannot shard (channels_last); these weights were made "
            "contiguous; inputs may keep their memory format",
            len(strided_parameters),
        )


def reshard(model: nn.Module) -> None:
    """Free the gathered weights of all units in place, so that the parameters of the model are the sharded weights.

    Call this function after a forward pass without a backward pass, because some weights may still be gathered.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Set the next backward passes to reduce gradients over the ranks, or to accumulate gradients on each rank.

    Args:
        model: sharded model; a model that is not sharded is left unchanged.
        enabled: True to reduce gradients, False to accumulate them.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
