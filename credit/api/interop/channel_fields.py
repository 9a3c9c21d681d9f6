"""Conversion between arrays of channels and datasets of `credit.api.model.Model`, and names of channels.

Shape suffixes: T times, C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import xarray as xr

from credit.api.model import Model
from credit.api.variables import Variable
from credit.data.formats.units import is_same_unit
from credit.errors import ConfigError
from credit.interop.variable_names import find_variable_names

# A channel: a variable and a level of this variable (None for a variable without levels).
LeveledVariable = tuple[Variable, float | None]


def build_state(
    model: Model, channels: Sequence[LeveledVariable], fields_TCHW: np.ndarray, valid_times: np.ndarray
) -> xr.Dataset:
    """Return a dataset with fields at the input times, from which the model can make a forecast.

    Args:
        model: model that makes the forecast.
        channels: the C channels; for each variable, they must include all its levels in the order of the model.
        fields_TCHW: fields in the units of the model.
        valid_times: (T,) valid times as datetime64.
    """
    arrays: dict[str, list[np.ndarray]] = {}
    for index, (variable, _) in enumerate(channels):
        arrays.setdefault(variable.name, []).append(fields_TCHW[:, index])
    dataset = xr.Dataset(
        coords={
            "time": valid_times,
            "latitude": ("latitude", model.grid.lat, {"units": "degrees_north"}),
            "longitude": ("longitude", model.grid.lon, {"units": "degrees_east"}),
        }
    )
    level_attributes = {"axis": "Z", "positive": "down", "units": model.level_units}
    for variable in dict.fromkeys(variable for variable, _ in channels):
        fields = np.stack(arrays[variable.name], axis=1)
        attributes = {"units": variable.units} if variable.units else {}
        if not variable.levels:
            dataset[variable.name] = (("time", "latitude", "longitude"), fields[:, 0], attributes)
            continue
        # Variables may have different levels, so each one has a separate dimension.
        dim = f"level_{variable.name}"
        dataset = dataset.assign_coords({dim: (dim, list(variable.levels), level_attributes)})
        dataset[variable.name] = (("time", dim, "latitude", "longitude"), fields, attributes)
    return dataset


def read_channels(dataset: xr.Dataset, channels: Sequence[LeveledVariable]) -> np.ndarray:
    """Return the given channels of a dataset (forecast or state) as an array, (T, C, H, W) float32."""
    arrays = []
    for variable, level in channels:
        array = dataset[variable.name]
        if level is not None:
            # The dimensions are time, level, latitude and longitude.
            array = array.sel({array.dims[1]: level})
        arrays.append(array.values)
    return np.stack(arrays, axis=1)


def find_earth2studio_name(model: Model, variable: Variable, level: float | None, names: Mapping[str, str]) -> str:
    """Return the name of a channel in earth2studio, such as ``z500``.

    Args:
        model: model that contains the variable.
        variable: variable of the model.
        level: level of the variable; None for a variable without levels.
        names: name of a variable in the model -> its name in earth2studio without the level.

    Raises:
        ConfigError: if the variable is on model levels, has no known name in earth2studio, or has different units in
            earth2studio.
    """
    suffix = ""
    if level is not None:
        if model.level_units == "model_level":
            raise ConfigError(f"{variable.name}: is on model levels; earth2studio has variables on pressure levels")
        suffix = f"{level / 100 if model.level_units == 'Pa' else level:g}"
    if variable.name in names:
        return names[variable.name] + suffix
    names_of_variable = find_variable_names(variable.name, level is not None)
    if names_of_variable is None:
        raise ConfigError(f"{variable.name}: its name in earth2studio is not known; give the name in names")
    if not is_same_unit(variable.units, names_of_variable.units):
        raise ConfigError(
            f"{variable.name}: is in {variable.units or 'unknown units'} in {model.path}, and in "
            f"{names_of_variable.units} in earth2studio; give its name in names if another name has these units"
        )
    hours = model.time_step // np.timedelta64(1, "h")
    return names_of_variable.earth2studio.format(hours=int(hours)) + suffix
