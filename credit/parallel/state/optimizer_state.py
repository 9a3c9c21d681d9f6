"""Whole state of an optimizer on rank 0, gathered from the ranks' parts and scattered to them.

Parameters have plain names, without the prefixes of wrappers. State to be loaded is checked on rank 0 before any tensor
is sent, and all ranks share the result: an error on rank 0 between two collectives would leave the others waiting. Then
rank 0 sends an outline of the state, whose tensors are on the meta device: the other ranks need shapes and dtypes of
what they receive.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) are not used, because

- loading fails on rank 0 alone for a value that cannot be sent,
- missing optimizer state is made by a step with zero gradients, which then counts as a step of Adam,
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
        ``{"state": {name: {key: value}}, "param_groups": [...]}``, whose tensors are copies on the CPU.

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

    groups = _match_group_settings(optimizer, names, saved_groups)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _match_group_settings(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], saved_groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer, each with the settings that its first parameter had when saved.

    Args:
        optimizer: the optimizer that loads the state.
        names: its parameters and their plain names.
        saved_groups: saved parameter groups by plain names.

    Returns:
        Groups whose ``params`` are numbers, counted in the order of `names`, as `load_state_dict` takes them.
    """
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
    return groups


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
            problem = describe_unsendable(value, "fsdp2_optimizer_state_dict")
            if problem:
                raise CheckpointError(f"optimizer state: {name}/{key} {problem}")

    plain_groups = []
    for group in groups:
        plain_groups.append({**group, "params": list_plain_names(group["params"], names, "optimizer state")})
    return map_plain_names(state, names, "optimizer state"), plain_groups


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
            f"optimizer state: {join_problems(problems)}; it is of another model or of other trainable parameters"
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
