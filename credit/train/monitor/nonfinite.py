"""Finds what is not finite first, by computing a step once more with an eye on every layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from credit.parallel.blocks.marks import plain_name


def first_bad_layer(model: nn.Module, compute: Callable[[], Tensor]) -> str | None:
    """Return in words which layer's output, or else which gradient, is the first that is not finite; None for none.

    A layer that is compiled, or computed again in the backward pass, may be seen as a whole only.

    Args:
        model: the network.
        compute: returns the loss; the gradients that its backward pass leaves behind are dropped.
    """
    found: list[str] = []

    def watch(name: str) -> Callable:
        def look(module: nn.Module, args: tuple, output: object) -> None:
            if not isinstance(output, Tensor) or found:
                return
            where = f"{name or 'the model'} ({type(module).__name__})"
            if not torch.isfinite(output).all():
                found.append(f"the output of {where}")
            elif output.requires_grad:
                output.register_hook(lambda gradient: _note(found, gradient, f"the gradient at the output of {where}"))

        return look

    # layers inside others come first: the innermost culprit is met first
    hooks = [module.register_forward_hook(watch(plain_name(name))) for name, module in model.named_modules()]
    try:
        loss = compute()
        if not found and not torch.isfinite(loss):
            found.append("the loss")
        # also where the culprit is found: the other ranks of a sharded model may have to go on
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return found[0] if found else None


def _note(found: list[str], gradient: Tensor, where: str) -> None:
    if not found and not torch.isfinite(gradient).all():
        found.append(where)


def bad_channels(values_BCTHW: Tensor, names: list[str]) -> list[str]:
    """Return the channels of a batch that hold an infinite value; NaN stands for what is declared missing."""
    bad = torch.isinf(values_BCTHW).flatten(2).any(dim=2).any(dim=0)
    return [name for name, one in zip(names, bad.tolist(), strict=True) if one]
