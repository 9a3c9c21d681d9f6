"""Manifest of a checkpoint (size and checksum of every other file), and comparison of the files with the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from credit.parallel.object_collectives import current_rank, reduce_over_ranks, run_on_rank0
from credit.train.checkpoint.sharded.files import compute_checksum, shift_checksum

MANIFEST = "manifest.json"
# Largest number of bytes for which one rank computes a checksum; several ranks share larger files.
_BLOCK_BYTES = 2**28


@dataclass(frozen=True)
class _ManifestCheck:
    """Result of the comparison of a checkpoint's manifest with the names and sizes of its files.

    Attributes:
        manifest: path of a file in the checkpoint -> (bytes, CRC-32); empty if the manifest is missing or damaged.
        problem: description of the first problem; None without a problem.
    """

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
    """Collective: return a description of the damage to a checkpoint's files; None if no file is damaged.

    Only rank 0 reads the manifest and lists the files, because requests from a thousand ranks would slow down the file
    system. Each rank computes checksums of its share of the bytes.

    Args:
        path: folder of the checkpoint.
    """
    inspection = run_on_rank0(lambda: _check_names_and_sizes(path))
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

    problem, contributions = reduce_over_ranks(verify_share, _combine_results)
    for name, checksum in contributions.items():
        if problem is None and checksum != manifest[name][1]:
            problem = _describe_damage(name)
    return problem


def _check_names_and_sizes(path: Path) -> _ManifestCheck:
    """Return the manifest of a checkpoint, and a problem if names or sizes of its files differ from the manifest."""
    manifest = read_manifest(path)
    if manifest is None:
        return _ManifestCheck({}, f"{MANIFEST} is missing or unreadable, so it was not finished")
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    return _ManifestCheck(manifest, _compare_sizes(manifest, sizes))


def _compare_sizes(manifest: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> str | None:
    """Return a description of the first missing file, unexpected file or file with a wrong size; None without one.

    Args:
        manifest: path of a file in the checkpoint -> (bytes, CRC-32).
        sizes: path of a file in the checkpoint -> bytes on the disk.
    """
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
    """Return a message for a file whose contents differ from the saved contents."""
    return f"{name} does not match its checksum"


def _combine_results(
    low: tuple[str | None, dict[str, int]], high: tuple[str | None, dict[str, int]]
) -> tuple[str | None, dict[str, int]]:
    """Combine the results of two sets of ranks, which have compared different bytes with the manifest.

    Args:
        low: (problem or None, file -> contribution) of the lower ranks.
        high: (problem or None, file -> contribution) of the higher ranks.

    Returns:
        (first problem or None, file -> exclusive or of its contributions to the checksum).
    """
    contributions = dict(low[1])
    for name, checksum in high[1].items():
        contributions[name] = contributions.get(name, 0) ^ checksum
    return low[0] or high[0], contributions
