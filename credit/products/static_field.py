"""Reader of a field without a time, such as the land fraction or the height of the surface, from a netCDF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr

from credit.errors import DataError
from credit.grid import LatLonGrid


def read_static_field(
    path: Path, standard_names: Sequence[str], grid: LatLonGrid, key: str
) -> tuple[np.ndarray, dict[str, str]]:
    """Return the first field of a file that has one of the standard names and no dimensions but latitude and longitude.

    Dimensions of length 1 are removed.

    Args:
        path: path of the netCDF file.
        standard_names: accepted values of the CF attribute ``standard_name``.
        grid: grid of H x W cells that the field must have.
        key: config key that contains the path, for messages.

    Returns:
        The field (H, W) in the order of the grid and in the units of the file, and its attributes.

    Raises:
        DataError: if the file cannot be read, has no such field, or has a different grid.
    """
    try:
        dataset = xr.open_dataset(path, decode_times=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {path} cannot be read ({error}); give a netCDF file") from error
    with dataset:
        for variable in dataset.data_vars.values():
            if variable.attrs.get("standard_name") not in standard_names:
                continue
            field = variable.squeeze()
            dims = {str(field[dim].attrs.get("standard_name", dim)): dim for dim in field.dims}
            if set(dims) != {"latitude", "longitude"}:
                continue
            field = field.transpose(dims["latitude"], dims["longitude"])
            lat, lon = (field[dims[name]].values for name in ("latitude", "longitude"))
            file_grid, order = LatLonGrid.from_coords(lat, lon, origin=str(path))
            mismatch = file_grid.describe_mismatch(grid)
            if mismatch:
                raise DataError(f"{key}: {path} {mismatch}; it must be on the grid of the forecasts")
            return order.apply(field.values), dict(field.attrs)
    raise DataError(
        f"{key}: {path} has no field with the standard name {' or '.join(standard_names)} whose dimensions are "
        "latitude and longitude"
    )
