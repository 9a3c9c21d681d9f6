"""Whole state of an optimizer on rank 0: gathered from the parts on all ranks, or scattered to all ranks.

Whole state consists of full, unsharded tensors. Parameters have plain names, without the prefixes of wrappers. The
state of a parameter is a dict from keys such as ``exp_avg`` to values.

Before any tensor is sent, rank 0 checks the state and sends the result to all ranks. Otherwise, after an error on rank
0 between two collectives, the other ranks would wait. Rank 0 then sends an outline of the state with tensors on the
meta device, because the other ranks need the shapes and dtypes of the tensors that they receive.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) are not used, because

- for a value that cannot be sent, loading fails only on rank 0,
- they create missing optimizer state with a step with zero gradients, which increases the step count of Adam,
- if the optimizer has state for only some parameters, the loaded state mixes plain tensors with DTensors,
- they cannot load an optimizer without any state (SGD).
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
    """Collective: return the whole optimizer state on rank 0, and an empty dict on other ranks.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [{..., "params": [name, ...]}, ...]}`` with plain parameter
        names. Tensors are copies on the CPU.

    Raises:
        ConfigError: if the optimizer has parameters that do not belong to the model.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)
    # A parameter that never had a gradient has no state. The order of the parameters is the same on all ranks.
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
    """Collective: load a whole optimizer state from rank 0; the argument `saved` of other ranks is ignored.

    A parameter without saved state gets the initial state of the optimizer. A parameter keeps its saved settings, such
    as the learning rate, even if the optimizer now groups its parameters differently.

    Args:
        model: model, sharded or not, wrapped or not.
        optimizer: optimizer of the model's parameters; its state is replaced.
        saved: whole optimizer state in the format of `gather_optimizer_state`.

    Raises:
        ConfigError: if the optimizer has parameters that do not belong to the model.
        CheckpointError: on every rank, if the state belongs to different parameters, if it has only one rank's parts
            of sharded tensors, or if it has different settings for two parameters that are now in the same group.
    """
    names = _name_parameters(unwrap_data_parallel(model), optimizer)

    # Check the state on rank 0, and send the shapes and dtypes to the other ranks.
    state_on_rank0: dict[Any, Mapping[str, Any]] = {}

    def check_on_rank0() -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        state, groups = _read_optimizer_state(saved, set(names.values()))
        state_on_rank0.update(state)
        # Outlines are small, so the outlines of all parameters are sent in one message.
        outlines = {}
        for name, entry in state.items():
            outlines[name] = {key: _build_outline(value) for key, value in entry.items()}
        return outlines, groups

    outlines, saved_groups = run_on_rank0(check_on_rank0)
    _require_same_parameters(outlines, saved_groups, names)
    groups = _match_group_settings(optimizer, names, saved_groups)

    # Scatter the state of one parameter after the other. `load_state_dict` identifies parameters by their number.
    # A parameter without saved state gets the same keys as the first parameter with saved state.
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
    """Return the parameter groups of an optimizer, each with the saved settings of its parameters.

    Args:
        optimizer: optimizer that loads the state.
        names: parameter of the optimizer -> plain name.
        saved_groups: saved parameter groups; their ``params`` are plain names.

    Returns:
        Parameter groups for `load_state_dict`: their ``params`` are indices of parameters in the order of `names`.

    Raises:
        CheckpointError: if two parameters of a group have different saved settings.
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
    """Require that two parameters of the same group have the same saved settings.

    Args:
        name: plain name of a parameter.
        other_name: plain name of another parameter of the group.
        settings_of_name: plain name of a parameter -> its saved settings.

    Raises:
        CheckpointError: if a setting differs; the message names the first different setting.
    """
    settings = settings_of_name[name]
    other_settings = settings_of_name[other_name]
    for key in sorted({*settings, *other_settings}):
        value = settings.get(key)
        other_value = other_settings.get(key)
        if value != other_value:
            raise CheckpointError(
                f"optimizer state: {name} and {other_name} are in one group here, but were saved with {key} {value} "
                f"and {other_value}; put these parameters into different groups"
            )


def _name_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return parameter -> plain name for all parameters of an optimizer, in the order of its parameter groups.

    Raises:
        ConfigError: if the optimizer has parameters that do not belong to the model.
    """
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in model.named_parameters()}
    parameters: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    num_foreign = sum(parameter not in names for parameter in parameters)
    if num_foreign:
        raise ConfigError(
            f"optimizer: {num_foreign} of its {len(parameters)} parameters do not belong to the model; build the "
            "optimizer after the model has been sharded"
        )
    return {parameter: names[parameter] for parameter in parameters}


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group of an optimizer (learning rate, betas, ...), without ``params``."""
    return {key: value for key, value in group.items() if key != "params"}


def _read_optimizer_state(
    saved: Any, names: Collection[str]
) -> tuple[dict[Any, Mapping[str, Any]], list[dict[str, Any]]]:
    """Check a saved optimizer state on rank 0, and return its state and parameter groups with plain names.

    Args:
        saved: saved optimizer state by parameter name; names may have the prefixes of wrappers.
        names: plain names of the optimizer's parameters.

    Returns:
        The state (plain name -> key -> value), and the list of parameter groups, which have plain names in ``params``.

    Raises:
        CheckpointError: if `saved` is not an optimizer state, or has values that cannot be sent.
    """
    # The structure: {"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], ...}, ...]}.
    if not (isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()):
        raise CheckpointError("optimizer state: rank 0 has no dict with state and param_groups")
    state = saved["state"]
    groups = saved["param_groups"]
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"optimizer state: state is a {type(state).__name__} instead of a dict with parameter names"
        )
    is_group_list = isinstance(groups, list | tuple) and all(_has_params(group) for group in groups)
    if not is_group_list:
        raise CheckpointError("optimizer state: param_groups is not a list of dicts with the key params")
    for name, entry in state.items():
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"optimizer state: {name} has a {type(entry).__name__} instead of a dict")
    for group in groups:
        if any(isinstance(name, int) for name in group["params"]):
            raise CheckpointError(
                "optimizer state: parameters are numbers instead of names, so this is a result of "
                "optimizer.state_dict(), which under FSDP2 has only one rank's part; save the result of "
                "fsdp2_optimizer_state_dict"
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
    """Return True if a saved parameter group is a dict with the key ``params``."""
    return isinstance(group, Mapping) and "params" in group


def _build_outline(value: Any) -> Any:
    """Return the outline of a value of the state: for a tensor, its shape and dtype as a tensor on the meta device.

    A scalar tensor, such as the number of steps, and a value of another type are returned unchanged. They are not split
    over the ranks, so they are sent with the outline.
    """
    if isinstance(value, Tensor) and value.dim():
        return value.detach().to("meta")
    return value


def _require_same_parameters(
    outlines: Mapping[Any, Mapping[str, Any]], groups: list[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    """Require that the saved state and the optimizer have the same parameters with the same shapes.

    Args:
        outlines: outline of the saved state: plain name -> key -> outline of the value.
        groups: saved parameter groups; their ``params`` are plain names.
        names: parameter of the optimizer -> plain name.

    Raises:
        CheckpointError: if the parameters differ; the message names the first few.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    grouped_names: set[str] = set()
    for group in groups:
        grouped_names.update(group["params"])
    # A parameter has no state if it never had a gradient, but every parameter must be in a group.
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
            f"optimizer state: {join_problems(problems)}; the state belongs to a different model or to different "
            "trainable parameters"
        )


