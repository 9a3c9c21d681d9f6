"""Sharding units (modules whose weights FSDP2 gathers and frees together), and checks that FSDP2 can shard a model."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from credit.errors import ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes, wrapped_module_ids

# Wrappers of other kinds of parallelism, which themselves shard parameters or sum gradients.
_OTHER_WRAPPERS = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
# Modules that only contain other modules or parameters; torch never calls their forward.
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
    """Return the sharding units of a model; the last unit is the model itself.

    A unit inside another unit precedes the outer unit. Late blocks of the model precede early blocks.
    """
    inside_wrapper = wrapped_module_ids(model)
    units = []
    for module in model.modules():
        # If a marked block has a wrapper, the wrapper is the unit.
        is_checkpointed = isinstance(module, CheckpointWrapper) or id(module) in inside_wrapper
        if module is not model and _is_shardable(module, is_checkpointed):
            units.append(module)
    return [*reversed(units), model]


def split_by_dtype(unit: nn.Module, inner_parameter_ids: set[int]) -> list[nn.Module]:
    """Return the modules of a sharding unit that FSDP2 must shard separately, inner before outer; the unit is the last.

    FSDP2 reduces all gradients of a sharded module in the same dtype. A module is therefore sharded separately if the
    dtype of its trainable weights differs from the dtype of the weights around it.

    Args:
        unit: sharding unit. The trainable weights of each single module in it have one dtype, see `require_shardable`.
        inner_parameter_ids: `id` of each parameter in units inside this unit; these units are sharded before it.

    Raises:
        ConfigError: if a module that must be sharded separately is a container, whose forward is never called.
    """
    # A dict is used instead of a list, because the recursion may reach a module on two paths.
    separate_modules: dict[nn.Module, None] = {}

    def visit(module: nn.Module, dtype: torch.dtype | None) -> None:
        """Collect the modules inside `module` that must be sharded separately.

        Args:
            module: the unit, or a module inside it.
            dtype: dtype of the trainable weights that are sharded together with `module`; None if there are none.
        """
        for name, child in module.named_children():
            child_dtype = _direct_dtype(child, inner_parameter_ids)
            # The direct weights of the child can be sharded together with the weights around it.
            if child_dtype in (None, dtype):
                visit(child, dtype)
                continue
            if _is_container(child):
                raise ConfigError(
                    f"{type(module).__name__}.{name}: a {type(child).__name__} of {child_dtype} among weights of "
                    f"{dtype}; FSDP2 shards weights of one dtype together, and cannot shard a container separately, "
                    f"because its forward is never called; convert it to {dtype}, or put it into a module that has a "
                    "forward"
                )
            # Modules inside the child come first, because FSDP2 shards inner modules before outer ones.
            visit(child, child_dtype)
            separate_modules[child] = None

    visit(unit, _main_dtype(unit, inner_parameter_ids))
    return [*separate_modules, unit]


def require_shardable(model: nn.Module) -> None:
    """Require that FSDP2 can shard a model; without this check, some errors would occur only in the first forward pass.

    Raises:
        ConfigError: if the model has already been sharded, or has a wrapper of another kind of parallelism; if a
            container is marked, a module has trainable weights of several dtypes, two sharding units share a parameter,
            or a parameter is a scalar or complex. The message names the modules or parameters.
    """
    if fsdp2_is_applied(model):
        raise ConfigError(f"{type(model).__name__} is already sharded; call apply_fsdp2 only once, on a plain model")
    for path, module in model.named_modules():
        _require_shardable_module(strip_wrapper_prefixes(path) or "the model", module, module is model)

    # `split_by_dtype` is called here only because of its errors.
    inner_parameter_ids: set[int] = set()
    for unit in find_sharding_units(model):
        split_by_dtype(unit, inner_parameter_ids)
        inner_parameter_ids.update(map(id, unit.parameters()))

    # A parameter must not belong to two units. Inner units come first, so a module belongs to the first unit with it.
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
                        f"{_join_names(model, parameter)}: two sharding units share this parameter, but each parameter "
                        "must belong to a single unit; call one module from both blocks, or do not mark the blocks "
                        "with _fsdp2_shard"
                    )

    for name, parameter in model.named_parameters():
        plain_name = strip_wrapper_prefixes(name)
        if parameter.dim() == 0:
            raise ConfigError(f"{plain_name}: FSDP2 cannot shard a scalar; give it one dimension, torch.ones(1)")
        if parameter.is_complex():
            raise ConfigError(
                f"{plain_name}: FSDP2 does not support complex parameters reliably (bfloat16 loses the imaginary "
                "part); store both parts in a last dimension of length 2, and use torch.view_as_complex in forward"
            )


def require_unwrapped(path: str, module: nn.Module) -> None:
    """Require that a module is not a DistributedDataParallel, DataParallel or FullyShardedDataParallel wrapper.

    These wrappers keep references to the parameters, but sharding or splitting replaces the parameters.

    Args:
        path: path of the module in the model, empty for the model itself.
        module: any module of the model.

    Raises:
        ConfigError: if the module is one of these wrappers; the message names the module.
    """
    if isinstance(module, _OTHER_WRAPPERS):
        raise ConfigError(
            f"{path or 'the model'}: is wrapped in {type(module).__name__}, which itself sums gradients or shards "
            "weights; pass the plain model (the attribute `module` of the wrapper) instead"
        )


def _require_shardable_module(path: str, module: nn.Module, is_root: bool) -> None:
    """Require that FSDP2 can shard a module: its class is allowed, and its trainable weights have one dtype.

    Wrappers of other kinds of parallelism and marked containers (such as a ModuleList) are not allowed.

    Args:
        path: path of the module in the model, for the message.
        module: module to check; the modules inside it are not checked.
        is_root: True for the model itself, which is sharded like a marked block.

    Raises:
        ConfigError: if the module cannot be sharded; the message names the module.
    """
    require_unwrapped(path, module)
    if (is_root or _has_fsdp2_shard(module)) and _is_container(module):
        raise ConfigError(
            f"{path}: a {type(module).__name__} cannot be a sharding unit: its forward is never called, so FSDP2 "
            "cannot gather its weights; mark the blocks inside it with _fsdp2_shard, or define its forward"
        )
    # dtype -> name of the first parameter with this dtype
    name_by_dtype: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.requires_grad:
            name_by_dtype.setdefault(parameter.dtype, name)
    if len(name_by_dtype) > 1:
        listed = ", ".join(f"{name} is {dtype}" for dtype, name in name_by_dtype.items())
        raise ConfigError(
            f"{path} ({type(module).__name__}): trainable parameters of two dtypes in one module: {listed}; FSDP2 "
            "reduces all gradients of a module in the same dtype; use the same dtype, or move one parameter into a "
            "separate module"
        )


def _is_container(module: nn.Module) -> bool:
    """Return True if a module is a list or dict of modules or parameters that has no forward."""
    return isinstance(module, _CONTAINERS) and type(module).forward is nn.Module.forward


def _direct_dtype(module: nn.Module, inner_parameter_ids: set[int]) -> torch.dtype | None:
    """Return the dtype of a module's direct trainable weights, without those of its children; None if there are none.

    Parameters whose `id` is in `inner_parameter_ids` are ignored.
    """
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in inner_parameter_ids:
            return parameter.dtype
    return None


def _main_dtype(unit: nn.Module, inner_parameter_ids: set[int]) -> torch.dtype | None:
    """Return the dtype in which a unit as a whole is sharded; None if the unit has no trainable weights.

    This is the dtype of the direct trainable weights of the unit. If there are none, it is the most frequent dtype of
    the trainable weights in the modules inside. Parameters whose `id` is in `inner_parameter_ids` are ignored.
    """
    # A wrapper of checkpointing or compilation has no weights, so the weights of the block in it are used.
    inside_wrapper = wrapped_module_ids(unit)
    for module in unit.modules():
        if module is unit or id(module) in inside_wrapper:
            dtype = _direct_dtype(module, inner_parameter_ids)
            if dtype is not None:
                return dtype
    # The unit has no direct trainable weights, so the dtype of most elements inside is used.
    num_elements: Counter[torch.dtype] = Counter()
    for parameter in unit.parameters():
        if parameter.requires_grad and id(parameter) not in inner_parameter_ids:
            num_elements[parameter.dtype] += parameter.numel()
    return max(num_elements, key=num_elements.get, default=None)


def _join_names(model: nn.Module, parameter: nn.Parameter) -> str:
    """Return all names of a parameter of the model, joined by "and"; the names have no prefixes of wrappers."""
    names = []
    for name, other in model.named_parameters(remove_duplicate=False):
        if other is parameter:
            names.append(strip_wrapper_prefixes(name))
    return " and ".join(names)
