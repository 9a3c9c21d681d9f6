"""Floating point operations of the network in a training step, by torch's counter on tensors without memory."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit.config import Config
from credit.models.lora import apply_lora
from credit.train.assets import ModelAssets
from credit.train.build_model import build_network, build_policy

logger = logging.getLogger(__name__)


class FlopCounter:
    """What the whole network computes for a micro-batch: matrix products, convolutions, attention.

    Counted are the forward and the backward pass as they are, without what checkpointing computes again (the model
    FLOPs of Chowdhery et al. 2022, arXiv 2204.02311, appendix B): frozen weights have no gradient, the first step of a
    rollout none for its input, and attention is two products forward and four backward. Nothing is counted before it is
    asked for.

    Args:
        config: of the run.
        assets: of the run; only its shapes count.
        sharded: whether FSDP2 shards the network, and so decides on its precision.
    """

    def __init__(self, config: Config, assets: ModelAssets, sharded: bool = False) -> None:
        self._config, self._assets = config, assets
        conf, policy = config.trainer, build_policy(config.trainer, sharded)
        in_bfloat16 = conf.amp and (policy is None or policy.param_dtype == torch.bfloat16)
        self._rate = "bfloat16" if in_bfloat16 else "tf32" if conf.tf32 else "float32"

    def operations(self, steps: int) -> Mapping[str, int] | None:
        """Return rate -> operations of a rollout of so many steps, forward and backward.

        The rate is a field of `credit.hpc.planner.gpus.Gpu`: bfloat16 where the network computes in it, else as
        trainer.tf32 says. None for a network that does not run without values.
        """
        try:
            counts = Counter(self._first)
            if steps > 1:
                for rate, count in self._further.items():
                    counts[rate] += (steps - 1) * count
        except RuntimeError as error:
            logger.info("operations are not counted, as the network needs values: %s", str(error).split("\n")[0])
            return None
        return counts

    @functools.cached_property
    def _first(self) -> Mapping[str, int]:
        return self._count(fed_back=False)

    @functools.cached_property
    def _further(self) -> Mapping[str, int]:
        return self._count(fed_back=True)

    def _count(self, fed_back: bool) -> Mapping[str, int]:
        """Count one step of a rollout; the gradient of what is `fed_back` goes on to the step before."""
        config, assets = self._config, self._assets
        with torch.device("meta"):
            model = build_network(config, assets.channels, assets.grid, assets.attributes)
            lora = config.trainer.lora
            if lora is not None:
                apply_lora(model, lora.targets, lora.rank, lora.alpha)
            shape = (config.trainer.train_batch_size, len(assets.channels.input), config.data.history_len)
            x_BCTHW = torch.empty(*shape, *assets.grid.shape, requires_grad=fed_back)
        model.train()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            model(x_BCTHW).sum().backward()
        return {self._rate: counter.get_total_flops()}
