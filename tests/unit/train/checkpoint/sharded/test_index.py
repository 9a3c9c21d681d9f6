"""Tests that parts, files and checksums of the index equal those of torch and zlib on simulated ranks."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from credit.errors import CheckpointError
from credit.parallel.dtensor import local_slices
from credit.parallel.process_info import fake_process_group
from credit.train.checkpoint.sharded.index import INDEX, StemIndex, StoredTensor
from credit.train.checkpoint.sharded.reader import read_complete_tensors, read_index, read_into
from credit.train.checkpoint.sharded.split import Split, whole_box
from credit.train.checkpoint.sharded.writer import _join_contributions, _list_ranges, plan_file_shares, write_ranges

# Twelve ranks in every arrangement that a run may have, and some more.
SPLITS = {
    "plain": Split.of_plain_tensor(12),
    "fsdp": Split((12,), (1,), (0,)),
    "columns": Split((12,), (1,), (1,)),
    "hybrid": Split((3, 4), (4, 1), (None, 0)),
    "replicas on a host": Split((3, 4), (4, 1), (0, None)),
    "tensor by rows": Split((3, 4), (4, 1), (0, 0)),
    "tensor by columns": Split((3, 4), (4, 1), (0, 1)),
    "everything": Split((2, 3, 2), (6, 2, 1), (None, 0, 1)),
    "one axis of two": Split((3,), (4,), (0,)),
}
SHAPES = [(24, 4), (7, 5), (1, 3), (13,), (2, 3, 5), (0, 4), ()]


def build_tensors() -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    """Return complete tensors and their descriptions for all compatible splits and shapes."""
    generator = torch.Generator().manual_seed(0)
    values, stored = {}, {}
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool))
    for (split_name, split), shape in itertools.product(SPLITS.items(), SHAPES):
        if any(dim is not None and dim >= len(shape) for dim in split.dims):
            continue
        name = f"{split_name} {shape}"
        values[name] = (torch.randn(shape, generator=generator) * 100).to(next(dtypes))
        stored[name] = StoredTensor(values[name].dtype, shape, split)
    return values, stored


def write_all(folder: Path, index: StemIndex, values: dict[str, Tensor], num_ranks: int) -> dict[str, tuple[int, int]]:
    """Write the files of `num_ranks` ranks, one rank after the other, and return name -> (size, checksum)."""
    folder.mkdir()
    (folder / INDEX).write_text(index.to_text())
    files: dict[str, tuple[int, int]] = {}
    for rank in reversed(range(num_ranks)):
        for share in plan_file_shares(index, rank):
            parts = {}
            for _, name in share.parts:
                tensor = index.tensors[name]
                box = tensor.split.box_at(tensor.split.coordinate(rank), tensor.shape)
                parts[name] = values[name][tuple(slice(*interval) for interval in box)].contiguous()
            checksum = write_ranges(folder / share.name, _list_ranges(share, parts), share.size)
            files = _join_contributions(files, {share.name: (share.size, checksum)})
    return files


@pytest.mark.parametrize("ranks_per_file", [1, 2, 4, 12])
def test_torch_reads_the_same_parts_from_the_files(tmp_path: Path, ranks_per_file: int) -> None:
    values, stored = build_tensors()
    folder = tmp_path / "stem"
    files = write_all(folder, StemIndex(stored, ranks_per_file), values, 12)
    for name, (size, checksum) in files.items():
        content = (folder / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (size, checksum)
    # Every element is stored once.
    counts = dict.fromkeys(values, 0)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as content:
            for name in content.keys():  # noqa: SIM118
                counts[name] += content.get_tensor(name).numel()
    assert counts == {name: value.numel() for name, value in values.items()}
    # Torch reads all parts from the headers of files; the index computes them.
    index = read_index(folder)
    assert index == StemIndex(stored, ranks_per_file)
    scanned = HuggingFaceStorageReader(str(folder)).read_metadata()
    computed = index.metadata_for(folder, values)
    for name in values:
        expected, entry = (metadata.state_dict_metadata[name] for metadata in (scanned, computed))
        assert (entry.size, entry.properties.dtype) == (expected.size, expected.properties.dtype)
        assert sorted(map(str, entry.chunks)) == sorted(map(str, expected.chunks)), name
    for key, chunk in computed.storage_data.items():
        assert scanned.storage_data[key].relative_path == chunk.relative_path
    complete_tensors = read_complete_tensors(folder)
    assert complete_tensors.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(complete_tensors[name], value) and complete_tensors[name].dtype == value.dtype, name


def test_parts_that_overlap_with_a_box_are_found() -> None:
    """The expected parts are found by a search over all ranks."""
    for split, shape in itertools.product(SPLITS.values(), SHAPES):
        if 0 in shape or any(dim is not None and dim >= len(shape) for dim in split.dims):
            continue
        parts = {}
        for rank in range(12):
            coordinate = split.coordinate(rank)
            if coordinate is not None:
                parts[split.find_first_replica(coordinate)] = split.box_at(coordinate, shape)
        for interval in ((0, 1), (1, 2), (3, 9), (0, 24)):
            box = tuple((min(interval[0], length - 1), min(interval[1], length)) for length in shape)
            expected = set()
            for rank, part in parts.items():
                if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(part, box, strict=True)):
                    expected.add((rank, part))
            overlapping = set()
            for rank, part in split.find_parts(shape, box):
                if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(part, box, strict=True)):
                    overlapping.add((rank, part))
            assert overlapping == expected
            assert len(list(split.find_parts(shape, whole_box(shape)))) == sum(
                all(start < stop for start, stop in part) for part in parts.values()
            )


def build_dtensor(mesh_shape: tuple[int, ...], placements: tuple[object, ...], shape: tuple[int, ...]) -> DTensor:
    """Return a DTensor of zeros, with placements as FSDP2 and tensor parallelism use."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("abc"[: len(mesh_shape)]))
    return torch.distributed.tensor.zeros(shape, device_mesh=mesh, placements=placements)


