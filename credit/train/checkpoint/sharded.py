"""Sharded tensors on disk: each rank writes its parts, and a mesh of any shape can read them.

torch.distributed.checkpoint (DCP) decides which rank writes which part, and finds the parts again on another mesh. The
files have the format of DCP's safetensors storage: any number of files in a folder, with the offset of each part in the
metadata of its file. DCP's `HuggingFaceStorageReader` reads them. DCP's own writer is not used, for three reasons. It
makes a second copy of all tensors in memory. It holds Python's global lock (GIL) meanwhile, so that training waits
(3.4 s for 1 GB). It calls fsync before the last block has left Python's buffer (torch 2.11 to 2.13).

A stem is a set of tensors, such as ``model`` or ``optimizer``, and has a folder of its own. A part is a rank's shard of
a tensor. A whole tensor is the full, unsharded one.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    HuggingFaceStorageReader,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import current_rank, run_on_all_ranks, scatter_from_rank0

# Keys that DCP's reader looks for: in the metadata of a file, and in the entry of a tensor there.
_SHARDING_KEY = "DCP_SHARDING_INFO"
_OFFSETS_KEY = "saved_offsets"


@dataclass(frozen=True)
class StagedShards:
    """Copies in host memory of this rank's parts of the tensors to save.

    Attributes:
        parts: stem -> name of the tensor -> this rank's part of it on the CPU.
        plans: stem -> DCP's plan, which has the position of each part in its tensor.
        done: event after which the copies from the device are complete, None for tensors on the CPU.
    """

    parts: dict[str, dict[str, Tensor]]
    plans: dict[str, SavePlan]
    done: torch.Event | None


class ShardWriter:
    """Writer of this rank's parts of all checkpoints of a run.

    It reuses two things from save to save. One is host memory, because allocating it takes many times as long as the
    copy. The other is the plan of which rank writes which part, which takes 4 s for 64 ranks and 2000 tensors.

    Args:
        group: process group of the threads that write, None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._local_plans: dict[str, SavePlan] = {}
        self._write_plans: dict[str, SavePlan] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> StagedShards:
        """Copy this rank's parts of the tensors to host memory, over the previous copy.

        The method does not wait for copies from a GPU. They are queued in its stream before any later change of the
        tensors.

        Args:
            tensors: stem -> name -> DTensor, or plain tensor that is equal on all ranks.

        Returns:
            The copies, which the next call overwrites.
        """
        previous_parts = self._parts
        self._parts = {}
        on_device = False
        for stem, tensors_by_name in tensors.items():
            buffers = previous_parts.get(stem, {})
            self._parts[stem] = {}
            for name, tensor in tensors_by_name.items():
                part = local_shard(tensor)
                # Only a copy to pinned memory is asynchronous.
                from_device = part.device.type != "cpu"
                buffer = buffers.get(name)
                # The first save allocates the buffers.
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=from_device)
                self._parts[stem][name] = buffer.copy_(part, non_blocking=from_device)
                on_device |= from_device
        plans = {}
        for stem, tensors_by_name in tensors.items():
            plans[stem] = create_default_local_save_plan(tensors_by_name, False)
        done = torch.accelerator.current_stream().record_event() if on_device else None
        return StagedShards(self._parts, plans, done)

    def write(self, folder: Path, staged: StagedShards) -> dict[str, dict[str, int]]:
        """Collective: write the parts of each stem into ``folder/STEM`` and flush them to the disk.

        A part that several ranks hold is written by one of them.

        Args:
            folder: folder of the checkpoint, which exists.
            staged: copies of this rank's parts of the tensors.

        Returns:
            Entries of the manifest for the files of all ranks: path below `folder` -> size and checksum.

        Raises:
            CheckpointError: on all ranks, if any rank cannot write.
        """
        write_plans = self._agree_on_write_plans(staged.plans)
        rank = current_rank(self._group)

        def write_files() -> dict[str, dict[str, int]]:
            if staged.done is not None:
                staged.done.synchronize()
            entries = {}
            for stem, parts in staged.parts.items():
                # Rank 0 writes a file even without parts, so that the folder of an empty stem exists.
                if write_plans[stem].items or rank == 0:
                    path = folder / stem / f"rank_{rank:05d}.safetensors"
                    path.parent.mkdir(exist_ok=True)
                    _write_parts(path, write_plans[stem], parts)
                    entries[str(path.relative_to(folder))] = fsync_and_checksum(path)
            return entries

        manifest = {}
        for entries in run_on_all_ranks(write_files, self._group):
            manifest |= entries
        return manifest

    def _agree_on_write_plans(self, local_plans: dict[str, SavePlan]) -> dict[str, SavePlan]:
        """Collective: return stem -> plan of the parts that this rank writes.

        The plans of the previous save are used again unless a rank's parts have changed. Only rank 0 gets the plans of
        all ranks, because those of 1024 ranks take a GB of memory and seconds to send.

        Args:
            local_plans: stem -> plan of all parts that this rank has.
        """
        # All ranks see the answers of all, so all of them take part in the scatter or none does.
        is_unchanged = run_on_all_ranks(lambda: local_plans == self._local_plans, self._group)
        if not all(is_unchanged):
            self._write_plans = scatter_from_rank0(local_plans, _assign_parts, self._group)
            self._local_plans = local_plans
        return self._write_plans


