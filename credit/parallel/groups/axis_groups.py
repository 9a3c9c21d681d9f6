"""Process groups of the axes of a device mesh: each rank creates only the groups to which it belongs.

torch's own device meshes create more groups. On CPUs, every rank takes part in the creation of all groups, which needs
thousands of calls on thousands of ranks. On GPUs, the group of each axis gets a second communicator, of gloo, for
tensors in host memory. In this module, only the group of all ranks has a gloo communicator; Python objects are sent
through this group (`object_tree`). All groups have the timeout of the group of all ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def build_axis_mesh(device_type: str, axis_sizes: Mapping[str, int]) -> DeviceMesh:
    """Collective: build a mesh of all ranks, like `init_device_mesh`, but with fewer process groups.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        axis_sizes: name -> length of each axis; the product of the lengths is the number of ranks.
    """
    with _patch_group_creation(device_type):
        return init_device_mesh(device_type, tuple(axis_sizes.values()), mesh_dim_names=tuple(axis_sizes))


def merge_mesh_axes(mesh: DeviceMesh, name: str | None = None) -> DeviceMesh:
    """Return a mesh of the same ranks in which all axes are merged into one axis.

    The first call for these axes is a collective.

    Args:
        mesh: mesh with named axes; it may be part of a larger mesh.
        name: name of the merged axis; None to join the names of the axes.
    """
    with _patch_group_creation(mesh.device_type):
        return mesh._flatten(name)


def build_group(ranks_GN: torch.Tensor, device_type: str, description: str) -> dist.ProcessGroup:
    """Collective: divide all ranks into groups and return the process group of this rank.

    Args:
        ranks_GN: (G, N) the N ranks of each of the G groups; the array contains every rank of the run once.
        device_type: ``"cpu"`` or ``"cuda"``.
        description: name of the group in reports.
    """
    rows = ranks_GN.tolist()
    if dist.group.WORLD.bound_device_id is not None and ranks_GN.shape[1] > 1:
        return _split_all_ranks(split_ranks=rows, timeout=_find_timeout(device_type), group_desc=description)
    rank = dist.get_rank()
    row = next(row for row in rows if rank in row)
    return _create_group(row, device_type, description)


def _find_timeout(device_type: str) -> timedelta | None:
    """Return the timeout of the group of all ranks, which torch does not pass on to new groups; None if unknown."""
    if dist.get_backend() == "fake":
        return None
    try:
        return dist.group.WORLD._get_backend(torch.device(device_type)).options._timeout
    except RuntimeError:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL, some versions of torch wrap the backend without its options.
        return None


def _create_group(ranks: Sequence[int], device_type: str, description: str) -> dist.ProcessGroup:
    """Collective over `ranks`: create a process group of these ranks."""
    # In a GPU run, the group of all ranks has two backends. The other groups have only the backend for GPUs.
    backend = "nccl" if f"{device_type}:nccl" in dist.get_backend_config() else None
    # With local synchronisation, torch names a group by a hash of its ranks, otherwise by a number. A process with fake
    # groups may represent several ranks, one after the other. DTensor's caches then contain meshes of the previous rank
    # and look up groups by name, so the names must not depend on the rank.
    is_fake = dist.get_backend() == "fake"
    return dist.new_group(
        ranks,
        timeout=_find_timeout(device_type),
        backend=backend,
        use_local_synchronization=not is_fake,
        group_desc=description,
    )


def _split_all_ranks(**options: Any) -> dist.ProcessGroup:
    """Collective: split the group of all ranks for GPU tensors; `options` are options of `dist.split_group`."""
    # Versions of torch without this option also create a gloo communicator.
    if "backend" in inspect.signature(dist.split_group).parameters:
        options["backend"] = "nccl"
    return dist.split_group(**options)


@contextmanager
def _patch_group_creation(device_type: str) -> Iterator[None]:
    """Context in which torch's device meshes create process groups with the functions of this module.

    Each rank then creates only the groups to which it belongs.
    """
    rank = dist.get_rank()

    def create_group(ranks: Sequence[int], group_desc: str, **_: Any) -> dist.ProcessGroup | None:
        # Device meshes call this function for each row of ranks, but use only the group of this rank's row.
        if rank not in ranks:
            return None
        return _create_group(ranks, device_type, group_desc)

    def split_group(split_ranks: list[list[int]], group_desc: str, **_: Any) -> dist.ProcessGroup:
        return build_group(torch.tensor(split_ranks), device_type, group_desc)

    # Device meshes have no option for other functions, but they look up these two functions in their module.
    torch_functions = (device_mesh.new_group, device_mesh.split_group)
    device_mesh.new_group, device_mesh.split_group = create_group, split_group
    try:
        yield
    finally:
        device_mesh.new_group, device_mesh.split_group = torch_functions
