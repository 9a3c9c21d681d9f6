"""Cases for comparisons of several ranks with one process: variants of a network and of its training step."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from credit.channels import ChannelMap
from credit.config.sections.execution import ParallelismConfig
from credit.config.sections.trainer import TrainerConfig
from credit.data.normalize import Normalizer
from credit.data.samples.batch import Batch
from credit.data.store.statistics import Statistics
from credit.forecast.objectives.base import Objective, ObjectiveContext
from credit.forecast.objectives.deterministic import DeterministicRollout
from credit.forecast.objectives.ensemble import EnsembleRollout
from credit.forecast.objectives.section import DeterministicSection, EnsembleObjectiveSection
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.losses.base import Loss
from credit.losses.build import build_loss_context, build_loss_from_context
from credit.losses.domain_loss import build_domain_loss
from credit.losses.member_loss import LossPart
from credit.losses.section import CRPSSection, PointwiseSection
from credit.models.base import ModelSpec
from credit.models.initialise import initial_values
from credit.models.layers import spectral_norm, spectral_norm_batched
from credit.models.noise.base import NoiseGenerator
from credit.models.wxformer import WXFormer
from credit.models.wxformer.section import WXFormerSection
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.domain.split import split_domain
from credit.parallel.fsdp2 import _build_mp_policy
from credit.parallel.mesh import DeviceGrid
from credit.parallel.parallelize import parallelize
from credit.parallel.reduce import mean_over_ranks
from credit.parallel.state.materialise import allocate_, fill_, require_filled
from credit.train.ema import EMA
from credit.train.optim import build_optimizer
from credit.train.step import StepSettings, TrainingStep

ROWS, COLUMNS = 16, 24
NOISES: dict[str, dict[str, Any]] = {
    "global": {"kind": "global", "channels": 6, "memory": ["step", "24h"]},
    "cell": {"kind": "cell", "channels": 3, "memory": ["step", "24h"]},
    "dropout": {"kind": "dropout", "rate": 0.2, "memory": ["step", "forecast"]},
    "spherical": {"kind": "spherical", "channels": 2, "lengths": [1000, 3000], "memory": ["24h"]},
}
GROUPS = {"prognostic": ["a", "b"], "diagnostic": ["rain"], "dynamic_forcing": ["sun"], "static": ["land"]}
CHANNELS = ChannelMap.build({name: {"vars_3D": [], "vars_2D": members} for name, members in GROUPS.items()}, [])
MESHES: dict[str, dict[str, Any]] = {
    "4x1": {"data": "fsdp2"},
    "2x2": {"data": "fsdp2", "tensor": 2},
    "1x4": {"data": "fsdp2", "tensor": 4},
    "tensor alone": {"data": "none", "tensor": 4},
    "2x2x1": {"data": "fsdp2", "replicate": 2},
    "2x1x2": {"data": "fsdp2", "replicate": 2, "tensor": 2},
    "ddp": {"data": "ddp"},
}
# Number of ranks -> meshes whose ranks share the members of a sample.
ENSEMBLE_MESHES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"ens 2": {"data": "fsdp2", "ensemble": 2}},
    4: {
        "ens 4": {"data": "fsdp2", "ensemble": 4},
        "ens 2 x fsdp2 2": {"data": "fsdp2", "ensemble": 2},
        "ens 2 x replicate 2": {"data": "fsdp2", "ensemble": 2, "replicate": 2},
        "ens 2 x tensor 2": {"data": "fsdp2", "ensemble": 2, "tensor": 2},
        "ens 2 x ddp 2": {"data": "ddp", "ensemble": 2},
    },
}


@dataclass(frozen=True)
class Case:
    """One variant of the network and of its training."""

    spectral_norm: bool = True
    checkpoint: bool | str = False
    accumulation: int = 1
    rollout: int = 1
    decoder: str = "transposed"
    recompute: bool = False
    amp: bool = False
    steps: int = 5
    # Samples of an optimizer step, on all ranks together.
    samples: int = 8
    dropout: float = 0.0
    # With more than one member, the network has noise and the loss is the CRPS.
    members: int = 1
    members_at_once: int = 1
    global_mean: float = 0.0
    rows: int = ROWS
    # Train in float64, and without gradient clipping, whose factor is float32.
    double: bool = False
    # Several ranks normalise weights of the same shape together, as on GPUs. One process normalises each by itself.
    alike: bool = False
    # Kinds of noise, if there is more than one member.
    noise: tuple[str, ...] = ("global", "cell", "spherical", "dropout")
    optimizer: str = "adamw"

    @property
    def name(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())


# For any two options from `spectral_norm` to `recompute`, every useful pair of values occurs in a case. The time of a
# pass through the network is the same for any small size, so cases with many passes (micro-steps, rollout steps,
# members) take only two steps.
CASES = [
    Case(False, False, 1, 1, "transposed"),
    Case(True, False, 2, 2, "pixel_shuffle", recompute=True, steps=2),
    Case(True, True, 1, 2, "pixel_shuffle", alike=True),
    Case(True, "selective", 2, 1, "transposed", alike=True),
    Case(False, False, 2, 1, "pixel_shuffle", optimizer="muon"),
    Case(False, True, 2, 2, "transposed", recompute=True, steps=2),
    Case(True, True, 2, 2, "pixel_shuffle", recompute=True, steps=2, members=3),
    # Cases of `ENSEMBLE_CASES`. Ranks divide the loss by rows, or by channels if it has a global mean. The last case
    # trains in float64.
    Case(True, False, 2, 3, "transposed", members=4, rows=15, samples=4, steps=2),
    Case(
        False, True, 1, 2, "pixel_shuffle", recompute=True, members=4, members_at_once=2, global_mean=1.0, rows=15,
        samples=4, steps=2,
    ),
    Case(False, False, 1, 1, "transposed", members=4, rows=15, samples=2, steps=20, double=True),
]  # fmt: skip
# Numbers of the cases whose members are shared by ranks.
ENSEMBLE_CASES = (7, 8, 9)
# Number of the ensemble case whose collectives are counted.
COUNTED_CASE = 7
# Every mesh runs `COUNTED_CASE`. Case 8 depends least on the mesh, so only three meshes run it. Some parts of the
# package always compute in float32, so the float64 case runs only on meshes on which each rank has all samples.
ENSEMBLE_CASE_NUMBERS = {
    "ens 2": (7, 8, 9),
    "ens 4": (7, 8, 9),
    "ens 2 x fsdp2 2": (7, 8),
    "ens 2 x replicate 2": (7,),
    "ens 2 x tensor 2": (7, 9),
    "ens 2 x ddp 2": (7,),
}
# FSDP2 alone (4x1) runs all cases that are not in `ENSEMBLE_CASES`, and 2x2 runs three. Other meshes run two
# cases that differ in most options.
CASE_NUMBERS = dict.fromkeys(MESHES, (2, 4)) | {"4x1": range(7), "2x2": (1, 2, 4)}
# With EQUALITY=product in the environment, every mesh runs all combinations of these options. It takes 45 minutes.
if os.environ.get("EQUALITY") == "product":
    OPTIONS = *2 * [(True, False)], *2 * [(1, 2)], ("transposed", "pixel_shuffle"), (False, True)
    # Without spectral norm, `alike` has no effect.
    CASES = [
        Case(*option_values, alike=alike)
        for *option_values, alike in product(*OPTIONS)
        if option_values[0] or not alike
    ]
    CASE_NUMBERS = dict.fromkeys(MESHES, range(len(CASES)))


def settings(case: Case) -> dict[str, Any]:
    """Return the keyword arguments of the network."""
    return {
        "image_height": case.rows, "image_width": COLUMNS, "in_channels": 4, "out_channels": 3, "frames": 1,
        "output_frames": 1, "dim": [8, 16, 32, 64], "depth": [1, 1, 1, 1], "dim_head": 4,
        "global_window_size": [2, 2, 1, 1], "local_window_size": [4, 2, 1, 1],
        "cross_embed_kernel_sizes": [[4, 8, 16], [2, 4], [2, 4], [2, 4]],
        "padding": {"mode": "earth", "lat": [8, 24 - case.rows], "lon": [4, 4]},
        "decoder": case.decoder, "use_spectral_norm": case.spectral_norm,
        "attn_dropout": case.dropout, "ff_dropout": case.dropout,
        "noise": [NOISES[kind] for kind in case.noise] if case.members > 1 else [],
    }  # fmt: skip


def build(
    case: Case, mesh: DeviceGrid, data: str, domain_parts: tuple[int, int] | None = None, **changes: Any
) -> tuple[nn.Module, bool]:
    """Return the network with values and distributed over its ranks, and True if it runs under autocast."""
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**settings(case))
    if case.double:
        model.double()
    if mesh.degrees.num_field_parts > 1:
        split_domain(model, mesh.domain_group, domain_parts)
    sharded = mesh.device_mesh is not None and data != "none"
    policy = _build_mp_policy({"trainer": {"amp": True, "fsdp2_mp_policy": {"param_dtype": "bfloat16"}}})
    policy = policy if case.amp and sharded else None
    parallelize(model, mesh.device_mesh, shard=sharded, checkpoint=case.checkpoint, policy=policy, **changes)
    allocate_(model, torch.device("cpu"))
    if case.alike and mesh.device_mesh is not None:
        spectral_norm.install_batched_normalization(model, by_unit=sharded or bool(case.checkpoint))
    fill_(model, trained_values(model))
    require_filled(model)
    return model.train(), case.amp and policy is None


def trained_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield initial values, but random ones for weights of the noise, which start as zeros and change in training."""
    for name, tensor in initial_values(model, seed=7):
        if name.endswith(("scale_shift.weight", "noise_embed.weight")):
            generator = torch.Generator().manual_seed(len(strip_wrapper_prefixes(name)) * 1000 + tensor.shape[0])
            tensor = 0.2 * torch.randn(tensor.shape, generator=generator)
        yield name, tensor


