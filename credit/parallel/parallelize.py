"""The one place that knows the order: tensor split, checkpointing, compilation, sharding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from credit.errors import ConfigError
from credit.parallel.activation_checkpoint import checkpoint_blocks
from credit.parallel.compiled_blocks import keep_dtensors_outside
from credit.parallel.fsdp2 import shard_units
from credit.parallel.mesh import DeviceGrid
from credit.parallel.tensor_parallel import apply_tensor_parallel, has_dropout, share_sums

logger = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    mesh: DeviceGrid,
    *,
    shard: bool = True,
    checkpoint: bool | Literal["selective"] = False,
    compile_blocks: Callable[[nn.Module], None] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> nn.Module:
    """Make `model` run on the ranks of `mesh`, in place; returns the model.

    Blocks say what may be done with them by ``_fsdp2_shard`` and ``_tp_plan``. On one process,
    checkpointing and compilation are what is left.

    Args:
        model: best on the meta device; a filled one must have the same values on all ranks.
        mesh: of the run.
        shard: False for tensor parallelism alone.
        checkpoint: recompute marked blocks in the backward pass.
        compile_blocks: compiles the marked blocks in place.
        policy: FSDP2's mixed precision.
        reshard_after_forward: free whole weights between forward and backward.
        cpu_offload: keep parameters and optimizer state in host memory.

    Raises:
        ConfigError: if the model does not offer what is asked for.
    """
    if mesh.degrees.tensor > 1:
        if compile_blocks is not None and has_dropout(model):
            raise ConfigError(
                "trainer.compile: with trainer.parallelism.tensor above 1, dropout, which differs between the ranks, "
                "cannot be compiled; set compile to false, or the model's dropout to 0"
            )
        split = apply_tensor_parallel(model, mesh.device_mesh["tp"])
        logger.info("%d layers are split over %d tensor-parallel ranks", len(split), mesh.degrees.tensor)
    if checkpoint:
        checkpoint_blocks(model, checkpoint)
    if compile_blocks is not None:
        keep_dtensors_outside(model)
        compile_blocks(model)
    elif mesh.degrees.tensor > 1:
        share_sums(model)
    if shard and mesh.device_mesh is not None:
        shard_units(model, mesh.whole_mesh, mesh.split_mesh, policy, reshard_after_forward, cpu_offload)
    return model
