"""Writer of sharded tensors: each rank writes its parts, and ranks of any other mesh can read them.

The ranks need no communication to divide the work. From the placements of the DTensors, each rank computes its part of
each tensor, the rank that writes this part, and the position in the files (`credit.train.checkpoint.sharded.index`).
The ranks of a host write separate byte ranges into the same files.

The files have the format of the safetensors storage of DCP (torch.distributed.checkpoint), so DCP's
`HuggingFaceStorageReader` can read them. The writer of DCP is not used, for two reasons. First, DCP gathers the plans
of all ranks on rank 0. This takes time and memory in proportion to the number of ranks (33 s and 478 MB for 512 ranks
and 4,736 tensors). Second, its writer makes a second copy of all tensors and meanwhile holds Python's global lock
(GIL), so training waits (3.4 s for 1 GB).
"""

from __future__ import annotations

import math
import socket
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.tensor import DTensor

from credit.errors import CheckpointError
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import current_rank, reduce_over_ranks
from credit.parallel.process_info import read_process_info
from credit.train.checkpoint.sharded.files import (
    ArrayEntry,
    encode_header,
    fsync_and_checksum,
    view_bytes,
    write_ranges,
)
from credit.train.checkpoint.sharded.index import DTYPE_NAMES, INDEX, Slab, StemIndex, shard_file_name


@dataclass(frozen=True)
class FileShare:
    """Byte ranges that one rank writes into a file.

    Attributes:
        name: name of the file in the folder of its stem.
        header: the header of the file; None if a different rank writes the header.
        size: size of the complete file in bytes.
        parts: (offset in the file, name of the tensor) for each part that the rank writes, in ascending order.
    """

    name: str
    header: bytes | None
    size: int
    parts: list[tuple[int, str]]


@dataclass(frozen=True)
class StagedShards:
    """Copies in host memory of the parts that this rank writes.

    Attributes:
        parts: stem -> name of the tensor -> this rank's part of the tensor on the CPU.
        shares: stem -> byte ranges of files that this rank writes.
        indices: stem -> contents of the index file of the stem, equal on all ranks.
        copy_event: event after which the copies from the device are complete; None for tensors on the CPU.
    """

    parts: dict[str, dict[str, Tensor]]
    shares: dict[str, list[FileShare]]
    indices: dict[str, str]
    copy_event: torch.Event | None


