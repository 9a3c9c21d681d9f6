"""Sharding units: the modules whose weights FSDP2 gathers and frees together, and checks for what it cannot shard."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from credit.errors import ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes, wrapped_module_ids

# Wrappers that replace or sum a model's parameters or gradients by themselves.
_OTHER_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
# Modules that only hold others; torch never calls their forward.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def _has_fsdp2_shard(module: nn.Module) -> bool:
    """Return True if a module, or the block inside a checkpoint wrapper, is marked with ``_fsdp2_shard``.

    The mark may be an attribute of the instance or of its class.
    """
    return bool(getattr(module, "_fsdp2_shard", False))


def _is_shardable(module: nn.Module, ac_enabled: bool) -> bool:
    """Return True if a module is a sharding unit: a marked block, or the wrapper around it with checkpointing.

    Args:
        module: any module of the model.
        ac_enabled: True if the marked blocks are wrapped for activation checkpointing.
    """
    if ac_enabled:
        return isinstance(module, CheckpointWrapper) and _has_fsdp2_shard(module._checkpoint_wrapped_module)
    return not isinstance(module, CheckpointWrapper) and _has_fsdp2_shard(module)


def fsdp2_is_applied(model: nn.Module) -> bool:
    """Return True if ``fully_shard`` has been applied to `model` or to a module inside it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def find_sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the sharding units of a model, the model itself last.

    Units inside another unit come before that unit, and late blocks before early ones.
    """
    inside_wrapper = wrapped_module_ids(model)
    units = []
    for module in model.modules():
        # Of a wrapper and the marked block in it, the wrapper is the unit.
        is_checkpointed = isinstance(module, CheckpointWrapper) or id(module) in inside_wrapper
        if module is not model and _is_shardable(module, is_checkpointed):
            units.append(module)
    return [*reversed(units), model]


def split_by_dtype(unit: nn.Module, inner_parameter_ids: set[int]) -> list[nn.Module]:
    """Return the modules of a unit that must be sharded separately, inner before outer; the last is the unit itself.

    FSDP2 reduces the gradients of a sharded module in one dtype. So a module whose trainable weights have another dtype
    than those around it is sharded by itself.

    Args:
        unit: sharding unit, in which each module has trainable weights of one dtype, see `require_shardable`.
        inner_parameter_ids: `id` of each parameter of the units inside this one, which are sharded before it.

    Raises:
        ConfigError: if a module that must be sharded separately is a container, whose forward is never called.
    """
    # A dict in place of a list, since a module may be reached on two paths.
    separate_modules: dict[nn.Module, None] = {}

    def visit(module: nn.Module, dtype: torch.dtype | None) -> None:
        """Collect the modules inside `module` that must be sharded separately.

        Args:
            module: the unit, or a module inside it.
            dtype: dtype of the trainable weights that `module` is sharded with; None without any.
        """
        for name, child in module.named_children():
            child_dtype = _direct_dtype(child, inner_parameter_ids)
            # The child's own weights can be sharded with those around it.
            if child_dtype in (None, dtype):
                visit(child, dtype)
                continue
            if _is_container(child):
                raise ConfigError(
                    f"{type(module).__name__}.{name}: a {type(child).__name__} of {child_dtype} among weights of "
                    f"{dtype}; FSDP2 takes one dtype and cannot shard a container by itself, since its forward is "
                    f"never called; give it the dtype {dtype}, or put it into a module with a forward"
                )
            # Modules inside the child come first, because FSDP2 shards inner modules before outer ones.
            visit(child, child_dtype)
            separate_modules[child] = None

    visit(unit, _main_dtype(unit, inner_parameter_ids))
    return [*separate_modules, unit]


def require_shardable(model: nn.Module) -> None:
    """Refuse models on which FSDP2 would fail, in some cases only in the first forward.

    Raises:
        ConfigError: if the model is sharded already, or is wrapped by another kind of parallelism; if a container is
            marked, a module has trainable weights of several dtypes, two sharding units share a parameter, or a
            parameter is a scalar or complex. The message names the modules or parameters.
    """
    if fsdp2_is_applied(model):
        raise ConfigError(f"{type(model).__name__} is sharded already; apply_fsdp2 is called once, on a plain model")
    for path, module in model.named_modules():
        _require_shardable_module(strip_wrapper_prefixes(path) or "the model", module, module is model)

    # `split_by_dtype` is called for its errors only.
    inner_parameter_ids: set[int] = set()
    for unit in find_sharding_units(model):
        split_by_dtype(unit, inner_parameter_ids)
        inner_parameter_ids.update(map(id, unit.parameters()))

    # A parameter must not belong to two units. Inner units come first, so a module belongs to the first that has it.
    unit_of_parameter: dict[int, int] = {}
    modules_of_inner_units: set[int] = set()
    for number, unit in enumerate(find_sharding_units(model)):
        unit_modules = [module for module in unit.modules() if id(module) not in modules_of_inner_units]
        modules_of_inner_units.update(map(id, unit_modules))
        for module in unit_modules:
            for parameter in module.parameters(recurse=False):
                first_unit = unit_of_parameter.setdefault(id(parameter), number)
                if first_unit != number:
                    raise ConfigError(
                        f"{_join_names(model, parameter)}: one parameter in two units of sharding, but each must have "
                        "its own; call one module from both blocks, or do not mark them with _fsdp2_shard"
                    )

    for name, parameter in model.named_parameters():
        plain_name = strip_wrapper_prefixes(name)
        if parameter.dim() == 0:
            raise ConfigError(f"{plain_name}: FSDP2 cannot shard a scalar; give it one dimension, torch.ones(1)")
        if parameter.is_complex():
            raise ConfigError(
                f"{plain_name}: FSDP2 cannot be relied upon for complex parameters (bfloat16 loses the imaginary "
                "part); store both parts in a last dimension of 2, and use torch.view_as_complex in forward"
            )


def require_unwrapped(path: str, module: nn.Module) -> None:
    """Refuse a module that is a DistributedDataParallel or similar wrapper.

    Such a wrapper keeps references to the parameters, which sharding or splitting would replace.

    Args:
        path: path of the module in the model, empty for the model itself.
        module: any module of the model.

    Raises:
        ConfigError: if the module is such a wrapper; the message names the module.
    """
    if isinstance(module, _OTHER_WRAPPERS):
        raise ConfigError(
            f"{path or 'the model'}: is wrapped in {type(module).__name__}, which sums gradients or shards weights by "
            "itself; give the plain model (its attribute `module`) instead"
        )


def _require_shardable_module(path: str, module: nn.Module, is_root: bool) -> None:
    """Refuse a module that is another parallel wrapper or a marked container, or has trainable weights of two dtypes.

    Args:
        path: path of the module in the model, for the message.
        module: the module, checked without the modules inside it.
        is_root: True for the model itself, which is sharded like a marked block.

    Raises:
        ConfigError: if the module cannot be sharded; the message names the module.
    """
    require_unwrapped(path, module)
    if (is_root or _has_fsdp2_shard(module)) and _is_container(module):
        raise ConfigError(
            f"{path}: a {type(module).__name__} cannot be a unit of sharding: its forward is never called, so FSDP2 "
            "could not gather its weights; mark the blocks inside with _fsdp2_shard, or give it a forward"
        )
    # dtype -> name of the first parameter that has it
    name_by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            name_by_dtype.setdefault(parameter.dtype, name)
    if len(name_by_dtype) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in name_by_dtype.items())
        raise ConfigError(
            f"{path} ({type(module).__name__}): trainable parameters of two dtypes in one module: {listed}; FSDP2 "
            "reduces a module's gradients in one dtype; give them one dtype, or move one into a module of its own"
        )


def _is_container(module: nn.Module) -> bool:
    """Return True if a module is a list or dict of modules or parameters that has no forward."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def _direct_dtype(module: nn.Module, inner_parameter_ids: set[int]) -> torch.dtype | None:
    """Return the dtype of the trainable weights that a module itself holds, without its children; None without any.

    Parameters whose `id` is in `inner_parameter_ids` do not count.
    """
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in inner_parameter_ids:
            return parameter.dtype
    return None


