"""Cases of power iterations of sharded weights: the vectors are those of one process, and two sums are needed."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.collectives import CollectiveCounter
from credit.models.layers.spectral_norm import advance_power_iterations, apply_spectral_norm, find_singular_vectors
from credit.models.lora import apply_lora
from credit.parallel import fsdp2
from tests.parallel.fsdp2_api.example_models import build_seeded, require_close
from tests.parallel.fsdp2_api.gradient_cases import register_case


class UnevenWeights(nn.Module):
    """Model with weights of every kind, inside and outside of a unit, whose rows the ranks cannot divide evenly.

    One of the weights is frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 7, 3)
        self.block = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 9))
        self.block._fsdp2_shard = True
        self.frozen = nn.Linear(5, 5)
        self.up = nn.ConvTranspose2d(5, 6, 2)
        self.frozen.requires_grad_(False)


def build_uneven_weights() -> nn.Module:
    return apply_spectral_norm(UnevenWeights())


def build_adapted_weights() -> nn.Module:
    model = apply_lora(build_uneven_weights(), ["block.*", "up"], rank=3, alpha=6.0)
    for name, parameter in model.named_parameters():
        if name.endswith((".a", ".b")):
            nn.init.normal_(parameter)
    return model


def require_same_vectors(model: nn.Module, dp_mesh: DeviceMesh) -> None:
    """Advance the power iterations of a sharded model and of its copy on one process, and compare the vectors."""
    reference_model = copy.deepcopy(model)
    fsdp2.apply_fsdp2(model, dp_mesh, {})
    vectors_before = {name: vector.clone() for name, vector in find_singular_vectors(model).items()}
    for iterations in (1, 3):
        with CollectiveCounter() as counter:
            advance_power_iterations(model, iterations)
        assert dict(counter.calls) == {"all-reduce": 2 * iterations}
        advance_power_iterations(reference_model, iterations)
    vectors = find_singular_vectors(model)
    require_close(vectors, find_singular_vectors(reference_model))
    moved_names = {name for name, vector in vectors.items() if not torch.equal(vector, vectors_before[name])}
    assert moved_names
    assert all(model.get_submodule(name.partition(".")[0]) is not model.frozen for name in moved_names)


@register_case
def power_iterations_of_sharded_weights() -> None:
    hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    for mesh in (init_device_mesh("cpu", (4,)), hybrid_mesh):
        for build in (build_uneven_weights, build_adapted_weights):
            require_same_vectors(build_seeded(build), mesh)


@register_case
def power_iterations_of_a_model_on_some_of_the_ranks() -> None:
    """Each half of the ranks has its own model, so a sum over all ranks would mix both models."""
    mesh_of_halves = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("model", "replicate", "dp"))
    seed = mesh_of_halves.get_local_rank("model")
    require_same_vectors(build_seeded(build_uneven_weights, seed=seed), mesh_of_halves["dp"])
    require_same_vectors(build_seeded(build_uneven_weights, seed=seed), mesh_of_halves["replicate", "dp"])


@register_case
def power_iterations_of_whole_replicas_need_no_sum() -> None:
    model = build_seeded(build_uneven_weights)
    reference_model = copy.deepcopy(model)
    fsdp2.apply_fsdp2(model, init_device_mesh("cpu", (4, 1), mesh_dim_names=("replicate", "dp")), {})
    with CollectiveCounter() as counter:
        advance_power_iterations(model)
    assert not counter.calls
    advance_power_iterations(reference_model)
    require_close(find_singular_vectors(model), find_singular_vectors(reference_model), tolerance=1e-6)