class ShardWriter:
    """Writer of this rank's parts of all checkpoints of a run; its construction is collective.

    The writer reuses the plan of the rank's byte ranges and the host memory in later saves, because the allocation of
    host memory takes many times as long as the copy.

    Args:
        group: process group of the threads that write; None for a single process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = current_rank(group)
        self._num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._ranks_per_file = find_ranks_per_file(group)
        self._parts: dict[str, dict[str, Tensor]] = {}
        self._planned_indices: dict[str, StemIndex] = {}
        self._shares: dict[str, list[FileShare]] = {}
        self._index_texts: dict[str, str] = {}

    @torch.no_grad()
    def copy_to_host(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> StagedShards:
        """Copy the parts that this rank writes to host memory; the copy overwrites the previous copy.

        The method does not communicate and does not wait for copies from a GPU. These copies are queued in the stream
        of the GPU before any later change of the tensors.

        Args:
            tensors: stem -> name -> DTensor, or plain tensor that is equal on all ranks.

        Returns:
            The copies, which the next call overwrites.

        Raises:
            CheckpointError: if the ranks of a mesh are not evenly spaced.
        """
        self._plan(tensors)
        previous_parts = self._parts
        self._parts = {}
        on_device = False
        for stem, shares in self._shares.items():
            buffers = previous_parts.get(stem, {})
            self._parts[stem] = {}
            for name in sorted({name for share in shares for _, name in share.parts}):
                part = local_shard(tensors[stem][name])
                # Only a copy to pinned memory is asynchronous.
                from_device = part.device.type != "cpu"
                buffer = buffers.get(name)
                # The first save allocates the buffers.
                if buffer is None or buffer.shape != part.shape or buffer.dtype != part.dtype:
                    buffer = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=from_device)
                self._parts[stem][name] = buffer.copy_(part, non_blocking=from_device)
                on_device |= from_device
        copy_event = torch.accelerator.current_stream().record_event() if on_device else None
        return StagedShards(self._parts, self._shares, self._index_texts, copy_event)

    def _plan(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Plan the byte ranges that this rank writes, unless the plan of the previous save is still valid."""
        indices = {}
        for stem, tensors_by_name in tensors.items():
            indices[stem] = StemIndex.of_tensors(tensors_by_name, self._num_ranks, self._ranks_per_file)
        if indices == self._planned_indices:
            return
        for stem, index in indices.items():
            _require_same_shards_as_torch(index, tensors[stem], self._rank)
        self._shares = {stem: plan_file_shares(index, self._rank) for stem, index in indices.items()}
        self._index_texts = {stem: index.to_text() for stem, index in indices.items()}
        self._planned_indices = indices

    def write(self, folder: Path, staged: StagedShards) -> dict[str, dict[str, int]]:
        """Collective: write the parts of each stem into ``folder/STEM`` and flush the files to the disk.

        If several ranks have the same part, only one of them writes the part.

        Args:
            folder: existing folder of the checkpoint.
            staged: copies of this rank's parts of the tensors.

        Returns:
            On rank 0, the manifest entries of the files of all ranks: path relative to `folder` -> size and checksum.

        Raises:
            CheckpointError: on all ranks, if any rank cannot write, or the ranks save different tensors.
        """
        manifest = {}

        def create_folders() -> set[int]:
            if self._rank == 0:
                for stem, text in staged.indices.items():
                    (folder / stem).mkdir()
                    (folder / stem / INDEX).write_text(text)
                    manifest[f"{stem}/{INDEX}"] = fsync_and_checksum(folder / stem / INDEX)
            return {zlib.crc32("".join(staged.indices.values()).encode())}

        # If a rank had different tensors, the files would have gaps.
        if len(reduce_over_ranks(create_folders, set.union, self._group)) > 1:
            raise CheckpointError("the ranks save different tensors, or tensors that are sharded in different ways")

        def write_files() -> dict[str, tuple[int, int]]:
            if staged.copy_event is not None:
                staged.copy_event.synchronize()
            contributions = {}
            for stem, shares in staged.shares.items():
                for share in shares:
                    path = folder / stem / share.name
                    ranges = _list_ranges(share, staged.parts[stem])
                    contributions[f"{stem}/{share.name}"] = (share.size, write_ranges(path, ranges, share.size))
            return contributions

        files = reduce_over_ranks(write_files, _join_contributions, self._group)
        for name, (size, checksum) in files.items():
            manifest[name] = {"size": size, "crc32": checksum}
        return manifest


def find_ranks_per_file(group: dist.ProcessGroup | None) -> int:
    """Collective: return the number of ranks per host, which write into the same files.

    Return 1 if hosts have different numbers of ranks, or if the numbers of the ranks of a host are not consecutive.
    Ranks of different hosts never share a file, because network file systems are slow, and some lose data, if several
    hosts write into one file.

    Args:
        group: process group of the ranks; None for a single process.
    """
    if not dist.is_initialized():
        return 1
    process = read_process_info()
    first_rank = current_rank(group) - process.local_rank
    # (host, rank with local rank 0) -> number of ranks.
    hosts = reduce_over_ranks(lambda: {(socket.gethostname(), first_rank): 1}, _add_counts, group)
    sizes = set(hosts.values())
    first_ranks = sorted(first for _, first in hosts)
    if len(sizes) == 1 and first_ranks == list(range(0, dist.get_world_size(group), min(sizes))):
        return min(sizes)
    return 1


def plan_file_shares(index: StemIndex, rank: int) -> list[FileShare]:
    """Return the byte ranges that a rank writes into the files of its group (the ranks of its host).

    All ranks of the group compute the same plan, so they need no communication. Tensors with the largest elements
    come first in a file, so that every array begins at a multiple of its element size.

    Args:
        index: index of the stem.
        rank: number of the rank.
    """
    group = rank // index.ranks_per_file
    first_rank = group * index.ranks_per_file
    slabs_by_key: dict[object, list[Slab]] = {}
    # For each file of the group, the list of (name of the tensor, slab) in the file.
    files: list[list[tuple[str, Slab]]] = []
    for name in sorted(index.tensors, key=lambda name: (-index.tensors[name].dtype.itemsize, name)):
        tensor = index.tensors[name]
        key = (tensor.split, tensor.shape)
        if key not in slabs_by_key:
            slabs_by_key[key] = index.list_slabs(tensor, group)
        for number, slab in enumerate(slabs_by_key[key]):
            if number == len(files):
                files.append([])
            files[number].append((name, slab))
    num_bytes_by_rank = dict.fromkeys(range(first_rank, first_rank + index.ranks_per_file), 0)
    shares = []
    for number, entries in enumerate(files):
        share = _plan_file(index, shard_file_name(first_rank, number), entries, num_bytes_by_rank, rank)
        if share.header is not None or share.parts:
            shares.append(share)
    return shares


