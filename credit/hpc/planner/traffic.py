"""What the ranks send each other in an optimizer step, and how long that takes.

FSDP2's gathers and reductions follow from the sharding units, the sums of power iterations from the spectrally
normalised weights. The sums of tensor parallelism come from the traced step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from credit.hpc.planner.gpus import LINK_SHARE, Gpu
from credit.hpc.planner.memory import Precision, Schedule, Unit
from credit.hpc.planner.trace import Trace
from credit.models.layers.spectral_norm import is_trainable, normalized_weights
from credit.parallel.mesh import ParallelDims

# Latency of NCCL's own cost model (src/graph/tuning.cc, protocol LL128), seconds: of a collective, and of a hop in a
# ring and in a tree, within a node and between nodes.
_BASE, _RING, _TREE = 14e-6, (1.9e-6, 4.0e-6), (1.25e-6, 8.5e-6)


class Message(NamedTuple):
    """A collective among every `stride`-th rank.

    Attributes:
        kind: all-gather, reduce-scatter or all-reduce.
        ranks: how many take part.
        stride: distance of their numbers; neighbouring ranks share a node.
        bytes: of the result on each rank.
        waits: whether the arithmetic waits for it.
    """

    kind: str
    ranks: int
    stride: int
    bytes: int
    waits: bool


def sharding_messages(
    units: Sequence[Unit], degrees: ParallelDims, precision: Precision, schedule: Schedule
) -> Counter[Message]:
    """Return FSDP2's collectives of an optimizer step.

    Each pass through the model and back gathers a unit that frees its weights twice and one that keeps them once;
    weights that a recomputed rollout step gathers stay for its backward pass. Gradients are reduced once: over the
    shards, then over the replicas.
    """
    messages: Counter[Message] = Counter()
    for unit in units:
        ranks = unit.ranks(degrees)
        stride = degrees.tensor if unit.split else 1
        trained = unit.part(degrees, training=True) * precision.reduced
        if ranks > 1:
            gather = Message("all-gather", ranks, stride, unit.gathered(degrees) * precision.whole, False)
            messages[gather] += schedule.passes * (1 if unit.kept else 2)
            if trained:
                messages[Message("reduce-scatter", ranks, stride, trained, False)] += 1
        if degrees.replicate > 1 and trained:
            across = degrees.shard * degrees.tensor
            messages[Message("all-reduce", degrees.replicate, across, trained, False)] += 1
    return messages


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


def iteration_messages(iterated: Mapping[str, tuple[int, int]], degrees: ParallelDims) -> Counter[Message]:
    """Return the two sums of an optimizer step's power iterations, see `read_iterated_bytes`."""
    # What is cut by `dp` alone is whole on the tensor-parallel peers.
    shards = {"tp": degrees.shard * degrees.tensor, "shard": degrees.shard * degrees.tensor, "dp": degrees.shard}
    cut = [sums for axis, sums in iterated.items() if shards[axis] > 1]
    return Counter(Message("all-reduce", degrees.world, 1, sum(step), True) for step in zip(*cut, strict=True))


def traced_messages(trace: Trace) -> Counter[Message]:
    """Return the collectives of a traced optimizer step: sums of tensor parallelism, and the norm of the gradients.

    Tensor-parallel peers are neighbours, and the norm is that of all ranks, so either group is a run of ranks.
    """
    calls = Counter(trace.calls)
    if trace.closing is not None:
        calls[trace.closing] += 1
    return Counter({Message(call.kind, call.ranks, 1, call.bytes, True): count for call, count in calls.items()})


def calls_by_kind(messages: Mapping[Message, int]) -> dict[str, int]:
    """Return kind -> calls."""
    total: Counter[str] = Counter()
    for message, count in messages.items():
        total[message.kind] += count
    return dict(total)


def bytes_by_kind(messages: Mapping[Message, int]) -> dict[str, int]:
    """Return kind -> bytes of the results on a rank."""
    total: Counter[str] = Counter()
    for message, count in messages.items():
        total[message.kind] += message.bytes * count
    return dict(total)


def sent(message: Message) -> float:
    """Return the bytes that each rank sends in a ring (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002)."""
    n = message.ranks
    return {
        "all-gather": message.bytes * (n - 1) / n,
        "reduce-scatter": message.bytes * (n - 1),
        "all-reduce": 2 * message.bytes * (n - 1) / n,
        "broadcast": message.bytes,
    }[message.kind]


def sent_by_kind(messages: Mapping[Message, int]) -> dict[str, float]:
    """Return kind -> bytes that each rank sends."""
    total: Counter[str] = Counter()
    for message, count in messages.items():
        total[message.kind] += sent(message) * count
    return dict(total)


def seconds(message: Message, gpu: Gpu) -> float:
    """Return the time of a collective: bytes over the slowest link of its ring, and the latency of its hops."""
    n = message.ranks
    if n == 1:
        return 0.0
    together = min(n, max(1, gpu.per_node // message.stride))  # ranks that share a node
    nodes = math.ceil(n / together)
    link = gpu.node_gbs if nodes == 1 else min(gpu.node_gbs, together * gpu.network_gbs)
    return sent(message) / (link * 1e9 * LINK_SHARE) + _latency(message.kind, n, nodes)


def _latency(kind: str, n: int, nodes: int) -> float:
    ring = (n - nodes) * _RING[0] + (nodes - 1) * _RING[1]
    if kind != "all-reduce":
        return _BASE + ring
    tree = 2 * ((n / nodes - 1) * _TREE[0] + math.log2(nodes) * _TREE[1])
    return _BASE + min(2 * ring, tree)
