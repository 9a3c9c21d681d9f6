"""Manifest of a checkpoint, with size and checksum of every other file, and comparison of the files with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from credit.parallel.object_collectives import current_rank, reduce_over_ranks, run_on_rank0
from credit.train.checkpoint.sharded.files import compute_checksum, shift_checksum

MANIFEST = "manifest.json"
# Bytes of a file whose checksum one rank computes; the ranks share a larger file.
_BLOCK_BYTES = 2**28


@dataclass(frozen=True)
class _Inspection:
    """Result of rank 0's look at a checkpoint: its manifest, and a problem if there is one already."""

    manifest: dict[str, tuple[int, int]]
    problem: str | None


def read_manifest(path: Path) -> dict[str, tuple[int, int]] | None:
    """Return the manifest: path of a file in the checkpoint -> (bytes, CRC-32); None if it is missing or damaged."""
    try:
        entries = json.loads((path / MANIFEST).read_text())
        manifest = {name: (entry["size"], entry["crc32"]) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if not all(isinstance(number, int) for numbers in manifest.values() for number in numbers):
        return None
    return manifest


def verify_checkpoint(path: Path) -> str | None:
    """Collective: return a description of the damage to a checkpoint's files, None if they are as they were saved.

    Rank 0 alone reads the manifest and lists the files, because a file system answers a thousand ranks slowly. Each
    rank computes checksums of its share of the bytes.

    Args:
        path: folder of the checkpoint.
    """
    inspection = run_on_rank0(lambda: _inspect(path))
    if inspection.problem is not None:
        return inspection.problem
    manifest = inspection.manifest
    blocks = []
    for name, (size, _) in sorted(manifest.items()):
        for start in range(0, max(size, 1), _BLOCK_BYTES):
            blocks.append((name, start, min(start + _BLOCK_BYTES, size)))
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1

    def verify_share() -> tuple[str | None, dict[str, int]]:
        # Name of a file of several blocks -> contribution of this rank's blocks to its checksum.
        contributions: dict[str, int] = {}
        for name, start, stop in blocks[current_rank() :: num_ranks]:
            size, crc32 = manifest[name]
            checksum = compute_checksum(path / name, start, stop)
            if stop - start < size:
                contributions[name] = contributions.get(name, 0) ^ shift_checksum(checksum, size - stop)
            elif checksum != crc32:
                return _describe_damage(name), {}
        return None, contributions

    problem, contributions = reduce_over_ranks(verify_share, _join_shares)
    for name, checksum in contributions.items():
        if problem is None and checksum != manifest[name][1]:
            problem = _describe_damage(name)
    return problem


def _inspect(path: Path) -> _Inspection:
    """Return the manifest of a checkpoint, and what its names and sizes of files tell about damage."""
    manifest = read_manifest(path)
    if manifest is None:
        return _Inspection({}, f"{MANIFEST} is missing or unreadable, so it was not finished")
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    return _Inspection(manifest, _compare_sizes(manifest, sizes))


def _compare_sizes(manifest: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> str | None:
    """Return a description of a file that is missing, left over or of another size than in the manifest."""
    extra_names = sorted(sizes.keys() - manifest.keys() - {MANIFEST})
    if extra_names:
        return f"{extra_names[0]} is not in {MANIFEST}"
    for name, (size, _) in sorted(manifest.items()):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} bytes instead of {size}"
    return None


def _describe_damage(name: str) -> str:
    """Return the description of a file with other contents than were saved."""
    return f"{name} does not match its checksum"


def _join_shares(
    low: tuple[str | None, dict[str, int]], high: tuple[str | None, dict[str, int]]
) -> tuple[str | None, dict[str, int]]:
    """Return the problem of the lowest rank with one, and the joint contributions to checksums."""
    contributions = dict(low[1])
    for name, checksum in high[1].items():
        contributions[name] = contributions.get(name, 0) ^ checksum
    return low[0] or high[0], contributions
