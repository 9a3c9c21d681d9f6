"""Sharded tensors on disk: copied in a moment, written by the ranks that hold them, read on any mesh.

torch.distributed.checkpoint (DCP) decides which rank writes which part and finds the parts again on another mesh. The
files are those of its safetensors storage: any number of them in a folder, each part's offset in the file's metadata.
They are read by its `HuggingFaceStorageReader` but not written by its writer: that one makes a second copy of
everything in memory, holds Python's lock meanwhile (3.4 s for 1 GB, in which training stands still), and calls fsync
before the last block has left Python's buffer (torch 2.11 to 2.13).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
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
from credit.parallel.object_collectives import rank_of, scatter_from_rank0, together

# file's metadata that DCP's reader looks for
_OFFSETS, _OFFSET = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True)
class StagedShards:
    """This rank's parts of what is to be saved, independent of the live tensors.

    Attributes:
        parts: stem -> name -> CPU tensor.
        plans: stem -> where each part lies in its tensor.
        done: when the copies from the device have arrived, None for tensors of the CPU.
    """

    parts: dict[str, dict[str, Tensor]]
    plans: dict[str, SavePlan]
    done: torch.Event | None


class ShardWriter:
    """Copies and writes this rank's parts of one checkpoint after the other.

    Host memory is kept from save to save, as new memory costs many times the copy; so is what the ranks have agreed on,
    which for 64 ranks and 2000 tensors takes 4 s.

    Args:
        group: of the threads that write; None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._offered: dict[str, SavePlan] = {}
        self._chosen: dict[str, SavePlan] = {}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> StagedShards:
        """Copy this rank's parts; what was copied before is overwritten.

        Copies from a device are queued before whatever its stream does next, so nobody waits for them here.
        """
        kept, self._parts = self._parts, {}
        on_device = False
        for stem, named in tensors.items():
            buffers, self._parts[stem] = kept.get(stem, {}), {}
            for name, tensor in named.items():
                part = local_shard(tensor)
                from_device = part.device.type != "cpu"
                buffer = buffers.get(name)
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=from_device)
                self._parts[stem][name] = buffer.copy_(part, non_blocking=from_device)
                on_device |= from_device
        plans = {stem: create_default_local_save_plan(named, False) for stem, named in tensors.items()}
        done = torch.accelerator.current_stream().record_event() if on_device else None
        return StagedShards(self._parts, plans, done)

    def write(self, folder: Path, copied: StagedShards) -> dict[str, dict[str, int]]:
        """Collective: write each stem's parts into ``folder/STEM``, every part once, and flush them.

        Returns:
            The facts of all ranks' files: path below `folder` -> size and checksum.

        Raises:
            CheckpointError: on all ranks, if one cannot write.
        """
        plans, rank = self._choose(copied.plans), rank_of(self._group)

        def write() -> dict[str, dict[str, int]]:
            if copied.done is not None:
                copied.done.synchronize()
            files = {}
            for stem, parts in copied.parts.items():
                if plans[stem].items or rank == 0:
                    path = folder / stem / f"rank_{rank:05d}.safetensors"
                    path.parent.mkdir(exist_ok=True)
                    _write_parts(path, plans[stem], parts)
                    files[str(path.relative_to(folder))] = seal(path)
            return files

        return {name: facts for files in together(write, self._group) for name, facts in files.items()}

    def _choose(self, plans: dict[str, SavePlan]) -> dict[str, SavePlan]:
        """Collective: return which parts this rank writes, of those that it has.

        Rank 0 chooses for all: of 1024 ranks the plans take it seconds and a GB.
        """
        if not all(together(lambda: plans == self._offered, self._group)):
            self._chosen, self._offered = scatter_from_rank0(plans, _choose_parts, self._group), plans
        return self._chosen


def _choose_parts(offers: list[dict[str, SavePlan]]) -> list[dict[str, SavePlan]]:
    """Return, for each rank, what it writes; each part is written once."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    by_stem = {stem: planner.create_global_plan([plans[stem] for plans in offers])[0] for stem in offers[0]}
    return [{stem: of_ranks[rank] for stem, of_ranks in by_stem.items()} for rank in range(len(offers))]


def _write_parts(path: Path, plan: SavePlan, parts: Mapping[str, Tensor]) -> None:
    offsets = {item.index.fqn: {_OFFSET: list(item.index.offset)} for item in plan.items}
    assert len(offsets) == len(plan.items), "a rank holds one part of a tensor"
    # one entry alone: safetensors writes several in random order, and equal weights shall make equal files
    save_file({name: parts[name] for name in offsets}, path, metadata={_OFFSETS: json.dumps(offsets)})


def seal(path: Path) -> dict[str, int]:
    """Flush a file that is complete, give it the usual mode, and return its size and checksum."""
    # safetensors' files are for the owner alone; the folder's mode knows the umask
    path.chmod(path.parent.stat().st_mode & 0o666)
    flush(path)
    return {"size": path.stat().st_size, "crc32": checksum(path)}


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_metadata(folder: Path) -> Metadata:
    """Return what the files in `folder` hold and where, from the heads of all of them."""
    return HuggingFaceStorageReader(str(folder)).read_metadata()


def shapes(metadata: Metadata) -> dict[str, torch.Size]:
    """Return the shapes of the whole tensors."""
    return {name: entry.size for name, entry in metadata.state_dict_metadata.items()}


def read_into(folder: Path, metadata: Metadata, state: Mapping[str, Tensor]) -> None:
    """Fill `state`, plain tensors or DTensors on any mesh, in place; each rank reads its own parts and asks no other.

    Args:
        folder: written by `ShardWriter`, or any folder of safetensors files with whole tensors.
        metadata: of `folder`, see `read_metadata`.
        state: some or all of the folder's tensors, of their shapes.
    """
    assert not any(tensor.is_meta for tensor in state.values()), "a tensor without memory cannot be filled"
    reader = HuggingFaceStorageReader(str(folder))
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(planner.create_local_plan(), planner).wait()


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Return the whole tensors of `folder` on the CPU."""
    metadata = read_metadata(folder)
    entries: dict[str, Any] = metadata.state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    read_into(folder, metadata, state)
    return state
