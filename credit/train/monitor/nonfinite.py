"""Search for the first layer with values that are not finite, and for channels with infinite values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.object_collectives import reduce_over_ranks


def find_nonfinite_layer(model: nn.Module, compute: Callable[[], Tensor]) -> str | None:
    """Collective if the model is sharded: recompute a step and describe its first tensor that is not finite.

    The outputs of all layers are checked first, then the loss, then the gradients at the outputs of the layers. For a
    block that is compiled or recomputed in the backward pass, only the block may be named, not the layer inside it.

    Args:
        model: the network. Its gradients are removed at the end.
        compute: function that runs the forward pass and returns the loss, a scalar. `find_nonfinite_layer` itself runs
            the backward pass.

    Returns:
        Description of the layer output, loss or gradient; None if all values are finite.
    """
    problems: list[str] = []

    # Each layer gets a hook on its output. This hook registers a second hook on the gradient of the output.
    def build_forward_hook(name: str) -> Callable:
        def check_output(module: nn.Module, args: tuple, output: object) -> None:
            # Only the first problem is reported, because it makes the outputs of all later layers non-finite.
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

    # Inner layers finish before the layers that contain them, so the innermost layer is reported.
    hooks = []
    for name, module in model.named_modules():
        hook = build_forward_hook(strip_wrapper_prefixes(name))
        hooks.append(module.register_forward_hook(hook))
    try:
        loss = compute()
        if not problems and not torch.isfinite(loss):
            problems.append("the loss")
        # The backward pass runs even if this rank has found a problem. Other ranks of a sharded model may not have
        # found one, and would otherwise wait for this rank in a collective.
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return problems[0] if problems else None


def find_infinite_channels(values_BCTHW: Tensor, names: list[str]) -> list[str]:
    """Return the names of the channels with infinite values; NaN is allowed, because it marks missing values.

    Args:
        values_BCTHW: B samples of C channels at T times, on H latitude rows and W longitude columns, in any units.
        names: names of the C channels.
    """
    is_infinite_C = torch.isinf(values_BCTHW).flatten(2).any(dim=2).any(dim=0)
    infinite_names = []
    for name, is_infinite in zip(names, is_infinite_C.tolist(), strict=True):
        if is_infinite:
            infinite_names.append(name)
    return infinite_names


def describe_nonfinite_cause(explanation: str | None) -> str:
    """Collective: return a sentence that names the first tensor of any rank that is not finite.

    Args:
        explanation: description of the first non-finite tensor on this rank; None if all its tensors are finite.
    """

    def choose(low: str | None, high: str | None) -> str | None:
        # Ranks that share members also share the loss. So a rank with a non-finite layer output takes precedence over
        # a rank that only reports the loss.
        return high if high and low in (None, "the loss") else low

    cause = reduce_over_ranks(lambda: explanation, choose)
    return f"Not finite at first: {cause}" if cause else "All values were finite when the last batch was recomputed"
