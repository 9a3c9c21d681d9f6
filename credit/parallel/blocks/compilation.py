"""Replacement of DTensors by plain tensors in compiled blocks whose weights tensor parallelism has split."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from credit.parallel.dtensor import to_local


def keep_dtensors_out_of_graphs(model: nn.Module) -> None:
    """Change marked blocks in place: each forward sees this rank's parts of split tensors as plain tensors.

    A compiled graph that turns a DTensor into a plain tensor has the device mesh among its values. In a checkpointed
    block, torch 2.13 tries to save the mesh for the backward pass and fails ("expected all tensors_saved_with_vc_check
    to be Tensors"). So hooks take the parts before each forward, outside of the graph and of checkpointing.

    Args:
        model: model after tensor parallelism and checkpointing, and before compilation and FSDP2. FSDP2 later puts its
            own hook before these, so the parts are taken from weights that are gathered already.
    """
    for block in _outermost_marked(model):
        split_tensors: list[tuple[nn.Module, str]] = []
        for module in block.modules():
            tensors = module._parameters | module._buffers
            split_tensors += [(module, name) for name, tensor in tensors.items() if isinstance(tensor, DTensor)]
        if split_tensors:
            _use_local_tensors_in_forward(block, split_tensors)


def _outermost_marked(model: nn.Module) -> Iterator[nn.Module]:
    """Yield each marked block that is not inside another marked block; instead of a wrapped block, its wrapper."""
    for child in model.children():
        # A checkpoint wrapper shows the mark of the block inside it.
        if getattr(child, "_fsdp2_shard", False):
            yield child
        else:
            yield from _outermost_marked(child)


def _use_local_tensors_in_forward(block: nn.Module, split_tensors: list[tuple[nn.Module, str]]) -> None:
    """Register hooks on a block that replace DTensors by this rank's parts during each forward.

    Args:
        block: outermost marked block.
        split_tensors: (module inside the block, name of its parameter or buffer that is a DTensor).
    """

    def set_local_tensors(block: nn.Module, args: tuple) -> None:
        """Forward pre-hook: hide each DTensor behind an attribute that holds this rank's part as a plain tensor."""
        for module, name in split_tensors:
            tensors = module._parameters if name in module._parameters else module._buffers
            # An instance attribute hides the parameter of the same name, which stays registered in the module.
            vars(module)[name] = to_local(tensors[name])

    def remove_local_tensors(block: nn.Module, args: tuple, output: object) -> None:
        """Forward hook: remove the attributes, so that the modules have their DTensors again."""
        for module, name in split_tensors:
            vars(module).pop(name, None)

    block.register_forward_pre_hook(set_local_tensors)
    # `always_call` removes the attributes after an exception as well.
    block.register_forward_hook(remove_local_tensors, always_call=True)
