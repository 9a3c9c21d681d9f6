"""Grid of a run or of its scores, from the config or from an example file."""

from __future__ import annotations

from credit.config.sections.source import GridConfig, SourceConfig
from credit.data.formats.cf import Coordinates
from credit.data.formats.files import expand_path, open_file
from credit.errors import DataError
from credit.grid import LatLonGrid


def load_grid(conf: GridConfig, key: str = "data.grid") -> LatLonGrid:
    """Return the grid that a section of the config describes.

    Args:
        conf: config section with ``like`` (path of a file on the grid), or with ``rows``, ``columns`` and ``poles``.
        key: config key of the section, for error messages.

    Raises:
        DataError: if the file of ``like`` does not have exactly one latitude and one longitude coordinate, or if its
            grid is not global.
    """
    if conf.like is None:
        return LatLonGrid.equiangular(conf.rows, conf.columns, conf.poles)
    # All files that match a pattern are assumed to have the same grid, so only the first file is read.
    path = expand_path(conf.like, f"{key}.like")[0]
    with open_file(path, SourceConfig(path=str(path))) as dataset:
        coordinates = Coordinates(dataset)
        # If the file has several grids, the choice is ambiguous.
        lat_dims = [dim for dim, (role, _) in coordinates.role_and_name_by_dim.items() if role == "lat"]
        lon_dims = [dim for dim, (role, _) in coordinates.role_and_name_by_dim.items() if role == "lon"]
        if len(lat_dims) != 1 or len(lon_dims) != 1:
            raise DataError(
                f"{key}.like: {path} has {len(lat_dims)} latitude and {len(lon_dims)} longitude coordinates, but "
                "exactly one of each is needed; name a different file, or set rows, columns and poles"
            )
        grid, _ = coordinates.build_grid(lat_dims[0], lon_dims[0], str(path))
        return grid