def _plan_file(
    index: StemIndex, file: str, entries: list[tuple[str, Slab]], num_bytes_by_rank: dict[int, int], rank: int
) -> FileShare:
    """Return the byte ranges of a file that a rank writes; the first rank of a group writes the header.

    Args:
        index: index of the stem.
        file: name of the file.
        entries: (name of the tensor, slab) in the order of the file.
        num_bytes_by_rank: rank of the group -> number of bytes that the rank writes; this dict is updated.
        rank: number of the rank.
    """
    arrays = []
    parts = []
    offset = 0
    for name, slab in entries:
        item_size = index.tensors[name].dtype.itemsize
        begin = offset
        for box, holders in slab.parts:
            # If several ranks of the host have the same part, the rank with the fewest bytes so far writes it.
            writer = min(holders, key=num_bytes_by_rank.__getitem__)
            if writer == rank:
                parts.append((offset, name))
            num_bytes = item_size * math.prod(stop - start for start, stop in box)
            num_bytes_by_rank[writer] += num_bytes
            offset += num_bytes
        shape = [stop - start for start, stop in slab.box]
        starts = [start for start, _ in slab.box]
        arrays.append(ArrayEntry(name, DTYPE_NAMES[index.tensors[name].dtype], shape, starts, offset - begin))
    header = encode_header(arrays)
    shifted_parts = [(len(header) + part_offset, name) for part_offset, name in parts]
    is_first_rank = rank % index.ranks_per_file == 0
    return FileShare(file, header if is_first_rank else None, len(header) + offset, shifted_parts)


def _list_ranges(share: FileShare, parts: Mapping[str, Tensor]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (offset in the file, bytes) for each byte range that a rank writes into a file."""
    if share.header is not None:
        yield 0, np.frombuffer(share.header, dtype=np.uint8)
    for offset, name in share.parts:
        yield offset, view_bytes(parts[name])


def _join_contributions(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    """Combine the entries of two sets of ranks, which have written parts of the same or of different files.

    Args:
        first: path of a file -> (size, checksum contribution) of the first set of ranks.
        second: path of a file -> (size, checksum contribution) of the second set of ranks.
    """
    joined = dict(first)
    for path, (size, checksum) in second.items():
        _, other_checksum = joined.get(path, (size, 0))
        joined[path] = (size, checksum ^ other_checksum)
    return joined


def _add_counts(first: dict[object, int], second: dict[object, int]) -> dict[object, int]:
    """Return key -> sum of the counts in two dicts; a missing key has the count 0."""
    return {key: first.get(key, 0) + second.get(key, 0) for key in first | second}


def _require_same_shards_as_torch(index: StemIndex, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Raise CheckpointError unless the index and torch assign the same part of each DTensor to this rank.

    Raises:
        CheckpointError: if the parts differ; the message names the tensor.
    """
    compared = set()
    for name, tensor in tensors.items():
        stored = index.tensors[name]
        coordinate = stored.split.coordinate(rank)
        key = (stored.split, stored.shape)
        if not isinstance(tensor, DTensor) or coordinate is None or key in compared:
            continue
        compared.add(key)
        chunk = create_default_local_save_plan({name: tensor}, False).items[0].tensor_data.chunk
        box = stored.split.box_at(coordinate, stored.shape)
        sizes = [stop - start for start, stop in box]
        is_empty = 0 in sizes and 0 in chunk.sizes
        if not is_empty and (list(chunk.sizes) != sizes or list(chunk.offsets) != [start for start, _ in box]):
            raise CheckpointError(
                f"{name} is sharded in a way that checkpoints do not support: {tensor.placements} over "
                f"{tensor.device_mesh}"
            )
