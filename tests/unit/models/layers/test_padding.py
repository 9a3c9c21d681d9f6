"""Padding compared with analytic fields on the sphere, and automatic padding for the sizes that windows need."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from credit.errors import ConfigError
from credit.models.layers.padding import SpherePadding, auto_padding, window_multiple
from credit.models.padding.build import build_padding

from ..small import build

STRIDES = (2, 2, 2, 2)
WINDOWS = ((8, 4), (4, 4), (2, 4), (1, 4))
WIDTH = 12


def build_test_padding(
    height: int, pole_points: bool, vector_channels: tuple[int, ...] = (), **section: Any
) -> SpherePadding:
    return build_padding(
        section,
        grid=(height, WIDTH),
        strides=STRIDES,
        multiple=window_multiple(STRIDES, WINDOWS),
        vector_channels=vector_channels,
        pole_points=pole_points,
    )


def compute_latitudes(height: int, pole_points: bool, north: int = 0, south: int = 0) -> torch.Tensor:
    """Return latitudes in radians from north to south, continued by `north` and `south` rows beyond the poles."""
    step = math.pi / (height - 1 if pole_points else height)
    first = math.pi / 2 - (0 if pole_points else step / 2)
    return first - step * torch.arange(-north, height + south, dtype=torch.float64)


def compute_smooth_fields(lat: torch.Tensor, west: int = 0, east: int = 0) -> torch.Tensor:
    """Return a scalar and the eastward and northward components of a tangent vector field, (1, 3, 1, H, W).

    With x = cos(lat) cos(lon) and so on, the scalar is a polynomial in x, y, z. The vector is the gradient of x + y z.
    As functions of (lat, lon), all three are smooth across a pole if the latitude continues beyond 90 degrees.
    """
    lon = 2 * math.pi / WIDTH * torch.arange(-west, WIDTH + east, dtype=torch.float64)
    lat, lon = lat[:, None], lon[None, :]
    x, y, z = torch.cos(lat) * torch.cos(lon), torch.cos(lat) * torch.sin(lon), torch.sin(lat) + 0 * lon
    scalar = x + 0.5 * y * z + 0.3 * x * y + z**3
    eastward = -torch.sin(lon) + torch.sin(lat) * torch.cos(lon)
    northward = -torch.sin(lat) * torch.cos(lon) + torch.cos(2 * lat) * torch.sin(lon)
    return torch.stack((scalar, eastward, northward))[None, :, None]


@pytest.mark.parametrize("pole_points", [False, True])
def test_exact_poles_continue_scalars_and_vectors(pole_points: bool) -> None:
    padding = build_test_padding(9, pole_points, (1, 2), mode="earth", lat=[4, 3], lon=[2, 5], pole="exact")
    fields = compute_smooth_fields(compute_latitudes(9, pole_points))
    before = fields.clone()
    expected = compute_smooth_fields(compute_latitudes(9, pole_points, 4, 3), 2, 5)
    torch.testing.assert_close(padding.pad(fields), expected)
    assert torch.equal(fields, before)
    torch.testing.assert_close(padding.pad(fields)[..., 4:-3, 2:-5], fields, rtol=0, atol=0)


def test_published_earth_padding_is_exact_only_for_scalars_without_pole_rows() -> None:
    padding = build_test_padding(9, False, (1, 2), mode="earth", lat=[4, 3], lon=[0, 1])
    padded = padding.pad(compute_smooth_fields(compute_latitudes(9, False)))
    expected = compute_smooth_fields(compute_latitudes(9, False, 4, 3), 0, 1)
    torch.testing.assert_close(padded[:, :1], expected[:, :1])
    torch.testing.assert_close(padded[:, 1:, :, :4], -expected[:, 1:, :, :4])  # vectors keep their sign, as published


def test_published_earth_padding_repeats_a_pole_row() -> None:
    field = torch.arange(3.0)[:, None].expand(3, WIDTH)[None, None, None]
    padding = build_test_padding(3, True, mode="earth", lat=[2, 1], lon=[0, 0])
    assert padding.pad(field)[0, 0, 0, :, 0].tolist() == [1, 0, 0, 1, 2, 2]
    exact = build_test_padding(3, True, mode="earth", lat=[2, 1], lon=[0, 0], pole="exact")
    assert exact.pad(field)[0, 0, 0, :, 0].tolist() == [2, 1, 0, 1, 2, 1]


def test_mirror_reflects_latitude_in_place_and_wraps_longitude() -> None:
    field = (10 * torch.arange(4.0)[:, None] + torch.arange(3.0))[None, None, None]
    padded = SpherePadding("mirror", (2, 1), (1, 0), 1, ()).pad(field)
    assert padded[0, 0, 0, :, 1].tolist() == [20, 10, 0, 10, 20, 30, 20]
    assert padded[0, 0, 0, 2].tolist() == [2, 0, 1, 2]


def test_a_side_without_padding_stays_as_it_is() -> None:
    field = torch.randn(1, 1, 1, 6, WIDTH)
    for mode in ("earth", "mirror"):
        padded = build_test_padding(6, False, mode=mode, lat=[2, 0], lon=[0, 3]).pad(field)
        assert padded.shape[-2:] == (8, WIDTH + 3)
        assert torch.equal(padded[..., 2:, :WIDTH], field)


def test_gradients_reach_vector_rows_with_their_sign() -> None:
    padding = build_test_padding(6, False, (0,), mode="earth", lat=[1, 0], lon=[0, 0], pole="exact")
    field = torch.randn(1, 1, 1, 6, WIDTH, requires_grad=True)
    padding.pad(field)[..., 0, 0].sum().backward()
    expected = torch.zeros(6, WIDTH)
    expected[0, WIDTH // 2] = -1
    torch.testing.assert_close(field.grad[0, 0, 0], expected)


@pytest.mark.parametrize(
    ("size", "strides", "windows", "expected"),
    [
        # The rule gives the paddings of the starter config and of the published models.
        (181, STRIDES, WINDOWS, (37, 38)),
        (360, STRIDES, WINDOWS, (12, 12)),
        (640, STRIDES, ((10, 10), (5, 10), (2, 10), (1, 10)), (80, 80)),
        (1280, STRIDES, ((10, 10), (5, 10), (2, 10), (1, 10)), (80, 80)),
        (64, STRIDES, ((2, 2), (2, 2), (2, 2), (1, 2)), (16, 16)),
    ],
)
def test_automatic_pads(size: int, strides: tuple, windows: tuple, expected: tuple[int, int]) -> None:
    multiple = window_multiple(strides, windows)
    assert auto_padding(size, multiple, strides) == expected
    for i, (long, short) in enumerate(windows):
        cells = (size + sum(expected)) // 2 ** (i + 1)
        assert cells % long == cells % short == 0


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"latitude": [1, 1]}, r"model\.padding\.latitude: unknown key"),
        ({"mode": "earht"}, r'model\.padding\.mode: \'earht\'.*did you mean "earth"'),
        ({"lat": [1]}, r"model\.padding\.lat: \[1\] must be `auto` or two numbers"),
        ({"lat": [1, -1]}, r"model\.padding\.lat: \[1, -1\] must be whole numbers of cells, 0 or more"),
        ({"lat": [9, 0]}, r"model\.padding\.lat: \[9, 0\] exceeds the 8 cells"),
        ({"lat": [8, 0], "mode": "mirror"}, r"model\.padding\.lat: \[8, 0\] exceeds the 7 cells"),
        ({"lat": [1, 1], "mode": "mirror", "pole": "exact"}, r"model\.padding\.pole: exact needs .*mode: earth"),
    ],
)
def test_errors_say_what_to_do(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_test_padding(8, False, **{"lat": [0, 0], "lon": [0, 0], **section})


def test_an_odd_number_of_longitudes_has_no_opposite_meridian() -> None:
    with pytest.raises(ConfigError, match="even number of longitudes, the grid has 15"):
        build_padding({"lat": [1, 1]}, grid=(8, 15), strides=STRIDES, multiple=1, vector_channels=(), pole_points=False)


def test_vectors_of_all_frames_change_sign_at_a_pole() -> None:
    options = {"mode": "earth", "lat": [4, 4], "lon": [4, 4], "pole": "exact"}
    model = build(frames=2, image_height=24, image_width=24, padding=options, vector_channels=[1])
    single_frame_model = build(frames=1, image_height=24, image_width=24, padding=options, vector_channels=[1])
    x_BCTHW = torch.randn(1, *model.spec.in_shape)
    expected = torch.stack([single_frame_model.padding.pad(x_BCTHW[:, :, frame]) for frame in range(2)], dim=2)
    assert torch.equal(model.padding.pad(x_BCTHW.flatten(1, 2)), expected.flatten(1, 2))
