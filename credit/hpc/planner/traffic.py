"""Collectives of an optimizer step: their number, bytes and estimated time.

FSDP2's gathers and reductions are computed from the sharding units. The sums of power iterations are computed from the
spectrally normalised weights. `credit.hpc.planner.trace` counts the sums of tensor parallelism.

An argument `collectives` maps each `Collective` to the number of its calls in an optimizer step, on one rank. An
argument `degrees` is the number of ranks along each axis of the mesh.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from credit.hpc.planner.collectives import Collective
from credit.hpc.planner.gpus import LINK_SHARE, Gpu
from credit.hpc.planner.memory import ElementBytes, PassSchedule, ShardUnit
from credit.models.layers.spectral_norm import find_spectral_norms, is_trainable
from credit.parallel.mesh import ParallelDims

# Latencies in NCCL's cost model (src/graph/tuning.cc, protocol LL128). The first number is the base latency of any
# collective. The pairs are the latencies of a hop (within a node, between nodes) in a ring and in a tree.
_BASE_SECONDS = 14e-6
_RING_HOP_SECONDS = (1.9e-6, 4.0e-6)
_TREE_HOP_SECONDS = (1.25e-6, 8.5e-6)


def count_sharding_collectives(
    units: Sequence[ShardUnit], degrees: ParallelDims, precision: ElementBytes, schedule: PassSchedule
) -> Counter[Collective]:
    """Return FSDP2 collective -> number of its calls in an optimizer step.

    A forward and backward pass gathers a unit once, or twice if its weights are freed after the forward pass. A forward
    pass without a gradient gathers each unit once. Recomputing a rollout step in the backward pass adds no gather,
    because the gathered weights are then kept for the backward pass of this rollout step. Gradients are reduced once
    per optimizer step: by a reduce-scatter over the shards, then by an all-reduce over the replicas.

    Args:
        units: sharding units of the model.
        degrees: number of ranks along each axis of the mesh.
        precision: bytes of an element in the collectives.
        schedule: number of passes through the model.
    """
    collectives: Counter[Collective] = Counter()
    for unit in units:
        ranks = unit.num_ranks(degrees)
        # Tensor-parallel peers have consecutive numbers, so the ranks that share a part of a split unit do not.
        stride = degrees.tensor if unit.has_split_weights else 1
        gradient_bytes = unit.elements_per_rank(degrees, training=True) * precision.reduced
        # FSDP2 runs its collectives at the same time as kernels, so kernels do not wait for them.
        if ranks > 1:
            gathered_bytes = unit.gathered_elements(degrees) * precision.gathered
            all_gather = Collective("all-gather", ranks, gathered_bytes, stride, is_blocking=False)
            gathers_per_pass = 1 if unit.stays_gathered else 2
            collectives[all_gather] += schedule.passes * gathers_per_pass + schedule.forwards_without_gradient
            # A unit of frozen weights has no gradient.
            if gradient_bytes:
                reduce_scatter = Collective("reduce-scatter", ranks, gradient_bytes, stride, is_blocking=False)
                collectives[reduce_scatter] += 1
        if degrees.replicate > 1 and gradient_bytes:
            # Replicas are the outermost axis of the mesh, so the ranks of a replica are consecutive.
            replica_stride = degrees.shard * degrees.domain * degrees.tensor
            all_reduce = Collective("all-reduce", degrees.replicate, gradient_bytes, replica_stride, is_blocking=False)
            collectives[all_reduce] += 1
    return collectives


def count_sequence_collectives(units: Sequence[ShardUnit], degrees: ParallelDims) -> Counter[Collective]:
    """Return the all-reduce with which sequence parallelism averages gradients, and its number of calls in a step.

    The averaged gradients are those of unsplit weights in units with split weights. The result is empty without
    sequence parallelism.

    Args:
        units: sharding units of the model.
        degrees: number of ranks along each axis of the mesh.
    """
    if not degrees.sequence_parallel:
        return Counter()
    num_bytes = 0
    for unit in units:
        for weight in unit.weights:
            if unit.has_split_weights and weight.is_trained and weight.needs_gradient_average:
                num_bytes += weight.elements_per_rank(unit.num_ranks(degrees)) * weight.element_bytes
    if num_bytes == 0:
        return Counter()
    return Counter({Collective("all-reduce", degrees.tensor, num_bytes): 1})


def count_member_collectives(
    output_bytes: int, whole_fields: bool, num_exchanges: int, degrees: ParallelDims
) -> Counter[Collective]:
    """Return the calls of the collective with which the ranks of an ensemble group exchange members.

    Args:
        output_bytes: bytes of the outputs of all members that a rank computes, at one step of the rollout.
        whole_fields: True if every rank gathers the whole fields of all members (all-gather), False if each rank gets a
            part of the fields of all members (all-to-all).
        num_exchanges: number of rollout steps that contribute to the loss, times the number of micro-steps.
        degrees: number of ranks along each axis of the mesh.

    Returns:
        The collective -> its number of calls in an optimizer step; empty without ensemble groups.
    """
    collectives: Counter[Collective] = Counter()
    if degrees.ensemble == 1:
        return collectives
    if whole_fields:
        # No gradient is sent back, because every rank computes the whole loss.
        gathered_bytes = output_bytes * degrees.ensemble
        all_gather = Collective("all-gather", degrees.ensemble, gathered_bytes, degrees.tensor)
        collectives[all_gather] += num_exchanges
    else:
        # Outputs are exchanged before the loss, and their gradients after the loss.
        all_to_all = Collective("all-to-all", degrees.ensemble, output_bytes, degrees.tensor)
        collectives[all_to_all] += 2 * num_exchanges
    return collectives


def count_power_iteration_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the bytes that the power iterations of spectral norm sum over the ranks, for a split or sharded model.

    A power iteration needs two sums over the ranks. The first sum contains the products from which the right singular
    vectors v are computed, and the parameters of adapters. The second sum contains the products from which the left
    singular vectors u are computed.

    Returns:
        mesh axis -> (bytes of the first sum, bytes of the second sum). The weights are grouped by the last axis of
        their mesh: ``dp``, ``tp``, or ``shard`` for both axes together. Empty if no weight is split or sharded.
    """
    power_iteration_bytes: dict[str, tuple[int, int]] = {}
    for norm, chain in find_spectral_norms(model).items():
        if is_trainable(chain) and isinstance(chain.original, DTensor):
            axis = chain.original.device_mesh.mesh_dim_names[-1]
            # All parametrizations in the chain are adapters, except the last, which is the spectral norm itself.
            num_adapters = 0
            for link in list(chain)[:-1]:
                num_adapters += sum(parameter.numel() for parameter in link.parameters())
            v_bytes, u_bytes = power_iteration_bytes.get(axis, (0, 0))
            v_bytes += norm.v.element_size() * (norm.v.numel() + num_adapters)
            u_bytes += norm.u.element_size() * norm.u.numel()
            power_iteration_bytes[axis] = (v_bytes, u_bytes)
    return power_iteration_bytes


