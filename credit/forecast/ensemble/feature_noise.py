"""Gaussian noise on the hidden features of the network at every step, which represents model error in an ensemble.

The noise is added to the outputs of the network's blocks. The layers after a block transform the noise to changes of
the network's output that are correlated in space and between variables (per-layer noise: Karras et al. 2019, arXiv
1812.04948). The network was not trained with this noise, so the user must choose its standard deviation. The noise is
independent in each cell of the feature grid. In a deep stage of the network, a cell is some hundred kilometres wide, so
the changes of the output are correlated over this distance.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from torch import Tensor, nn

from credit.config.sections.inference import EnsembleConfig
from credit.errors import ConfigError, did_you_mean
from credit.forecast.rollout import ForecastStart, build_member_rng
from credit.parallel.blocks.marks import is_marked, strip_wrapper_prefixes
from credit.parallel.host_copy import to_device

# Stream of `build_member_rng` that only this perturbation uses.
_RNG_STREAM = 3


class FeatureNoise:
    """Gaussian noise that is added to the outputs of a network's blocks.

    The noise is active only inside the contexts that `__call__` provides for the steps of a forecast.

    Args:
        conf: config section ``inference.ensemble``, with ``feature_noise``.
        model: the network. During a step, a forward hook on each selected block adds the noise.

    Raises:
        ConfigError: if the network does not have the blocks in ``feature_noise.blocks``.
    """

    def __init__(self, conf: EnsembleConfig, model: nn.Module) -> None:
        noise_config = conf.feature_noise
        assert noise_config is not None
        self._std = noise_config.std
        self._seed = conf.seed
        self._first_noisy_member = 1 if conf.control else 0
        # During a step: a generator for each forecast of the batch, or None for a forecast without noise. Between
        # steps, the attribute is None.
        self._generators: Sequence[np.random.Generator | None] | None = None
        self._blocks = find_blocks(model, noise_config.blocks)

    def __call__(self, starts: Sequence[ForecastStart]) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that builds a context for a step; inside the context, the blocks add noise to their output.

        Member 0 has no noise if it is a control (``inference.ensemble.control``). The random numbers depend only on the
        seed, the initial time and the member, not on the batch.

        Args:
            starts: starts of the forecasts of the batch.
        """
        generators: list[np.random.Generator | None] = []
        for start in starts:
            if start.member >= self._first_noisy_member:
                generators.append(build_member_rng(self._seed, start, _RNG_STREAM))
            else:
                generators.append(None)
        return functools.partial(self._use_generators, generators)

    @contextmanager
    def _use_generators(self, generators: Sequence[np.random.Generator | None]) -> Iterator[None]:
        """Return a context in which hooks on the blocks add noise to the outputs of the blocks.

        The hooks are removed at the end of the context, because other forecasts use the same network.

        Args:
            generators: a generator for each forecast of the batch; None for a forecast without noise.
        """
        self._generators = generators
        hooks = []
        for name, block in self._blocks.items():
            hooks.append(block.register_forward_hook(functools.partial(self._add_noise, name)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._generators = None

    def _add_noise(self, name: str, block: nn.Module, inputs: object, output: Tensor) -> Tensor | None:
        """Forward hook: return the output of a block plus noise, or None to keep the output unchanged.

        The noise is scaled by the standard deviation of the output over all channels and cells of a forecast. All
        channels share this scale, because the following layers normalise over channels as well.

        Args:
            name: name of the block, for messages.
            block: block of the network.
            inputs: arguments of the block, unused.
            output: output of the block, (B, ...) with the B forecasts of the batch.

        Raises:
            ConfigError: if the output is not one tensor with the forecasts of the batch in its first dimension.
        """
        # Between steps there are no generators. In a batch with only controls, all generators are None.
        if self._generators is None or not any(self._generators):
            return None
        if not isinstance(output, Tensor) or len(output) != len(self._generators):
            description = f"a {type(output).__name__}"
            if isinstance(output, Tensor):
                description = f"a tensor {tuple(output.shape)}"
            raise ConfigError(
                f"inference.ensemble.feature_noise: {name} ({type(block).__name__}) returns {description} for a batch "
                f"of {len(self._generators)}; noise needs one tensor with a row for each forecast: choose different "
                "blocks in feature_noise.blocks"
            )
        # Each forecast has a separate generator, so its noise does not depend on the batch. A control has no noise.
        noise = np.zeros(output.shape, dtype=np.float32)
        for forecast_noise, generator in zip(noise, self._generators, strict=True):
            if generator is not None:
                generator.standard_normal(out=forecast_noise, dtype=np.float32)
        # One standard deviation for each forecast: over all dimensions but the first.
        feature_dims = tuple(range(1, output.ndim))
        output_std = output.float().std(dim=feature_dims, keepdim=True)
        scaled_noise = self._std * output_std * to_device(noise, output.device)
        return output + scaled_noise.to(output.dtype)


def find_blocks(model: nn.Module, prefixes: Sequence[str] | None) -> dict[str, nn.Module]:
    """Return the blocks of a network that get noise on their outputs, by name.

    Args:
        model: the network. Its blocks are the modules with the attribute ``_fsdp2_shard``.
        prefixes: ``feature_noise.blocks``: names of blocks, or of modules that contain blocks; None for all blocks.

    Raises:
        ConfigError: if the network has no blocks, or if a prefix matches no block.
    """
    blocks = {}
    for name, module in model.named_modules():
        if is_marked(module):
            blocks[strip_wrapper_prefixes(name)] = module
    if not blocks:
        raise ConfigError(
            f"inference.ensemble.feature_noise: {type(model).__name__} has no block with the attribute _fsdp2_shard; "
            "mark the blocks to which noise may be added (docs/add_a_model.md), or use inference.ensemble.stochastic"
        )
    if prefixes is None:
        return blocks
    selected: dict[str, nn.Module] = {}
    for prefix in prefixes:
        matches = {}
        for name, block in blocks.items():
            # With the dots, "stages.1" does not match "stages.10".
            if f"{name}.".startswith(f"{prefix}."):
                matches[name] = block
        if not matches:
            raise ConfigError(
                f'inference.ensemble.feature_noise.blocks: no block of {type(model).__name__} matches "{prefix}"'
                f"{did_you_mean(prefix, blocks)}; give the name of a block, or the beginning of names up to a dot to "
                "select all blocks with this beginning"
            )
        selected |= matches
    return selected


def build_feature_noise(conf: EnsembleConfig | None, model: nn.Module) -> FeatureNoise | None:
    """Build the noise of ``inference.ensemble.feature_noise``; None for a single forecast, or if the key is not set.

    Args:
        conf: config section ``inference.ensemble``; None for a single forecast.
        model: the network.
    """
    if conf is None or conf.feature_noise is None:
        return None
    return FeatureNoise(conf, model)
