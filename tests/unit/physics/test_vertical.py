"""Tests of interpolation between hybrid and pressure levels, against closed forms and numpy column by column."""

from __future__ import annotations

import numpy as np
import pytest

from credit.errors import DataError
from credit.physics.vertical import HybridLevels, build_interpolator
from tests.unit.data.hybrid_on_the_fly import levels

SURFACE = np.random.default_rng(1).uniform(5.5e4, 1.04e5, (5, 7))
PRESSURES = HybridLevels.from_pressures([20, 30, 50, 100, 200, 300, 500, 700, 850, 925, 1000], 100.0)
HYBRID = levels(24)
FINER = levels(60)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (HYBRID, PRESSURES),
        (PRESSURES, HYBRID.select(range(6, 24))),
        (FINER, HYBRID),
        (HYBRID, FINER.select(range(9, 60))),
    ],
    ids=["to pressure", "to hybrid", "to fewer levels", "to more levels"],
)
def test_profile_linear_in_ln_p_is_exact(source: HybridLevels, target: HybridLevels) -> None:
    interpolator = build_interpolator(source, target, SURFACE)
    field = 3.0 - 7.0 * np.log(source.pressure(SURFACE))
    np.testing.assert_allclose(interpolator.pressure, target.pressure(SURFACE), rtol=1e-14)
    np.testing.assert_allclose(
        interpolator.interpolate_and_extrapolate(field), 3.0 - 7.0 * np.log(interpolator.pressure), rtol=1e-11
    )
    np.testing.assert_allclose(
        interpolator.interpolate_and_hold(field)[interpolator.is_below_source],
        np.broadcast_to(field[-1], interpolator.is_below_source.shape)[interpolator.is_below_source],
    )


@pytest.mark.parametrize(("source", "target"), [(HYBRID, PRESSURES), (PRESSURES, HYBRID.select(range(6, 24)))])
def test_interpolation_equals_numpy_column_by_column(source: HybridLevels, target: HybridLevels) -> None:
    field = np.random.default_rng(2).normal(size=(len(source), *SURFACE.shape))
    interpolated = build_interpolator(source, target, SURFACE).interpolate_and_hold(field)
    source_log_p = np.log(source.pressure(SURFACE))
    target_log_p = np.log(target.pressure(SURFACE))
    for i, j in np.ndindex(SURFACE.shape):
        np.testing.assert_allclose(
            interpolated[:, i, j], np.interp(target_log_p[:, i, j], source_log_p[:, i, j], field[:, i, j]), atol=1e-10
        )


def test_interpolation_to_the_same_levels_changes_nothing() -> None:
    field = np.random.default_rng(3).normal(size=(len(HYBRID), *SURFACE.shape))
    np.testing.assert_allclose(
        build_interpolator(HYBRID, HYBRID, SURFACE).interpolate_and_hold(field), field, atol=1e-10
    )


def test_hydrostatic_interpolation_is_exact_for_second_order() -> None:
    x = np.log(HYBRID.pressure(SURFACE))
    interpolator = build_interpolator(HYBRID, PRESSURES, SURFACE)
    interpolated = interpolator.interpolate_hydrostatic(2.0 + x - 3.0 * x**2, 1.0 - 6.0 * x)
    y = np.log(interpolator.pressure)
    above = ~interpolator.is_below_source
    np.testing.assert_allclose(interpolated[above], (2.0 + y - 3.0 * y**2)[above], rtol=1e-10)


def test_levels_above_the_source_are_refused() -> None:
    low = HYBRID.select(range(10, 24))
    with pytest.raises(DataError, match=r"level 20 \(20 hPa\) is above the uppermost level of the source"):
        build_interpolator(low, PRESSURES, SURFACE)
    with pytest.raises(DataError, match="level 1 "):
        build_interpolator(PRESSURES, HYBRID.select([0, 10]), SURFACE)


def test_missing_surface_pressure_gives_missing_values() -> None:
    surface = SURFACE.copy()
    surface[2, 3] = np.nan
    interpolated = build_interpolator(HYBRID, PRESSURES, surface).interpolate_and_hold(
        np.ones((len(HYBRID), *surface.shape))
    )
    assert np.isnan(interpolated[:, 2, 3]).all() and np.isnan(interpolated).sum() == len(PRESSURES)
