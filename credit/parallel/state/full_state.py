"""State dicts of weights and of an optimizer: whole on rank 0 and by plain name, and back to the ranks' parts.

What rank 0 is given to load is checked there alone, in one place and before any tensor is sent, and the verdict is that
of all ranks. A failure of rank 0 between two collectives would leave the others waiting until the group's timeout.

torch's own functions (`torch.distributed.checkpoint.state_dict`, 2.13) gather the weights. They would not do for the
rest. Loading fails on rank 0 alone for a value that cannot be sent. Optimizer state that does not exist yet they make
by a step with zero gradients, which then counts as a step of Adam; into an optimizer that has state for some parameters
only they load plain tensors beside DTensors; an optimizer without any state (SGD) they cannot load.
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
from credit.parallel.blocks.marks import plain_name
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import rank_of, run_on_rank0
from credit.parallel.state.materialise import scatter_from_main

# FSDP1 puts this anywhere into a name; DDP and DataParallel put the other at its beginning, once for each wrapper
_FSDP1_WRAPPER, _DDP_WRAPPER = "_fsdp_wrapped_module", "module."


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Collective: return a copy of the whole state dict on the CPU of rank 0, an empty dict elsewhere."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # what is not sharded, a buffer say, would be the live one where the model is on the CPU
    live = {_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return {
        name: value.clone() if isinstance(value, Tensor) and _memory(value) in live else value
        for name, value in state.items()
    }


def scatter_weights(model: nn.Module, state_dict: Any) -> None:
    """Collective: load a whole state dict that rank 0 has; the other ranks' `state_dict` is not read.

    Names may carry what wrappers put into them (``module.``, also repeated, ``_orig_mod.``, and so on).

    Raises:
        CheckpointError: on every rank, if the state dict does not fit; the model is as it was.
    """
    model = unwrap(model)
    target = model.state_dict()
    target_name = {plain_name(name): name for name in target}
    given: dict[str, Any] = {}

    def outline_on_main() -> dict[str, Any]:
        given.update(_by_plain_name(state_dict, target_name, "state dict"))
        problems = _differences({plain: target[name] for plain, name in target_name.items()}, given)
        if problems:
            raise CheckpointError(f"state dict: {_listed(problems)}; is it of this model?")
        # a module's extra state may be anything and is sent as it is
        return {name: None if isinstance(value, Tensor) else value for name, value in given.items()}

    outline = run_on_rank0(outline_on_main)
    state = {}
    for plain, name in target_name.items():
        if isinstance(target[name], Tensor):
            state[name] = scatter_from_main(given.get(plain), target[name])
        else:
            state[name] = outline[plain]
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in target.values())
    model.load_state_dict(state, strict=True, assign=on_meta)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel or DataParallel, which put ``module.`` before its names."""
    while isinstance(model, DistributedDataParallel | DataParallel):
        model = model.module
    return model


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Collective: return the whole optimizer state on rank 0, an empty dict elsewhere.

    It is ``{"state": {name: {key: value}}, "param_groups": [...]}``, whose tensors are copies on the CPU.

    Raises:
        ConfigError: if the optimizer has other parameters than the model.
    """
    names = _names(unwrap(model), optimizer)
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
    """Collective: load what `gather_state` returned and rank 0 has; the other ranks' `saved` is not read.

    Settings go to the parameters that had them, however the optimizer groups them now.

    Raises:
        ConfigError: if the optimizer has other parameters than the model.
        CheckpointError: on every rank, if the state is of other parameters or not whole.
    """
    names = _names(unwrap(model), optimizer)
    state_on_rank0: dict[Any, Mapping[str, Any]] = {}

    def outline_on_main() -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
        state, groups = _plain_optimizer_state(saved, set(names.values()))
        state_on_rank0.update(state)
        return {name: {key: _outline(value) for key, value in entry.items()} for name, entry in state.items()}, groups

    entries, saved_groups = run_on_rank0(outline_on_main)
    _require_same(entries, saved_groups, names)
    pattern = next(iter(entries.values()), {})
    state = {}
    for index, (parameter, name) in enumerate(names.items()):
        if name in entries:
            full_values = state_on_rank0.get(name, {})
            state[index] = {key: _part(value, full_values.get(key), parameter) for key, value in entries[name].items()}
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
    num_foreign = sum(p not in names for p in parameters)
    if num_foreign:
        raise ConfigError(
            f"optimizer: {num_foreign} of its {len(parameters)} parameters are not the model's; build it after the "
            "model has been sharded"
        )
    return {p: names[p] for p in parameters}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _plain_optimizer_state(
    saved: Any, names: Collection[str]
) -> tuple[dict[Any, Mapping[str, Any]], list[dict[str, Any]]]:
    """Return state and groups of what rank 0 was given, by plain name.

    Raises:
        CheckpointError: if it is no optimizer state, or one whose values cannot be sent.
    """
    if not (isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()):
        raise CheckpointError("optimizer state: rank 0 has no dict with state and param_groups")
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer state: state is a {type(state).__name__} in place of a dict by parameter")
    if not (isinstance(groups, list | tuple) and all(isinstance(g, Mapping) and "params" in g for g in groups)):
        raise CheckpointError("optimizer state: param_groups is no list of dicts that name their params")
    wrong = [name for name, entry in state.items() if not isinstance(entry, Mapping)]
    if wrong:
        raise CheckpointError(f"optimizer state: {wrong[0]} has a {type(state[wrong[0]]).__name__} in place of a dict")
    if any(isinstance(name, int) for group in groups for name in group["params"]):
        raise CheckpointError(
            "optimizer state: its parameters are numbers, as optimizer.state_dict() has them, which under FSDP2 is one "
            "rank's part; save what fsdp2_optimizer_state_dict returns"
        )
    for name, entry in state.items():
        for key, value in entry.items():
            problem = _unsendable(value, "fsdp2_optimizer_state_dict")
            if problem:
                raise CheckpointError(f"optimizer state: {name}/{key} {problem}")
    plain_groups = [
        {**group, "params": list(_plain_names(group["params"], names, "optimizer state"))} for group in groups
    ]
    return _by_plain_name(state, names, "optimizer state"), plain_groups


def _outline(value: Any) -> Any:
    """Return a tensor of one dimension or more without its values; anything else as it is."""
    return value.detach().to("meta") if isinstance(value, Tensor) and value.dim() else value


def _require_same(
    entries: Mapping[Any, Mapping[str, Any]], groups: list[Mapping[str, Any]], names: Mapping[nn.Parameter, str]
) -> None:
    shapes = {name: parameter.shape for parameter, name in names.items()}
    grouped = {name for group in groups for name in group["params"]}
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
            f"optimizer state: {_listed(wrong)}; it is of another model or of other trainable parameters"
        )


def _whole_on_main(value: Any) -> Any:
    """Return a copy of a whole value on the CPU of rank 0, None elsewhere; collective for a DTensor."""
    if isinstance(value, DTensor):
        # state in host memory is gathered where the mesh is
        value = value.to(value.device_mesh.device_type).full_tensor()
    if rank_of() > 0:
        return None
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def _part(outline: Any, full_value: Tensor | None, parameter: nn.Parameter) -> Any:
    """Collective: return this rank's part of what rank 0 has as `whole`, cut as `parameter` is."""
    if not (isinstance(outline, Tensor) and outline.is_meta):
        return copy.deepcopy(outline)
    return scatter_from_main(full_value, parameter, outline.dtype)


