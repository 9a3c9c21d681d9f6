"""Exponential moving average of the parameters, on their device and with their sharding.

Only parameters are averaged. The singular vectors of spectral norm belong to the current weights, and their average has
no meaning. While the averaged weights are in the model, power iterations adapt the singular vectors to these weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from credit.models.layers.spectral_norm import advance_power_iterations, find_singular_vectors
from credit.models.lora import checkpoint_state_dict
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shards
from credit.parallel.fsdp2 import reshard

# Power iterations that adapt the singular vectors to the averaged weights.
AVERAGE_ITERATIONS = 5


class EMA:
    """Exponential moving average of a model's trainable parameters.

    Args:
        model: the model in training.
        decay: decay of the average per optimizer step. Step n uses min(decay, (1 + n) / (10 + n)), so the influence of
            the initial weights decreases quickly.

    Attributes:
        average: name -> averaged parameter, sharded like the parameter of the model.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self.average: dict[str, torch.Tensor] = {}
        # The parameters are listed only once, because iterating over the modules takes as long as averaging a small
        # model.
        self._live: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.average[strip_wrapper_prefixes(name)] = parameter.detach().clone()
                self._live.append(parameter)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the current weights after optimizer step `step` (from 0)."""
        decay = min(self._decay, (1 + step) / (10 + step))
        averages = local_shards(self.average.values())
        # A single call for all tensors launches fewer kernels than a call for each tensor.
        torch._foreach_lerp_(averages, local_shards(self._live), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights; collective if the model is sharded."""
        live_vectors = {name: vector.clone() for name, vector in find_singular_vectors(self._model).items()}
        # Weights that FSDP2 has gathered would still have the values before the exchange, so they are freed first.
        reshard(self._model)
        self._swap()
        try:
            advance_power_iterations(self._model, AVERAGE_ITERATIONS)
            yield
        finally:
            reshard(self._model)
            self._swap()
            # The power iterations have adapted the singular vectors to the average, so their old values are restored.
            with torch.no_grad():
                for name, vector in find_singular_vectors(self._model).items():
                    vector.copy_(live_vectors[name])

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the values of the average and of the model's parameters."""
        averages = local_shards(self.average.values())
        for average, live in zip(averages, local_shards(self._live), strict=True):
            live_copy = live.clone()
            live.copy_(average)
            average.copy_(live_copy)


def forecast_state_dict(model: nn.Module, average: EMA | None) -> dict[str, torch.Tensor]:
    """Collective: return the weights for forecasts: the moving average, or the current weights without an average.

    Returns:
        Name -> tensor, see `checkpoint_state_dict`.
    """
    if average is None:
        return checkpoint_state_dict(model)
    with average.applied():
        reshard(model)
        return {name: value.clone() for name, value in checkpoint_state_dict(model).items()}