def build_step(case: Case, model: nn.Module, autocast: bool, mesh: DeviceGrid) -> tuple[TrainingStep, Any, EMA]:
    """Return the training step, its optimizer and the moving average of the weights."""
    random_generator = np.random.default_rng(0)
    zeros = np.zeros(5)
    std, tendency = random_generator.uniform(1, 3, 5), random_generator.uniform(0.2, 0.5, 5)
    statistics = Statistics(("a", "b", "rain", "sun", "land"), zeros, std, zeros, zeros, zeros, tendency, zeros)
    normalizer = Normalizer(CHANNELS, statistics, {}, {})
    static = torch.randn(1, case.rows, COLUMNS, generator=torch.Generator().manual_seed(5))[part_slices(model)]
    grid = LatLonGrid.from_coords(np.linspace(84, -84, case.rows), np.arange(COLUMNS) * 360 / COLUMNS)[0]
    section_class = PointwiseSection if case.members == 1 else CRPSSection
    loss_section = section_class(global_mean=case.global_mean)
    loss_context = build_loss_context(loss_section, CHANNELS, grid, normalizer.tendency_scale_C.numpy(), {})
    domain = model.domain
    build_loss = functools.partial(build_loss_from_context, loss_section)
    loss = build_loss(loss_context) if domain is None else build_domain_loss(loss_context, build_loss, domain)
    if case.double:
        for module in (normalizer, loss):
            module.double()
        static = static.double()
    stepper = Stepper(model, CHANNELS, normalizer, static, True, None, amp=autocast)
    trainer_config = TrainerConfig(max_steps=5, optimizer=case.optimizer, learning_rate=1e-3, weight_decay=0.1)
    optimizer = build_optimizer(model, trainer_config)
    average = EMA(model, 0.9)

    def build_part_losses(parts: Sequence[LossPart]) -> list[Loss]:
        if domain is None:
            losses = [build_loss(loss_context.select(part.channels, part.rows)) for part in parts]
        else:
            losses = [build_domain_loss(loss_context, build_loss, domain, part) for part in parts]
        return [loss.double() if case.double else loss for loss in losses]

    context = ObjectiveContext(
        stepper,
        loss,
        case.recompute,
        field_shape=(3, *((case.rows, COLUMNS) if domain is None else domain.part.shape)),
        build_part_losses=build_part_losses,
        ensemble_group=mesh.ensemble_group,
    )
    objective = build_objective(context, case)
    max_norm = None if case.double else 1.0
    step_settings = StepSettings(lambda _: case.rollout, 1, case.accumulation, max_norm, data_rank=mesh.data_rank)
    step = TrainingStep(objective, optimizer, average, step_settings)
    return step, optimizer, average


