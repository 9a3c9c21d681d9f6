"""Reader of GRIB2 files of this package; it returns the same variable names and units as for netCDF files.

Shape suffixes: H latitude rows, W longitude columns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from credit.data.formats.grib.messages import read_values
from credit.forecast.io.grib.index import load_index


def open_grib_forecast(path: Path) -> tuple[dict[str, xr.Variable], dict[str, object]]:
    """Return the variables of a GRIB2 file by name, and its global attributes.

    The fields of a variable are read only when the variable is indexed.

    Args:
        path: path of the file; its index must be in the same folder.

    Raises:
        DataError: if the index is missing or damaged, or does not belong to the file.
    """
    index = load_index(path)
    variables = {}
    for name, coordinate in index.content["coordinates"].items():
        variables[name] = xr.Variable(coordinate["dims"], np.asarray(coordinate["values"]), coordinate["attributes"])
    grid_shape = (variables["latitude"].size, variables["longitude"].size)
    for name, field in index.content["fields"].items():
        leading_shape = [variables[dim].size for dim in field["dims"][:-2]]
        offsets = np.asarray(index.messages[name], dtype=np.int64).reshape(leading_shape)
        scale, offset = (field["grib"]["scale"], field["grib"]["offset"])
        fields = _Fields(path, offsets, grid_shape, scale, offset)
        variables[name] = xr.Variable(field["dims"], indexing.LazilyIndexedArray(fields), field["attributes"])
    return variables, index.attributes


class _Fields(BackendArray):
    """Fields of one variable in a GRIB2 file, read message by message and converted to the units of the variable.

    Args:
        path: path of the file.
        offsets: (time, [member,] [level]) offset of each message in bytes; -1 if there is no message.
        grid_shape: number of rows and columns, (H, W).
        scale: factor of the conversion: value in GRIB2 units = scale * value in the variable's units + offset.
        offset: offset of the conversion, in GRIB2 units.
    """

    def __init__(
        self, path: Path, offsets: np.ndarray, grid_shape: tuple[int, int], scale: float, offset: float
    ) -> None:
        self._path = path
        self._offsets = offsets
        self._scale = scale
        self._offset = offset
        self.shape = (*offsets.shape, *grid_shape)
        self.dtype = np.dtype(np.float32)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> np.ndarray:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.BASIC, self._read)

    def _read(self, key: tuple[int | slice, ...]) -> np.ndarray:
        """Return the selected values, float32 in the units of the variable, NaN where missing.

        Args:
            key: index or slice along each dimension.
        """
        num_leading = self._offsets.ndim
        offsets = np.asarray(self._offsets[key[:num_leading]])
        fields = np.full((offsets.size, *self.shape[-2:]), np.nan, dtype=np.float32)
        rows = np.flatnonzero(offsets >= 0)
        if len(rows):
            positions = [(int(offset), 0) for offset in offsets.ravel()[rows]]
            points = read_values(self._path, positions)
            values = (points.astype(np.float64) - self._offset) / self._scale
            fields[rows] = values.reshape(len(rows), *self.shape[-2:])
        return fields.reshape(*offsets.shape, *self.shape[-2:])[(..., *key[num_leading:])]
