"""Whole state of an optimizer on rank 0, gathered from the ranks' parts and scattered to them.

Whole state consists of full, unsharded tensors. Parameters have plain names, without the prefixes of wrappers. The
state of a parameter is a dict from keys such as ``exp_avg`` to values.

State to be loaded is checked on rank 0 before any tensor is sent, and all ranks learn the result: an error on rank 0
between two collectives would leave the other ranks waiting. Then rank 0 sends an outline of the state, whose tensors
are on the meta device, because the other ranks need to know the shapes and dtypes that they receive.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) are not used, because

- loading a value that cannot be sent fails on rank 0 alone,
- missing optimizer state is created by a step with zero gradients, which then counts as a step of Adam,
- if the optimizer has state for some parameters only, plain tensors are loaded beside DTensors,
- an optimizer without any state (SGD) cannot be loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError, ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.object_collectives import current_rank, run_on_rank0
from credit.parallel.state.materialise import scatter_tensor_from_rank0
from credit.parallel.state.state_checks import (
    describe_unsendable,
    join_problems,
    list_plain_names,
    map_plain_names,
    unwrap_data_parallel,
)


def gather_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collective: return the whole optimizer state on rank 0, an empty dict on other ranks.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}, ...]}`` with plain parameter
        names. Tensors are copies on the CPU.

    Raises:
        ConfigError: if the optimizer has parameters that are not the model's.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)
    # A parameter that never had a gradient has no state. All ranks go through the same parameters in the same order.
    state = {}
    for parameter, name in names.items():
        if optimizer.state.get(parameter):
            state[name] = {key: _gather_value(value) for key, value in optimizer.state[parameter].items()}
    groups = []
    for group in optimizer.param_groups:
        settings = copy.deepcopy(_group_settings(group))
        parameter_names = [names[parameter] for parameter in group["params"]]
        groups.append({**settings, "params": parameter_names})
    if current_rank() > 0:
        return {}
    return {"state": state, "param_groups": groups}


def scatter_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Collective: load what `gather_optimizer_state` has returned on rank 0; the `saved` of other ranks is not read.

    A parameter without saved state gets the state that it would start with. Settings, such as the learning rate, go to
    the parameters that had them when saved, even if the optimizer groups its parameters in another way now.

    Args:
        model: model, sharded or not, wrapped or not.
        optimizer: optimizer of the model's parameters, whose state is replaced.
        saved: whole optimizer state by parameter name, as `gather_optimizer_state` returns it.

    Raises:
        ConfigError: if the optimizer has parameters that are not the model's.
        CheckpointError: on every rank, if the state belongs to other parameters, holds only one rank's parts of
            sharded tensors, or has different settings for two parameters that are in one group now.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)

    # Check the state on rank 0, and tell the others the shapes and dtypes that they will receive.
    state_on_rank0: dict[Any, Mapping[str, Any]] = {}

    def check_on_rank0() -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        state, groups = _read_optimizer_state(saved, set(names.values()))
        state_on_rank0.update(state)
        # Outlines are small, so those of all parameters travel in one message.
        outlines = {}
        for name, entry in state.items():
            outlines[name] = {key: _outline(value) for key, value in entry.items()}
        return outlines, groups

    outlines, saved_groups = run_on_rank0(check_on_rank0)
    _require_same_parameters(outlines, saved_groups, names)
    groups = _match_group_settings(optimizer, names, saved_groups)

    # Scatter the state of one parameter after the other. `load_state_dict` takes parameters by number.
    # A parameter without saved state gets the same keys as the first parameter that has some.
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
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _match_group_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved_groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, each with the settings that its parameters had when saved.

    Args:
        optimizer: the optimizer that loads the state.
        names: plain name of each of its parameters.
        saved_groups: saved parameter groups, whose ``params`` are plain names.

    Returns:
        Parameter groups for `load_state_dict`: their ``params`` are indices of parameters in the order of `names`.

    Raises:
        CheckpointError: if two parameters of a group had different settings, of which the group can have only one.
    """
    index_of_parameter = {parameter: index for index, parameter in enumerate(names)}
    settings_of_name = {}
    for saved_group in saved_groups:
        for name in saved_group["params"]:
            settings_of_name[name] = _group_settings(saved_group)
    groups = []
    for group in optimizer.param_groups:
        parameters = group["params"]
        saved_settings = _group_settings(group)
        if parameters:
            first_name = names[parameters[0]]
            saved_settings = settings_of_name[first_name]
            for parameter in parameters[1:]:
                _require_same_settings(first_name, names[parameter], settings_of_name)
        settings = {}
        for key, value in saved_settings.items():
            # Some file formats store tuples as lists.
            if isinstance(group.get(key), tuple):
                value = tuple(value)
            settings[key] = value
        indices = [index_of_parameter[parameter] for parameter in parameters]
        groups.append({**settings, "params": indices})
    return groups


