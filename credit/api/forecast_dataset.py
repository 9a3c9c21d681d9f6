"""Builder of xarray datasets of forecasts with the same names, dimensions and attributes as forecast files.

Shape suffixes: T times, M members, C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from credit.api.datasets import decode_times
from credit.forecast.io.schema import (
    INITIAL_TIME,
    LATITUDE,
    LEAD_TIME,
    LONGITUDE,
    MEMBER,
    REALIZATION,
    VALID_TIME,
    ForecastSchema,
)
from credit.train.build.assets import ModelAssets


class ForecastDataset:
    """Builder of the xarray dataset of a forecast, which receives the fields lead time by lead time.

    Args:
        schema: variables, levels, members and grid of the forecast.
        initial_minutes: initial time in minutes.
        lead_minutes: lead times in minutes that the dataset contains.
    """

    def __init__(self, schema: ForecastSchema, initial_minutes: int, lead_minutes: Sequence[int]) -> None:
        self._schema = schema
        self._initial_minutes = initial_minutes
        self._lead_minutes = np.asarray(lead_minutes, dtype=np.int64)
        self._values = {}
        for variable in schema.variables:
            shape = (len(lead_minutes), *schema.shape(variable))
            self._values[variable.name] = np.empty(shape, dtype=np.float32)

    def set_fields(self, lead_index: int, fields_MCHW: np.ndarray) -> None:
        """Set the fields of one lead time.

        Args:
            lead_index: index of the lead time.
            fields_MCHW: fields of the members in physical units; M is 1 for a forecast without members.
        """
        schema = self._schema
        for variable in schema.variables:
            members = [schema.select(variable, fields_CHW) for fields_CHW in fields_MCHW]
            self._values[variable.name][lead_index] = members[0] if schema.members is None else np.stack(members)

    def build(self) -> xr.Dataset:
        """Return the dataset. It shares its arrays with this builder."""
        schema = self._schema
        leads = self._lead_minutes.astype("timedelta64[m]").astype("timedelta64[ns]")
        coordinates = {
            "time": ("time", decode_times(self._initial_minutes + self._lead_minutes, schema.calendar), VALID_TIME),
            "forecast_reference_time": (
                (),
                decode_times(np.array([self._initial_minutes]), schema.calendar)[0],
                INITIAL_TIME,
            ),
            "forecast_period": ("time", leads, LEAD_TIME),
            "latitude": ("latitude", schema.grid.lat, LATITUDE),
            "longitude": ("longitude", schema.grid.lon, LONGITUDE),
        }
        if schema.members is not None:
            coordinates[MEMBER] = (MEMBER, np.arange(schema.members), REALIZATION)
        for dim, levels in schema.levels.items():
            coordinates[dim] = (dim, np.asarray(levels, dtype=np.float64), schema.level_attributes(dim))
        variables = {}
        for variable in schema.variables:
            dims = schema.dims(variable, "time")
            variables[variable.name] = (dims, self._values[variable.name], variable.attributes)
        return xr.Dataset(variables, coordinates, schema.global_attributes)


def add_forcing(
    output: xr.Dataset, schema: ForecastSchema, assets: ModelAssets, forcing_TCHW: np.ndarray
) -> xr.Dataset:
    """Return the outputs of a model with the dynamic forcing from data as additional variables.

    Args:
        output: dataset of the outputs at T times.
        schema: description of the outputs.
        assets: assets of the model, which contain its channels.
        forcing_TCHW: dynamic forcing at the T times of `output`, in physical units.
    """
    # Name of a variable -> level -> index of the channel.
    channels: dict[str, dict[float | None, int]] = {}
    for index, channel in enumerate(assets.channels.group("dynamic_forcing")):
        if channel.source == "data":
            channels.setdefault(channel.variable, {})[channel.level] = index
    for name, levels in channels.items():
        attributes = {}
        for key in ("units", "standard_name", "long_name"):
            if assets.attributes.get(name, {}).get(key):
                attributes[key] = assets.attributes[name][key]
        if None in levels:
            output[name] = (("time", "latitude", "longitude"), forcing_TCHW[:, levels[None]], attributes)
            continue
        dim = f"level_{name}"
        output[name] = (("time", dim, "latitude", "longitude"), forcing_TCHW[:, list(levels.values())], attributes)
        output = output.assign_coords({dim: (dim, list(levels), schema.level_attributes(dim))})
    return output