def _assign_parts(plans_by_rank: list[dict[str, SavePlan]]) -> list[dict[str, SavePlan]]:
    """Return for each rank the plans of the parts that it writes, so that each part is written once.

    Args:
        plans_by_rank: for each rank, stem -> plan of all parts that the rank has.

    Returns:
        For each rank, stem -> plan of the parts that the rank writes.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    write_plans: list[dict[str, SavePlan]] = [{} for _ in plans_by_rank]
    # All ranks have the same stems. The planner assigns a part that several ranks have to one of them.
    for stem in plans_by_rank[0]:
        stem_plans, _ = planner.create_global_plan([plans[stem] for plans in plans_by_rank])
        for rank, plan in enumerate(stem_plans):
            write_plans[rank][stem] = plan
    return write_plans


def _write_parts(path: Path, plan: SavePlan, parts: Mapping[str, Tensor]) -> None:
    """Write the parts in `plan` as a safetensors file that DCP can read."""
    # DCP finds a part again by the offset of its first element in the whole tensor, whose name is `fqn`.
    offsets = {item.index.fqn: {_OFFSETS_KEY: list(item.index.offset)} for item in plan.items}
    assert len(offsets) == len(plan.items), "a rank holds one part of a tensor"
    written_parts = {name: parts[name] for name in offsets}
    # The metadata has one entry only: safetensors writes several in random order, and equal weights must give equal
    # files.
    save_file(written_parts, path, metadata={_SHARDING_KEY: json.dumps(offsets)})


def fsync_and_checksum(path: Path) -> dict[str, int]:
    """Flush a complete file to the disk, give it its folder's read and write permissions, and return its checksum.

    Returns:
        The entry of the manifest: ``size`` in bytes and ``crc32``.
    """
    # safetensors creates files that only the owner can read. The mode of the folder takes account of the umask.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync_path(path)
    return {"size": path.stat().st_size, "crc32": compute_checksum(path)}


def compute_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, which is read in blocks of 4 MiB."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def fsync_path(path: Path) -> None:
    """Wait until the contents of a file, or the list of entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(folder: Path) -> Metadata:
    """Return DCP's metadata of a folder: the shapes and positions of all tensors, from the headers of its files."""
    return HuggingFaceStorageReader(str(folder)).read_metadata()


def tensor_shapes(metadata: Metadata) -> dict[str, torch.Size]:
    """Return name -> shape of the whole tensor, from the output of `read_metadata`."""
    return {name: entry.size for name, entry in metadata.state_dict_metadata.items()}


def read_into(folder: Path, metadata: Metadata, state: Mapping[str, Tensor]) -> None:
    """Fill tensors in place from a folder; each rank reads its own parts, without communication.

    Args:
        folder: folder that `ShardWriter` has written, or any folder of safetensors files with whole tensors.
        metadata: the metadata of `folder`, from `read_metadata`.
        state: name -> tensor to fill, for some or all tensors of the folder; plain tensors, or DTensors on any mesh.
    """
    assert not any(tensor.is_meta for tensor in state.values()), "a tensor without memory cannot be filled"
    # The steps of `torch.distributed.checkpoint.load` for one rank alone, without its collectives.
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def read_whole(folder: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return name -> whole tensor of a folder, on the CPU; only of the tensors in `names`, if it is not None."""
    metadata = read_metadata(folder)
    entries: dict[str, Any] = metadata.state_dict_metadata
    state = {}
    for name, entry in entries.items():
        if names is None or name in names:
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    read_into(folder, metadata, state)
    return state
