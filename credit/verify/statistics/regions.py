"""Area weights of the regions for which scores are computed.

A region consists of one or more latitude-longitude boxes.

Shapes: R regions, H x W cells of the grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.config.sections.verification import REGIONS, RegionConfig, VerificationConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid

# Tolerance for cell centres on the edge of a box, because coordinates in files are often float32.
_TOLERANCE_DEGREES = 1e-3
# Regions of scores that are only computed for the globe, such as spectra.
GLOBE = {"global": REGIONS["global"]}


def scored_regions(config: VerificationConfig) -> dict[str, tuple[RegionConfig, ...]]:
    """Return name of each scored region -> latitude-longitude boxes that make up the region.

    The named regions of ``verification.regions`` come first, then the regions of ``verification.boxes``.
    """
    regions = {name: REGIONS[name] for name in config.regions}
    for name, box in config.boxes.items():
        regions[name] = (box,)
    return regions


def region_weights(grid: LatLonGrid, regions: Mapping[str, Sequence[RegionConfig]]) -> np.ndarray:
    """Return the area weights of the cells in R regions, (R, H, W) float64; the weights of a region add up to 1.

    A cell belongs to a region if its centre is inside a box of the region or on its edge. The weight of a cell outside
    the region is 0.

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
    """Return a mask (H, W), True for cells whose centre is inside the box or on its edge."""
    south, north = box.lat
    west, east = box.lon
    rows = (grid.lat >= south - _TOLERANCE_DEGREES) & (grid.lat <= north + _TOLERANCE_DEGREES)
    # Longitudes are measured eastward from the western edge, so a box may cross the dateline.
    width = np.mod(east - west, 360.0)
    # For a box around the globe, the remainder is 0 instead of 360.
    if east - west == 360.0:
        width = 360.0
    # The tolerance moves the origin westward, so that a column on the western edge is not at 359.999 degrees.
    distance = np.mod(grid.lon - west + _TOLERANCE_DEGREES, 360.0)
    columns = distance <= width + 2 * _TOLERANCE_DEGREES
    return rows[:, None] & columns


def describe_regions(regions: Mapping[str, Sequence[RegionConfig]]) -> str:
    """Return a string with the names and bounds of regions, in degrees north and degrees east.

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
