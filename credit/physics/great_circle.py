"""Great-circle distance on the sphere."""

from __future__ import annotations

import numpy as np

from credit.physics.spherical_harmonics import EARTH_RADIUS_KM

METRES_PER_DEGREE = 1000.0 * EARTH_RADIUS_KM * np.pi / 180.0


def compute_great_circle_distance(
    lat_a: np.ndarray, lon_a: np.ndarray, lat_b: np.ndarray, lon_b: np.ndarray
) -> np.ndarray:
    """Return the great-circle distance between points a and b in degrees, computed with the haversine formula.

    The arguments must have shapes that broadcast.

    Args:
        lat_a: latitudes of the points a in degrees north.
        lon_a: longitudes of the points a in degrees east.
        lat_b: latitudes of the points b in degrees north.
        lon_b: longitudes of the points b in degrees east.
    """
    lat_a, lon_a, lat_b, lon_b = (np.deg2rad(angle) for angle in (lat_a, lon_a, lat_b, lon_b))
    haversine = np.sin((lat_b - lat_a) / 2) ** 2 + np.cos(lat_a) * np.cos(lat_b) * np.sin((lon_b - lon_a) / 2) ** 2
    return np.rad2deg(2 * np.arcsin(np.sqrt(np.clip(haversine, 0.0, 1.0))))
