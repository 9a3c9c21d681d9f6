"""Whole state dict of a model's weights on rank 0: gathered from the parts on all ranks, or scattered to all ranks.

Whole state consists of full, unsharded tensors. Names are plain, without the prefixes of wrappers. Before any tensor is
sent, rank 0 checks the state dict and sends the result to all ranks. Otherwise, after an error on rank 0 between two
collectives, the other ranks would wait.

torch's own function (`torch.distributed.checkpoint.state_dict`, 2.13) gathers the weights. torch's function for loading
is not used, because it fails only on rank 0 if a value cannot be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from credit.errors import CheckpointError
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.state.materialise import scatter_tensor_from_rank0
from credit.parallel.state.state_checks import (
    describe_unsendable,
    join_problems,
    map_plain_names,
    unwrap_data_parallel,
)


def gather_weights(model: nn.Module) -> dict[str, Any]:
    """Collective: return a copy of the whole state dict on the CPU of rank 0, and an empty dict on other ranks.

    Returns:
        Plain name -> whole tensor, or extra state of a module (any object).
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    # For a model on the CPU, torch does not copy tensors that are not sharded, such as buffers.
    model_tensors = (*model.parameters(), *model.buffers())
    model_addresses = {_memory_address(tensor) for tensor in model_tensors}
    for name, value in state.items():
        if isinstance(value, Tensor) and _memory_address(value) in model_addresses:
            state[name] = value.clone()
    return state


def scatter_weights(model: nn.Module, state_dict: Any) -> None:
    """Collective: load a whole state dict from rank 0; the argument `state_dict` of other ranks is ignored.

    Names may contain the prefixes of wrappers (``module.``, also repeated, ``_orig_mod.``, and so on).

    Args:
        model: model, sharded or not, wrapped or not. If it is on the meta device, the loaded tensors become its
            parameters and buffers.
        state_dict: name -> whole tensor, or extra state of a module.

    Raises:
        CheckpointError: on every rank, if names or shapes differ from the model, or a value cannot be sent. The model
            is then unchanged.
    """
    model = unwrap_data_parallel(model)
    target = model.state_dict()
    target_names = {strip_wrapper_prefixes(name): name for name in target}
    full_values: dict[str, Any] = {}

    def check_on_rank0() -> dict[str, Any]:
        full_values.update(map_plain_names(state_dict, target_names, "state dict"))
        plain_target = {plain: target[name] for plain, name in target_names.items()}
        problems = _describe_differences(plain_target, full_values)
        if problems:
            raise CheckpointError(f"state dict: {join_problems(problems)}; is it of this model?")
        # The extra state of a module may be any object. It is sent here; tensors are scattered below.
        extra_state: dict[str, Any] = {}
        for name, value in full_values.items():
            extra_state[name] = None if isinstance(value, Tensor) else value
        return extra_state

    extra_state = run_on_rank0(check_on_rank0)
    # Each tensor needs a collective, so all ranks loop over the tensors in the order of the model's state dict.
    state = {}
    for plain, name in target_names.items():
        if isinstance(target[name], Tensor):
            state[name] = scatter_tensor_from_rank0(full_values.get(plain), target[name])
        else:
            state[name] = extra_state[plain]
    # A parameter on the meta device has no memory, so it is replaced with the loaded tensor.
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in target.values())
    model.load_state_dict(state, strict=True, assign=on_meta)


def _describe_differences(target: Mapping[str, Any], full_values: Mapping[str, Any]) -> list[str]:
    """Describe the differences between the state dict of the model and the whole state dict that rank 0 loads.

    Args:
        target: state dict of the model with plain names; its tensors may be sharded.
        full_values: state dict that rank 0 loads, with plain names.

    Returns:
        One message for each value that cannot be loaded. If all values can be loaded: one message for each missing or
        unknown name, and for each tensor of a different shape.
    """
    problems = []
    for name, value in full_values.items():
        if name not in target or not isinstance(target[name], Tensor):
            continue
        unsendable = describe_unsendable(value, "fsdp2_state_dict")
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
        # A missing value has been reported above.
        full_value = full_values.get(name, target_value)
        # Extra state has no shape.
        target_shape = tuple(getattr(target_value, "shape", ()))
        shape = tuple(getattr(full_value, "shape", ()))
        if shape != target_shape:
            problems.append(f"{name} is {shape}, here {target_shape}")
    return problems


def _memory_address(tensor: Tensor) -> int:
    """Return the address of the memory of a tensor, or of this rank's part of a DTensor."""
    return local_shard(tensor).untyped_storage().data_ptr()
