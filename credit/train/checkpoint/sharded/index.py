"""Index of the files of a stem, from which every rank computes the file and the position of each part of each tensor.

A stem is a set of tensors, such as ``model`` or ``optimizer``, with a separate folder. The index does not list the
parts. It contains the name, dtype, shape and split (`Split`) of each tensor, and the number of ranks that share a file.
So its size does not depend on the number of ranks, and all ranks compute the same files without communication.

The ranks of a host write their parts of a tensor next to each other. Parts that are adjacent along the first dimension
become one slab, which is stored as a single array. The usual shards of FSDP2 give one slab per host and tensor. Parts
that are not adjacent, for example with tensor parallelism, give several slabs. The n-th slab of each tensor is stored
in the n-th file of the host, because the format of DCP (torch.distributed.checkpoint) allows only one array with the
same name in a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from credit.errors import CheckpointError
from credit.parallel.dtensor import local_slices
from credit.train.checkpoint.sharded.split import Box, Split, find_split, whole_box

INDEX = "index.json"
# Names of the dtypes in safetensors files.
DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of a complete tensor, and its split over the ranks that saved it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    split: Split


@dataclass(frozen=True)
class Slab:
    """Part of a tensor that is stored as one array.

    Attributes:
        box: (start, stop) of the slab along each dimension of the complete tensor.
        parts: (box of the part, ranks that have the part) for each part of the slab, in the order of their bytes.
    """

    box: Box
    parts: tuple[tuple[Box, tuple[int, ...]], ...]


@dataclass(frozen=True)
class SlabFile:
    """File that contains a slab; DCP's reader of safetensors files requires the attribute `relative_path`."""

    relative_path: str


