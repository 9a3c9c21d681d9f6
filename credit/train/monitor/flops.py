"""Floating-point operations of the network in a training step, counted by torch on the meta device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit.config import Config
from credit.train.build.assets import ModelAssets
from credit.train.build.model import build_mixed_precision_policy, build_network
from credit.train.learning_rates import select_trained_weights

logger = logging.getLogger(__name__)


def choose_rate(config: Config, sharded: bool) -> str:
    """Return the precision in which the network computes: bfloat16, tf32 or float32.

    Args:
        config: the config of the run.
        sharded: True if FSDP2 shards the network; FSDP2's mixed precision then decides.
    """
    conf = config.trainer
    policy = build_mixed_precision_policy(conf, sharded)
    # With `amp` and no policy the network runs under autocast, which is always bfloat16 here.
    if conf.amp and (policy is None or policy.param_dtype == torch.bfloat16):
        return "bfloat16"
    return "tf32" if conf.tf32 else "float32"


class FlopCounter:
    """Counter of the operations of the whole network for one micro-batch: matrix products, convolutions, attention.

    It counts the forward and the backward pass without the recomputation of activation checkpointing. These are the
    model FLOPs of Chowdhery et al. 2022, arXiv 2204.02311, appendix B. Gradients of frozen weights and of the input of
    a rollout's first step are not computed and not counted. Attention counts as two matrix products forward and four
    backward. The operations are counted in the first call of `operations`, which takes longer than later calls.

    Args:
        config: the config of the run.
        assets: the assets of the model, of which only channels, grid and attributes are used.
        sharded: True if FSDP2 shards the network; FSDP2's mixed precision then decides on the rate.
    """

    def __init__(self, config: Config, assets: ModelAssets, sharded: bool = False) -> None:
        self._config = config
        self._assets = assets
        self._rate = choose_rate(config, sharded)

    def operations(self, steps: int) -> Mapping[str, int] | None:
        """Return the floating-point operations of a rollout with one micro-batch, forward and backward.

        An operation is an addition or a multiplication.

        Args:
            steps: number of steps of the rollout.

        Returns:
            rate -> number of operations, the same on every rank; None for a network that cannot run on the meta device.
            A rate is the name of a peak rate of `credit.hpc.planner.gpus.Gpu`: bfloat16 if the network computes in that
            precision, else tf32 or float32 according to ``trainer.tf32``.
        """
        passes = self.count_passes(steps)
        if passes is None:
            return None
        return {self._rate: sum(passes)}

    def count_passes(self, steps: int) -> tuple[int, int] | None:
        """Return the operations of the forward and of the backward pass of a rollout with one micro-batch.

        Args:
            steps: number of steps of the rollout.

        Returns:
            The operations, see `operations`; None for a network that cannot run on the meta device.
        """
        try:
            forward, backward = self._first_step
            if steps > 1:
                further_forward, further_backward = self._further_step
                forward += (steps - 1) * further_forward
                backward += (steps - 1) * further_backward
        # torch raises it for operations that need the values of a tensor.
        except RuntimeError as error:
            first_line = str(error).split("\n")[0]
            logger.info("operations are not counted, as the network needs values: %s", first_line)
            return None
        return forward, backward

    @functools.cached_property
    def _first_step(self) -> tuple[int, int]:
        """Operations, forward and backward, of the first step of a rollout, whose input needs no gradient."""
        return self._count(fed_back=False)

    @functools.cached_property
    def _further_step(self) -> tuple[int, int]:
        """Operations, forward and backward, of each further step of a rollout, whose input needs a gradient."""
        return self._count(fed_back=True)

    def _count(self, fed_back: bool) -> tuple[int, int]:
        """Return the operations of one step of a rollout, forward and backward.

        Args:
            fed_back: True if the input is the output of the step before, so that its gradient is computed as well.
        """
        config = self._config
        assets = self._assets
        # On the meta device tensors have shapes and no values, so counting takes no memory and no arithmetic.
        with torch.device("meta"):
            model = build_network(config, assets.channels, assets.grid, assets.attributes)
            select_trained_weights(model, config.trainer)
            shape = (config.trainer.train_batch_size, len(assets.channels.input), config.data.history_len)
            x_BCTHW = torch.empty(*shape, *assets.grid.shape, requires_grad=fed_back)
        model.train()
        # Unlike fused attention, the plain formulation computes nothing again in the backward pass.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            output = model(x_BCTHW)
            forward = counter.get_total_flops()
            output.sum().backward()
        return forward, counter.get_total_flops() - forward