def _main_dtype(unit: nn.Module, inner_parameter_ids: set[int]) -> torch.dtype | None:
    """Return the dtype in which a unit as a whole is sharded; None without trainable weights.

    It is the dtype of the trainable weights that the unit itself holds, or else that of most trainable weights in the
    modules inside. Parameters whose `id` is in `inner_parameter_ids` do not count.
    """
    # A wrapper of checkpointing or compilation has no weights; those of the block in it count as its own.
    inside_wrapper = wrapped_module_ids(unit)
    for module in unit.modules():
        if module is unit or id(module) in inside_wrapper:
            dtype = _direct_dtype(module, inner_parameter_ids)
            if dtype is not None:
                return dtype
    # The unit has no trainable weights of its own, so the dtype of most elements inside decides.
    num_elements: Counter[torch.dtype] = Counter()
    for parameter in unit.parameters():
        if parameter.requires_grad and id(parameter) not in inner_parameter_ids:
            num_elements[parameter.dtype] += parameter.numel()
    return max(num_elements, key=num_elements.get, default=None)


def _join_names(model: nn.Module, parameter: nn.Parameter) -> str:
    """Return all names of a parameter of the model, without the prefixes of wrappers and joined by "and"."""
    names = []
    for name, other in model.named_parameters(remove_duplicate=False):
        if other is parameter:
            names.append(strip_wrapper_prefixes(name))
    return " and ".join(names)
