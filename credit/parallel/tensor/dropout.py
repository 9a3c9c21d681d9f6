"""Dropout with tensor parallelism: ranks need different masks for different activations, and equal masks otherwise."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def drop_rate(module: nn.Module) -> float:
    """Return the probability with which a module itself drops activations, without its submodules.

    For a Dropout module, this is its rate. For a different module, such as attention, it is the attribute ``dropout``
    if this is a number, otherwise 0.
    """
    rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout", 0.0)
    # The attribute may also be a Dropout module, which is then a submodule.
    return rate if isinstance(rate, int | float) else 0.0


def has_dropout(module: nn.Module) -> bool:
    """Return True if a module or one of its submodules drops activations in training."""
    return any(drop_rate(inner) > 0 for inner in module.modules())


def remove_dropout(module: nn.Module) -> None:
    """Set the rates of torch's dropout to 0 in a module and its submodules, for example in a trained model."""
    for inner in module.modules():
        if drop_rate(inner) > 0:
            if isinstance(inner, nn.Dropout):
                inner.p = 0.0
            else:
                inner.dropout = 0.0


class RankRandomState:
    """Random state of a tensor-parallel rank, which is used between a colwise layer and its rowwise partner.

    In other parts of the model, all ranks sample the same random numbers from a common random state. Between the two
    layers, ranks have different activations, so each rank samples from a separate stream. The seed of this stream is a
    number from the common state plus the rank. A recomputed block starts from the same common state, so it samples the
    same numbers again.

    Args:
        rank: rank of this process among the tensor-parallel ranks.
        parent: module that contains both layers and the dropout between them.
    """

    def __init__(self, rank: int, parent: nn.Module) -> None:
        self._rank = rank
        self._parent = parent
        self._common_state: Tensor | None = None

    def is_needed(self) -> bool:
        """Return True if dropout is active, which means that a module that drops activations is in training mode.

        Dropout is active in training, and in ensembles that set only dropout modules to training mode.
        """
        return any(module.training and drop_rate(module) > 0 for module in self._parent.modules())

    def enter(self, device: torch.device) -> None:
        """Replace the common random state of `device` with this rank's random state."""
        # All ranks sample the same number here, from the common state on the CPU.
        seed = int(torch.randint(2**62, ())) + self._rank
        generator = _default_generator(device)
        self._common_state = generator.get_state()
        generator.manual_seed(seed)

    def leave(self, device: torch.device) -> None:
        """Restore the common random state of `device`, if `enter` has replaced it."""
        if self._common_state is None:
            return
        _default_generator(device).set_state(self._common_state)
        self._common_state = None


def _default_generator(device: torch.device) -> torch.Generator:
    """Return the random generator that dropout on `device` uses.

    `torch.cuda.manual_seed` would seed the current device, which may differ from the device of the tensor.
    """
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
