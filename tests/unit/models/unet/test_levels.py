"""Levels, spherical convolutions, and messages about sizes that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.models.layers.sphere_conv import SphereConv2d
from credit.models.unet.blocks import choose_num_groups
from credit.models.unet.domain import plan_unet
from credit.models.unet.levels import find_levels
from credit.parallel.domain.split import plan_domain

from . import reference
from .small import build


def test_rows_beyond_a_pole_are_exact_where_the_level_has_them() -> None:
    """181 rows with poles: the last row lies on the pole in 181, 91 and 46 rows, and half a row from it in 23 rows."""
    grid = LatLonGrid.equiangular(181, 360, poles=True)
    levels = find_levels(grid, 4)
    assert [level.shape for level in levels] == [(181, 360), (91, 180), (46, 90), (23, 45)]
    assert [level.pole_skip for level in levels] == [(1, 1), (1, 1), (1, 1), (1, 0)]
    for number, level in enumerate(levels):
        lat = grid.lat[:: 2**number]
        assert len(lat) == level.shape[0]
        for row in (-1, len(lat)):
            assert reference.find_neighbour(lat, level.shape[1], row, 0)[2] < 1e-9


@pytest.mark.parametrize(("rows", "poles"), [(32, False), (33, False), (48, True), (721, True)])
def test_rows_beyond_a_pole_have_the_nearest_latitude(rows: int, poles: bool) -> None:
    grid = LatLonGrid.equiangular(rows, 64, poles)
    for number, level in enumerate(find_levels(grid, 5)):
        lat = grid.lat[:: 2**number]
        north = reference.find_neighbour(lat, 64, -1, 0)[0]
        south = reference.find_neighbour(lat, 64, len(lat), 0)[0]
        assert level.pole_skip == (north, len(lat) - 1 - south)


def test_a_pole_on_one_side_alone() -> None:
    lat = 90 - 0.5 * torch.arange(360, dtype=torch.float64).numpy()
    grid = LatLonGrid.from_coords(lat, torch.arange(720).double().numpy() / 2)[0]
    assert find_levels(grid, 2)[0].pole_skip == (1, 0)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("rows", "poles"), [(9, True), (8, True), (8, False)])
def test_convolution_on_the_sphere(rows: int, poles: bool, stride: int) -> None:
    grid = LatLonGrid.equiangular(rows, 12, poles)
    skip = find_levels(grid, 1)[0].pole_skip
    conv = SphereConv2d(3, 5, stride=stride, skip=skip, vector_channels=(0, 2)).double()
    x_BCHW = torch.randn(2, 3, rows, 12, dtype=torch.float64)
    state = {f"conv.{name}": value for name, value in conv.state_dict().items()}
    expected = reference.convolve(state, "conv", x_BCHW, grid.lat, stride, vector_channels=(0, 2))
    torch.testing.assert_close(conv(x_BCHW), expected, rtol=0, atol=1e-12)


def test_groups_of_the_norms() -> None:
    assert [choose_num_groups(channels) for channels in (1, 6, 8, 100, 144, 640)] == [1, 1, 2, 25, 24, 32]


@pytest.mark.parametrize(
    ("sizes", "settings", "message"),
    [
        ({}, {"depth": [1, 1]}, r"model\.depth: \[1, 1\] has 2 entries, .* 3 levels; .* for example \[1, 1, 1\]"),
        ({}, {"depth": [1, 0, 1]}, r"model\.depth: \[1, 0, 1\] must be 1 or more"),
        ({}, {"dim": [8, -1, 8]}, r"model\.dim: \[8, -1, 8\] must be 1 or more"),
        ({}, {"dim_head": 5}, r"model\.dim_head: 5 does not divide the 12 channels .* nearest divisor is 4"),
        ({}, {"attention_levels": 4}, r"model\.attention_levels: 4 is more than the 3 levels .* at most 3"),
        (
            {"image_width": 22},
            {},
            r"model\.dim: 3 levels need .* multiple of 4 columns and at least 5 rows; this grid has 27 rows and 22 "
            r"columns; give at most 2 entries",
        ),
        ({"image_height": 4}, {}, r"model\.dim: 3 levels .* 4 rows and 20 columns; give at most 2 entries"),
        ({"image_width": 21}, {}, r"which do not allow any number of levels; choose a different grid"),
    ],
)
def test_messages_name_a_value_that_works(sizes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(sizes, **settings)


def test_division_refuses_dropout_and_too_many_parts() -> None:
    with pytest.raises(ConfigError, match=r"the masks of torch's dropout would depend .*kind: dropout"):
        plan_domain(build(ff_dropout=0.1), 2)
    with pytest.raises(ConfigError, match="the 27 cells of the grid cannot be divided into 30 parts"):
        plan_unet(build(), (30, 1))
