"""The grid that a run, or its scores, are on: one that the config describes, or that of a file."""

from __future__ import annotations

from credit.config.schema_source import GridConfig, SourceConfig
from credit.data.formats.cf import Coordinates
from credit.data.formats.files import expand_path, open_file
from credit.errors import DataError
from credit.grid import LatLonGrid


def load_grid(conf: GridConfig, key: str = "data.grid") -> LatLonGrid:
    """Return the grid that `key` of the config describes.

    Raises:
        DataError: where the file of ``like`` does not have one latitude and one longitude of a global grid.
    """
    if conf.like is None:
        return LatLonGrid.equiangular(conf.rows, conf.columns, conf.poles)
    path = expand_path(conf.like, f"{key}.like")[0]
    with open_file(path, SourceConfig(path=str(path))) as dataset:
        coordinates = Coordinates(dataset)
        roles = {dim: role for dim, (role, _) in coordinates.of_dim.items()}
        lat, lon = ([dim for dim in roles if roles[dim] == role] for role in ("lat", "lon"))
        if len(lat) != 1 or len(lon) != 1:
            raise DataError(
                f"{key}.like: {path} has {len(lat)} latitude and {len(lon)} longitude coordinates, one of each is "
                "needed; name another file, or rows, columns and poles"
            )
        return coordinates.grid(lat[0], lon[0], str(path))[0]
