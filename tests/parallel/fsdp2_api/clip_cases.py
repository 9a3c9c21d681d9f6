"""Cases of clipping on four ranks, compared with `torch.nn.utils.clip_grad_norm_` of the whole model on one process."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from credit.parallel.dtensor import local_shard
from credit.parallel.parallelize import parallelize
from credit.parallel.reduce import clip_grad_norm_
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Block,
    build_seeded,
    describe_error,
    gradients,
    mean_square_loss,
    require_close,
    samples,
)
from tests.parallel.fsdp2_api.gradient_cases import register_case

# Name -> shape and axes of a mesh, and True if FSDP2 shards the model.
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...], bool]] = {
    "FSDP2": ((4,), ("dp",), True),
    "tensor parallelism": ((1, 4), ("dp", "tp"), False),
    "both": ((2, 2), ("dp", "tp"), True),
    "replicas": ((2, 1, 2), ("replicate", "dp", "tp"), True),
}


class SplitBlock(nn.Module):
    """Marked block with a plan: its linear layers are split, and its norm is not."""

    _fsdp2_shard = True
    _tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), SplitBlock(), Block(), nn.Linear(WIDTH, WIDTH))


def distribute_with_gradients(model: nn.Module, name: str) -> None:
    """Distribute a model over a mesh and give it the gradients of this rank's share of the samples."""
    shape, axes, shard = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    parallelize(model, mesh, shard=shard)
    tensor_ranks = shape[-1] if "tp" in axes else 1
    num_data_ranks = 4 // tensor_ranks
    local_samples = samples().chunk(num_data_ranks)[dist.get_rank() // tensor_ranks]
    mean_square_loss(model, local_samples).backward()


@register_case
def clipping_equals_one_process_on_every_mesh() -> None:
    reference_model = build_seeded(build_model)
    mean_square_loss(reference_model, samples()).backward()
    for name in MESHES:
        for max_norm in (0.01, 1e6):
            clipped_reference = copy.deepcopy(reference_model)
            for parameter, unclipped_parameter in zip(
                clipped_reference.parameters(), reference_model.parameters(), strict=True
            ):
                parameter.grad = unclipped_parameter.grad.clone()
            expected_norm = nn.utils.clip_grad_norm_(clipped_reference.parameters(), max_norm)
            model = build_seeded(build_model)
            distribute_with_gradients(model, name)
            norm = clip_grad_norm_(model.parameters(), max_norm)
            assert torch.isclose(norm, expected_norm, rtol=1e-5), f"{name}: {norm} is not {expected_norm}"
            require_close(gradients(model), gradients(clipped_reference))


@register_case
def clipping_plain_gradients_that_all_ranks_hold() -> None:
    model = build_seeded(build_model).double()
    mean_square_loss(model, samples().double()).backward()
    clipped_reference = copy.deepcopy(model)
    for parameter, unclipped_parameter in zip(clipped_reference.parameters(), model.parameters(), strict=True):
        parameter.grad = unclipped_parameter.grad.clone()
    expected_norm = nn.utils.clip_grad_norm_(clipped_reference.parameters(), 0.01)
    norm = clip_grad_norm_(model.parameters(), 0.01)
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
    require_close(gradients(model), gradients(clipped_reference), tolerance=1e-12)


@register_case
def clipping_counts_terms_of_a_sum_as_their_sum() -> None:
    """The tensor parallelism of torch may leave partial gradients, whose value is their sum over the ranks."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False))
    terms = torch.tensor([1.0, 2.0, -1.0]) * (dist.get_rank() + 1)
    weight.grad = DTensor.from_local(terms, mesh, [Partial()], run_check=False)
    norm = clip_grad_norm_(weight, max_norm=1.0)
    total = 10 * torch.tensor([1.0, 2.0, -1.0])
    torch.testing.assert_close(norm, total.norm())
    torch.testing.assert_close(weight.grad.full_tensor(), total / total.norm(), rtol=1e-5, atol=1e-6)


@register_case
def clipping_refuses_a_norm_that_is_not_finite_on_every_rank() -> None:
    """Only the part of one rank has a NaN. All ranks raise an error and leave the gradients unchanged."""
    for name in MESHES:
        model = build_seeded(build_model)
        distribute_with_gradients(model, name)
        gradients_before = [local_shard(parameter.grad).clone() for parameter in model.parameters()]
        if dist.get_rank() == 3:
            local_shard(model[1].up.weight.grad).view(-1)[0] = torch.nan
        message = describe_error(partial(clip_grad_norm_, model.parameters(), 1.0, error_if_nonfinite=True))
        assert message.startswith("RuntimeError: the gradient norm is nan"), f"{name}: {message}"
        for parameter, gradient in zip(model.parameters(), gradients_before, strict=True):
            gradient_now = local_shard(parameter.grad)
            assert ((gradient_now == gradient) | gradient_now.isnan()).all(), name
