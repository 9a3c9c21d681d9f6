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
    TwoTypes,
    build_seeded,
    gradients,
    local_share,
    require_close,
)
from tests.parallel.fsdp2_api.gradient_cases import CHECKPOINTED, case, require_same_gradients

PAGE = Path(__file__).parents[3] / "docs" / "add_a_model.md"
SELECTIVE = {"trainer": {"activation_checkpoint": "selective"}}


def rolled(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of two forwards, of which the second begins with the result of the first."""
    first = model(x)
    return first.square().mean() + model(first).square().mean()


@case
def entry_points_are_computed_again() -> None:
    for conf, calls in (({}, 8), (CHECKPOINTED, 16), (SELECTIVE, 16)):
        model = build_seeded(Coders)
        with warnings.catch_warnings(action="error"):
            require_same_gradients(model, None, conf, rolled)
        # a reference that was copied before sharding counts its own calls
        counted = [module.calls for module in model.modules() if isinstance(module, Coder)]
        assert counted == [calls // 2] * 2, counted


@case
def hooked_spectral_norm_of_entry_points() -> None:
    """A recomputed block uses the vectors of its first pass, also after a second forward."""

    def normalised() -> Coders:
        model = Coders()
        for coder in model.coders:
            nn.utils.spectral_norm(coder.down)
        return model

    for conf in ({}, CHECKPOINTED, SELECTIVE):
        require_same_gradients(build_seeded(normalised), None, conf, rolled)


class Parts(nn.Module):
    """A marked block that returns a view of one tensor in every kind of container."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor], Latent]:
        y = self.linear(x).unflatten(-1, (5, WIDTH))
        first, second, third, fourth, fifth = (y[..., number, :] for number in range(5))
        return first, [second], {"third": third}, Latent({"fourth": [fourth]}, Note(3, fifth))


class Views(nn.Module):
    """Changes the views that a block returns in place, and returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.head = Parts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first, (second,), named, latent = self.parts(x)
        first += 1
        second *= 2
        total = first * second + named["third"] + latent.parts["fourth"][0].sin() + latent.note.weights
        return self.head(total).transpose(0, 1)


def changed_in_place(model: nn.Module, x: Tensor) -> Tensor:
    """Return the loss of an output that is changed in place."""
    y = model(x)
    y += 1
    return y.square().mean()


@case
def views_may_be_returned() -> None:
    for conf in ({}, CHECKPOINTED, SELECTIVE):
        with warnings.catch_warnings(action="error"):
            require_same_gradients(build_seeded(Views), None, conf, changed_in_place)


@case
def the_model_of_the_documentation() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    page: dict[str, Any] = {"__name__": "my_models"}
    exec(code, page)
    spec = ModelSpec.from_sizes(image_height=4, image_width=6, in_channels=3, out_channels=2, frames=2)
    torch.manual_seed(0)
    model = page["SmallConv"](spec, page["SmallConvSection"](type="small_conv", width=8, layers=3))
    alone = copy.deepcopy(model)
    x = torch.randn(8, 3, 2, 4, 6)
    changed_in_place(alone, x).backward()
    with warnings.catch_warnings(action="error"):
        fsdp2.apply_fsdp2(model, None, {})
        changed_in_place(model, local_share(x)).backward()
    require_close(gradients(model), gradients(alone))


@case
def selective_around_sharding_units() -> None:
    """Blocks in a block, and a layer of another dtype, which is sharded by itself."""

    def mixed() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), TwoTypes(), nn.Linear(WIDTH, WIDTH))

    for build in (lambda: nn.Sequential(Outer(), Outer()), mixed):
        require_same_gradients(build_seeded(build), None, SELECTIVE, rolled)
