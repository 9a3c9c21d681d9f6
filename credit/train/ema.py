"""Exponential moving average of the parameters, on the device, sharded as they are.

Only parameters are averaged. The spectral-norm vectors belong to the live weights: averaged ones estimate nothing.
When the average is used they start from the live ones and take power iterations for the averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from credit.models.layers.spectral_norm import advance_power_iterations, singular_vectors
from credit.parallel.blocks.marks import plain_name
from credit.parallel.fsdp2 import reshard

AVERAGE_ITERATIONS = 5


class EMA:
    """The average of a model's trainable parameters.

    Args:
        model: the live model.
        decay: of the average per optimizer step; smaller while the run is young, min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        live = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in live.items()}
        # found once: going through the model takes as long as the average of a small one
        self._live = [*live.values()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the live weights after optimizer step `step` (from 0)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(*self._parts(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for the duration of the block; collective where the model is sharded."""
        vectors = {name: buffer.clone() for name, buffer in singular_vectors(self._model).items()}
        reshard(self._model)
        self._swap()
        try:
            advance_power_iterations(self._model, AVERAGE_ITERATIONS)
            yield
        finally:
            reshard(self._model)
            self._swap()
            with torch.no_grad():
                for name, buffer in singular_vectors(self._model).items():
                    buffer.copy_(vectors[name])

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's parts of the average and of the live weights."""
        averages = [p.to_local() if isinstance(p, DTensor) else p for p in self.average.values()]
        return averages, [p.to_local() if isinstance(p, DTensor) else p for p in self._live]

    @torch.no_grad()
    def _swap(self) -> None:
        for average, live in zip(*self._parts(), strict=True):
            kept = live.clone()
            live.copy_(average)
            average.copy_(kept)
