"""Cases of entry points besides forward, of views that a forward returns, and of recomputed results."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credit.models.base import ModelSpec
from credit.parallel import fsdp2
from tests.parallel.fsdp2_api.example_models import (
    WIDTH,
    Coder,
    Coders,
    Latent,
    Note,
    Outer,
    TwoDtypeBlock,
    build_seeded,
    gradients,
    local_share,
    require_close,
)
from tests.parallel.fsdp2_api.gradient_cases import CHECKPOINTED, register_case, require_same_gradients

PAGE = Path(__file__).parents[3] / "docs" / "add_a_model.md"
SELECTIVE = {"trainer": {"activation_checkpoint": "selective"}}


def compute_rollout_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of two forwards, of which the second takes the output of the first."""
    first = model(x)
    return first.square().mean() + model(first).square().mean()


@register_case
def entry_points_are_computed_again() -> None:
    for conf, expected_calls in (({}, 8), (CHECKPOINTED, 16), (SELECTIVE, 16)):
        model = build_seeded(Coders)
        with warnings.catch_warnings(action="error"):
            require_same_gradients(model, None, conf, compute_rollout_loss)
        # The reference model is a copy and counts its own calls.
        calls_of_coders = [module.calls for module in model.modules() if isinstance(module, Coder)]
        assert calls_of_coders == [expected_calls // 2] * 2, calls_of_coders


@register_case
def hooked_spectral_norm_of_entry_points() -> None:
    """A recomputed block uses the singular vectors of its first pass, also after a second forward."""

    def build_normalised() -> Coders:
        model = Coders()
        for coder in model.coders:
            nn.utils.spectral_norm(coder.down)
        return model

    for conf in ({}, CHECKPOINTED, SELECTIVE):
        require_same_gradients(build_seeded(build_normalised), None, conf, compute_rollout_loss)


class ViewBlock(nn.Module):
    """Marked block that returns views of one tensor, in every kind of container."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor], Latent]:
        y = self.linear(x).unflatten(-1, (5, WIDTH))
        first, second, third, fourth, fifth = (y[..., number, :] for number in range(5))
        return first, [second], {"third": third}, Latent({"fourth": [fourth]}, Note(3, fifth))


class ViewModel(nn.Module):
    """Model that changes the views of a block in place, and returns a view itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = ViewBlock(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, (second,), named, latent = self.parts(x)
        first += 1
        second *= 2
        total = first * second + named["third"] + latent.parts["fourth"][0].sin() + latent.note.weights
        return self.head(total).transpose(0, 1)


def compute_in_place_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Change the output of a model in place and return its loss."""
    y = model(x)
    y += 1
    return y.square().mean()


@register_case
def views_may_be_returned() -> None:
    for conf in ({}, CHECKPOINTED, SELECTIVE):
        with warnings.catch_warnings(action="error"):
            require_same_gradients(build_seeded(ViewModel), None, conf, compute_in_place_loss)


@register_case
def the_model_of_the_documentation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page_namespace: dict[str, Any] = {"__name__": "my_models"}
    exec(code, page_namespace)
    spec = ModelSpec.from_sizes(image_height=4, image_width=6, in_channels=3, out_channels=2, frames=2)
    torch.manual_seed(0)
    model = page_namespace["SmallConv"](spec, page_namespace["SmallConvSection"](type="small_conv", width=8, layers=3))
    reference_model = copy.deepcopy(model)
    x = torch.randn(8, 3, 2, 4, 6)
    compute_in_place_loss(reference_model, x).backward()
    with warnings.catch_warnings(action="error"):
        fsdp2.apply_fsdp2(model, None, {})
        compute_in_place_loss(model, local_share(x)).backward()
    require_close(gradients(model), gradients(reference_model))


@register_case
def selective_around_sharding_units() -> None:
    """Blocks inside a block, and a layer of another dtype, which is a sharding unit of its own."""

    def build_two_dtype_model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), TwoDtypeBlock(), nn.Linear(WIDTH, WIDTH))

    for build in (lambda: nn.Sequential(Outer(), Outer()), build_two_dtype_model):
        require_same_gradients(build_seeded(build), None, SELECTIVE, compute_rollout_loss)
