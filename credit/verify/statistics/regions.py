"""Area weights of the regions that are scored.

A region consists of one or more latitude-longitude boxes.

Shapes: R regions, H x W cells of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.config.sections.verification import REGIONS, RegionConfig, VerificationConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid

# Coordinates in files are often float32.
_TOLERANCE_DEGREES = 1e-3
# The only region of scores that are computed for the whole globe, such as spectra.
GLOBE = {"global": REGIONS["global"]}


def scored_regions(config: VerificationConfig) -> dict[str, tuple[RegionConfig, ...]]:
    """Return region name -> its latitude-longitude boxes.

    The named regions of ``verification.regions`` come first, then the regions of ``verification.boxes``.
    """
    regions = {name: REGIONS[name] for name in config.regions}
    for name, box in config.boxes.items():
        regions[name] = (box,)
    return regions


def region_weights(grid: LatLonGrid, regions: Mapping[str, Sequence[RegionConfig]]) -> np.ndarray:
    """Return the area weights of R regions, (R, H, W) float64; those of each region add up to 1.

    A cell belongs to a region if its centre lies in one of the boxes of the region. Other cells have the weight 0.

    Args:
        grid: grid of H x W cells.
        regions: region name -> boxes that make up the region.

    Raises:
        ConfigError: if a region has no cell on this grid.
    """
    area_HW = grid.area_weights()
    weights = []
    for name, boxes in regions.items():
        is_inside = np.any([_find_cells_in_box(grid, box) for box in boxes], axis=0)
        if not is_inside.any():
            raise ConfigError(
                f"verification: region {describe_regions({name: boxes})} has no cell on the grid of "
                f"{grid.shape[0]} x {grid.shape[1]} cells; leave it out, or make the box larger"
            )
        region_area = area_HW[is_inside].sum()
        weights.append(np.where(is_inside, area_HW, 0.0) / region_area)
    return np.stack(weights)


def _find_cells_in_box(grid: LatLonGrid, box: RegionConfig) -> np.ndarray:
    """Return a mask (H, W), True for cells whose centre lies in the box or on its edge."""
    south, north = box.lat
    west, east = box.lon
    rows = (grid.lat >= south - _TOLERANCE_DEGREES) & (grid.lat <= north + _TOLERANCE_DEGREES)
    # Longitudes count eastward from the western edge, so a box may cross the dateline.
    width = np.mod(east - west, 360.0)
    # The remainder of a box around the globe is 0, as if it were empty.
    if east - west == 360.0:
        width = 360.0
    # The tolerance moves the origin westward, so that a column on the western edge does not become 359.999 degrees.
    distance = np.mod(grid.lon - west + _TOLERANCE_DEGREES, 360.0)
    columns = distance <= width + 2 * _TOLERANCE_DEGREES
    return rows[:, None] & columns


def describe_regions(regions: Mapping[str, Sequence[RegionConfig]]) -> str:
    """Return the names and bounds of regions as text, in degrees north and degrees east.

    Args:
        regions: region name -> boxes that make up the region.
    """
    descriptions = []
    for name, boxes in regions.items():
        bounds = []
        for box in boxes:
            south, north = box.lat
            west, east = box.lon
            bounds.append(f"lat {south:g} to {north:g}, lon {west:g} to {east:g}")
        descriptions.append(f"{name}: {' and '.join(bounds)}")
    return "; ".join(descriptions)