@dataclass(frozen=True)
class StemIndex:
    """Index of a stem, a set of tensors with a separate folder, such as ``model``.

    Attributes:
        tensors: name -> description of the tensor.
        ranks_per_file: number of neighbouring ranks that write into the same files.
    """

    tensors: dict[str, StoredTensor]
    ranks_per_file: int

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], num_ranks: int, ranks_per_file: int) -> StemIndex:
        """Return the index for tensors that `num_ranks` ranks will save; the index is equal on all ranks.

        Args:
            tensors: name -> DTensor, or plain tensor with a complete copy on every rank.
            num_ranks: number of ranks that save the tensors.
            ranks_per_file: number of ranks that share a file, a divisor of `num_ranks`.

        Raises:
            CheckpointError: if the ranks of a mesh are not evenly spaced, or safetensors files do not support a dtype.
        """
        # Splits are cached, because most tensors have one of a few meshes and placements.
        splits: dict[object, Split] = {}
        stored = {}
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name}: safetensors files have no {tensor.dtype}; store another dtype")
            key = (getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None))
            if key not in splits:
                splits[key] = find_split(tensor, num_ranks)
            stored[name] = StoredTensor(tensor.dtype, tuple(tensor.shape), splits[key])
        return cls(stored, ranks_per_file)

    def to_text(self) -> str:
        """Return the contents of the file `INDEX`."""
        splits = list(dict.fromkeys(tensor.split for tensor in self.tensors.values()))
        split_numbers = {split: number for number, split in enumerate(splits)}
        tensors = {}
        for name, tensor in self.tensors.items():
            tensors[name] = [DTYPE_NAMES[tensor.dtype], tensor.shape, split_numbers[tensor.split]]
        content = {
            "ranks_per_file": self.ranks_per_file,
            "splits": [[split.sizes, split.strides, split.dims] for split in splits],
            "tensors": tensors,
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> StemIndex:
        """Return the index for the contents of the file `INDEX`, from `to_text`."""
        content = json.loads(text)
        splits = [Split(*map(tuple, fields)) for fields in content["splits"]]
        tensors = {}
        for name, (dtype, shape, number) in content["tensors"].items():
            tensors[name] = StoredTensor(_DTYPES[dtype], tuple(shape), splits[number])
        return cls(tensors, content["ranks_per_file"])

    def shapes(self) -> dict[str, torch.Size]:
        """Return a dict: name -> shape of the complete tensor."""
        return {name: torch.Size(tensor.shape) for name, tensor in self.tensors.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return a dict: name -> dtype of the tensor."""
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def find_overlapping_slabs(self, tensor: StoredTensor, box: Box) -> Iterator[tuple[str, Box]]:
        """Yield (name of the file, box of the slab) for each slab of a tensor that overlaps with `box`."""
        groups = {rank // self.ranks_per_file for rank, _ in tensor.split.find_parts(tensor.shape, box)}
        for group in sorted(groups):
            for number, slab in enumerate(self.list_slabs(tensor, group)):
                if _do_boxes_overlap(slab.box, box):
                    yield shard_file_name(group * self.ranks_per_file, number), slab.box

    def list_slabs(self, tensor: StoredTensor, group: int) -> list[Slab]:
        """Return the slabs of a tensor in the files of a group of ranks, in the order of the files.

        Args:
            tensor: description of the tensor.
            group: number of the group; group 0 has the ranks 0 to `ranks_per_file` - 1.
        """
        if 0 in tensor.shape:
            box = whole_box(tensor.shape)
            return [Slab(box, ((box, (0,)),))] if group == 0 else []
        ranks = range(group * self.ranks_per_file, (group + 1) * self.ranks_per_file)
        holders: dict[Box, list[int]] = {}
        for rank in ranks:
            coordinate = tensor.split.coordinate(rank)
            # Replicas on other hosts do not write.
            if coordinate is None or tensor.split.find_first_replica(coordinate) not in ranks:
                continue
            box = tensor.split.box_at(coordinate, tensor.shape)
            # The last ranks may have empty parts.
            if all(start < stop for start, stop in box):
                holders.setdefault(box, []).append(rank)
        return _merge_boxes(holders)

    def metadata_for(self, folder: Path, state: Mapping[str, Tensor]) -> Metadata:
        """Return the metadata that DCP (torch.distributed.checkpoint) needs to fill `state` on this rank.

        Args:
            folder: folder of the stem.
            state: name -> tensor to fill, a plain tensor or a DTensor on any mesh.
        """
        entries: dict[str, TensorStorageMetadata] = {}
        files: dict[MetadataIndex, SlabFile] = {}
        # Slabs are cached, because many tensors have the same shape and split.
        slabs_by_key: dict[object, list[tuple[str, Box]]] = {}
        for name, target in state.items():
            tensor = self.tensors[name]
            box = tuple((part.start, part.stop) for part in local_slices(target))
            key = (tensor.split, tensor.shape, box)
            if key not in slabs_by_key:
                slabs_by_key[key] = list(self.find_overlapping_slabs(tensor, box))
            chunks = []
            for file, slab_box in slabs_by_key[key]:
                offsets = torch.Size([start for start, _ in slab_box])
                sizes = torch.Size([stop - start for start, stop in slab_box])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                files[MetadataIndex(name, offsets)] = SlabFile(str(folder / file))
            properties = TensorProperties(dtype=tensor.dtype)
            entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        return Metadata(state_dict_metadata=entries, storage_data=files)


def shard_file_name(first_rank: int, number: int) -> str:
    """Return the name of a file of a group of ranks.

    Args:
        first_rank: lowest rank of the group.
        number: number of the file among the files of the group, from 0.
    """
    suffix = f"_{number}" if number else ""
    return f"rank_{first_rank:05d}{suffix}.safetensors"


def _merge_boxes(holders: Mapping[Box, list[int]]) -> list[Slab]:
    """Join boxes that are adjacent along the first dimension, and return the resulting slabs.

    Args:
        holders: box -> ranks with this box; no two boxes overlap.
    """
    slabs: list[Slab] = []
    for box in sorted(holders, key=lambda box: (box[1:], box[:1])):
        part = (box, tuple(holders[box]))
        previous = slabs[-1] if slabs else None
        if previous and box and previous.box[1:] == box[1:] and previous.box[0][1] == box[0][0]:
            joined = ((previous.box[0][0], box[0][1]), *box[1:])
            slabs[-1] = Slab(joined, (*previous.parts, part))
        else:
            slabs.append(Slab(box, (part,)))
    return sorted(slabs, key=lambda slab: slab.box)


def _do_boxes_overlap(first: Box, second: Box) -> bool:
    """Return True if two boxes of a tensor have common elements, or if the tensor has no elements."""
    pairs = zip(first, second, strict=True)
    return all(max(a[0], b[0]) < min(a[1], b[1]) or a == b for a, b in pairs)
