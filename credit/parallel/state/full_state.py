"""Whole state dicts of weights and of an optimizer on rank 0, gathered from the ranks' parts and scattered to them.

Names are plain, without the prefixes of wrappers. State to be loaded is checked on rank 0 before any tensor is sent,
and all ranks share the result: an error on rank 0 between two collectives would leave the others waiting.

The ranks need the shapes and dtypes of the tensors that they receive. For optimizer state rank 0 sends an outline, in
which tensors are on the meta device.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) gather the weights. They are not used for the
rest, because

- loading fails on rank 0 alone for a value that cannot be sent,
- missing optimizer state is made by a step with zero gradients, which then counts as a step of Adam,
- if the optimizer has state for some parameters only, plain tensors are loaded beside DTensors,
- an optimizer without any state (SGD) cannot be loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from credit.errors import CheckpointError, ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import current_rank, run_on_rank0
from credit.parallel.state.materialise import scatter_tensor_from_rank0

# FSDP1 puts this prefix anywhere into a name.
_FSDP1_PREFIX = "_fsdp_wrapped_module."
# DDP and DataParallel put this one at the beginning, once for each wrapper.
_DDP_PREFIX = "module."
_MAX_LISTED_PROBLEMS = 5


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Collective: return a copy of the whole state dict on the CPU of rank 0, an empty dict on other ranks.

    Returns:
        Plain name -> whole tensor, or extra state of a module as it is.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # Of a model on the CPU, torch returns the model's own memory for tensors that are not sharded, such as buffers.
    model_memory = {_memory_address(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for name, value in state.items():
        if isinstance(value, Tensor) and _memory_address(value) in model_memory:
            state[name] = value.clone()
    return state


def scatter_weights(model: nn.Module, state_dict: Any) -> None:
    """Collective: load a whole state dict from rank 0; the `state_dict` of other ranks is not read.

    Names may contain the prefixes of wrappers (``module.``, also repeated, ``_orig_mod.``, and so on).

    Args:
        model: sharded or not, wrapped or not; on the meta device it takes the loaded tensors as its own.
        state_dict: name -> whole tensor.

    Raises:
        CheckpointError: on every rank, if the state dict does not fit; the model is as it was.
    """
    model = unwrap_data_parallel(model)
    target = model.state_dict()
    target_names = {strip_wrapper_prefixes(name): name for name in target}
    full_values: dict[str, Any] = {}

    def check_on_rank0() -> dict[str, Any]:
        full_values.update(_by_plain_name(state_dict, target_names, "state dict"))
        plain_target = {plain: target[name] for plain, name in target_names.items()}
        problems = _find_differences(plain_target, full_values)
        if problems:
            raise CheckpointError(f"state dict: {_join_problems(problems)}; is it of this model?")
        # The extra state of a module may be any object and is sent as it is.
        extra_state: dict[str, Any] = {}
        for name, value in full_values.items():
            extra_state[name] = None if isinstance(value, Tensor) else value
        return extra_state

    extra_state = run_on_rank0(check_on_rank0)
    # All ranks go through the tensors in the order of the model's state dict, a collective for each.
    state = {}
    for plain, name in target_names.items():
        if isinstance(target[name], Tensor):
            state[name] = scatter_tensor_from_rank0(full_values.get(plain), target[name])
        else:
            state[name] = extra_state[plain]
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in target.values())
    model.load_state_dict(state, strict=True, assign=on_meta)


def unwrap_data_parallel(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel; any other model is returned as it is."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def gather_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collective: return the whole optimizer state on rank 0, an empty dict on other ranks.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [...]}``, whose tensors are copies on the CPU.

    Raises:
        ConfigError: if the optimizer has parameters that are not the model's.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)
    state = {}
    for parameter, name in names.items():
        if optimizer.state.get(parameter):
            state[name] = {key: _gather_value(value) for key, value in optimizer.state[parameter].items()}
    groups = []
    for group in optimizer.param_groups:
        parameter_names = [names[parameter] for parameter in group["params"]]
        groups.append({**copy.deepcopy(_group_settings(group)), "params": parameter_names})
    if current_rank() > 0:
        return {}
    return {"state": state, "param_groups": groups}


def scatter_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Collective: load what `gather_optimizer_state` has returned on rank 0; the `saved` of other ranks is not read.

    A parameter without saved state gets the state that it would start with. Settings, such as the learning rate, go to
    the parameters that had them, however the optimizer groups them now.

    Args:
        model: sharded or not, wrapped or not.
        optimizer: its parameters are the model's.
        saved: optimizer state by parameter name, as `gather_optimizer_state` returns it.

    Raises:
        ConfigError: if the optimizer has parameters that are not the model's.
        CheckpointError: on every rank, if the state belongs to other parameters or is not whole.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)

    # Check the state on rank 0, and tell the others the shapes and dtypes that they will receive.
    state_on_rank0: dict[Any, Mapping[str, Any]] = {}

    def check_on_rank0() -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        state, groups = _read_optimizer_state(saved, set(names.values()))
        state_on_rank0.update(state)
        outlines = {}
        for name, entry in state.items():
            outlines[name] = {key: _outline(value) for key, value in entry.items()}
        return outlines, groups

    outlines, saved_groups = run_on_rank0(check_on_rank0)
    _require_same_parameters(outlines, saved_groups, names)

    # Scatter the state of one parameter after the other. `load_state_dict` takes parameters by number.
    first_outline = next(iter(outlines.values()), {})
    state = {}
    for index, (parameter, name) in enumerate(names.items()):
        entry = {}
        if name in outlines:
            full_values = state_on_rank0.get(name, {})
            for key, outline in outlines[name].items():
                entry[key] = _scatter_value(outline, full_values.get(key), parameter)
        else:
            for key, outline in first_outline.items():
                entry[key] = _initial_value(outline, parameter)
        state[index] = entry

    # Give each group the settings that its first parameter had.
    index_of_parameter = {parameter: index for index, parameter in enumerate(names)}
    settings_of_name = {}
    for saved_group in saved_groups:
        for name in saved_group["params"]:
            settings_of_name[name] = _group_settings(saved_group)
    groups = []
    for group in optimizer.param_groups:
        settings = _group_settings(group)
        if group["params"]:
            settings = settings_of_name[names[group["params"][0]]]
        for key, value in settings.items():
            # Some file formats store tuples as lists.
            if isinstance(group.get(key), tuple):
                settings = {**settings, key: tuple(value)}
        groups.append({**settings, "params": [index_of_parameter[parameter] for parameter in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the plain names of the optimizer's parameters, in its order.

    Raises:
        ConfigError: if one is not a parameter of the model.
    """
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(parameter not in names for parameter in parameters)
    if num_foreign:
        raise ConfigError(
            f"optimizer: {num_foreign} of its {len(parameters)} parameters are not the model's; build it after the "
            "model has been sharded"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a parameter group of an optimizer holds besides its parameters: learning rate, betas, ..."""
    return {key: value for key, value in group.items() if key != "params"}


def _read_optimizer_state(
    saved: Any, names: Collection[str]
) -> tuple[dict[Any, Mapping[str, Any]], list[dict[str, Any]]]:
    """Return state and groups of a saved optimizer state by plain names, checked.

    Args:
        saved: optimizer state by parameter name.
        names: plain names of the optimizer's parameters.

    Returns:
        (plain name -> key -> value, parameter groups with plain names).

    Raises:
        CheckpointError: if it is not an optimizer state, or has values that cannot be sent.
    """
    # The structure: {"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}, ...]}.
    if not (isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()):
        raise CheckpointError("optimizer state: rank 0 has no dict with state and param_groups")
    state = saved["state"]
    groups = saved["param_groups"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer state: state is a {type(state).__name__} in place of a dict by parameter")
    is_group_list = isinstance(groups, list | tuple) and all(
        isinstance(group, Mapping) and "params" in group for group in groups
    )
    if not is_group_list:
        raise CheckpointError("optimizer state: param_groups is not a list of dicts that name their params")
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"optimizer state: {name} has a {type(entry).__name__} in place of a dict")
    for group in groups:
        if any(isinstance(name, int) for name in group["params"]):
            raise CheckpointError(
                "optimizer state: its parameters are numbers, as optimizer.state_dict() has them, which under FSDP2 is "
                "one rank's part; save what fsdp2_optimizer_state_dict returns"
            )

    # Its values must be whole tensors.
    for name, entry in state.items():
        for key, value in entry.items():
            problem = _describe_unsendable(value, "fsdp2_optimizer_state_dict")
            if problem:
                raise CheckpointError(f"optimizer state: {name}/{key} {problem}")

    plain_groups = []
    for group in groups:
        plain_groups.append({**group, "params": _plain_names(group["params"], names, "optimizer state")})
    return _by_plain_name(state, names, "optimizer state"), plain_groups


def _outline(value: Any) -> Any:
    """Return a tensor of one dimension or more without its values, on the meta device; anything else as it is.

    A scalar, such as the number of steps, is sent with the outline: it is not split over the ranks.
    """
    if isinstance(value, Tensor) and value.dim():
        return value.detach().to("meta")
    return value


def _require_same_parameters(
    outlines: Mapping[Any, Mapping[str, Any]], groups: list[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    """Refuse an optimizer state of other parameters than the optimizer's, or of other shapes.

    Args:
        outlines: plain name -> key -> outline of the saved state.
        groups: saved parameter groups by plain names.
        names: the optimizer's parameters and their plain names.

    Raises:
        CheckpointError: naming the first few parameters that differ.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    grouped_names: set[str] = set()
    for group in groups:
        grouped_names.update(group["params"])
    problems = [f"{name} is not optimized here" for name in outlines if name not in shapes]
    problems += [f"{name} is in none of its groups" for name in shapes if name not in grouped_names]
    for name, entry in outlines.items():
        if name not in shapes:
            continue
        for key, value in entry.items():
            if isinstance(value, Tensor) and value.is_meta and value.shape != shapes[name]:
                problems.append(f"{name}/{key} is {tuple(value.shape)}, here {tuple(shapes[name])}")
    if problems:
        raise CheckpointError(
            f"optimizer state: {_join_problems(problems)}; it is of another model or of other trainable parameters"
        )


def _gather_value(value: Any) -> Any:
    """Collective for a DTensor: return a copy of a whole value on the CPU of rank 0, None on other ranks."""
    if isinstance(value, DTensor):
        # State in host memory is gathered on the device of the mesh.
        value = value.to(value.device_mesh.device_type).full_tensor()
    if current_rank() > 0:
        return None
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _scatter_value(outline: Any, full_value: Tensor | None, parameter: nn.Parameter) -> Any:
    """Collective for a tensor: return this rank's part of a whole value of rank 0, split as `parameter` is.

    Args:
        outline: see `_outline`; a value that is not a tensor on the meta device is the value itself.
        full_value: whole tensor on rank 0, None on other ranks.
        parameter: parameter that the value belongs to.
    """
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return copy.deepcopy(outline)
    return scatter_tensor_from_rank0(full_value, parameter, outline.dtype)


def _initial_value(value: Any, parameter: nn.Parameter) -> Any:
    """Return the zero that optimizer state like `value` starts from, for a parameter that never had a gradient."""
    if not isinstance(value, Tensor):
        return type(value)()
    return torch.zeros_like(parameter, dtype=value.dtype) if value.is_meta else torch.zeros_like(value)


def _find_differences(target: Mapping[str, Any], full_values: Mapping[str, Any]) -> list[str]:
    """Return in words where a whole state dict does not fit the one of the model.

    Args:
        target: plain name -> tensor of the model, sharded or not, or extra state.
        full_values: plain name -> value of the state dict that rank 0 loads.

    Returns:
        A text for each problem with a value, or else for each missing or unknown name and other shape.
    """
    problems = []
    for name, value in full_values.items():
        if name not in target or not isinstance(target[name], Tensor):
            continue
        unsendable = _describe_unsendable(value, "fsdp2_state_dict")
        if not isinstance(value, Tensor):
            problems.append(f"{name} is not a tensor")
        elif unsendable:
            problems.append(f"{name} {unsendable}")
        elif value.is_complex() and not target[name].is_complex():
            problems.append(f"{name} is complex, here real")
    if problems:
        return problems
    problems += [f"{name} is missing" for name in target if name not in full_values]
    problems += [f"{name} is unknown" for name in full_values if name not in target]
    for name, target_value in target.items():
        # Extra state has no shape.
        target_shape = tuple(getattr(target_value, "shape", ()))
        shape = tuple(getattr(full_values.get(name, target_value), "shape", ()))
        if shape != target_shape:
            problems.append(f"{name} is {shape}, here {target_shape}")
    return problems


def _describe_unsendable(value: Any, source: str) -> str | None:
    """Return the reason why a value cannot be sent to the ranks as a whole tensor, None if it can.

    Args:
        value: value of a state that rank 0 loads.
        source: name of the function that returns whole values.
    """
    if isinstance(value, DTensor):
        return f"is a rank's part (a DTensor), as state_dict() of a sharded model has it; give what {source} returns"
    if not isinstance(value, Tensor):
        return None
    if value.is_meta:
        return "has no values (it is on the meta device)"
    if value.layout != torch.strided or value.is_quantized:
        return "is a sparse or quantized tensor; only dense ones can be loaded"
    return None


def _by_plain_name(state: Any, names: Collection[str], label: str) -> dict[str, Any]:
    """Return a state dict by plain names; for the arguments and errors see `_plain_names`."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{label}: {type(state).__name__} in place of a dict from names to tensors")
    return dict(zip(_plain_names(state, names, label), state.values(), strict=True))


def _plain_names(state_names: Iterable[Any], names: Collection[str], label: str) -> list[str]:
    """Return names without the prefixes of wrappers.

    Args:
        state_names: names in the state that is loaded.
        names: names of the model without wrappers, one of which may begin with ``module.`` by itself.
        label: kind of state, for messages: ``"state dict"``.

    Raises:
        CheckpointError: if a key is not a name, or two have the same plain name.
    """
    # plain name -> name in the state
    name_of_plain: dict[str, str] = {}
    for name in state_names:
        if not isinstance(name, str):
            raise CheckpointError(f"{label}: the key {name!r} is not a name")
        plain = strip_wrapper_prefixes(name).replace(_FSDP1_PREFIX, "")
        while plain not in names and plain.startswith(_DDP_PREFIX):
            plain = plain.removeprefix(_DDP_PREFIX)
        if plain in name_of_plain:
            raise CheckpointError(
                f"{label}: {name_of_plain[plain]} and {name} are one parameter, {plain}, without the prefixes of "
                "wrappers; leave one out"
            )
        name_of_plain[plain] = name
    return list(name_of_plain)


def _join_problems(problems: list[str]) -> str:
    """Return the first few problems in one line."""
    listed = problems[:_MAX_LISTED_PROBLEMS]
    if len(problems) > len(listed):
        listed = [*listed, "..."]
    return "; ".join(listed)


def _memory_address(tensor: Tensor) -> int:
    """Return the address of the memory that holds a tensor, or this rank's part of it."""
    return local_shard(tensor).untyped_storage().data_ptr()