def count_power_iteration_collectives(
    power_iteration_bytes: Mapping[str, tuple[int, int]], degrees: ParallelDims
) -> Counter[Collective]:
    """Return the calls of the collectives of the power iteration in an optimizer step: at most two all-reduces.

    Args:
        power_iteration_bytes: mesh axis -> (bytes of the first sum, bytes of the second sum), from
            `count_power_iteration_bytes`.
        degrees: number of ranks along each axis of the mesh.
    """
    # A weight that is sharded only over the axes `dp` and `domain` is whole on tensor-parallel peers.
    num_shards = degrees.shard * degrees.domain
    num_parts = num_shards * degrees.tensor
    num_parts_by_axis = {"tp": num_parts, "shard": num_parts, "dp": num_shards, "dp_domain": num_shards}
    cut_bytes = [sums for axis, sums in power_iteration_bytes.items() if num_parts_by_axis[axis] > 1]
    collectives: Counter[Collective] = Counter()
    # Weights of all axes are summed together, first for v and then for u. `zip` converts the pairs of each axis to the
    # bytes for v on all axes, followed by the bytes for u on all axes.
    for bytes_by_axis in zip(*cut_bytes, strict=True):
        all_reduce = Collective("all-reduce", degrees.world, sum(bytes_by_axis))
        collectives[all_reduce] += 1
    return collectives


