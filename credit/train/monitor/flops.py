"""Number of floating-point operations of the network in a training step, counted by torch on the meta device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from credit.config import Config
from credit.models.layers.spectral_norm import find_spectral_norms
from credit.train.build.assets import ModelAssets
from credit.train.build.model import build_mixed_precision_policy, build_network
from credit.train.learning_rates import select_trained_weights

logger = logging.getLogger(__name__)


def choose_compute_precision(config: Config, sharded: bool) -> str:
    """Return the precision in which the network computes: bfloat16, tf32 or float32.

    Args:
        config: the config of the run.
        sharded: True if FSDP2 shards the network; the mixed-precision policy of FSDP2 then determines the precision.
    """
    conf = config.trainer
    policy = build_mixed_precision_policy(conf, sharded)
    # With `amp` and without a policy, the network runs under autocast in bfloat16.
    if conf.amp and (policy is None or policy.param_dtype == torch.bfloat16):
        return "bfloat16"
    return "tf32" if conf.tf32 else "float32"


class _OperationSum(TorchDispatchMode):
    """Sum of the operations that are computed in its context, with torch's formulas.

    torch's `FlopCounterMode` also assigns the operations to modules, which takes 40 % more time. Unlike it, this class
    does not count operations inside higher-order operators, such as `torch.cond`.

    Attributes:
        total: number of floating-point operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


class FlopCounter:
    """Counter of the network's floating-point operations for one micro-batch.

    The counter includes matrix products, convolutions and attention in the forward and the backward pass, without the
    recomputation of activation checkpointing (the model FLOPs of Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    Gradients of frozen weights and of the input of a rollout's first step are not computed and not counted. Attention
    is counted as two matrix products in the forward pass and four in the backward pass. The first call
    counts the operations of a step, so it takes longer than later calls.

    Args:
        config: the config of the run.
        assets: the assets of the model; only channels, grid and attributes are used.
        sharded: True if FSDP2 shards the network; the mixed-precision policy of FSDP2 then determines the precision.
    """

    def __init__(self, config: Config, assets: ModelAssets, sharded: bool = False) -> None:
        self._config = config
        self._assets = assets
        self._rate = choose_compute_precision(config, sharded)

    def count_operations_by_precision(self, steps: int) -> Mapping[str, int] | None:
        """Return the floating-point operations of a rollout with one micro-batch, forward and backward pass together.

        An operation is an addition or a multiplication.

        Args:
            steps: number of steps of the rollout.

        Returns:
            precision -> number of operations, the same on every rank; None if the network cannot run on the meta
            device. The precision is the name of a peak rate of `credit.hpc.planner.gpus.Gpu`: bfloat16, tf32 or
            float32, see `choose_compute_precision`.
        """
        passes = self.count_operations_by_pass(steps)
        if passes is None:
            return None
        return {self._rate: sum(passes)}

    def count_operations_by_pass(self, steps: int) -> tuple[int, int] | None:
        """Return the floating-point operations of a rollout with one micro-batch, separately for both passes.

        Args:
            steps: number of steps of the rollout.

        Returns:
            (operations of the forward pass, operations of the backward pass); None if the network cannot run on the
            meta device.
        """
        try:
            forward, backward = self._first_step
            if steps > 1:
                further_forward, further_backward = self._further_step
                forward += (steps - 1) * further_forward
                backward += (steps - 1) * further_backward
        # torch raises RuntimeError for operations that need the values of a tensor.
        except RuntimeError as error:
            first_line = str(error).split("\n")[0]
            logger.info("operations are not counted, because the network needs values of tensors: %s", first_line)
            return None
        return forward, backward

    @functools.cached_property
    def _first_step(self) -> tuple[int, int]:
        """Operations of the forward and of the backward pass of a rollout's first step; its input needs no gradient."""
        return self._count_step(needs_input_gradient=False)

    @functools.cached_property
    def _further_step(self) -> tuple[int, int]:
        """Operations of the forward and of the backward pass of a later rollout step; its input needs a gradient."""
        return self._count_step(needs_input_gradient=True)

    def _count_step(self, needs_input_gradient: bool) -> tuple[int, int]:
        """Return (operations of the forward pass, operations of the backward pass) of one rollout step.

        Args:
            needs_input_gradient: True if the input is the output of the previous step, so that the gradient of the
                input is computed as well.
        """
        config = self._config
        assets = self._assets
        # On the meta device, tensors have shapes but no values, so counting needs no memory and no arithmetic.
        with torch.device("meta"):
            model = build_network(config, assets.channels, assets.grid, assets.attributes)
            select_trained_weights(model, config.trainer)
            shape = (config.trainer.train_batch_size, len(assets.channels.input), config.data.history_len)
            x_BCTHW = torch.empty(*shape, *assets.grid.shape, requires_grad=needs_input_gradient)
        model.train()
        # Spectral normalisation contains no counted operation, but would take a third of the time of counting.
        for norm in find_spectral_norms(model):
            norm.forward = _return_weight
        # Unlike fused attention, the math backend recomputes nothing in the backward pass.
        with _OperationSum() as counter, sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
            output = model(x_BCTHW)
            forward = counter.total
            output.sum().backward()
        return forward, counter.total - forward


def _return_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight itself, in place of the normalised weight."""
    return weight