def _require_same_settings(name: str, other_name: str, settings_of_name: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse two parameters of one group that had different settings when saved.

    Args:
        name: plain name of a parameter.
        other_name: plain name of another parameter of its group.
        settings_of_name: plain name of a parameter -> its settings when saved.

    Raises:
        CheckpointError: if a setting differs; the message names the first one.
    """
    settings = settings_of_name[name]
    other_settings = settings_of_name[other_name]
    for key in sorted({*settings, *other_settings}):
        value = settings.get(key)
        other_value = other_settings.get(key)
        if value != other_value:
            raise CheckpointError(
                f"optimizer state: {name} and {other_name} are in one group here, but were saved with {key} {value} "
                f"and {other_value}; put them into different groups"
            )


def _name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the plain name of each of the optimizer's parameters, in the order of its parameter groups.

    Raises:
        ConfigError: if a parameter of the optimizer is not one of the model's.
    """
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in model.named_parameters()}
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    num_foreign = sum(parameter not in names for parameter in parameters)
    if num_foreign:
        raise ConfigError(
            f"optimizer: {num_foreign} of its {len(parameters)} parameters are not the model's; build it after the "
            "model has been sharded"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a parameter group of an optimizer (learning rate, betas, ...), without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _read_optimizer_state(
    saved: Any, names: Collection[str]
) -> tuple[dict[Any, Mapping[str, Any]], list[dict[str, Any]]]:
    """Check a saved optimizer state on rank 0, and return its state and parameter groups with plain names.

    Args:
        saved: saved optimizer state by parameter name; names may have the prefixes of wrappers.
        names: plain names of the optimizer's parameters.

    Returns:
        The state, a dict from plain names to dicts from keys to values, and the list of parameter groups, whose
        ``params`` are plain names.

    Raises:
        CheckpointError: if `saved` is not an optimizer state, or has values that cannot be sent.
    """
    # The structure: {"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}, ...]}.
    if not (isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()):
        raise CheckpointError("optimizer state: rank 0 has no dict with state and param_groups")
    state = saved["state"]
    groups = saved["param_groups"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer state: state is a {type(state).__name__} in place of a dict by parameter")
    is_group_list = isinstance(groups, list | tuple) and all(_has_params(group) for group in groups)
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

    # Tensors in the state must be whole.
    for name, entry in state.items():
        for key, value in entry.items():
            problem = describe_unsendable(value, "fsdp2_optimizer_state_dict")
            if problem:
                raise CheckpointError(f"optimizer state: {name}/{key} {problem}")

    plain_groups = []
    for group in groups:
        plain_names = list_plain_names(group["params"], names, "optimizer state")
        plain_groups.append({**group, "params": plain_names})
    return map_plain_names(state, names, "optimizer state"), plain_groups


def _has_params(group: Any) -> bool:
    """Return True if a saved parameter group is a dict that names its parameters."""
    return isinstance(group, Mapping) and "params" in group


def _outline(value: Any) -> Any:
    """Return the outline of a value: a tensor is replaced by one on the meta device, any other value stays as it is.

    A scalar tensor, such as the number of steps, is not replaced either. It is not split over the ranks, so it is sent
    with the outline.
    """
    if isinstance(value, Tensor) and value.dim():
        return value.detach().to("meta")
    return value


def _require_same_parameters(
    outlines: Mapping[Any, Mapping[str, Any]], groups: list[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    """Refuse a saved state whose parameters, or their shapes, are not those of the optimizer.

    Args:
        outlines: outline of the saved state, a dict from plain names to dicts from keys to outlines of values.
        groups: saved parameter groups, whose ``params`` are plain names.
        names: plain name of each of the optimizer's parameters.

    Raises:
        CheckpointError: if the parameters differ; the message names the first few.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    grouped_names: set[str] = set()
    for group in groups:
        grouped_names.update(group["params"])
    # A parameter may be without state, if it never had a gradient, but not without a group.
    problems = [f"{name} is not optimized here" for name in outlines if name not in shapes]
    problems += [f"{name} is in none of its groups" for name in shapes if name not in grouped_names]
    for name, entry in outlines.items():
        if name not in shapes:
            continue
        for key, value in entry.items():
            # Only the outline of a tensor that is split like its parameter is on the meta device.
            is_split = isinstance(value, Tensor) and value.is_meta
            if is_split and value.shape != shapes[name]:
                problems.append(f"{name}/{key} is {tuple(value.shape)}, here {tuple(shapes[name])}")
    if problems:
        raise CheckpointError(
            f"optimizer state: {join_problems(problems)}; it is of another model or of other trainable parameters"
        )


def _gather_value(value: Any) -> Any:
    """Collective for a DTensor: return a copy of the whole `value` on the CPU of rank 0, None on other ranks."""
    if isinstance(value, DTensor):
        # State in host memory is gathered on the device of the mesh.
        value = value.to(value.device_mesh.device_type).full_tensor()
    if current_rank() > 0:
        return None
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _scatter_value(outline: Any, full_value: Tensor | None, parameter: nn.Parameter) -> Any:
    """Collective for a tensor: send a value from rank 0, and return it sharded like `parameter`.

    Args:
        outline: outline of the value, see `_outline`. Unless it is a tensor on the meta device, it is the value itself
            and is copied.
        full_value: whole tensor on rank 0, None on other ranks.
        parameter: parameter that the value belongs to.
    """
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return copy.deepcopy(outline)
    return scatter_tensor_from_rank0(full_value, parameter, outline.dtype)


def _initial_value(value: Any, parameter: nn.Parameter) -> Any:
    """Return the zero (or zeros) that optimizer state starts from, for a parameter that never had a gradient.

    Args:
        value: outline of the same state of another parameter, see `_outline`.
        parameter: parameter that the state belongs to.
    """
    if not isinstance(value, Tensor):
        return type(value)()
    if value.is_meta:
        return torch.zeros_like(parameter, dtype=value.dtype)
    return torch.zeros_like(value)
