"""Correction of station values for the difference between the height of the station and the height of the model.

The surface of the model is smoother than the real surface. Temperature decreases with height, so a station in a valley
is warmer than the model, and a station on a mountain is colder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from credit.data.formats.units import find_conversion
from credit.errors import ConfigError, DataError
from credit.grid import LatLonGrid
from credit.physics.thermodynamics import GRAVITY
from credit.products.description import FieldInfo
from credit.products.points.interpolation import PointInterpolator
from credit.products.points.stations import Station
from credit.products.section import HeightCorrection
from credit.products.static_field import read_static_field

_ALTITUDE = "surface_altitude"
_GEOPOTENTIAL = ("surface_geopotential", "geopotential")


def read_surface_height(path: Path, grid: LatLonGrid, key: str) -> np.ndarray:
    """Return the height of the surface in a netCDF file, (H, W) in m.

    Args:
        path: path of the file.
        grid: grid of the forecasts.
        key: config key that contains the path, for messages.

    Raises:
        DataError: if the file cannot be read, has no height and no geopotential of the surface, has a different grid,
            or has units that are not those of a height or of a geopotential.
    """
    field_HW, attributes = read_static_field(path, (_ALTITUDE, *_GEOPOTENTIAL), grid, key)
    standard_name = attributes["standard_name"]
    units = "m" if standard_name == _ALTITUDE else "m2 s-2"
    conversion = find_conversion(attributes.get("units", ""), units, standard_name, str(path), key)
    if conversion is not None:
        field_HW = conversion.apply(field_HW)
    height_HW = field_HW.astype(np.float64)
    return height_HW if standard_name == _ALTITUDE else height_HW / GRAVITY


def compute_corrections(
    section: HeightCorrection,
    infos: Sequence[FieldInfo],
    stations: Sequence[Station],
    interpolator: PointInterpolator,
    height_HW: np.ndarray,
    key: str,
) -> dict[str, np.ndarray]:
    """Return the corrections of the fields, name -> (S,) in the units of the field; they are added to the values.

    Args:
        section: config section of the correction.
        infos: descriptions of the fields of the product.
        stations: the S stations, all with an elevation.
        interpolator: interpolator from the grid of the forecasts to the stations.
        height_HW: height of the model's surface in m, NaN where missing.
        key: config key of the section, for messages.

    Raises:
        ConfigError: if a corrected field is not a field of the product, or is a spread or a probability.
        DataError: if the height of the model is missing at a station.
    """
    info_by_name = {info.name: info for info in infos}
    elevation_S = np.array([station.elevation for station in stations])
    model_height_S = interpolator.apply(height_HW[None])[0]
    for station, model_height in zip(stations, model_height_S, strict=True):
        if np.isnan(model_height):
            raise DataError(
                f"{key}.orography: {section.orography} has no height at the station {station.name} "
                f"({station.latitude:g}, {station.longitude:g}); give a file without missing values there, or remove "
                "the station"
            )
    height_difference_S = model_height_S - elevation_S
    corrections = {}
    for name, lapse_rate in section.lapse_rates.items():
        info = info_by_name.get(name)
        if info is None:
            raise ConfigError(f"{key}.lapse_rates: {name} is not in the key `of` of this product; add it there")
        if info.is_probability or info.statistic == "standard_deviation":
            raise ConfigError(
                f"{key}.lapse_rates: {name} is a probability or a spread, which does not depend on the height of the "
                "station in this way; remove it"
            )
        corrections[name] = lapse_rate / 1000.0 * height_difference_S
    return corrections
