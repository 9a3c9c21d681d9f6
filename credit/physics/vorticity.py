"""Relative vorticity on a latitude-longitude grid."""

from __future__ import annotations

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.spherical_harmonics import EARTH_RADIUS_KM


def relative_vorticity(eastward: np.ndarray, northward: np.ndarray, grid: LatLonGrid) -> np.ndarray:
    """Return relative vorticity in s-1, computed with centred differences; NaN in rows on a pole.

    zeta = (dv/dlambda - d(u cos phi)/dphi) / (a cos phi), with the radius a of the Earth; J. R. Holton (2004), An
    Introduction to Dynamic Meteorology, section 4.2.

    Args:
        eastward: eastward wind in m s-1, (..., H, W).
        northward: northward wind in m s-1, (..., H, W).
        grid: the grid.
    """
    phi_H1 = np.deg2rad(grid.lat)[:, None]
    spacing = 2.0 * np.pi / len(grid.lon)
    dv_dlambda = (np.roll(northward, -1, axis=-1) - np.roll(northward, 1, axis=-1)) / (2.0 * spacing)
    du_dphi = np.gradient(eastward * np.cos(phi_H1), phi_H1[:, 0], axis=-2)
    cosine_H1 = np.cos(phi_H1)
    cosine_H1 = np.where(cosine_H1 > 1e-6, cosine_H1, np.nan)
    return (dv_dlambda - du_dphi) / (1000.0 * EARTH_RADIUS_KM * cosine_H1)