def count_calls_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind of collective -> number of calls."""
    return _sum_by_kind(collectives, lambda collective: 1)


def sum_bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, int]:
    """Return kind of collective -> bytes of the results of all calls on a rank."""
    return _sum_by_kind(collectives, lambda collective: collective.bytes)


def sum_ring_bytes_by_kind(collectives: Mapping[Collective, int]) -> dict[str, float]:
    """Return kind of collective -> bytes that a rank sends in all calls with the ring algorithm."""
    return _sum_by_kind(collectives, count_ring_bytes)


def _sum_by_kind(collectives: Mapping[Collective, int], value: Callable[[Collective], Any]) -> dict[str, Any]:
    """Return kind of collective -> sum of ``value(collective)`` over all calls."""
    totals: Counter[str] = Counter()
    for collective, count in collectives.items():
        totals[collective.kind] += value(collective) * count
    return dict(totals)


def count_ring_bytes(collective: Collective) -> float:
    """Return the bytes that each rank sends in one call with the ring algorithm.

    Source: Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002.
    """
    ranks = collective.ranks
    result_bytes = collective.bytes
    # The result of a reduce-scatter is a shard. The results of all other collectives have the size of the whole tensor.
    return {
        "all-gather": result_bytes * (ranks - 1) / ranks,
        "reduce-scatter": result_bytes * (ranks - 1),
        "all-reduce": 2 * result_bytes * (ranks - 1) / ranks,
        "broadcast": result_bytes,
        # Each rank keeps the part for itself.
        "all-to-all": result_bytes * (ranks - 1) / ranks,
    }[collective.kind]


def estimate_call_seconds(collective: Collective, gpu: Gpu) -> float:
    """Estimate the seconds of one call: time to send the bytes over the slowest link, plus the latency of the hops."""
    ranks = collective.ranks
    if ranks == 1:
        return 0.0
    # Every stride-th GPU of a node takes part, or one GPU if the stride exceeds the node.
    ranks_per_node = min(ranks, max(1, gpu.per_node // collective.stride))
    nodes = math.ceil(ranks / ranks_per_node)
    link_gbs = gpu.node_gbs
    if nodes > 1:
        # The participating ranks of a node together use the ports of their GPUs.
        link_gbs = min(gpu.node_gbs, ranks_per_node * gpu.network_gbs)
    transfer_seconds = count_ring_bytes(collective) / (link_gbs * 1e9 * LINK_SHARE)
    return transfer_seconds + _estimate_latency(collective.kind, ranks, nodes)


def _estimate_latency(kind: str, ranks: int, nodes: int) -> float:
    """Estimate the latency of one call of a collective in seconds: a constant plus the time of the hops.

    The data of an all-reduce pass twice through a ring or a tree, whichever is faster. The data of all other kinds pass
    once through a ring.

    Args:
        kind: kind of the collective.
        ranks: number of ranks that take part.
        nodes: number of nodes on which these ranks run.
    """
    hop_in_node, hop_between_nodes = _RING_HOP_SECONDS
    ring_seconds = (ranks - nodes) * hop_in_node + (nodes - 1) * hop_between_nodes
    if kind != "all-reduce":
        return _BASE_SECONDS + ring_seconds
    # A tree is a chain of the ranks in each node, and a binary tree of the nodes. Data pass upwards and downwards.
    hop_in_node, hop_between_nodes = _TREE_HOP_SECONDS
    tree_seconds = 2 * ((ranks / nodes - 1) * hop_in_node + math.log2(nodes) * hop_between_nodes)
    return _BASE_SECONDS + min(2 * ring_seconds, tree_seconds)