def build_objective(context: ObjectiveContext, case: Case) -> Objective:
    """Return the objective of a case: a single forecast, or an ensemble of forecasts."""
    if case.members == 1:
        return DeterministicRollout(context, DeterministicSection())
    section = WXFormerSection.model_validate({"type": "wxformer", "noise": settings(case)["noise"]})
    spec = ModelSpec.from_sizes(image_height=case.rows, image_width=COLUMNS, in_channels=4, out_channels=3)
    noise = NoiseGenerator(spec, section)
    context = replace(
        context, noise=noise, seed=3, members=case.members, members_at_once=case.members_at_once, valid_members=4
    )
    return EnsembleRollout(context, EnsembleObjectiveSection())


def part_slices(model: nn.Module) -> tuple[Any, ...]:
    """Return the index of this rank's part of a whole field (..., H, W)."""
    return (...,) if model.domain is None else (..., *model.domain.part.slices)


def gather_field(model: nn.Module, field: Tensor) -> Tensor:
    """Collective: return the whole field (B, C, 1, H, W) of which each rank has a part."""
    if model.domain is None:
        return field
    return model.domain.build_gather().exchange_fields(field.flatten(1, 2)).unflatten(1, field.shape[1:3])


def batches(case: Case, mesh: DeviceGrid, first_batch: int = 0, part: tuple[Any, ...] = (...,)) -> Iterator[Batch]:
    """Yield the micro-batches of this rank. All ranks together have the same samples of a step on every mesh."""
    for number in range(first_batch, first_batch + 1000):
        generator = torch.Generator().manual_seed(number)
        shape = (case.samples, 3 + case.rollout, max(3, case.rollout), case.rows, COLUMNS)
        micro_steps = (case.accumulation, mesh.num_sample_ranks, -1)
        fields = torch.randn(shape, generator=generator).unflatten(0, micro_steps)[part]
        if case.double:
            fields = fields.double()
        sample_numbers = (number * case.samples + torch.arange(case.samples)).unflatten(0, micro_steps)
        for share, numbers in zip(fields[:, mesh.sample_rank], sample_numbers[:, mesh.sample_rank], strict=True):
            target = torch.stack([share[:, 3 + n, :3] for n in range(case.rollout)], dim=2)
            yield Batch(share[:, :2, :1], share[:, 2:3, : case.rollout], target, tuple(numbers.tolist()))


