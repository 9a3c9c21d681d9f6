"""Hyperdiffusion: single waves against the closed form, poles, vectors, masks, and conservation of the mean."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from credit.channels import Channel, ChannelMap
from credit.errors import ConfigError
from credit.forecast.postprocess.hyperdiffusion import Hyperdiffusion, WaveFilter
from credit.forecast.postprocess.section import HyperdiffusionSection
from credit.grid import LatLonGrid

ROWS, COLUMNS = 32, 64


def build_grid(rows: int = ROWS, columns: int = COLUMNS, pole_points: bool = False) -> LatLonGrid:
    edges = np.linspace(90, -90, rows) if pole_points else 90 - (np.arange(rows) + 0.5) * 180 / rows
    return LatLonGrid.from_coords(edges, np.arange(columns) * 360 / columns)[0]


def build_filter(grid: LatLonGrid, channels: int = 1, vector: bool = False, hours: int = 6) -> WaveFilter:
    flags = torch.full((channels,), vector)
    return WaveFilter(grid, 360, hours * 60, 8, flags, torch.ones(channels, dtype=torch.bool))


def compute_coordinates(grid: LatLonGrid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latitude (H, 1) and longitude (1, W) in radians, float64."""
    return torch.deg2rad(torch.from_numpy(grid.lat))[:, None], torch.deg2rad(torch.from_numpy(grid.lon))[None]


@pytest.mark.parametrize("wave", [1, 5, 20, 32])
def test_a_zonal_wave_decays_by_its_length_in_kilometres(wave: int) -> None:
    """At latitude `lat` the wavelength is cos(lat) times that at the equator. Wave 1 is not damped."""
    grid = build_grid()
    lat, lon = compute_coordinates(grid)
    field = torch.cos(wave * lon).expand(ROWS, COLUMNS)
    # Rows near the poles are left out: an odd wave with the same amplitude in every row is discontinuous there.
    middle = slice(ROWS // 2 - 3, ROWS // 2 + 3)
    damped = build_filter(grid)(field[None, None].float())[0, 0, middle]
    expected = torch.exp(-((wave / (COLUMNS / 2 * torch.cos(lat))) ** 8)) if wave > 1 else torch.ones_like(lat)
    ratio = (damped * field[middle]).sum(1) / field[middle].square().sum(1)
    torch.testing.assert_close(ratio.double(), expected[middle, 0], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("pole_points", [False, True])
@pytest.mark.parametrize("wave", [2, 10, 24])
def test_a_meridional_wave_decays_by_the_closed_form(wave: int, pole_points: bool) -> None:
    """Even waves of the colatitude are equal on both sides of a pole and do not depend on longitude."""
    grid = build_grid(ROWS + pole_points, COLUMNS, pole_points)
    lat, _ = compute_coordinates(grid)
    field = torch.cos(wave * (math.pi / 2 - lat)).expand(-1, COLUMNS)
    damped = build_filter(grid, hours=3)(field[None, None].float())[0, 0]
    expected = field * math.exp(-2 * (wave / ROWS) ** 8)
    torch.testing.assert_close(damped.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("pole_points", [False, True])
def test_a_uniform_wind_across_the_pole_stays(pole_points: bool) -> None:
    """The components of the wind rotate with longitude. It is smooth across the pole only as a vector field."""
    grid = build_grid(ROWS + pole_points, COLUMNS, pole_points)
    lat, lon = compute_coordinates(grid)
    # This is the wind of a solid rotation about an axis in the plane of the equator: u eastward, v northward.
    u, v = -torch.sin(lat) * torch.cos(lon), torch.sin(lon).expand(len(grid.lat), -1)
    fields = torch.stack([u, v])[None].float()
    as_vector = (build_filter(grid, 2, vector=True)(fields) - fields).abs().max()
    as_scalar = (build_filter(grid, 2, vector=False)(fields) - fields).abs().max()
    assert as_vector < 1e-5 < 1e-2 < as_scalar


def test_noise_next_to_the_pole_goes_and_large_scales_stay() -> None:
    grid = build_grid()
    lat, lon = compute_coordinates(grid)
    smooth = (torch.sin(lat) + torch.cos(lat) ** 3 * torch.cos(3 * lon)).float()
    noise = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    damped = build_filter(grid)(torch.stack([smooth, noise])[:, None])[:, 0]
    assert (damped[0] - smooth).abs().max() < 1e-3
    assert damped[1, 0].var() < 0.1 < 0.5 < damped[1, ROWS // 2].var() < 1.0


def test_masked_channels_are_unchanged_and_gradients_flow() -> None:
    flags = torch.zeros(2, dtype=torch.bool)
    wave_filter = WaveFilter(build_grid(), 360, 360, 8, flags, torch.tensor([True, False]))
    x = torch.randn(1, 2, ROWS, COLUMNS, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = wave_filter(x)
    assert torch.equal(out[:, 1], x[:, 1]) and not torch.equal(out[:, 0], x[:, 0])
    out.sum().backward()
    # Damping keeps the mean of a field along each great circle.
    assert x.grad[0, 1].eq(1).all() and x.grad[0, 0].mean() == pytest.approx(1.0, abs=0.01)


def test_an_odd_number_of_columns_is_refused() -> None:
    channels = ChannelMap([Channel("t2m", "t2m", None, "prognostic")])
    context = SimpleNamespace(grid=build_grid(columns=63), channels=channels, key="model.postprocess.0")
    with pytest.raises(ConfigError, match=r"model\.postprocess\.0: .* an even number of columns, not 63"):
        Hyperdiffusion(context, HyperdiffusionSection())
