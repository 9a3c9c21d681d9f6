"""Analytic cyclones on the sphere: pressure, wind and a warm core around a moving centre."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from credit.grid import LatLonGrid
from credit.physics.great_circle import compute_great_circle_distance


@dataclass(frozen=True)
class Vortex:
    """Cyclone that moves on a straight line in latitude and longitude.

    Attributes:
        lat: latitude at hour 0.
        lon: longitude at hour 0.
        lat_speed: degrees per hour northward.
        lon_speed: degrees per hour eastward.
        depth: depression of pressure in hPa.
        warm: additional thickness of the core in m; negative for a cold core.
        first: first hour at which it exists.
        last: last hour at which it exists.
        radius: size in degrees.
        sign: 1 for cyclonic, -1 for anticyclonic wind.
    """

    lat: float
    lon: float
    lat_speed: float = 0.0
    lon_speed: float = 0.0
    depth: float = 30.0
    warm: float = 60.0
    first: float = 0.0
    last: float = 1000.0
    radius: float = 2.5
    sign: float = 1.0

    def position(self, hour: float) -> tuple[float, float]:
        """Return latitude and longitude in degrees, 0 to 360."""
        return self.lat + self.lat_speed * hour, (self.lon + self.lon_speed * hour) % 360.0


def vortex_fields(grid: LatLonGrid, vortices: list[Vortex], hour: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Return fields (H, W): msl in Pa, u850 and v850, u10 and v10 in m s-1, z500 and z300 in m2 s-2.

    Around the vortices there is a zonal jet, a meridional gradient of pressure and thickness, and small-scale noise.
    """
    lat, lon = np.meshgrid(grid.lat, grid.lon, indexing="ij")
    noise = np.random.default_rng(seed).normal(size=(2, *grid.shape))
    pressure = 1012.0 - 8.0 * np.sin(np.deg2rad(2 * lat)) ** 2 + 2.0 * np.sin(np.deg2rad(3 * lon)) + 0.1 * noise[0]
    thickness = 3800.0 - 500.0 * np.sin(np.deg2rad(lat)) ** 2 + 0.3 * noise[1]
    eastward = 20.0 * np.cos(np.deg2rad(2 * lat)) ** 2
    northward = np.zeros_like(lat)
    for vortex in vortices:
        if not vortex.first <= hour <= vortex.last:
            continue
        centre_lat, centre_lon = vortex.position(hour)
        distance = compute_great_circle_distance(centre_lat, centre_lon, lat, lon)
        shape = np.exp(-0.5 * (distance / vortex.radius) ** 2)
        pressure = pressure - vortex.depth * shape
        thickness = thickness + vortex.warm * shape
        # Tangential wind with its maximum at the radius; anticlockwise in the Northern Hemisphere.
        tangential = vortex.sign * np.sign(centre_lat) * 40.0 * distance / vortex.radius * shape
        east = (lon - centre_lon + 180.0) % 360.0 - 180.0
        angle = np.arctan2(lat - centre_lat, east * np.cos(np.deg2rad(lat)))
        eastward = eastward - tangential * np.sin(angle)
        northward = northward + tangential * np.cos(angle)
    z500 = 9.80665 * (5600.0 - 300.0 * np.sin(np.deg2rad(lat)) ** 2)
    return {
        "msl": 100.0 * pressure, "u850": eastward, "v850": northward, "u10": 0.7 * eastward, "v10": 0.7 * northward,
        "z500": z500, "z300": z500 + 9.80665 * thickness,
    }  # fmt: skip
