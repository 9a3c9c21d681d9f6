"""Reductions over ranks: norm and clipping of sharded gradients, means for the log, and sums over shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from credit.parallel.dtensor import local_shard, num_shards
from credit.parallel.groups.axis_groups import merge_mesh_axes

# Number that is added to the norm before the division by the norm, as in torch.nn.utils.clip_grad_norm_.
NORM_EPS = 1e-6


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Collective: scale all gradients in place so that their global 2-norm is at most `max_norm`.

    For training loops of other programs; the trainer clips in `credit.train.step`.

    This function is `torch.nn.utils.clip_grad_norm_` for models whose parameters are on different device meshes. A
    parameter may be sharded by FSDP2, split by tensor parallelism, or both; or it may be a plain tensor that is equal
    on all ranks. Every element is counted once, so the result equals the result for the whole model on one process.
    Only one collective is needed.

    Args:
        parameters: a tensor or several tensors. All ranks pass the same parameters in the same order. Parameters
            without a gradient are ignored.
        max_norm: largest allowed norm; gradients with a smaller norm are not changed.
        error_if_nonfinite: True to raise an error if the norm is NaN or infinite; False to scale the gradients anyway.
        group: ranks that together store the model; None for all ranks.

    Returns:
        The norm before clipping, a scalar that is equal on all ranks. Its dtype is float32, or float64 if a gradient is
        float64. The norm is 0 if there are no gradients.

    Raises:
        RuntimeError: on every rank, if `error_if_nonfinite` is true and the norm is NaN or infinite. The gradients are
            then unchanged.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm_dtype = torch.float32
    if any(gradient.dtype == torch.float64 for gradient in gradients):
        norm_dtype = torch.float64
    total_norm, _ = reduce_norm_and_flags(gradients, group=group, dtype=norm_dtype)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"the gradient norm is {total_norm.item()}, so the gradients cannot be clipped; skip the step, or set "
            "error_if_nonfinite=False to scale the gradients anyway"
        )
    scale = (max_norm / (total_norm + NORM_EPS)).clamp(max=1.0)
    for gradient in gradients:
        # Each rank scales its local part, because a DTensor could only be multiplied by another DTensor.
        shard = local_shard(gradient)
        shard.mul_(scale.to(shard.device))
    return total_norm


@torch.no_grad()
def reduce_norm_and_flags(
    gradients: Sequence[Tensor],
    flags: Sequence[Tensor] = (),
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Collective: return the global 2-norm of gradients, and sums of flags, without waiting for the device.

    Gradients may be sharded or split over different device meshes, or whole on all ranks; each element is counted once.
    A single all-reduce sums both the squared norms and the flags.

    Args:
        gradients: at least one gradient; all ranks pass gradients of the same parameters in the same order.
        flags: scalars of this rank, on any device, for example 1 if this rank has a problem. They are summed over the
            ranks in the same all-reduce.
        group: ranks that together store the model; None for all ranks.
        dtype: dtype of the result; fused optimizers accept only float32 as the gradient scale.

    Returns:
        The norm, a scalar, and the sums of the flags, (number of flags,). Both tensors are on the device of the
        gradients and are equal on all ranks.
    """
    num_ranks = 1
    if dist.is_initialized():
        num_ranks = dist.get_world_size(group)
    # (number of ranks that store each element, dtype in which the norm is computed) -> this rank's parts of gradients.
    local_gradients: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # A sum of many squares needs at least float32.
        norm_dtype = torch.promote_types(gradient.dtype, torch.float32)
        copies = num_ranks
        if isinstance(gradient, DTensor):
            gradient = _add_partial_sums(gradient)
            copies = num_ranks // num_shards(gradient)
            gradient = gradient.to_local()
        local_gradients.setdefault((copies, norm_dtype), []).append(gradient)
    square_sums = []
    # The sum over the ranks includes an element once for each rank that stores it. The division corrects for this.
    for (copies, norm_dtype), tensors in local_gradients.items():
        norms = torch._foreach_norm(tensors, dtype=norm_dtype)
        square_sum = torch.stack(norms).square().sum()
        square_sums.append((square_sum / copies).to(dtype))
    total_square = torch.stack(square_sums).sum()
    # The copy must not be `non_blocking`: if gradients are in host memory, it must wait for the flags from the GPU.
    flags_on_device = [flag.to(total_square) for flag in flags]
    sums = torch.stack([total_square, *flags_on_device])
    if dist.is_initialized():
        dist.all_reduce(sums, group=group)
    return sums[0].sqrt(), sums[1:]


