"""Area weights of the regions that are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.config.schema_verification import REGIONS, RegionConfig, VerificationConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid

_TOLERANCE_DEGREES = 1e-3  # coordinates in files are often float32
GLOBE = {"global": REGIONS["global"]}


def scored_regions(conf: VerificationConfig) -> dict[str, tuple[RegionConfig, ...]]:
    """Return name -> boxes of ``verification.regions`` and ``verification.boxes``, in their order."""
    return {name: REGIONS[name] for name in conf.regions} | {name: (box,) for name, box in conf.boxes.items()}


def region_weights(grid: LatLonGrid, regions: Mapping[str, Sequence[RegionConfig]]) -> np.ndarray:
    """Return (R, H, W) area weights, float64, each region's summing to 1; a cell belongs by its centre.

    Raises:
        ConfigError: if a region has no cell on this grid.
    """
    area = grid.area_weights()
    weights = []
    for name, boxes in regions.items():
        inside = np.any([_is_inside(grid, box) for box in boxes], axis=0)
        if not inside.any():
            raise ConfigError(
                f"verification: region {describe_regions({name: boxes})} has no cell on the grid of "
                f"{grid.shape[0]} x {grid.shape[1]} cells; leave it out, or make the box larger"
            )
        weights.append(np.where(inside, area, 0.0) / area[inside].sum())
    return np.stack(weights)


def _is_inside(grid: LatLonGrid, box: RegionConfig) -> np.ndarray:
    """Return (H, W): whether a cell's centre lies in the box or on its edge."""
    (south, north), (west, east) = box.lat, box.lon
    rows = (grid.lat >= south - _TOLERANCE_DEGREES) & (grid.lat <= north + _TOLERANCE_DEGREES)
    width = 360.0 if east - west == 360.0 else np.mod(east - west, 360.0)
    columns = np.mod(grid.lon - west + _TOLERANCE_DEGREES, 360.0) <= width + 2 * _TOLERANCE_DEGREES
    return rows[:, None] & columns


def describe_regions(regions: Mapping[str, Sequence[RegionConfig]]) -> str:
    """Return the regions and their bounds in words."""
    return "; ".join(f"{name}: {' and '.join(map(_describe, boxes))}" for name, boxes in regions.items())


def _describe(box: RegionConfig) -> str:
    return f"lat {box.lat[0]:g} to {box.lat[1]:g}, lon {box.lon[0]:g} to {box.lon[1]:g}"
