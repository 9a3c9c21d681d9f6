"""Errors of the network itself in an ensemble: Gaussian noise is added to its hidden fields at every step.

Random numbers go in where the network has found features of the weather, and the layers after it turn them into changes
that hang together in space and between variables (per-layer noise: Karras et al. 2019, arXiv 1812.04948). Here the
network has not been trained with them, so their size is a setting. They are drawn cell by cell: the cells of a deep
stage are some hundred kilometres wide, so what comes of them at the output is correlated over as much.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from torch import Tensor, nn

from credit.config.schema_inference import EnsembleConfig
from credit.errors import ConfigError, did_you_mean
from credit.forecast.rollout import ForecastStart, member_rng
from credit.parallel.blocks.marks import is_marked, plain_name
from credit.parallel.host_copy import to_device


class FeatureNoise:
    """Adds noise to what a network's blocks give, while a forecast asks for it.

    Args:
        conf: with `noise`.
        model: gets a hook at each of the blocks.

    Raises:
        ConfigError: if the network has no such blocks.
    """

    def __init__(self, conf: EnsembleConfig, model: nn.Module) -> None:
        chosen = conf.noise
        assert chosen is not None
        self._std, self._seed = chosen.std, conf.seed
        self._first = 1 if conf.control else 0
        # of the forecasts that take a step now, None for one that stays as it is
        self._generators: Sequence[np.random.Generator | None] | None = None
        for name, block in find_blocks(model, chosen.where).items():
            block.register_forward_hook(functools.partial(self._add, name))

    def __call__(self, starts: Sequence[ForecastStart]) -> Callable[[], AbstractContextManager[None]]:
        """Return what to enter for each step of these forecasts; an unperturbed member 0 has no noise.

        The numbers depend on seed, initial time and member alone.
        """
        generators = [member_rng(self._seed, start, 3) if start.member >= self._first else None for start in starts]
        return functools.partial(self._drawing, generators)

    @contextmanager
    def _drawing(self, generators: Sequence[np.random.Generator | None]) -> Iterator[None]:
        self._generators = generators
        try:
            yield
        finally:
            self._generators = None

    def _add(self, name: str, block: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        """Return a block's output with noise of its own standard deviation, over all channels and cells of a forecast.

        One deviation for all channels, because the layers after it normalise over channels, too: noise has the same
        share of what they see whatever the channel.

        Raises:
            ConfigError: if the output is not one tensor with the forecasts of the batch in its first dimension.
        """
        if self._generators is None or not any(self._generators):
            return None
        if not isinstance(output, Tensor) or len(output) != len(self._generators):
            gives = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise ConfigError(
                f"inference.ensemble.noise: {name} ({type(block).__name__}) gives {gives} for a batch of "
                f"{len(self._generators)}; noise needs one tensor with a row for each forecast: name other blocks in "
                "noise.where"
            )
        drawn = np.zeros(output.shape, dtype=np.float32)
        for row, generator in zip(drawn, self._generators, strict=True):
            if generator is not None:
                generator.standard_normal(out=row, dtype=np.float32)
        size = output.float().std(dim=tuple(range(1, output.ndim)), keepdim=True)
        return output + (self._std * size * to_device(drawn, output.device)).to(output.dtype)


def find_blocks(model: nn.Module, where: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks of a network whose outputs get noise, by name.

    Args:
        model: its blocks are marked with ``_fsdp2_shard``.
        where: names of blocks, or of modules that hold some; None for all.

    Raises:
        ConfigError: if there are no blocks, or none of a name.
    """
    blocks = {plain_name(name): module for name, module in model.named_modules() if is_marked(module)}
    if not blocks:
        raise ConfigError(
            f"inference.ensemble.noise: {type(model).__name__} marks no block with _fsdp2_shard; mark those whose "
            "outputs may get noise (docs/add_a_model.md), or use inference.ensemble.stochastic"
        )
    if where is None:
        return blocks
    found = {}
    for wanted in where:
        below = {name: block for name, block in blocks.items() if f"{name}.".startswith(f"{wanted}.")}
        if not below:
            raise ConfigError(
                f"inference.ensemble.noise.where: {wanted} is no block of {type(model).__name__} and holds none"
                f"{did_you_mean(wanted, blocks)}; a name may be cut at a dot for all blocks that begin with it"
            )
        found |= below
    return found


def build_noise(conf: EnsembleConfig | None, model: nn.Module) -> FeatureNoise | None:
    """Return what ``inference.ensemble.noise`` asks for, None where it does not."""
    return None if conf is None or conf.noise is None else FeatureNoise(conf, model)
