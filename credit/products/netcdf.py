"""Writer of the CF netCDF file of a field product, lead time by lead time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import netCDF4
import numpy as np

from credit import __version__
from credit.errors import CreditError
from credit.forecast.io.files.names import FilePart
from credit.forecast.io.files.netcdf import MISSING_VALUE, define_coordinates
from credit.forecast.io.files.writer import LEADS, MEMBERS
from credit.forecast.io.schema import HISTORY, INITIAL_FIELDS, MEMBER, ForecastSchema
from credit.products.base import ProductCase, ProductOutput
from credit.products.description import FieldInfo, ForecastDescription
from credit.utils.temporary import temporary_path

_LEVEL_STANDARD_NAMES = {"hPa": "air_pressure", "Pa": "air_pressure", "model_level": "model_level_number"}
# Compression level of zlib. A low level is enough, because products are smooth or have few distinct values.
_COMPRESSION = 1


class FieldFile(ProductOutput):
    """Writer of the netCDF file of a field. The file gets its final name when all lead times are written.

    Args:
        name: name of the variable and of the file.
        info: description of the field.
        case: the forecast.
    """

    def __init__(self, name: str, info: FieldInfo, case: ProductCase) -> None:
        self._info = info
        self._case = case
        self._path = case.folder / f"{name}.nc"
        self._temporary_path = temporary_path(self._path)
        self._dataset: netCDF4.Dataset | None = None

    def add(self, lead_index: int) -> None:
        """Compute the field at a lead time and write it to the file."""
        fields_NHW = self._case.fields.read(self._info.name, lead_index)
        values = np.where(np.isnan(fields_NHW), MISSING_VALUE, fields_NHW)
        try:
            if self._dataset is None:
                self._create()
            variable = self._dataset[self._info.name]
            variable[lead_index] = values if self._info.dim else values[0]
        except (OSError, RuntimeError) as error:
            raise self._build_error(error) from error

    def finish(self) -> list[Path]:
        """Flush the file to disk, give it its final name, and return its path in a list."""
        try:
            self._dataset.close()
            with open(self._temporary_path, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(self._temporary_path, self._path)
        except (OSError, RuntimeError) as error:
            raise self._build_error(error) from error
        return [self._path]

    def discard(self) -> None:
        """Remove the incomplete file."""
        if self._dataset is not None and self._dataset.isopen():
            with suppress(OSError, RuntimeError):  # If the disk is full, closing fails too.
                self._dataset.close()
        with suppress(OSError):
            self._temporary_path.unlink(missing_ok=True)

    def _build_error(self, error: Exception) -> CreditError:
        reason = getattr(error, "strerror", None) or error
        return CreditError(f"{self._path}: cannot be written ({reason}); is the disk full or the folder read-only?")

    def _create(self) -> None:
        """Create the file under a temporary name, and define its coordinates and its variable."""
        info = self._info
        forecasts = self._case.forecasts
        self._dataset = netCDF4.Dataset(self._temporary_path, "w", format="NETCDF4")
        self._dataset.set_fill_off()
        self._dataset.setncatts(_build_global_attributes(info, self._case))
        schema = _build_coordinate_schema(info, forecasts)
        define_coordinates(
            self._dataset, schema, self._case.initial_minutes, FilePart(list(range(len(forecasts.lead_minutes))))
        )
        coordinates = ["forecast_period", "forecast_reference_time"]
        if info.windows:
            lengths = [info.windows[lead] for lead in forecasts.lead_minutes.tolist()]
            _write_time_bounds(self._dataset, lengths)
        if info.level is not None:
            attributes = schema.level_attributes("level")
            _write_scalar_coordinate(self._dataset, "level", info.level, attributes)
            coordinates.append("level")
        if info.height is not None:
            attributes = {"standard_name": "height", "units": "m", "positive": "up", "axis": "Z"}
            _write_scalar_coordinate(self._dataset, "height", info.height, attributes)
            coordinates.append("height")
        dims = ["time", "latitude", "longitude"]
        if info.dim is not None:
            dims.insert(1, info.dim)
        if info.dim not in (None, MEMBER):
            self._dataset.createDimension(info.dim, len(info.coordinate))
            quantile = self._dataset.createVariable(info.dim, "f8", (info.dim,))
            quantile.setncatts({"long_name": f"{info.dim} of the ensemble members", "units": "1"})
            quantile[:] = info.coordinate
        variable = self._dataset.createVariable(
            info.name,
            "f4",
            dims,
            fill_value=MISSING_VALUE,
            chunksizes=(*(1,) * (len(dims) - 2), *forecasts.grid.shape),
            compression="zlib",
            complevel=_COMPRESSION,
            shuffle=True,
        )
        attributes = {"standard_name": info.standard_name, "long_name": info.title, "units": info.units}
        attributes["cell_methods"] = _describe_cell_methods(info)
        attributes["coordinates"] = " ".join(coordinates)
        variable.setncatts({key: value for key, value in attributes.items() if value})


def _build_global_attributes(info: FieldInfo, case: ProductCase) -> dict[str, object]:
    """Return the global attributes of the file: the attributes of the forecast, the title and the history."""
    attributes = {**case.attributes, "Conventions": "CF-1.8", "title": info.title}
    # These attributes describe the forecast files: their lead times, members, and the checksum of the initial state.
    for name in (LEADS, MEMBERS, INITIAL_FIELDS):
        attributes.pop(name, None)
    attributes[HISTORY] = f"credit {__version__}: credit products"
    return attributes


def _build_coordinate_schema(info: FieldInfo, forecasts: ForecastDescription) -> ForecastSchema:
    """Return a schema without variables, from which the coordinates of the file are written.

    Forecasts of other programs may use a different spelling of hPa. Therefore, units of levels that this package does
    not know are treated as hPa.
    """
    return ForecastSchema(
        variables=(),
        levels={},
        level_units=forecasts.level_units if forecasts.level_units in _LEVEL_STANDARD_NAMES else "hPa",
        grid=forecasts.grid,
        calendar=forecasts.calendar,
        lead_minutes=forecasts.lead_minutes,
        members=len(info.coordinate) if info.dim == MEMBER else None,
        keep_bits=None,
        compression=_COMPRESSION,
        global_attributes={},
    )


def _write_time_bounds(dataset: netCDF4.Dataset, lengths: list[int]) -> None:
    """Write time bounds: each window ends at a valid time and has the given length in minutes."""
    dataset["time"].bounds = "time_bnds"
    bounds = dataset.createVariable("time_bnds", "f8", ("time", "bnds"))
    ends = dataset["time"][:]
    bounds[:] = np.stack([ends - np.array(lengths), ends], axis=1)


def _write_scalar_coordinate(dataset: netCDF4.Dataset, name: str, value: float, attributes: dict[str, str]) -> None:
    """Write a scalar coordinate with its attributes."""
    variable = dataset.createVariable(name, "f8", ())
    variable.setncatts(attributes)
    variable[...] = value


def _describe_cell_methods(info: FieldInfo) -> str:
    """Return the CF attribute ``cell_methods``; empty for instantaneous values without a statistic of the members."""
    methods = []
    # A probability is not a sum over time, even if the values of the members are sums.
    if info.windows and not info.is_probability:
        methods.append(f"time: {info.temporal}")
    if info.statistic:
        # CF requires the standard name `realization` here, because the field no longer has a dimension of members.
        methods.append(f"realization: {info.statistic}")
    return " ".join(methods)
