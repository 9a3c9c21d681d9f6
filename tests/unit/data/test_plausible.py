"""Units that cannot be right are named, and those that can are left alone."""

from __future__ import annotations

import numpy as np
import pytest

from credit.channels import Channel
from credit.data.plausible import find_contradictions


def look(name: str, units: str, mean: float, level: float | None = None, standard_name: str = "") -> list[str]:
    """Return what is said of a field of this mean."""
    fields = np.array([[[mean - 1, mean + 1], [mean, np.nan]]], dtype=np.float32)
    attributes = {name: {"units": units, "standard_name": standard_name}}
    return find_contradictions(fields, [Channel(name, name, level, "prognostic")], attributes, "hPa", "2000-01-01")


@pytest.mark.parametrize(
    ("name", "units", "mean", "level", "standard_name"),
    [
        ("t", "K", 255.0, 500, ""),
        ("t", "kelvin", 200.0, 50, ""),
        ("t2m", "degC", 14.0, None, ""),
        ("tas", "degrees_Celsius", -40.0, None, "air_temperature"),
        ("msl", "hPa", 1013.0, None, ""),
        ("sp", "Pa", 98000.0, None, ""),
        ("q", "kg/kg", 1e-6, 10, ""),
        ("q", "g kg**-1", 8.0, 1000, ""),
        ("z", "m**2 s**-2", 54000.0, 500, ""),
        ("z", "m2 s-2", 300000.0, 10, ""),
        ("z", "m2 s-2", 900.0, 1000, ""),
        ("hgt", "gpm", 5500.0, 500, "geopotential_height"),
        ("u10", "m s-1", -0.3, None, ""),
        # not known: units, quantity
        ("t2m", "furlong", 3.0, None, ""),
        ("tp", "K", 3.0, None, ""),
        ("z", "", 3.0, 500, ""),
    ],
)
def test_what_can_be_right(name: str, units: str, mean: float, level: float | None, standard_name: str) -> None:
    assert look(name, units, mean, level, standard_name) == []


@pytest.mark.parametrize(
    ("name", "units", "mean", "level", "standard_name"),
    [
        ("t", "K", -20.0, 500, ""),
        ("t2m", "degC", 287.0, None, ""),
        ("msl", "Pa", 1013.0, None, ""),
        ("msl", "hPa", 101300.0, None, ""),
        ("sp", "K", 98000.0, None, ""),
        ("q", "kg kg-1", 5.0, 1000, ""),
        ("z", "m2 s-2", 5500.0, 500, ""),
        ("hgt", "m", 54000.0, 500, "geopotential_height"),
        ("z", "m", 5500.0, 500, ""),
        ("temperature", "Pa", 250.0, 500, "air_temperature"),
    ],
)
def test_what_cannot(name: str, units: str, mean: float, level: float | None, standard_name: str) -> None:
    (message,) = look(name, units, mean, level, standard_name)
    assert message.startswith(name) and f'"{units}"' in message
