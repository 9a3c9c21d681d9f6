"""Exponential moving average of the parameters, on the device.

Only parameters are averaged. The spectral-norm vectors belong to the live weights: averaged ones estimate nothing.
When the average is used they start from the live ones and take power iterations for the averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from credit.models.wxformer import spectral_norm

AVERAGE_ITERATIONS = 5


class WeightAverage:
    """The average of a model's trainable parameters.

    Args:
        model: the live model.
        decay: of the average per optimizer step; smaller while the run is young, min(decay, (1 + n) / (10 + n)).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self.average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move towards the live weights after optimizer step `step` (from 0)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        live = dict(self._model.named_parameters())
        torch._foreach_lerp_(list(self.average.values()), [live[name].detach() for name in self.average], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average into the model for the duration of the block, without a copy of the weights."""
        vectors = {name: buffer.clone() for name, buffer in spectral_norm.vectors(self._model).items()}
        self._swap()
        try:
            spectral_norm.settle_(self._model, AVERAGE_ITERATIONS)
            yield
        finally:
            self._swap()
            with torch.no_grad():
                for name, buffer in spectral_norm.vectors(self._model).items():
                    buffer.copy_(vectors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name in self.average:
                live = parameter.data
                parameter.data = self.average[name]
                self.average[name] = live
