"""Composition of domain and tensor parallelism, activation checkpointing, compilation and FSDP2, in the one order that works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from credit.errors import ConfigError
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.compilation import keep_dtensors_out_of_graphs
from credit.parallel.domain.split import split_domain
from credit.parallel.fsdp2 import shard_units
from credit.parallel.tensor.dropout import has_dropout
from credit.parallel.tensor.tensor_parallel import apply_tensor_parallel, share_sums

logger = logging.getLogger(__name__)

# Meshes that `parallelize` takes, by the names of their axes.
AXIS_NAMES = (
    ("dp",),
    ("dp", "tp"),
    ("dp", "domain"),
    ("dp", "domain", "tp"),
    ("replicate", "dp"),
    ("replicate", "dp", "tp"),
    ("replicate", "dp", "domain"),
    ("replicate", "dp", "domain", "tp"),
)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    shard: bool = True,
    checkpoint: bool | Literal["selective"] = False,
    compile_blocks: Callable[[nn.Module], None] | None = None,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    domain_parts: tuple[int, int] | None = None,
) -> nn.Module:
    """Collective: distribute `model` over the ranks of `mesh`, in place, and return the model.

    Blocks declare with ``_fsdp2_shard`` and ``_tp_plan`` how they may be distributed, and the model with `plan_domain`
    how its fields may be divided. The steps are, in this order, domain parallelism, tensor parallelism, activation
    checkpointing, compilation and sharding.

    Args:
        model: model, preferably on the meta device; a model with memory must have the same values on all ranks.
        mesh: ranks that hold the model together, such as
            ``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))``; None for one process. An axis ``dp``
            (data parallelism and shards) is required. Axes ``domain`` (parts of the fields, see
            `credit.parallel.domain.split.split_domain`) and ``tp`` (tensor parallelism) may follow it, and an axis
            ``replicate`` (replicas) may precede it. `credit.parallel.mesh.build_mesh` builds such a mesh.
        shard: False for tensor parallelism alone.
        checkpoint: True or ``"selective"`` to recompute marked blocks in the backward pass, see `checkpoint_blocks`.
        compile_blocks: function that compiles the marked blocks of a model in place; None for no compilation.
        policy: FSDP2's mixed precision; None to compute in the dtype of the weights.
        reshard_after_forward: True to free gathered weights between forward and backward.
        cpu_offload: True to keep parameters, gradients and optimizer state in host memory.
        domain_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns, whose product is the
            length of the axis ``domain``; None for the pair with which the ranks have the most even work.

    Raises:
        ConfigError: if the mesh has other axes, the model or the grid cannot be divided, no ``_tp_plan`` fits the mesh, `checkpoint` is set but no block is
            marked, blocks with dropout are to be compiled and split, or FSDP2 cannot shard the model.
    """
    _require_axes(mesh)

    # The rules of a divided field are hooks of layers, which all further steps leave in place.
    if _axis_size(mesh, "domain") > 1:
        if compile_blocks is not None:
            raise ConfigError(
                "trainer.compile: with trainer.parallelism.domain above 1, blocks exchange cells, which is not compiled "
                "yet; set compile to false"
            )
        split_domain(model, mesh["domain"].get_group(), domain_parts)

    # Tensor parallelism comes first: it replaces weights and forwards of plain layers, which checkpoint wrappers and
    # sharding would hide.
    tensor_ranks = _axis_size(mesh, "tp")
    if tensor_ranks > 1:
        if compile_blocks is not None:
            _require_no_dropout(model)
        split_paths = apply_tensor_parallel(model, mesh["tp"])
        logger.info("%d layers are split over %d tensor-parallel ranks", len(split_paths), tensor_ranks)
    if checkpoint:
        checkpoint_blocks(model, checkpoint)

    # Compiled after checkpointing, so that the recomputation is part of the compiled graph.
    if compile_blocks is not None:
        keep_dtensors_out_of_graphs(model)
        compile_blocks(model)
    elif tensor_ranks > 1:
        share_sums(model)

    # Sharding comes last: FSDP2 must see the parts of split weights, and gather around recomputation and graphs.
    if shard and mesh is not None:
        # Units with split weights are sharded over the data-parallel ranks and the domain, other units over the
        # tensor-parallel ranks as well, so that they take no more memory than without tensor parallelism.
        shard_axes = tuple(name for name in ("dp", "domain") if name in mesh.mesh_dim_names)
        fsdp_mesh_of_tp_units = _build_shard_mesh(mesh, shard_axes, "dp_domain")
        fsdp_mesh = fsdp_mesh_of_tp_units
        if tensor_ranks > 1:
            fsdp_mesh = _build_shard_mesh(mesh, (*shard_axes, "tp"), "shard")
        shard_units(model, fsdp_mesh, fsdp_mesh_of_tp_units, policy, reshard_after_forward, cpu_offload)
    return model


def _require_axes(mesh: DeviceMesh | None) -> None:
    """Refuse a mesh whose axis names are none of `AXIS_NAMES`.

    Raises:
        ConfigError: if the names do not fit; the message lists the names of the mesh and the possible ones.
    """
    if mesh is not None and mesh.mesh_dim_names not in AXIS_NAMES:
        choices = ", ".join(str(names) for names in AXIS_NAMES)
        raise ConfigError(
            f"the axes of the mesh are called {mesh.mesh_dim_names}; parallelize takes one of {choices}; name them by "
            "mesh_dim_names of init_device_mesh, where an axis may have length 1"
        )


def _require_no_dropout(model: nn.Module) -> None:
    """Refuse a model with dropout, whose blocks are to be split by tensor parallelism and compiled.

    Raises:
        ConfigError: if a module of the model has dropout.
    """
    if has_dropout(model):
        raise ConfigError(
            "trainer.compile: with trainer.parallelism.tensor above 1, dropout, which differs between the ranks, "
            "cannot be compiled; set compile to false, or the model's dropout to 0"
        )


def _axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """Return the number of ranks along an axis; 1 for an axis that the mesh does not have."""
    if mesh is None or axis not in mesh.mesh_dim_names:
        return 1
    return mesh[axis].size()


def _build_shard_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Collective: return a mesh of the same ranks in which some axes are merged into one, over which FSDP2 shards.

    An axis of replicas stays in front of it.

    Args:
        mesh: the mesh of the model.
        axes: names of the neighbouring axes to merge.
        name: name of the merged axis, if there are several to merge.
    """
    has_replicas = "replicate" in mesh.mesh_dim_names
    if len(axes) == 1:
        return mesh["replicate", axes[0]] if has_replicas else mesh[axes[0]]
    # `_flatten` and `_concatenate` refer to the root mesh, so `mesh` may be part of a larger one, such as a mesh with
    # an axis of pipeline stages.
    shard_mesh = mesh[axes]._flatten(name)
    if not has_replicas:
        return shard_mesh
    return DeviceMesh._concatenate([mesh["replicate"], shard_mesh])