def to_full_tensor(tensor: Tensor) -> Tensor:
    """Collective: return a copy of the full value of a DTensor, or of a plain tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def train(
    case: Case,
    mesh: DeviceGrid,
    data: str = "fsdp2",
    last_step: AbstractContextManager[Any] | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """Collective: train a case and return outputs, losses, norms and the gradients of the first step, as full tensors.

    In float64, also return the weights after the last step. In float32, rounding errors grow too fast to compare them.

    Args:
        case: network and training.
        mesh: mesh of the ranks.
        data: kind of data parallelism.
        last_step: context of the last step, for instance a counter of its collectives.
        changes: further arguments of `parallelize`.
    """
    alike = case.alike and mesh.device_mesh is not None
    patches = {"is_cpu_path": lambda _: not alike}
    with mock.patch.multiple(spectral_norm, **patches), mock.patch.multiple(spectral_norm_batched, **patches):
        return _train(case, mesh, *build(case, mesh, data, **changes), last_step or nullcontext())


def _train(
    case: Case, mesh: DeviceGrid, model: nn.Module, autocast: bool, last_step: AbstractContextManager[Any]
) -> dict[str, Tensor]:
    step, optimizer, average = build_step(case, model, autocast, mesh)
    gradients: dict[str, Tensor] = {}

    def record_first_gradients(*_: Any) -> None:
        if not gradients:
            gradients.update(
                {strip_wrapper_prefixes(name): to_full_tensor(p.grad) for name, p in model.named_parameters()}
            )

    optimizer.register_step_pre_hook(record_first_gradients)
    model.eval()
    with torch.no_grad():
        x = torch.randn(2, 4, 1, case.rows, COLUMNS, generator=torch.Generator().manual_seed(3))[part_slices(model)]
        initial_output = gather_field(model, model(x.double() if case.double else x))
    model.train()
    batch_iterator, losses, norms = batches(case, mesh, part=part_slices(model)), [], []
    for number in range(case.steps):
        with last_step if number == case.steps - 1 else nullcontext():
            result = step(batch_iterator, number, 1e-3)
        losses.append(mean_over_ranks(result.loss))
        norms.append(result.grad_norm)
    model.eval()
    with average.applied(), torch.no_grad():
        x = torch.randn(2, 4, 1, case.rows, COLUMNS, generator=torch.Generator().manual_seed(4))[part_slices(model)]
        averaged_output = gather_field(model, model(x.double() if case.double else x))
    weights: dict[str, Tensor] = {}
    if case.double:
        weights = {f"weight/{strip_wrapper_prefixes(n)}": to_full_tensor(p) for n, p in model.named_parameters()}
    results = {
        "output": initial_output,
        "output of the average": averaged_output,
        "loss": torch.stack(losses),
        "norm": torch.stack(norms),
    }
    return {**results, **weights, **{f"gradient/{name}": value for name, value in gradients.items()}}


def parallelism(name: str) -> ParallelismConfig:
    """Return the config of a mesh of `MESHES` or `ENSEMBLE_MESHES`."""
    meshes = MESHES | ENSEMBLE_MESHES[2] | ENSEMBLE_MESHES[4]
    return ParallelismConfig(**meshes[name])
