"""Distribution of a model over ranks, with all methods applied in the required order.

The order is domain parallelism, tensor parallelism, activation checkpointing, compilation, and sharding by FSDP2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from credit.errors import ConfigError
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.compilation import keep_dtensors_out_of_graphs
from credit.parallel.domain.split import split_domain
from credit.parallel.fsdp2 import shard_units
from credit.parallel.groups.axis_groups import merge_mesh_axes
from credit.parallel.tensor.dropout import has_dropout
from credit.parallel.tensor.sequence_parallel import GradientAverage, SequenceRanks
from credit.parallel.tensor.tensor_parallel import apply_tensor_parallel, merge_all_reduces

logger = logging.getLogger(__name__)

# Names of the mesh axes that `parallelize` accepts, in the required order: replicas, data-parallel ranks (shards),
# domain ranks, tensor-parallel ranks. Only `dp` is required.
AXIS_NAMES = ("replicate", "dp", "domain", "tp")


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
) -> nn.Module:
    """Collective: distribute `model` over the ranks of `mesh`, in place, and return the model.

    The blocks declare with ``_fsdp2_shard`` and ``_tp_plan`` how their weights may be distributed. The model declares
    with `plan_domain` how its fields may be divided. To choose the parts of the fields, call
    `credit.parallel.domain.split.split_domain` first. If the fields are divided over the ranks of both `domain` and
    `tp`, split layers use sequence parallelism.

    Args:
        model: model, preferably on the meta device. If it has memory, its values must be the same on all ranks.
        mesh: mesh of the ranks that share the model, with some of the axes `AXIS_NAMES`; None for one process. An
            example is ``init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))``. See also
            `credit.parallel.mesh.build_mesh`.
        shard: False for tensor parallelism alone. Gradients are then not reduced over the ranks of a domain group.
        checkpoint: True or ``"selective"`` to recompute marked blocks in the backward pass, see `checkpoint_blocks`.
        compile_blocks: function that compiles the marked blocks of a model in place; None for no compilation.
        policy: FSDP2's mixed precision; None to compute in the dtype of the weights.
        reshard_after_forward: True to free gathered weights between the forward pass and the backward pass.
        cpu_offload: True to keep parameters, gradients and optimizer state in host memory.

    Raises:
        ConfigError: if the mesh has other axes, or the model does not support one of the steps; the message describes a
            remedy.
    """
    _require_axes(mesh)

    if compile_blocks is not None:
        _require_compilable(model, mesh)

    # Domain and tensor parallelism are applied first, because checkpoint wrappers and sharding would hide the layers.
    _divide_fields(model, mesh)
    sequence_ranks = _find_sequence_ranks(model, mesh)
    _split_layers(model, mesh, sequence_ranks)
    if checkpoint:
        checkpoint_blocks(model, checkpoint)

    # Blocks are compiled after checkpointing, so that the recomputation is part of the compiled graph.
    if compile_blocks is not None:
        keep_dtensors_out_of_graphs(model)
        compile_blocks(model)
    elif _axis_size(mesh, "tp") > 1:
        merge_all_reduces(model)

    # Sharding comes last: FSDP2 shards the parts of split weights, and gathers weights outside of compiled graphs.
    if shard and mesh is not None:
        fsdp_mesh, fsdp_mesh_of_tp_units = _build_shard_meshes(mesh)
        shard_units(model, fsdp_mesh, fsdp_mesh_of_tp_units, policy, reshard_after_forward, cpu_offload)
        if sequence_ranks is not None:
            _average_whole_weight_gradients(model, fsdp_mesh_of_tp_units, sequence_ranks)
    return model


def _divide_fields(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Divide the fields of a model over the axis `domain`, in place, unless the fields are already divided."""
    if _axis_size(mesh, "domain") > 1 and getattr(model, "domain", None) is None:
        split_domain(model, mesh["domain"].get_group())


def _find_sequence_ranks(model: nn.Module, mesh: DeviceMesh | None) -> SequenceRanks | None:
    """Return the tensor-parallel ranks of sequence parallelism; None without sequence parallelism.

    Raises:
        ConfigError: if the number of parts of the fields is neither the length of the axis `domain` nor the product of
            the lengths of `domain` and `tp`.
    """
    domain = getattr(model, "domain", None)
    if mesh is None or domain is None or domain.num_ranks == _axis_size(mesh, "domain"):
        return None
    num_ranks = _axis_size(mesh, "domain") * _axis_size(mesh, "tp")
    if domain.num_ranks != num_ranks:
        raise ConfigError(
            f"the fields are divided among {domain.num_ranks} ranks, but the mesh has domain x tp = {num_ranks} ranks; "
            "call split_domain with the ranks of the axis domain, or of the axes domain and tp"
        )
    return SequenceRanks.build(mesh["tp"].get_group(), domain.group)