@pytest.mark.parametrize("rank", [0, 5, 6, 11])
def test_boxes_are_those_of_torch(rank: int) -> None:
    with fake_process_group(12, rank):
        tensors = {
            "rows": build_dtensor((12,), (Shard(0),), (30, 4)),
            "hybrid": build_dtensor((3, 4), (Replicate(), Shard(1)), (3, 10)),
            "columns": build_dtensor((3, 4), (Shard(0), Shard(1)), (7, 10)),
            "strided": build_dtensor((3, 4), (_StridedShard(0, split_factor=4), Shard(0)), (24, 2)),
            "whole": torch.zeros(3),
        }
        index = StemIndex.of_tensors(tensors, 12, 4)
        for name, tensor in tensors.items():
            stored = index.tensors[name]
            box = stored.split.box_at(stored.split.coordinate(rank), stored.shape)
            assert [slice(*interval) for interval in box] == local_slices(tensor), name
            if isinstance(tensor, DTensor):
                chunk = tensor.__create_chunk_list__()[0]
                sizes = [stop - start for start, stop in box]
                assert list(chunk.sizes) == sizes
                assert 0 in sizes or list(chunk.offsets) == [start for start, _ in box]


def test_a_submesh_is_described_and_unevenly_spaced_ranks_are_refused() -> None:
    with fake_process_group(12, 5):
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("dp", "tp"))
        tensor = torch.distributed.tensor.zeros((8, 2), device_mesh=mesh["dp"], placements=(Shard(0),))
        split = StemIndex.of_tensors({"x": tensor}, 12, 1).tensors["x"].split
        # Each column of the mesh has the whole tensor; that of rank 0 represents the others.
        assert split == Split((3,), (4,), (0,))
        assert [split.coordinate(rank) for rank in (0, 1, 4, 5, 8)] == [(0,), None, (1,), None, (2,)]
        shuffled_mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 3, 5, 4, 1, 2, 6, 7, 8, 9, 10, 11])
        tensor = torch.distributed.tensor.zeros((24,), device_mesh=shuffled_mesh, placements=(Shard(0),))
        with pytest.raises(CheckpointError, match="not evenly spaced"):
            StemIndex.of_tensors({"x": tensor}, 12, 1)
    with pytest.raises(CheckpointError, match="x: safetensors files have no torch.complex128"):
        StemIndex.of_tensors({"x": torch.zeros(2, dtype=torch.complex128)}, 12, 1)


def test_a_rank_reads_only_what_it_needs(tmp_path: Path) -> None:
    values, stored = build_tensors()
    folder = tmp_path / "stem"
    write_all(folder, StemIndex(stored, 1), values, 12)
    name = "fsdp (24, 4)"
    with fake_process_group(4, 2):
        target = build_dtensor((4,), (Shard(0),), (24, 4))
        metadata = read_index(folder).metadata_for(folder, {name: target})
        # A quarter of the rows lies in three of twelve files.
        files = {Path(chunk.relative_path).name for chunk in metadata.storage_data.values()}
        assert files == {f"rank_{rank:05d}.safetensors" for rank in (6, 7, 8)}
        read_into(folder, read_index(folder), {name: target})
        assert torch.equal(target.to_local(), values[name][12:18])
