"""Tests that the costs of a checkpoint for one rank do not grow with the number of ranks.

The list of all files, with their sizes and checksums, is an exception, which these counts leave out.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, zeros

from credit.hpc.planner.report import count_checkpoint_files
from credit.parallel.mesh import ParallelDims
from credit.parallel.process_info import fake_process_group
from credit.train.checkpoint import manifest
from credit.train.checkpoint.sharded import writer
from credit.train.checkpoint.sharded.index import StemIndex

# Ranks of a host, and of the smallest and the largest run.
HOST = 8
SMALL = 64
LARGE = 16384


def build_state(num_ranks: int, replicas: int) -> dict[str, dict[str, Tensor]]:
    """Return small tensors on this rank, sharded over all ranks but the replicas."""
    mesh = init_device_mesh("cpu", (replicas, num_ranks // replicas), mesh_dim_names=("replicate", "dp"))
    state: dict[str, Tensor] = {"steps": torch.zeros(())}
    for number in range(20):
        state[f"weight {number}"] = zeros((2 * LARGE, 2), device_mesh=mesh, placements=(Replicate(), Shard(0)))
        state[f"bias {number}"] = zeros((256,), device_mesh=mesh, placements=(Replicate(), Shard(0)))
    return {"model": state, "optimizer": {f"{name}/exp_avg": tensor for name, tensor in state.items()}}


def save_on_one_rank(
    folder: Path, num_ranks: int, rank: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """Save as one of many ranks, and return the costs: bytes, collectives, files and parts."""
    results: list[Any] = []

    def record(function: Callable[[], Any], *_: object) -> Any:
        results.append(function())
        return results[-1]

    monkeypatch.setattr(writer, "reduce_over_ranks", record)
    monkeypatch.setattr(writer, "find_ranks_per_file", lambda _: HOST)
    with fake_process_group(num_ranks, rank):
        state = build_state(num_ranks, replicas)
        shard_writer = writer.ShardWriter(None)
        staged = shard_writer.copy_to_host(state)
        folder.mkdir()
        for stem in () if rank == 0 else state:
            (folder / stem).mkdir()
        shard_writer.write(folder, staged)
        index = StemIndex.from_text(staged.indices["model"])
        metadata = index.metadata_for(folder, state["model"])
    shares = [share for stem_shares in staged.shares.values() for share in stem_shares]
    return {
        "bytes of its answers": sum(len(pickle.dumps(result)) for result in results),
        "collectives": len(results),
        "index bytes": sum(map(len, staged.indices.values())),
        "header bytes": sum(len(share.header or b"") for share in shares),
        "files": len(shares),
        "parts": sum(len(share.parts) for share in shares),
        "staged bytes": sum(part.nbytes for parts in staged.parts.values() for part in parts.values()),
        "files read": len({chunk.relative_path for chunk in metadata.storage_data.values()}),
        "chunks read": sum(len(entry.chunks) for entry in metadata.state_dict_metadata.values()),
    }


@pytest.mark.parametrize(("replicas", "rank"), [(1, 0), (1, SMALL - 1), (8, 3)])
def test_costs_of_a_rank_do_not_grow(replicas: int, rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = save_on_one_rank(tmp_path / "small", SMALL, rank, replicas, monkeypatch)
    large = save_on_one_rank(tmp_path / "large", LARGE, rank, replicas, monkeypatch)
    assert small["parts"] >= 42 and small["chunks read"] == 41
    for kind, count in small.items():
        # With more ranks, numbers have more digits.
        assert large[kind] <= count * 1.1, kind


def test_replicas_on_other_hosts_copy_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = save_on_one_rank(tmp_path / "save", SMALL, SMALL - 1, 8, monkeypatch)
    assert counts["files"] == counts["parts"] == counts["staged bytes"] == 0


@pytest.mark.parametrize("degrees", [(1, 64, 1), (8, 8, 1), (64, 1, 1), (1, 16, 4), (2, 8, 4), (1, 4, 16)])
def test_number_of_files_equals_that_of_the_plan(degrees: tuple[int, int, int]) -> None:
    """Without tensor parallelism, each set of tensors has one file for each host."""
    replicate, shard, tensor = degrees
    with fake_process_group(SMALL):
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("replicate", "dp", "tp"))
        rows = zeros((640, 640), device_mesh=mesh, placements=(Replicate(), Shard(0), Replicate()))
        columns = zeros((640, 640), device_mesh=mesh, placements=(Replicate(), Shard(0), Shard(1)))
        index = StemIndex.of_tensors({"rows": rows, "columns": columns}, SMALL, HOST)
    names = {share.name for rank in range(SMALL) for share in writer.plan_file_shares(index, rank)}
    num_hosts = max(shard * tensor // HOST, 1)
    assert {f"rank_{rank:05d}.safetensors" for rank in range(0, num_hosts * HOST, HOST)} <= names
    # Three sets of tensors, each with an index, and three other files.
    candidate = SimpleNamespace(degrees=ParallelDims(replicate, shard, tensor))
    assert count_checkpoint_files(candidate, HOST) == 3 * (len(names) + 1) + 3
    if tensor == 1:
        assert len(names) == num_hosts


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2),
        ([("a", 0), ("a", 1), ("a", 2), ("a", 3)], 4),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], 1),
        ([("a", 0), ("a", 1), ("a", 2), ("b", 0)], 1),
    ],
)
def test_ranks_of_a_host_share_files(
    hosts: list[tuple[str, int]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts share files only if all have the same number of ranks, which are neighbours."""

    def gather(_: object, combine: Callable[[Any, Any], Any], __: object) -> Any:
        counts: dict[tuple[str, int], int] = {}
        for rank, (host, local_rank) in enumerate(hosts):
            counts = combine(counts, {(host, rank - local_rank): 1})
        return counts

    monkeypatch.setattr(writer, "reduce_over_ranks", gather)
    with fake_process_group(len(hosts)):
        assert writer.find_ranks_per_file(None) == expected


def test_large_files_are_verified_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_BLOCK_BYTES", 1000)
    content = torch.randint(0, 256, (4567,), dtype=torch.uint8).numpy()
    path = tmp_path / "step_00000001"
    path.mkdir()
    checksum = writer.write_ranges(path / "large", [(0, content)], len(content))
    entries = {"large": {"size": len(content), "crc32": checksum}}
    (path / manifest.MANIFEST).write_text(str(entries).replace("'", '"'))
    assert manifest.verify_checkpoint(path) is None
    for position in (0, 999, 1000, 4566):
        damaged = content.copy()
        damaged[position] ^= 1
        (path / "large").write_bytes(damaged.tobytes())
        assert manifest.verify_checkpoint(path) == "large does not match its checksum"
