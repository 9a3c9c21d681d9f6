"""An optimizer's state, whole on rank 0 and by parameter name, and back to the parts that the ranks hold.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) would not do: state that does not exist yet they
make by a step with zero gradients, which then counts as a step of Adam; into an optimizer that has state for some
parameters only they load plain tensors beside DTensors; one without any state (SGD) they cannot load.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError, ConfigError
from credit.parallel.activation import plain_name
from credit.parallel.materialise import part_of
from credit.parallel.verdict import on_main, rank_of


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``{"state": {name: {key: value}}, "param_groups": [...]}`` on rank 0, an empty dict elsewhere; collective.

    The tensors are copies on the CPU.

    Raises:
        ConfigError: if the optimizer has other parameters than the model.
    """
    names = _names(model, optimizer)
    state = {
        name: {key: _whole_on_main(value) for key, value in optimizer.state[parameter].items()}
        for parameter, name in names.items()
        if optimizer.state.get(parameter)
    }
    groups = [
        {**copy.deepcopy(_settings(group)), "params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups} if rank_of() == 0 else {}


def scatter_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what `gather_state` returned and rank 0 has; the other ranks' `saved` is not read. Collective.

    Settings go to the parameters that had them, however the optimizer groups them now.

    Raises:
        ConfigError: if the optimizer has other parameters than the model.
        CheckpointError: on every rank, if the state is of other parameters.
    """
    names = _names(model, optimizer)
    entries, saved_groups = on_main(lambda: (_outline(saved), saved["param_groups"]))
    _require_same(entries, saved_groups, names)
    pattern = next(iter(entries.values()), {})
    state = {}
    for index, (parameter, name) in enumerate(names.items()):
        if name in entries:
            whole = saved["state"][name] if rank_of() == 0 else {}
            state[index] = {key: _part(value, whole.get(key), parameter) for key, value in entries[name].items()}
        else:
            state[index] = {key: _zero(value, parameter) for key, value in pattern.items()}
    index_of = {parameter: index for index, parameter in enumerate(names)}
    settings_of = {name: _settings(group) for group in saved_groups for name in group["params"]}
    groups = []
    for group in optimizer.param_groups:
        settings = settings_of[names[group["params"][0]]] if group["params"] else _settings(group)
        # some formats of files know no tuples
        settings = {key: tuple(v) if isinstance(group.get(key), tuple) else v for key, v in settings.items()}
        groups.append({**settings, "params": [index_of[p] for p in group["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Return the plain names of the optimizer's parameters, in its order."""
    names = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    strange = sum(p not in names for p in parameters)
    if strange:
        raise ConfigError(
            f"optimizer: {strange} of its {len(parameters)} parameters are not the model's; build it after the model "
            "has been sharded"
        )
    return {p: names[p] for p in parameters}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _outline(saved: Any) -> dict[Any, dict[str, Any]]:
    """Return the saved state of the parameters with shapes in place of the tensors that have one."""
    if not (isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()):
        raise CheckpointError("optimizer state: rank 0 has no dict with state and param_groups")
    state = saved["state"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer state: state is a {type(state).__name__} in place of a dict by parameter")
    wrong = [name for name, entry in state.items() if not isinstance(entry, Mapping)]
    if wrong:
        raise CheckpointError(f"optimizer state: {wrong[0]} has a {type(state[wrong[0]]).__name__} in place of a dict")

    def outline(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) and value.dim() else value

    return {name: {key: outline(value) for key, value in entry.items()} for name, entry in state.items()}


def _require_same(
    entries: Mapping[Any, Mapping[str, Any]], groups: list[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    shapes = {name: parameter.shape for parameter, name in names.items()}
    grouped = {name for group in groups for name in group["params"]}
    if any(isinstance(name, int) for name in grouped):
        raise CheckpointError(
            "optimizer state: its parameters are numbers, as optimizer.state_dict() has them, which under FSDP2 is one "
            "rank's part; save what fsdp2_optimizer_state_dict returns"
        )
    wrong = [f"{name} is not optimized here" for name in entries if name not in shapes]
    wrong += [f"{name} is in none of its groups" for name in shapes if name not in grouped]
    wrong += [
        f"{name}/{key} is {tuple(value.shape)}, here {tuple(shapes[name])}"
        for name, entry in entries.items()
        for key, value in entry.items()
        if name in shapes and isinstance(value, Tensor) and value.is_meta and value.shape != shapes[name]
    ]
    if wrong:
        raise CheckpointError(
            f"optimizer state: {'; '.join(map(str, wrong[:5]))}{'; ...' if wrong[5:] else ''}; it is of another model "
            "or of other trainable parameters"
        )


def _whole_on_main(value: Any) -> Any:
    """Return a copy of a whole value on the CPU of rank 0, None elsewhere; collective for a DTensor."""
    if isinstance(value, DTensor):
        # state in host memory is gathered where the mesh is
        value = value.to(value.device_mesh.device_type).full_tensor()
    if rank_of() > 0:
        return None
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _part(outline: Any, whole: Tensor | None, parameter: nn.Parameter) -> Any:
    """Return this rank's part of what rank 0 has as `whole`, cut as `parameter` is; collective."""
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return copy.deepcopy(outline)
    is_part = isinstance(parameter, DTensor)
    device = torch.device(parameter.device_mesh.device_type) if is_part else parameter.device
    value = torch.empty(outline.shape, dtype=outline.dtype, device=device)
    if whole is not None:
        value.copy_(whole)
    if dist.is_initialized():
        dist.broadcast(value, src=0)
    part = part_of(value, parameter).clone().to(parameter.device)
    if not is_part:
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _zero(value: Any, parameter: nn.Parameter) -> Any:
    """Return how a value of the kind of `value` starts for a parameter that never had a gradient."""
    if not isinstance(value, Tensor):
        return type(value)()
    return torch.zeros_like(parameter, dtype=value.dtype) if value.is_meta else torch.zeros_like(value)
