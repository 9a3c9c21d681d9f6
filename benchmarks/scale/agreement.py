"""Part of the scale model: object collectives during training, such as the agreement on a reason to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from benchmarks.scale.simulation import SimulatedRank
from credit.parallel.object_collectives import reduce_over_ranks, run_on_all_ranks, run_on_rank0

_PAYLOAD = bytes(2**20)
# Name of a collective -> function that makes it once.
COLLECTIVES: dict[str, Callable[[], object]] = {
    "nothing fails": lambda: run_on_all_ranks(lambda: None),
    "a reason to stop": lambda: reduce_over_ranks(lambda: "the walltime is over", lambda low, high: low or high),
    "energy and memory": lambda: reduce_over_ranks(lambda: 1.0, lambda low, high: low + high),
    "1 MB of rank 0": lambda: run_on_rank0(lambda: _PAYLOAD),
}


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return connections, bytes and time of each collective on rank 0, which has the most work."""
    rows = []
    for world in ranks:
        for name, collective in COLLECTIVES.items():
            simulation = SimulatedRank(world, rank=0)
            with simulation.run(), measure_usage() as usage:
                collective()
            seconds = usage.seconds - simulation.seconds
            rows.append(Row(f"{name}: messages of rank 0", "", world, simulation.messages))
            rows.append(Row(f"{name}: received by rank 0", "bytes", world, simulation.received_bytes))
            rows.append(Row(f"{name}: connections of rank 0", "", world, len(simulation.peers)))
            rows.append(Row(f"{name}: time of rank 0", "s", world, seconds))
    return rows
