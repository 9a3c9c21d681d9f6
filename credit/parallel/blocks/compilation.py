"""Hooks that replace DTensors with plain tensors in compiled blocks, for models with tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import to_local


def keep_dtensors_out_of_graphs(model: nn.Module) -> None:
    """Add hooks to the blocks marked with `_fsdp2_shard`, so that their forward passes see each DTensor as a plain
    tensor with this rank's part.

    If a compiled graph converts a DTensor to a plain tensor, the device mesh is one of the values of the graph. In a
    checkpointed block, torch 2.13 tries to save the mesh for the backward pass and fails ("expected all
    tensors_saved_with_vc_check to be Tensors"). Hooks therefore convert the tensors before each forward pass, outside
    of the graph and of checkpointing.

    Args:
        model: model after tensor parallelism and checkpointing, and before compilation and FSDP2. FSDP2 later inserts
            its hook before these hooks, so the hooks here read gathered weights.
    """
    for block in _find_outermost_marked_blocks(model):
        split_tensors: list[tuple[nn.Module, str]] = []
        for module in block.modules():
            tensors = module._parameters | module._buffers
            split_tensors += [(module, name) for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
        if split_tensors:
            _use_local_tensors_in_forward(block, split_tensors)


def _find_outermost_marked_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks marked with ``_fsdp2_shard`` that are not inside another marked block.

    For a block with a checkpoint wrapper, the wrapper is yielded.
    """
    for child in model.children():
        # A checkpoint wrapper has the attributes of the block inside it, including the mark.
        if getattr(child, "_fsdp2_shard", False):
            yield child
        else:
            yield from _find_outermost_marked_blocks(child)


def _use_local_tensors_in_forward(block: nn.Module, split_tensors: list[tuple[nn.Module, str]]) -> None:
    """Register hooks on a block that replace its DTensors with this rank's parts during each forward pass.

    Args:
        block: marked block that is not inside another marked block.
        split_tensors: (module inside the block, name of its parameter or buffer that is a DTensor).
    """

    def set_local_tensors(block: nn.Module, args: tuple) -> None:
        """Forward pre-hook: hide each DTensor behind an attribute of its name, this rank's part as a plain tensor."""
        for module, name in split_tensors:
            tensors = module._parameters if name in module._parameters else module._buffers
            # An instance attribute hides the parameter of the same name. The parameter stays registered in the module.
            vars(module)[name] = to_local(tensors[name])

    def remove_local_tensors(block: nn.Module, args: tuple, output: object) -> None:
        """Forward hook: remove the attributes, so that the DTensors are visible again."""
        for module, name in split_tensors:
            vars(module).pop(name, None)

    block.register_forward_pre_hook(set_local_tensors)
    # With `always_call`, the attributes are also removed after an exception.
    block.register_forward_hook(remove_local_tensors, always_call=True)
