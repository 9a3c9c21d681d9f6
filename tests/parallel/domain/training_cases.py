"""Cases of training on divided fields: meshes, and variants of the network and its training."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import torch

from credit.config.sections.execution import ParallelismConfig
from credit.parallel.mesh import DeviceGrid, build_mesh, plan_degrees
from tests.parallel.training.cases import Case, train

# Meshes of four ranks.
MESHES: dict[str, dict[str, Any]] = {
    "domain 2 x 2": {"domain": {"lat": 2, "lon": 2}},
    "domain 4 x 1": {"domain": {"lat": 4, "lon": 1}},
    "fsdp2 2 x domain 2": {"domain": {"lat": 2, "lon": 1}},
    "replicate 2 x domain 2": {"replicate": 2, "domain": {"lat": 1, "lon": 2}},
    "domain 2 x tensor 2": {"domain": {"lat": 2, "lon": 1}, "tensor": 2},
    "ens 2 x domain 2": {"domain": {"lat": 1, "lon": 2}, "ensemble": 2},
    "fsdp2 2 x sequence 2": {"tensor": 2, "sequence_parallel": True},
    "sequence 4": {"tensor": 4, "sequence_parallel": True},
    "domain 2 x sequence 2": {"domain": 2, "tensor": 2, "sequence_parallel": True},
    "replicate 2 x sequence 2": {"replicate": 2, "tensor": 2, "sequence_parallel": True},
    "ens 2 x sequence 2": {"ensemble": 2, "tensor": 2, "sequence_parallel": True},
}
CASES = {
    "long rollout": Case(True, "selective", 2, 3, "pixel_shuffle", rows=15, samples=4, steps=2),
    # A global mean couples all cells, so the ranks gather the outputs for the loss.
    "global mean": Case(True, True, 1, 2, "transposed", recompute=True, global_mean=1.0, samples=4, optimizer="muon"),
    "ensemble": Case(True, False, 1, 2, "pixel_shuffle", members=2, rows=15, samples=2, steps=3),
    "ensemble with a global mean": Case(False, True, 1, 1, "transposed", members=2, global_mean=1.0, samples=2),
    "bfloat16": Case(True, True, 1, 2, "pixel_shuffle", amp=True, rows=15, samples=4, steps=3),
    "float64": Case(False, False, 2, 1, "transposed", rows=15, samples=4, steps=20, double=True),
    "float64, muon": Case(False, False, 1, 1, "transposed", rows=15, samples=2, steps=4, double=True, optimizer="muon"),
}
# Every mesh trains an ensemble or a rollout of several steps. Every combination of the domain with another axis, except
# the ensemble axis, also trains in float64.
CASES_OF_MESH = {
    "domain 2 x 2": ("long rollout", "ensemble with a global mean", "float64"),
    "domain 4 x 1": ("ensemble", "global mean"),
    "fsdp2 2 x domain 2": ("long rollout", "float64", "float64, muon"),
    "replicate 2 x domain 2": ("global mean", "float64"),
    "domain 2 x tensor 2": ("ensemble", "bfloat16", "float64"),
    "ens 2 x domain 2": ("ensemble", "ensemble with a global mean"),
    "fsdp2 2 x sequence 2": ("long rollout",),
    "sequence 4": ("ensemble",),
    "domain 2 x sequence 2": ("long rollout", "float64", "float64, muon"),
    "replicate 2 x sequence 2": ("global mean",),
    "ens 2 x sequence 2": ("ensemble",),
}
NUM_RANKS = 4
# With EQUALITY=product in the environment, every mesh trains all combinations of these options. It takes about an hour.
if os.environ.get("EQUALITY") == "product":
    for options in product((False, True), (False, True, "selective"), (1, 2), ("transposed", "pixel_shuffle"), (1, 2)):
        spectral_norm, checkpoint, accumulation, decoder, members = options
        CASES[f"product {options}"] = Case(
            spectral_norm, checkpoint, accumulation, 2, decoder, members=members, rows=15, samples=4, steps=2
        )
    CASES_OF_MESH = dict.fromkeys(MESHES, tuple(CASES))


def train_on_mesh(case_name: str, mesh_name: str, rank: int) -> dict[str, torch.Tensor]:
    """Collective: train a case on a mesh and return the full tensors of `tests.parallel.training.cases.train`."""
    settings = ParallelismConfig(**MESHES[mesh_name])
    mesh = build_mesh(plan_degrees(settings, NUM_RANKS), rank, "cpu")
    return train(CASES[case_name], mesh, domain_parts=settings.domain_parts)


def train_alone(case_name: str) -> dict[str, torch.Tensor]:
    """Train a case on one process and return the same tensors as `train_on_mesh`."""
    return train(CASES[case_name], DeviceGrid())
