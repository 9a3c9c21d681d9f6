"""Small graph networks for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from credit.config.sections.model import ModelSection
from credit.grid import LatLonGrid
from credit.models.base import ModelSpec
from credit.models.graph import GraphNetwork
from credit.models.graph.section import GraphSection

PROCESSORS = ("message_passing", "transformer")
ROWS, COLUMNS = 9, 24


def build_spec(**changes: Any) -> ModelSpec:
    """Return a spec with an odd number of rows, poles and two frames."""
    sizes: dict[str, Any] = {"image_height": ROWS, "image_width": COLUMNS, "in_channels": 4, "out_channels": 3}
    return ModelSpec.from_sizes(**{**sizes, "frames": 2, "output_frames": 2, "pole_points": True, **changes})


def build_section(**keys: Any) -> ModelSection:
    """Return the section of a network with few channels."""
    sizes = {"type": "graph", "dim": 16, "depth": 2, "refinements": 1}
    if keys.get("processor") == "transformer":
        sizes |= {"dim_head": 8, "hops": 2}
    return GraphSection.model_validate({**sizes, **keys})


def build(spec: ModelSpec | None = None, seed: int = 0, **keys: Any) -> GraphNetwork:
    """Return a network with weights of `seed`."""
    model = GraphNetwork(spec or build_spec(), build_section(**keys))
    model.initialise(seed)
    return model


def build_grid(first_longitude: float) -> LatLonGrid:
    """Return the grid of `build_spec`, with its first column at another longitude in degrees."""
    lon = first_longitude + np.arange(COLUMNS) * 360.0 / COLUMNS
    return LatLonGrid.from_coords(np.linspace(90, -90, ROWS), lon)[0]


def fields(batch: int = 1, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random input for `build()`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((batch, 4, 2, ROWS, COLUMNS), generator=generator, dtype=dtype)


def draw_noise(kind: str, batch: int, channels: int) -> dict[str, torch.Tensor]:
    """Return noise of one kind, in the form that `forward` takes."""
    shape = (batch, channels) if kind == "global" else (batch, channels, ROWS, COLUMNS)
    return {kind: torch.randn(shape, generator=torch.Generator().manual_seed(2))}
