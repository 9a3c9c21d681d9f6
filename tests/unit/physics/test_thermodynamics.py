"""Tests of thermodynamic formulas against closed forms and published numbers."""

from __future__ import annotations

import numpy as np
import pytest

from credit.physics import thermodynamics
from tests.unit.data.hybrid_on_the_fly import G, R, levels

SURFACE = np.random.default_rng(1).uniform(6e4, 1.04e5, (5, 7))
LAPSE = 0.0065
ALPHA = R * LAPSE / G


def test_geopotential_of_an_isothermal_atmosphere() -> None:
    """phi = phi_s + R T ln(ps / p) is exact at the edges of layers.

    At levels it is approximate, because the formula has its own mean pressure of a layer.
    """
    hybrid_levels = levels(137)
    upper, lower = hybrid_levels.edge_pressures(SURFACE)
    ground = np.full(SURFACE.shape, 1234.5)
    at_levels, at_edges = thermodynamics.geopotential(np.full((137, 5, 7), 250.0), upper, lower, ground)
    np.testing.assert_allclose(at_edges, ground + R * 250.0 * np.log(SURFACE / lower), rtol=1e-9)
    np.testing.assert_allclose(
        at_levels[40:], ground + R * 250.0 * np.log(SURFACE / hybrid_levels.pressure(SURFACE)[40:]), atol=5.0
    )
    # The uppermost half level has the pressure 0, so alpha is ln 2.
    np.testing.assert_allclose(at_levels[0], at_edges[0] + R * 250.0 * np.log(2.0), rtol=1e-12)


def test_geopotential_of_two_layers() -> None:
    """The reference is the documented sum, written out for two layers."""
    t = np.array([220.0, 280.0])
    upper = np.array([0.0, 5e4])
    lower = np.array([5e4, 1e5])
    at_levels, at_edges = thermodynamics.geopotential(t[:, None], upper[:, None], lower[:, None], np.array([100.0]))
    lowest_level = 100.0 + R * 280.0 * (1.0 - 5e4 / 5e4 * np.log(2.0))
    edge = 100.0 + R * 280.0 * np.log(2.0)
    np.testing.assert_allclose(at_levels[:, 0], [edge + R * 220.0 * np.log(2.0), lowest_level], rtol=1e-12)
    np.testing.assert_allclose(at_edges[:, 0], [edge, 100.0], rtol=1e-12)


@pytest.mark.parametrize("height", [0.0, 80.0, 400.0, 1200.0])
def test_extrapolation_below_ground_has_the_standard_lapse_rate(height: float) -> None:
    """A hydrostatic column with the standard lapse rate has T ~ p^(R lapse / g). The series are of third order."""
    sea_level = 288.0
    ground_t = 288.0 - LAPSE * height
    surface = 101325.0 * (ground_t / sea_level) ** (1 / ALPHA)
    lowest = 0.998 * surface
    lowest_t = ground_t * (lowest / surface) ** ALPHA
    arguments = (np.array(surface), np.array(lowest_t), np.array(lowest), np.array(height * G))
    pressure = np.array([1.0, 1.005, 1.02, 1.05]) * surface
    exact_t = ground_t * (pressure / surface) ** ALPHA
    np.testing.assert_allclose(thermodynamics.extrapolate_temperature(pressure, *arguments), exact_t, rtol=2e-6)
    exact_z = height * G + (ground_t - exact_t) * G / LAPSE
    computed = thermodynamics.extrapolate_geopotential(pressure, *arguments)
    # For a surface at sea level, the formula has exactly the standard lapse rate.
    np.testing.assert_allclose(computed, exact_z, atol=0.3)
    # The tolerance is for Taylor's remainder and for the lapse rate between the lowest level and the ground.
    np.testing.assert_allclose(thermodynamics.sea_level_pressure(*arguments), 101325.0, atol=0.5)


def test_temperature_between_the_lowest_level_and_the_ground() -> None:
    surface = np.array(1e5)
    lowest = np.array(9.9e4)
    ground = thermodynamics.surface_temperature(np.array(280.0), lowest, surface)
    assert ground == pytest.approx(280.0 * (1 + ALPHA * (1e5 / 9.9e4 - 1)), rel=1e-9)
    pressure = np.array([9.9e4, 9.95e4, 1e5])
    computed = thermodynamics.extrapolate_temperature(pressure, surface, np.array(280.0), lowest, np.array(0.0))
    np.testing.assert_allclose(computed, [280.0, 0.5 * (280.0 + ground), ground], rtol=1e-9)


def test_extrapolation_below_high_and_hot_ground_is_moderated() -> None:
    """Below high ground, sea level is not warmer than 298 K. Sea level pressure uses moderated temperatures."""
    surface = np.array(6e4)
    lowest = np.array(5.99e4)
    at_sea = thermodynamics.extrapolate_temperature(
        np.array(9.5e4), surface, np.array(290.0), lowest, np.array(4000.0 * G)
    )
    assert 290.0 < at_sea < 298.0  # the standard lapse rate would add 26 K
    hot = thermodynamics.sea_level_pressure(surface, np.array(300.0), lowest, np.array(4000.0 * G))
    assert hot == pytest.approx(6e4 * np.exp(4000.0 * G / (R * 0.5 * (290.5 + 300.0))), rel=1e-4)


def test_saturation_pressure_equals_published_tables() -> None:
    """The tables are the Smithsonian Meteorological Tables (Goff and Gratch): water at 20, 0, -20 degC, ice at -40."""
    kelvin = np.array([293.15, 273.15, 253.15])
    np.testing.assert_allclose(thermodynamics.saturation_pressure_water(kelvin), [2337.3, 610.78, 125.4], rtol=5e-3)
    mixed = thermodynamics.saturation_pressure_mixed(np.array([293.15, 273.16, 233.15]))
    np.testing.assert_allclose(mixed, [2337.3, 611.2, 12.83], rtol=4e-3)
    between = thermodynamics.saturation_pressure_mixed(np.array([261.66]))
    assert 217.0 < between < 244.0  # 217 over ice, 244 over water at -11.5 degC


def test_relative_humidity_of_saturated_air() -> None:
    saturation = 2337.3
    pressure = 9e4
    ratio = 0.62198 * saturation / (pressure - saturation)
    computed = thermodynamics.relative_humidity(np.array(ratio / (1 + ratio)), np.array(pressure), np.array(saturation))
    assert computed == pytest.approx(100.0, rel=1e-4)