def _add_partial_sums(gradient: DTensor) -> DTensor:
    """Collective: return a gradient whose partial sums (DTensor placement `Partial`) have been added over the ranks.

    torch's tensor parallelism may leave partial sums. A gradient without partial sums is returned unchanged.
    """
    if not any(isinstance(placement, Partial) for placement in gradient.placements):
        return gradient
    placements = []
    for placement in gradient.placements:
        if isinstance(placement, Partial):
            placement = Replicate()
        placements.append(placement)
    return gradient.redistribute(placements=placements)


def mean_over_ranks(values: Tensor) -> Tensor:
    """Collective: return the elementwise mean of a tensor over all ranks; shape and dtype are equal on all ranks.

    Without a process group, `values` is returned unchanged.
    """
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def sum_over_shards(summands: Sequence[Tensor], sharded: Sequence[DTensor]) -> list[Tensor]:
    """Collective: sum tensors that each rank has computed from its shards, with one all-reduce for each device mesh.

    If a larger mesh contains all ranks of a smaller mesh, the sums of both meshes use the same all-reduce.

    Args:
        summands: this rank's summand of each sum, computed from its shard of a tensor; ranks with equal shards have
            equal summands.
        sharded: for each summand, the sharded tensor from which the summand was computed.

    Returns:
        For each summand, a new tensor with the sum over all shards. Each shard is counted once. The sum is equal on all
        ranks of the mesh.
    """
    meshes = dict.fromkeys(tensor.device_mesh for tensor in sharded)
    group_of_mesh = _find_largest_groups({mesh: _get_group(mesh) for mesh in meshes})
    indices_of_group: dict[dist.ProcessGroup, list[int]] = {}
    for index, tensor in enumerate(sharded):
        indices_of_group.setdefault(group_of_mesh[tensor.device_mesh], []).append(index)

    # A single all-reduce for each group sums all of its summands.
    sums: dict[int, Tensor] = {}
    for group, indices in indices_of_group.items():
        weighted_summands = []
        for index in indices:
            # Ranks with copies of the same shard have the same summand. The weight is 1 / (number of copies), so that
            # each shard is counted once.
            weight = num_shards(sharded[index]) / dist.get_world_size(group)
            weighted_summands.append(summands[index].flatten() * weight)
        # Shards that are kept in host memory are summed on the device of their mesh.
        total = torch.cat(weighted_summands).to(sharded[indices[0]].device_mesh.device_type)
        dist.all_reduce(total, group=group)
        # Split the flat tensor into the sums.
        flat_sums = total.split([len(summand) for summand in weighted_summands])
        for index, flat_sum in zip(indices, flat_sums, strict=True):
            sums[index] = flat_sum.view_as(summands[index]).to(summands[index].device)
    return [sums[index] for index in range(len(summands))]


def _find_largest_groups(groups: Mapping[DeviceMesh, dist.ProcessGroup]) -> dict[DeviceMesh, dist.ProcessGroup]:
    """Return, for each mesh, the largest of all process groups in `groups` that contains all ranks of the mesh."""
    # In this common case, no list of all ranks is needed.
    if len(set(groups.values())) == 1:
        return dict(groups)
    ranks_of_group = {group: set(dist.get_process_group_ranks(group)) for group in groups.values()}
    largest_first = sorted(ranks_of_group, key=lambda group: len(ranks_of_group[group]), reverse=True)
    merged_groups = {}
    for mesh, group in groups.items():
        containing_groups = [other for other in largest_first if ranks_of_group[group] <= ranks_of_group[other]]
        merged_groups[mesh] = containing_groups[0]
    return merged_groups


def _get_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh; the first call for a mesh is a collective."""
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return merge_mesh_axes(mesh).get_group()
