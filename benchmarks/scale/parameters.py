"""Part of the scale model: initialisation of a model with random weights, of which each rank keeps its shards.

Each rank samples every tensor completely, because its random numbers must not depend on the sharding. Only one complete
tensor exists at a time. The time is therefore the time to sample the whole model once, and the memory is the memory of
the shards and the largest tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.networks import PUBLISHED
from benchmarks.scale.meter import measure_usage
from benchmarks.scale.rows import Row
from benchmarks.scale.simulation import SimulatedRank
from credit.models.initialise import initial_values
from credit.models.wxformer import WXFormer
from credit.parallel.mesh import ParallelDims, build_mesh
from credit.parallel.parallelize import parallelize
from credit.parallel.state.materialise import allocate_, fill_, named_tensors, require_filled


def measure(ranks: Sequence[int]) -> list[Row]:
    """Return rows with time and memory of the initialisation, and the number of elements that the last rank keeps."""
    rows = []
    for world in ranks:
        simulation = SimulatedRank(world, world - 1)
        with simulation.run():
            with measure_usage() as sharding:
                with torch.device("meta"):
                    model = WXFormer.from_kwargs(**PUBLISHED)
                mesh = build_mesh(ParallelDims(shard=world), world - 1, "cpu")
                parallelize(model, mesh.device_mesh)
            with measure_usage() as drawing:
                allocate_(model, torch.device("cpu"))
                fill_(model, initial_values(model, seed=0))
                require_filled(model)
            tensors = named_tensors(model).values()
            num_kept = sum(getattr(tensor, "_local_tensor", tensor).numel() for tensor in tensors)
        rows.append(Row("sharding: time", "s", world, sharding.seconds))
        rows.append(Row("drawing: time", "s", world, drawing.seconds))
        rows.append(Row("drawing: memory", "MB", world, drawing.megabytes))
        rows.append(Row("elements that the last rank keeps", "", world, num_kept))
    return rows
