"""Search for the first layer and the channels whose values are not finite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.object_collectives import reduce_over_ranks


def find_nonfinite_layer(model: nn.Module, compute: Callable[[], Tensor]) -> str | None:
    """Collective if the model is sharded: compute a step again and describe its first value that is not finite.

    The outputs of all layers are checked first, then the loss, then the gradients at the outputs of the layers. Layers
    inside a block that is compiled, or computed again in the backward pass, may not be told apart.

    Args:
        model: the network.
        compute: function that runs the forward pass and returns its loss, a scalar. This function runs the backward
            pass and then removes all gradients.

    Returns:
        Description of the layer output, loss or gradient; None if all values are finite.
    """
    problems: list[str] = []

    # Each layer has a hook on its output, and that hook puts another one on the gradient of the output.
    def build_forward_hook(name: str) -> Callable:
        def check_output(module: nn.Module, args: tuple, output: object) -> None:
            # Only the first problem counts, because it spreads through all layers after it.
            if not isinstance(output, Tensor) or problems:
                return
            layer = f"{name or 'the model'} ({type(module).__name__})"

            def check_gradient(gradient: Tensor) -> None:
                if not problems and not torch.isfinite(gradient).all():
                    problems.append(f"the gradient at the output of {layer}")

            if not torch.isfinite(output).all():
                problems.append(f"the output of {layer}")
            elif output.requires_grad:
                output.register_hook(check_gradient)

        return check_output

    # Layers inside others finish first, so the innermost layer is the one that is reported.
    hooks = []
    for name, module in model.named_modules():
        hook = build_forward_hook(strip_wrapper_prefixes(name))
        hooks.append(module.register_forward_hook(hook))
    try:
        loss = compute()
        if not problems and not torch.isfinite(loss):
            problems.append("the loss")
        # The backward pass runs even if the layer is known: other ranks of a sharded model may not know theirs, and
        # would wait for this one in a collective.
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return problems[0] if problems else None


def find_infinite_channels(values_BCTHW: Tensor, names: list[str]) -> list[str]:
    """Return the names of the channels that have an infinite value; NaN is not an error, as it marks missing values.

    Args:
        values_BCTHW: B samples of C channels at T times, on H latitude rows and W longitude columns, in any unit.
        names: names of the C channels.
    """
    is_infinite_C = torch.isinf(values_BCTHW).flatten(2).any(dim=2).any(dim=0)
    infinite_names = []
    for name, is_infinite in zip(names, is_infinite_C.tolist(), strict=True):
        if is_infinite:
            infinite_names.append(name)
    return infinite_names


def choose_cause(explanation: str | None) -> str:
    """Collective: return a sentence about the first value of any rank that is not finite.

    Args:
        explanation: description of the first non-finite tensor on this rank, None for none.
    """

    def choose(low: str | None, high: str | None) -> str | None:
        # Ranks that share members share the loss as well, so the rank with the cause names something before the loss.
        return high if high and low in (None, "the loss") else low

    cause = reduce_over_ranks(lambda: explanation, choose)
    return f"Not finite at first: {cause}" if cause else "Computed once more, the last one is finite"