def _split_layers(model: nn.Module, mesh: DeviceMesh | None, sequence_ranks: SequenceRanks | None) -> None:
    """Split the layers of a model over the mesh axis `tp`, in place.

    Args:
        model: model with ``_tp_plan`` on its blocks.
        mesh: mesh of the ranks; None for one process.
        sequence_ranks: tensor-parallel ranks of sequence parallelism; None without sequence parallelism.
    """
    tensor_ranks = _axis_size(mesh, "tp")
    if tensor_ranks > 1:
        split_paths = apply_tensor_parallel(model, mesh["tp"], sequence_ranks)
        logger.info("%d layers are split over %d tensor-parallel ranks", len(split_paths), tensor_ranks)


def _average_whole_weight_gradients(
    model: nn.Module, fsdp_mesh_of_tp_units: DeviceMesh, sequence_ranks: SequenceRanks
) -> None:
    """Register hooks that average gradients of whole weights over the tensor-parallel ranks after each backward pass.

    A whole weight is a weight that tensor parallelism has not split. Hooks are needed only in sharding units that also
    have split weights. In other units, FSDP2 itself averages the gradients over the tensor-parallel ranks.
    """
    whole_weights = [weight for weight in model.parameters() if weight.device_mesh == fsdp_mesh_of_tp_units]
    GradientAverage(sequence_ranks.group, torch.device(fsdp_mesh_of_tp_units.device_type)).watch(whole_weights)


def _require_axes(mesh: DeviceMesh | None) -> None:
    """Require that all axes of the mesh are in `AXIS_NAMES`, in this order, and that `dp` is one of the axes.

    Raises:
        ConfigError: if the axes of the mesh are different; the message lists the axes and the possible names.
    """
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ()
    expected_names = tuple(name for name in AXIS_NAMES if name in names)
    if names != expected_names or "dp" not in names:
        raise ConfigError(
            f"the axes of the mesh are {mesh.mesh_dim_names}; parallelize needs the axis dp, optionally with "
            "replicate before it, and domain and tp after it, in this order; set the names with mesh_dim_names of "
            "init_device_mesh; an axis may have length 1"
        )


def _require_compilable(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Require that blocks with dropout are not compiled if they are split or if their fields are divided.

    Raises:
        ConfigError: if the model has such blocks; the message names the keys to change.
    """
    # If inductor compiles seeded dropout, the masks of a part of a field differ from the masks of the whole field
    # (torch 2.13). The dropout layer is recognised by its attribute `field_ranks`.
    divides_fields = _axis_size(mesh, "domain") > 1 or getattr(model, "domain", None) is not None
    if divides_fields and any(hasattr(module, "field_ranks") for module in model.modules()):
        raise ConfigError(
            "trainer.compile: with trainer.parallelism.domain above 1 or sequence_parallel, dropout as noise cannot be "
            "compiled; set compile to false, or remove the kind dropout from model.noise"
        )
    if _axis_size(mesh, "tp") > 1 and has_dropout(model):
        raise ConfigError(
            "trainer.compile: with trainer.parallelism.tensor above 1, dropout, which differs between the ranks, "
            "cannot be compiled; set compile to false, or the model's dropout to 0"
        )


def _axis_size(mesh: DeviceMesh | None, axis: str) -> int:
    """Return the number of ranks along a mesh axis; 1 if the mesh does not have this axis."""
    if mesh is None or axis not in mesh.mesh_dim_names:
        return 1
    return mesh[axis].size()


def _build_shard_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Collective: return two FSDP2 meshes: one for units without split weights, and one for units with split weights.

    Units with split weights are sharded over the data-parallel ranks and the domain ranks. Units without split weights
    are also sharded over the tensor-parallel ranks, so they use no more memory than without tensor parallelism.
    """
    shard_axes = tuple(name for name in ("dp", "domain") if name in mesh.mesh_dim_names)
    mesh_of_tp_units = _merge_axes(mesh, shard_axes, "dp_domain")
    if _axis_size(mesh, "tp") == 1:
        return mesh_of_tp_units, mesh_of_tp_units
    return _merge_axes(mesh, (*shard_axes, "tp"), "shard"), mesh_of_tp_units


def _merge_axes(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Collective: return a mesh of the same ranks in which some axes are merged into a single axis.

    If the mesh has the axis `replicate`, this axis precedes the merged axis in the result.

    Args:
        mesh: mesh of the model.
        axes: names of the neighbouring axes to merge.
        name: name of the merged axis; not used if `axes` has only one name.
    """
    has_replicas = "replicate" in mesh.mesh_dim_names
    if len(axes) == 1:
        return mesh["replicate", axes[0]] if has_replicas else mesh[axes[0]]
    # Merging and `_concatenate` refer to the root mesh, so `mesh` may be part of a larger mesh, for example of a mesh
    # with an axis of pipeline stages.
    merged_mesh = merge_mesh_axes(mesh[axes], name)
    if not has_replicas:
        return merged_mesh
    return DeviceMesh._concatenate([mesh["replicate"], merged_mesh])
