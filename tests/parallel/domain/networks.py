"""Comparison of networks whose fields are divided among ranks with the same networks on one process, in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from credit.config.registry import MODELS
from credit.models.base import ForecastModel, ModelSpec
from credit.models.checks import SIZE_ARGUMENTS
from credit.models.registry import build_model
from credit.parallel.domain.split import split_domain
from credit.train.build.model import compile_blocks

ROLLOUT = 2
NOISE = [
    {"kind": "global", "channels": 3},
    {"kind": "cell", "channels": 2},
    {"kind": "spherical", "channels": 2, "lengths": [1000, 3000]},
    {"kind": "dropout", "rate": 0.2},
]


@dataclass(frozen=True)
class NetworkCase:
    """One variant of the network.

    Attributes:
        settings: keyword arguments of `ModelSpec.from_sizes` and keys of the model's section, if they differ from those
            in `BASES`.
        noise: True for noise of every kind.
        model: registered name of the model.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    noise: bool = False
    model: str = "wxformer"


SIZES: dict[str, Any] = {
    "image_height": 16,
    "image_width": 24,
    "in_channels": 4,
    "out_channels": 3,
    "vector_channels": (0, 1),
}
BASE: dict[str, Any] = {
    **SIZES,
    "dim": [8, 16, 32, 64],
    "depth": [1, 1, 1, 1],
    "dim_head": 4,
    "global_window_size": [2, 2, 1, 1],
    "local_window_size": [4, 2, 1, 1],
    "cross_embed_kernel_sizes": [[2, 4, 8], [2, 4], [2, 4], [2, 4]],
    "padding": {"mode": "earth", "lat": [8, 8], "lon": [4, 4], "pole": "exact"},
    "position_bias_index": "exact",
    "decoder": "pixel_shuffle",
    # The spectral norm always computes in float32.
    "use_spectral_norm": False,
}
# Settings of each model, by its registered name.
BASES: dict[str, dict[str, Any]] = {
    "wxformer": BASE,
    "unet": {**SIZES, "dim": [8, 12, 16], "depth": [1, 1, 1], "dim_head": 4},
    "swin": {**SIZES, "image_width": 32, "dim": 16, "depth": 2, "heads": 2, "num_groups": 4, "window_size": 2},
}
CASES = {
    "pixel shuffle": NetworkCase(),
    "noise": NetworkCase(noise=True),
    # An odd number of rows, rows on the poles, padding as for published weights, and windows of three cells.
    "odd rows": NetworkCase(
        {
            "image_height": 31,
            "image_width": 32,
            "pole_points": True,
            "decoder": "transposed",
            "padding": {"mode": "earth", "lat": [8, 9], "lon": [8, 8], "pole": "published"},
            "global_window_size": [4, 4, 2, 1],
            "local_window_size": [4, 4, 3, 3],
        }
    ),
    # The coarsest stage has one window, so that all parts but one are empty there. The head has margins of 0 cells.
    "one window": NetworkCase(
        {
            "image_height": 32,
            "image_width": 32,
            "padding": {"mode": "mirror", "lat": [8, 8], "lon": [0, 16]},
            "global_window_size": [4, 2, 1, 1],
            "local_window_size": [4, 4, 3, 3],
            "attn_dropout": 0.2,
        },
        noise=True,
    ),
    # The first stride is 4, so the output is interpolated to the grid. Some kernels are not symmetric around a cell of
    # the stride.
    "interpolated": NetworkCase(
        {
            "image_height": 61,
            "image_width": 60,
            "padding": {"mode": "earth", "lat": [1, 2], "lon": [2, 2]},
            "cross_embed_strides": [4, 2, 2, 2],
            "cross_embed_kernel_sizes": [[4, 7, 16], [2, 5], [2, 4], [3]],
            "global_window_size": [4, 2, 2, 2],
            "local_window_size": [4, 4, 4, 2],
        },
        noise=True,
    ),
    # The levels have 27, 14 and 7 rows. The first row is on a pole at all levels, the last row only at the two finer
    # levels. The coarsest level has an odd number of columns.
    "unet": NetworkCase({"image_height": 27, "image_width": 20, "pole_points": True}, noise=True, model="unet"),
    # The coarsest level has fewer rows than there are parts, so that a part is empty there.
    "unet, few rows": NetworkCase({"image_height": 10, "image_width": 16}, model="unet"),
    "swin": NetworkCase({"image_height": 31, "pole_points": True, "attn_dropout": 0.1}, noise=True, model="swin"),
    # Tokens are padded with zeros, windows do not wrap around, and patches do not cover the grid.
    "swin, published edges": NetworkCase(
        {
            "edges": "published",
            "image_height": 21,
            "image_width": 24,
            "window_size": 3,
            "padding": {"mode": "mirror", "pole": "published", "lat": [3, 4], "lon": [4, 4]},
        },
        model="swin",
    ),
}
# (M, N) parts of rows and columns, by the number of ranks
PARTS = {2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}