def _gather_value(value: Any) -> Any:
    """Collective for a DTensor: return a copy of the whole `value` on the CPU of rank 0, and None on other ranks."""
    if isinstance(value, DTensor):
        # State in host memory is gathered on the device of the mesh.
        value = value.to(value.device_mesh.device_type).full_tensor()
    if current_rank() > 0:
        return None
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _scatter_value(outline: Any, full_value: Tensor | None, parameter: nn.Parameter) -> Any:
    """Collective for a tensor: send a value from rank 0, and return it with the sharding of `parameter`.

    Args:
        outline: outline of the value, see `_build_outline`. An outline that is not a tensor on the meta device is the
            value itself; a copy of it is returned.
        full_value: on rank 0, whole tensor; on other ranks, None.
        parameter: parameter to which the value belongs.
    """
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return copy.deepcopy(outline)
    return scatter_tensor_from_rank0(full_value, parameter, outline.dtype)


def _initial_value(value: Any, parameter: nn.Parameter) -> Any:
    """Return the initial optimizer state (zero) for a parameter that never had a gradient.

    Args:
        value: outline of the same state of another parameter, see `_build_outline`.
        parameter: parameter to which the state belongs.
    """
    if not isinstance(value, Tensor):
        return type(value)()
    if value.is_meta:
        return torch.zeros_like(parameter, dtype=value.dtype)
    return torch.zeros_like(value)