def _zero(value: Any, parameter: nn.Parameter) -> Any:
    """Return how a value of the kind of `value` starts for a parameter that never had a gradient."""
    if not isinstance(value, Tensor):
        return type(value)()
    return torch.zeros_like(parameter, dtype=value.dtype) if value.is_meta else torch.zeros_like(value)


def _differences(target: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Return in words where a whole state dict does not fit that of the model; both are by plain name."""
    problems = []
    for name, value in given.items():
        if name not in target or not isinstance(target[name], Tensor):
            continue
        if not isinstance(value, Tensor):
            problems.append(f"{name} is no tensor")
        elif _unsendable(value, "fsdp2_state_dict"):
            problems.append(f"{name} {_unsendable(value, 'fsdp2_state_dict')}")
        elif value.is_complex() and not target[name].is_complex():
            problems.append(f"{name} is complex, here real")
    if problems:
        return problems
    shapes, given_shapes = (
        {name: tuple(getattr(value, "shape", ())) for name, value in state.items()} for state in (target, given)
    )
    return (
        [f"{name} is missing" for name in target if name not in given]
        + [f"{name} is unknown" for name in given if name not in target]
        + [
            f"{name} is {given_shapes[name]}, here {shape}"
            for name, shape in shapes.items()
            if given_shapes.get(name, shape) != shape
        ]
    )


def _unsendable(value: Any, source: str) -> str | None:
    """Return why a value cannot be sent to the ranks as a whole tensor, None if it can.

    Args:
        value: as rank 0 was given it.
        source: the function that returns whole ones.
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


def _by_plain_name(given: Any, names: Collection[str], label: str) -> dict[str, Any]:
    """Return a dict by names as a model without wrappers has them."""
    if not isinstance(given, Mapping):
        raise CheckpointError(f"{label}: {type(given).__name__} in place of a dict from names to tensors")
    return dict(zip(_plain_names(given, names, label), given.values(), strict=True))


def _plain_names(given: Iterable[Any], names: Collection[str], label: str) -> list[str]:
    """Return names without what wrappers have put into them.

    Args:
        given: names.
        names: those of the model without wrappers, one of which may begin with ``module.`` by itself.
        what: is loaded.

    Raises:
        CheckpointError: if a key is no name, or two have one plain name.
    """
    plain_names: dict[str, str] = {}
    for name in given:
        if not isinstance(name, str):
            raise CheckpointError(f"{label}: the key {name!r} is no name")
        plain = plain_name(name).replace(f"{_FSDP1_WRAPPER}.", "")
        while plain not in names and plain.startswith(_DDP_WRAPPER):
            plain = plain.removeprefix(_DDP_WRAPPER)
        if plain in plain_names:
            raise CheckpointError(
                f"{label}: {plain_names[plain]} and {name} are one parameter, {plain}, without what wrappers put into "
                "names; leave one out"
            )
        plain_names[plain] = name
    return list(plain_names)


def _listed(problems: list[str]) -> str:
    """Return the first five of many problems in one line."""
    return "; ".join(problems[:5]) + ("; ..." if problems[5:] else "")


def _memory(tensor: Tensor) -> int:
    return local_shard(tensor).untyped_storage().data_ptr()
