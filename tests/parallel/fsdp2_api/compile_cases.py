"""Cases of split layers in compiled blocks, and in sharding units inside a block with a plan."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from credit.config.sections.execution import ParallelismConfig
from credit.models.layers import spectral_norm
from credit.models.lora import apply_lora
from credit.parallel import fsdp2
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.mesh import build_mesh, plan_degrees
from credit.parallel.parallelize import parallelize
from credit.train.build.model import compile_blocks
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Planned,
    build_seeded,
    gradients,
    mean_square_loss,
    require_close,
    samples,
)
from tests.parallel.fsdp2_api.gradient_cases import register_case
from tests.parallel.training.cases import to_full_tensor

HEADS = 4


class Attention(nn.Module):
    """Self-attention with a layer for each of q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViTBlock(nn.Module):
    """Block of a plain vision transformer."""

    _fsdp2_shard = True
    _tp_plan = {
        "attention.to_q": "colwise",
        "attention.to_k": "colwise",
        "attention.to_v": "colwise",
        "attention.to_out": "rowwise",
        "up": "colwise",
        "down": "rowwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


def build_vit() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), ViTBlock(), ViTBlock(), nn.Linear(WIDTH, WIDTH))


def build_adapted_vit() -> nn.Module:
    """Return a spectrally normalised network of which only adapters are trained. The adapters are not zero."""
    model = spectral_norm.apply_spectral_norm(build_vit())
    apply_lora(model, ["*.to_q", "*.down"], rank=2, alpha=4.0)
    for name, parameter in model.named_parameters():
        if name.endswith((".a", ".b")):
            nn.init.normal_(parameter)
    return model


@register_case
def split_and_compiled() -> None:
    """Each step has two forwards before one backward. A forward without gradients follows each step."""
    mesh = build_mesh(plan_degrees(ParallelismConfig(tensor=2), 4), dist.get_rank(), "cpu")
    for build in (build_vit, build_adapted_vit):
        for checkpoint in (True, "selective"):
            torch._dynamo.reset()
            model = build_seeded(build)
            reference_model = copy.deepcopy(model)
            parallelize(
                model,
                mesh.device_mesh,
                checkpoint=checkpoint,
                compile_blocks=partial(compile_blocks, backend="aot_eager"),
            )
            for seed in (1, 2):
                local_samples = samples(seed).chunk(2)[mesh.data_rank]
                for compared_model, x in ((reference_model, samples(seed)), (model, local_samples)):
                    compared_model.train().zero_grad()
                    spectral_norm.advance_power_iterations(compared_model)
                    (mean_square_loss(compared_model, x) + mean_square_loss(compared_model, 2 * x)).backward()
                require_close(gradients(model), gradients(reference_model))
                with torch.no_grad():
                    require_close({"output": model(local_samples)}, {"output": reference_model(local_samples)})
                fsdp2.reshard(model)


class PlannedStage(nn.Module):
    """Module whose plan covers the layers of its inner sharding units; these units have no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Planned({}) for _ in range(2)])
        self.last = nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            layer._fsdp2_shard = True
        styles = {"up": "colwise", "down": "rowwise"}
        self._tp_plan = {f"layers.{number}.{name}": style for number in range(2) for name, style in styles.items()}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def build_planned_stages() -> nn.Module:
    """Return two spectrally normalised stages in training mode. The second one is a sharding unit itself."""
    model = spectral_norm.apply_spectral_norm(nn.Sequential(PlannedStage(), PlannedStage()))
    model[1]._fsdp2_shard = True
    return model.train()


@register_case
def plan_above_sharding_units() -> None:
    """Sums and power iterations use the weights of a unit in its own forward, while these are gathered."""
    mesh = build_mesh(plan_degrees(ParallelismConfig(tensor=2), 4), dist.get_rank(), "cpu")
    for checkpoint in (False, True, "selective"):
        for is_batched in (False, True):
            model = build_seeded(build_planned_stages)
            reference_model = copy.deepcopy(model)
            parallelize(model, mesh.device_mesh, checkpoint=checkpoint)
            if is_batched:
                # The trainer does this on a GPU.
                spectral_norm.install_batched_normalization(model, by_unit=True)
            for seed in (1, 2):
                for compared_model, x in (
                    (reference_model, samples(seed)),
                    (model, samples(seed).chunk(2)[mesh.data_rank]),
                ):
                    spectral_norm.advance_power_iterations(compared_model)
                    compared_model.zero_grad()
                    (mean_square_loss(compared_model, x) + mean_square_loss(compared_model, 2 * x)).backward()
                require_close(gradients(model), gradients(reference_model))
            vectors, expected = (
                {
                    strip_wrapper_prefixes(name): to_full_tensor(vector)
                    for name, vector in spectral_norm.find_singular_vectors(compared_model).items()
                }
                for compared_model in (model, reference_model)
            )
            require_close(vectors, expected)
