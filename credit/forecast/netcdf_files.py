"""Forecasts as CF netCDF, one file an initial time."""

from __future__ import annotations

import os
from pathlib import Path

import netCDF4
import numpy as np

from credit.errors import CreditError
from credit.forecast.layout import (
    HOURS,
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    VALID_TIME,
    WRITE_HINT,
    ForecastLayout,
    OutputVariable,
)

PREFIX = "forecast_"


def file_name(layout: ForecastLayout, initial_minutes: int) -> str:
    """Return for example ``forecast_2001-04-01T00.nc``; minutes are added where they are not 0."""
    date = layout.clock.datetime(initial_minutes)
    return date.strftime(f"{PREFIX}%Y-%m-%dT%H{'%M' if date.minute else ''}.nc")


class NetcdfFiles:
    """Writes forecasts of one layout into a folder; see `credit.forecast.writer.ForecastWriter`."""

    def __init__(self, folder: Path, layout: ForecastLayout) -> None:
        self._folder, self._layout = folder, layout
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CreditError(f"{folder}: cannot be made ({error.strerror}); choose another save_loc") from error

    def is_complete(self, initial_minutes: int) -> bool:
        """Return whether the file is there and of this layout; it got its name only when it was whole."""
        path = self._folder / file_name(self._layout, initial_minutes)
        if not path.exists():
            return False
        try:
            with netCDF4.Dataset(path) as dataset:
                return self._matches(dataset)
        except OSError:
            return False

    def _matches(self, dataset: netCDF4.Dataset) -> bool:
        layout = self._layout
        names = {variable.name for variable in layout.variables}
        fields = {name for name, variable in dataset.variables.items() if variable.dimensions[-1:] == ("longitude",)}
        if names != fields - {"longitude"} or "forecast_period" not in dataset.variables:
            return False
        same_leads = np.array_equal(dataset["forecast_period"][:], layout.lead_hours)
        stored = {name: dataset.getncattr(name) for name in dataset.ncattrs()}
        return same_leads and stored == layout.global_attributes

    def write(self, initial_minutes: int, fields: np.ndarray) -> Path:
        """Write beside, flush to the disk, then give the file its name."""
        path = self._folder / file_name(self._layout, initial_minutes)
        part = path.with_name(path.name + ".part")
        try:
            with netCDF4.Dataset(part, "w", format="NETCDF4") as dataset:
                _define_coordinates(dataset, self._layout, initial_minutes)
                for variable in self._layout.variables:
                    _write_variable(dataset, self._layout, variable, fields)
            with open(part, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(part, path)
        except (OSError, RuntimeError) as error:  # netCDF4 reports a full disk as RuntimeError("NetCDF: HDF error")
            part.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            raise CreditError(f"{path}: cannot be written ({reason}); {WRITE_HINT}") from error
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return path

    def close(self) -> None:
        """Every file is closed already."""


def _define_coordinates(dataset: netCDF4.Dataset, layout: ForecastLayout, initial_minutes: int) -> None:
    dataset.setncatts(layout.global_attributes)
    valid = initial_minutes + layout.lead_minutes
    dataset.createDimension("time", len(valid))
    dataset.createDimension("bnds", 2)
    time = layout.time_attributes()
    bounds = {"bounds": "time_bnds"} if layout.has_windows else {}
    _put(dataset, "time", "f8", ("time",), valid, {**VALID_TIME, **time, **bounds, "axis": "T"})
    if layout.has_windows:
        _put(dataset, "time_bnds", "f8", ("time", "bnds"), np.stack([valid - layout.step_minutes, valid], 1), {})
    _put(dataset, "forecast_reference_time", "f8", (), initial_minutes, {**INITIAL_TIME, **time})
    _put(dataset, "forecast_period", "f8", ("time",), layout.lead_hours, {**LEAD_TIME, "units": HOURS})
    for dim, values in layout.levels.items():
        dataset.createDimension(dim, len(values))
        _put(dataset, dim, "f8", (dim,), values, layout.level_attributes(dim))
    edges = layout.grid.lat_bounds
    dataset.createDimension("latitude", layout.grid.shape[0])
    dataset.createDimension("longitude", layout.grid.shape[1])
    _put(dataset, "latitude", "f8", ("latitude",), layout.grid.lat, {**LATITUDE, "bounds": "latitude_bnds"})
    _put(dataset, "latitude_bnds", "f8", ("latitude", "bnds"), np.stack([edges[:-1], edges[1:]], 1), {})
    _put(dataset, "longitude", "f8", ("longitude",), layout.grid.lon, LONGITUDE)


def _put(
    dataset: netCDF4.Dataset, name: str, kind: str, dims: tuple[str, ...], values: object, attributes: dict[str, str]
) -> None:
    variable = dataset.createVariable(name, kind, dims)
    variable.setncatts(attributes)
    variable[...] = values


def _write_variable(
    dataset: netCDF4.Dataset, layout: ForecastLayout, variable: OutputVariable, fields: np.ndarray
) -> None:
    dims = ("time", *((variable.level_dim,) if variable.level_dim else ()), "latitude", "longitude")
    target = dataset.createVariable(variable.name, "f4", dims, fill_value=netCDF4.default_fillvals["f4"])
    target.setncatts({**variable.attributes, "coordinates": "forecast_period forecast_reference_time"})
    values = layout.select(variable, fields)
    target[...] = np.ma.masked_where(np.isnan(values), values)