@dataclass(frozen=True)
class Result:
    """Output and gradients of a rollout.

    Attributes:
        output: (B, C, 1, H, W) state after the rollout.
        input_gradient: gradient of the input.
        gradients: name of a parameter -> its gradient.
    """

    output: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]


def build_network(case: NetworkCase) -> ForecastModel:
    """Return a network in float64. Weights that start as zeros get random values, as after some training."""
    settings = {**BASES[case.model], **case.settings}
    if case.noise:
        settings["noise"] = NOISE
    sizes = {key: settings.pop(key) for key in SIZE_ARGUMENTS if key in settings}
    section = MODELS.find_section(case.model).model_validate({"type": case.model, **settings})
    torch.manual_seed(3)
    network = build_model(ModelSpec.from_sizes(**sizes), section).double()
    for parameter in network.parameters():
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.1)
    return network.train()


def draw_inputs(case: NetworkCase) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
    """Return the input of a network, the gradient of its output, and its noise, all for the whole grid."""
    settings = {**BASES[case.model], **case.settings}
    height, width = settings["image_height"], settings["image_width"]
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x_BCTHW = draw(2, 4, 1, height, width)
    cotangent_BCTHW = draw(2, 3, 1, height, width)
    condition = None
    if case.noise:
        condition = {
            "global": draw(2, 3),
            "cell": draw(2, 2, height, width),
            "spherical": draw(2, 2, height, width),
            "dropout": torch.randint(1, 2**60, (2, 1), generator=generator),
        }
    return x_BCTHW, cotangent_BCTHW, condition


def run(network: nn.Module, x_BCTHW: Tensor, cotangent_BCTHW: Tensor, condition: dict[str, Tensor] | None) -> Result:
    """Return the output of a rollout, and its gradients for a given gradient of the output."""
    x_BCTHW = x_BCTHW.clone().requires_grad_()
    state_BCTHW = x_BCTHW
    for _ in range(ROLLOUT):
        arguments = (state_BCTHW,) if condition is None else (state_BCTHW, condition)
        output_BCTHW = network(*arguments)
        # The last channel is a forcing, which stays as it is.
        state_BCTHW = torch.cat([state_BCTHW[:, :3] + output_BCTHW, state_BCTHW[:, 3:]], dim=1)
    state_BCTHW[:, :3].backward(cotangent_BCTHW)
    gradients = {name: parameter.grad for name, parameter in network.named_parameters() if parameter.grad is not None}
    return Result(state_BCTHW[:, :3].detach(), x_BCTHW.grad, gradients)


@functools.cache
def run_whole_network(name: str) -> Result:
    """Return the result of the whole network of a case, which must not be modified; all divisions share it."""
    return run(build_network(CASES[name]), *draw_inputs(CASES[name]))


def compare(
    name: str,
    num_parts: tuple[int, int],
    context: AbstractContextManager[None] | None = None,
    backend: str | None = None,
) -> dict[str, float]:
    """Collective: return the largest relative differences between the divided and the whole network.

    Args:
        name: key of the variant of the network in `CASES`.
        num_parts: (M, N) numbers of parts of the rows and of the columns.
        context: context in which the network is divided, compiled and run, but not the whole network; None for none.
        backend: backend of torch.compile for the divided network; None to run it without compilation.

    Returns:
        Differences of ``output``, ``input_gradient`` and ``gradients``, the same on all ranks.
    """
    case = CASES[name]
    network = build_network(case)
    x_BCTHW, cotangent_BCTHW, condition = draw_inputs(case)
    whole_result = run_whole_network(name)
    with context or nullcontext():
        split_domain(network, dist.group.WORLD, num_parts)
        if backend is not None:
            compile_blocks(network, backend)
        slices = (..., *network.domain.part.slices)
        part_result = run(network, x_BCTHW[slices], cotangent_BCTHW[slices], condition)
    # The gradient of a weight is the sum over the ranks. The gradient of some parameters is zero except for rounding
    # errors, for example of biases that a norm removes. These are compared on the scale of all gradients.
    total_norm = torch.stack([gradient.norm() for gradient in whole_result.gradients.values()]).norm()
    gradient_errors = []
    for key, gradient in whole_result.gradients.items():
        total_gradient = part_result.gradients.get(key, torch.zeros_like(gradient)).clone()
        dist.all_reduce(total_gradient)
        gradient_errors.append((total_gradient - gradient).norm() / (gradient.norm() + 1e-6 * total_norm))
    errors = torch.stack(
        [
            (part_result.output - whole_result.output[slices]).abs().max() / whole_result.output.abs().max(),
            (part_result.input_gradient - whole_result.input_gradient[slices]).abs().max()
            / whole_result.input_gradient.abs().max(),
            torch.stack(gradient_errors).max(),
        ]
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(("output", "input_gradient", "gradients"), errors.tolist(), strict=True))
