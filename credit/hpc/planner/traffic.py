"""Collectives of an optimizer step: their number, bytes and estimated time.

FSDP2's gathers and reductions follow from the sharding units, the sums of power iterations from the spectrally
normalised weights. The sums of tensor parallelism come from the traced step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from credit.hpc.planner.gpus import LINK_SHARE, Gpu
from credit.hpc.planner.memory import Precision, Schedule, ShardUnit
from credit.hpc.planner.trace import Collective
from credit.models.layers.spectral_norm import is_trainable, normalized_weights
from credit.parallel.mesh import ParallelDims

# Latency of NCCL's own cost model (src/graph/tuning.cc, protocol LL128), seconds: of a collective, and of a hop in a
# ring and in a tree, within a node and between nodes.
_BASE, _RING, _TREE = 14e-6, (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)


def sharding_collectives(
    units: Sequence[ShardUnit], degrees: ParallelDims, precision: Precision, schedule: Schedule
) -> Counter[Collective]:
    """Return the number of each collective of FSDP2 in an optimizer step.

    Each pass through the model and back gathers a unit that frees its weights twice and one that keeps them once;
    weights that a recomputed rollout step gathers stay for its backward pass. Gradients are reduced once: over the
    shards, then over the replicas.
    """
    collectives: Counter[Collective] = Counter()
    for unit in units:
        ranks = unit.ranks(degrees)
        stride = degrees.tensor if unit.split else 1
        gradient_bytes = unit.part(degrees, training=True) * precision.reduced
        if ranks > 1:
            gathered_bytes = unit.gathered(degrees) * precision.gathered
            gather = Collective("all-gather", ranks, gathered_bytes, stride, blocks=False)
            collectives[gather] += schedule.passes * (1 if unit.stays_gathered else 2)
            if gradient_bytes:
                reduce = Collective("reduce-scatter", ranks, gradient_bytes, stride, blocks=False)
                collectives[reduce] += 1
        if degrees.replicate > 1 and gradient_bytes:
            replica_stride = degrees.shard * degrees.tensor
            reduce = Collective("all-reduce", degrees.replicate, gradient_bytes, replica_stride, blocks=False)
            collectives[reduce] += 1
    return collectives


def read_iterated_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return what the power iterations of a model that is split and sharded sum over ranks.

    Returns:
        For each innermost mesh axis on which weights are cut, the bytes of the first sum (products that become v, and
        adapters) and of the second (those that become u).
    """
    iterated: dict[str, tuple[int, int]] = {}
    for norm, chain in normalized_weights(model).items():
        if is_trainable(chain) and isinstance(chain.original, DTensor):
            axis = chain.original.device_mesh.mesh_dim_names[-1]
            adapters = sum(parameter.numel() for link in list(chain)[:-1] for parameter in link.parameters())
            v_bytes, u_bytes = iterated.get(axis, (0, 0))
            v_bytes += norm.v.element_size() * (norm.v.numel() + adapters)
            u_bytes += norm.u.element_size() * norm.u.numel()
            iterated[axis] = (v_bytes, u_bytes)
    return iterated


def iteration_collectives(iterated: Mapping[str, tuple[int, int]], degrees: ParallelDims) -> Counter[Collective]:
    """Return the two sums of an optimizer step's power iterations, see `read_iterated_bytes`."""
    # What is cut by `dp` alone is whole on the tensor-parallel peers.
    shards = {"tp": degrees.shard * degrees.tensor, "shard": degrees.shard * degrees.tensor, "dp": degrees.shard}
    cut = [sums for axis, sums in iterated.items() if shards[axis] > 1]
    return Counter(Collective("all-reduce", degrees.world, sum(step)) for step in zip(*cut, strict=True))


def calls_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind -> number of calls."""
    return _sum_by_kind(collectives, lambda collective: 1)


def bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind -> bytes of the results on a rank."""
    return _sum_by_kind(collectives, lambda collective: collective.bytes)


def ring_bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, float]:
    """Return kind -> bytes that each rank sends."""
    return _sum_by_kind(collectives, ring_bytes)


def _sum_by_kind(collectives: Mapping[Collective, int], value: Callable[[Collective], Any]) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    for collective, count in collectives.items():
        totals[collective.kind] += value(collective) * count
    return dict(totals)


def ring_bytes(collective: Collective) -> float:
    """Return the bytes that each rank sends in a ring (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002)."""
    ranks = collective.ranks
    result_bytes = collective.bytes
    return {
        "all-gather": result_bytes * (ranks - 1) / ranks,
        "reduce-scatter": result_bytes * (ranks - 1),
        "all-reduce": 2 * result_bytes * (ranks - 1) / ranks,
        "broadcast": result_bytes,
    }[collective.kind]


def estimate_seconds(collective: Collective, gpu: Gpu) -> float:
    """Estimate the time of a collective: bytes over the slowest link of its ring, and the latency of its hops."""
    ranks = collective.ranks
    if ranks == 1:
        return 0.0
    ranks_per_node = min(ranks, max(1, gpu.per_node // collective.stride))
    nodes = math.ceil(ranks / ranks_per_node)
    link_gbs = gpu.node_gbs if nodes == 1 else min(gpu.node_gbs, ranks_per_node * gpu.network_gbs)
    transfer_seconds = ring_bytes(collective) / (link_gbs * 1e9 * LINK_SHARE)
    return transfer_seconds + _estimate_latency(collective.kind, ranks, nodes)


def _estimate_latency(kind: str, ranks: int, nodes: int) -> float:
    hop_in_node, hop_between_nodes = _RING
    ring_seconds = (ranks - nodes) * hop_in_node + (nodes - 1) * hop_between_nodes
    if kind != "all-reduce":
        return _BASE + ring_seconds
    hop_in_node, hop_between_nodes = _TREE
    tree_seconds = 2 * ((ranks / nodes - 1) * hop_in_node + math.log2(nodes) * hop_between_nodes)
    return _BASE + min(2 * ring_seconds, tree_seconds)
