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

# Latencies of NCCL's own cost model (src/graph/tuning.cc, protocol LL128): of a collective, and of a hop in a ring and
# in a tree, each within a node and between nodes.
_BASE_SECONDS = 14e-6
_RING_HOP_SECONDS = (1.9e-6, 4.0e-6)
_TREE_HOP_SECONDS = (1.25e-6, 8.5e-6)


def count_sharding_collectives(
    units: Sequence[ShardUnit], degrees: ParallelDims, precision: Precision, schedule: Schedule
) -> Counter[Collective]:
    """Return the number of each collective of FSDP2 in an optimizer step.

    In each pass forward and back, a unit that frees its weights after the forward is gathered twice, and a unit that
    keeps them once. A forward without gradients gathers each unit once. Weights that are gathered to recompute a
    rollout step are kept for its backward pass. Gradients are reduced once per optimizer step: over the shards, then
    over the replicas.

    Args:
        units: sharding units of the model.
        degrees: degrees of parallelism.
        precision: bytes of an element in the collectives.
        schedule: passes of an optimizer step.
    """
    collectives: Counter[Collective] = Counter()
    for unit in units:
        ranks = unit.num_ranks(degrees)
        stride = degrees.tensor if unit.split else 1
        gradient_bytes = unit.elements_per_rank(degrees, training=True) * precision.reduced
        if ranks > 1:
            gathered_bytes = unit.gathered_elements(degrees) * precision.gathered
            gather = Collective("all-gather", ranks, gathered_bytes, stride, blocks=False)
            gathers_per_pass = 1 if unit.stays_gathered else 2
            collectives[gather] += schedule.passes * gathers_per_pass + schedule.forwards_without_gradient
            if gradient_bytes:
                reduce = Collective("reduce-scatter", ranks, gradient_bytes, stride, blocks=False)
                collectives[reduce] += 1
        if degrees.replicate > 1 and gradient_bytes:
            replica_stride = degrees.shard * degrees.tensor
            reduce = Collective("all-reduce", degrees.replicate, gradient_bytes, replica_stride, blocks=False)
            collectives[reduce] += 1
    return collectives


def count_member_collectives(
    output_bytes: int, whole_fields: bool, num_exchanges: int, degrees: ParallelDims
) -> Counter[Collective]:
    """Return the number of each collective of an optimizer step by which ranks exchange the members of samples.

    Args:
        output_bytes: bytes of the output of the members that a rank computes, at one step of the rollout.
        whole_fields: True if every rank gathers the whole fields of all members.
        num_exchanges: number of rollout steps whose loss counts, times the micro-steps.
        degrees: degrees of parallelism.
    """
    collectives: Counter[Collective] = Counter()
    if degrees.ensemble == 1:
        return collectives
    if whole_fields:
        gathered_bytes = output_bytes * degrees.ensemble
        collectives[Collective("all-gather", degrees.ensemble, gathered_bytes, degrees.tensor)] += num_exchanges
    else:
        # Outputs change hands before the loss, and their gradients after it.
        exchange = Collective("all-to-all", degrees.ensemble, output_bytes, degrees.tensor)
        collectives[exchange] += 2 * num_exchanges
    return collectives


def read_iterated_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the bytes that the power iterations of a model that is split and sharded sum over ranks.

    Returns:
        For each innermost mesh axis on which weights are cut, the bytes of the first sum (products that become the
        right singular vectors v, and adapters) and of the second (those that become the left ones, u).
    """
    iterated: dict[str, tuple[int, int]] = {}
    for norm, chain in normalized_weights(model).items():
        if is_trainable(chain) and isinstance(chain.original, DTensor):
            axis = chain.original.device_mesh.mesh_dim_names[-1]
            # All links of the chain but the last, the spectral norm itself, are adapters.
            num_adapters = 0
            for link in list(chain)[:-1]:
                num_adapters += sum(parameter.numel() for parameter in link.parameters())
            v_bytes, u_bytes = iterated.get(axis, (0, 0))
            v_bytes += norm.v.element_size() * (norm.v.numel() + num_adapters)
            u_bytes += norm.u.element_size() * norm.u.numel()
            iterated[axis] = (v_bytes, u_bytes)
    return iterated


def count_iteration_collectives(iterated: Mapping[str, tuple[int, int]], degrees: ParallelDims) -> Counter[Collective]:
    """Return the number of each collective of an optimizer step's power iterations, which are two sums.

    Args:
        iterated: mesh axis -> bytes of both sums, from `read_iterated_bytes`.
        degrees: degrees of parallelism.
    """
    # What is cut by `dp` alone is whole on the tensor-parallel peers.
    num_shards = {"tp": degrees.shard * degrees.tensor, "shard": degrees.shard * degrees.tensor, "dp": degrees.shard}
    cut_bytes = [sums for axis, sums in iterated.items() if num_shards[axis] > 1]
    collectives: Counter[Collective] = Counter()
    # Weights of all axes are summed together, first for v and then for u.
    for bytes_by_axis in zip(*cut_bytes, strict=True):
        collectives[Collective("all-reduce", degrees.world, sum(bytes_by_axis))] += 1
    return collectives


def count_calls_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind -> number of calls, from the number of each collective."""
    return _sum_by_kind(collectives, lambda collective: 1)


def sum_bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind -> bytes of the results on a rank, from the number of each collective."""
    return _sum_by_kind(collectives, lambda collective: collective.bytes)


def sum_ring_bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, float]:
    """Return kind -> bytes that each rank sends in rings, from the number of each collective."""
    return _sum_by_kind(collectives, ring_bytes)


def _sum_by_kind(collectives: Mapping[Collective, int], value: Callable[[Collective], Any]) -> dict[str, Any]:
    """Return kind -> sum of `value` over all calls."""
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
        # Each rank keeps its own part.
        "all-to-all": result_bytes * (ranks - 1) / ranks,
    }[collective.kind]


def estimate_seconds(collective: Collective, gpu: Gpu) -> float:
    """Estimate the seconds of a collective: bytes over the slowest link of its ring, and the latency of its hops."""
    ranks = collective.ranks
    if ranks == 1:
        return 0.0
    ranks_per_node = min(ranks, max(1, gpu.per_node // collective.stride))
    nodes = math.ceil(ranks / ranks_per_node)
    link_gbs = gpu.node_gbs
    if nodes > 1:
        # The ranks of a node share the ports of all its GPUs that take part.
        link_gbs = min(gpu.node_gbs, ranks_per_node * gpu.network_gbs)
    transfer_seconds = ring_bytes(collective) / (link_gbs * 1e9 * LINK_SHARE)
    return transfer_seconds + _estimate_latency(collective.kind, ranks, nodes)


def _estimate_latency(kind: str, ranks: int, nodes: int) -> float:
    """Return the seconds of the hops of a collective; an all-reduce takes a ring or a tree, whichever is faster."""
    hop_in_node, hop_between_nodes = _RING_HOP_SECONDS
    ring_seconds = (ranks - nodes) * hop_in_node + (nodes - 1) * hop_between_nodes
    if kind != "all-reduce":
        return _BASE_SECONDS + ring_seconds
    hop_in_node, hop_between_nodes = _TREE_HOP_SECONDS
    tree_seconds = 2 * ((ranks / nodes - 1) * hop_in_node + math.log2(nodes) * hop_between_nodes)
    return _BASE_SECONDS + min(2 * ring_seconds, tree_seconds)
