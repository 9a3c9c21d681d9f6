"""Fields of a step in SI units, and lookup of the channels and units of the variables of a budget.

Shape suffixes: B batch, C channels, K layers (1 for a variable without levels), H latitude rows, W longitude columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from credit.data.formats.units import normalise_units
from credit.data.normalize import Normalizer
from credit.errors import ConfigError
from credit.forecast.postprocess.base import PostprocessContext
from credit.physics.thermodynamics import GRAVITY

# Quantity -> unit -> factor that converts values in this unit to SI units.
_SI_FACTORS = {
    "pressure": {"Pa": 1.0, "hPa": 100.0},
    "mass fraction of water": {"kg kg-1": 1.0, "1": 1.0, "g kg-1": 1e-3},
    "temperature": {"K": 1.0},
    "wind": {"m s-1": 1.0},
    "geopotential or height of the surface": {"m2 s-2": 1.0, "m": GRAVITY},
}
# Kind of flux -> temporal meaning -> unit -> factor to SI units: kg m-2 or J m-2 for a sum, kg m-2 s-1 or J m-2 s-1 for
# a mean, which is then multiplied by the length of the step in seconds.
_FLUX_FACTORS = {
    "water": {
        "accumulate": {"kg m-2": 1.0, "mm": 1.0, "m": 1000.0},
        "mean": {
            "kg m-2 s-1": 1.0,
            "mm s-1": 1.0,
            "m s-1": 1000.0,
            "mm h-1": 1 / 3600,
            "mm hr-1": 1 / 3600,
            "mm day-1": 1 / 86400,
            "mm d-1": 1 / 86400,
            "kg m-2 day-1": 1 / 86400,
        },
    },
    "energy": {"accumulate": {"J m-2": 1.0}, "mean": {"W m-2": 1.0, "J m-2 s-1": 1.0}},
}
_SOLAR_RADIATION = "toa_incident_solar_radiation"


@dataclass(frozen=True)
class ChannelSlice:
    """Position of a variable among the channels, and its conversion to SI units.

    Attributes:
        group: group of channels: ``output``, in which prognostic channels come first, or ``dynamic_forcing``.
        rows: indices of the variable's channels in the group, adjacent, in the order of the run's levels.
        factor: factor that converts the field to SI units. For a flux, the product is the amount per step in kg m-2 or
            J m-2, with the sign convention of the budget.
    """

    group: str
    rows: tuple[int, ...]
    factor: float = 1.0

    def __post_init__(self) -> None:
        # Adjacent channels are a slice of the tensor, so no index array must be copied to the device.
        assert self.rows == tuple(range(self.rows[0], self.rows[-1] + 1)), "channels of a variable are adjacent"


class StepFields:
    """Fields before and after a step in SI units, float64. Each field is converted to SI units at its first use.

    Args:
        normalizer: conversion between physical units and normalised space.
        output_BCHW: normalised output of the step.
        previous_BCHW: normalised prognostic channels of the last input frame.
        forcing_BCHW: normalised dynamic forcing of the last input frame.

    Attributes:
        output_BCHW: normalised output, including all corrections that were made with `correct`.
    """

    def __init__(
        self, normalizer: Normalizer, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor
    ) -> None:
        self._normalizer = normalizer
        self._previous_BCHW = previous_BCHW
        self._forcing_BCHW = forcing_BCHW
        self.output_BCHW = output_BCHW
        self._decoded: dict[tuple[str, ChannelSlice], Tensor] = {}

    def before(self, variable: ChannelSlice) -> Tensor:
        """Return a prognostic variable before the step (last input frame), (B, K, H, W) float64 in SI units."""
        return self._decode("prognostic", variable, self._previous_BCHW)

    def after(self, variable: ChannelSlice) -> Tensor:
        """Return a predicted variable after the step, or a forcing of the step, (B, K, H, W) float64 in SI units."""
        fields_BCHW = self._forcing_BCHW
        if variable.group == "output":
            fields_BCHW = self.output_BCHW
        return self._decode(variable.group, variable, fields_BCHW)

    def correct(self, variable: ChannelSlice, values_BKHW: Tensor) -> None:
        """Replace the values of a predicted variable in `output_BCHW`.

        Args:
            variable: variable of the group ``output``.
            values_BKHW: new values in SI units.
        """
        encoded = self._normalizer.encode_channels(values_BKHW / variable.factor, "output", variable.rows)
        # Create a new tensor instead of a change in place, so that the step can be differentiated.
        start = variable.rows[0]
        stop = variable.rows[-1] + 1
        self.output_BCHW = self.output_BCHW.slice_scatter(encoded, dim=1, start=start, end=stop)
        # Later reads decode the corrected output, with the rounding of float32.
        self._decoded.pop(("output", variable), None)

    def _decode(self, group: str, variable: ChannelSlice, fields_BCHW: Tensor) -> Tensor:
        """Return a variable in SI units, (B, K, H, W) float64; a decoded variable is cached.

        Args:
            group: group of the channels of `fields_BCHW`.
            variable: the variable.
            fields_BCHW: normalised fields of the group.
        """
        key = (group, variable)
        if key not in self._decoded:
            physical_BKHW = self._normalizer.decode_channels(fields_BCHW, group, variable.rows)
            self._decoded[key] = physical_BKHW * variable.factor
        return self._decoded[key]


class ChannelFinder:
    """Lookup of the channels and units of the variables that an entry of ``model.postprocess`` names.

    In all methods, `key` is the key of the entry that contains the name of the variable, such as ``specific_humidity``.

    Args:
        context: context of the entry's post-process.
    """

    def __init__(self, context: PostprocessContext) -> None:
        self._context = context

    def find_field_channels(self, key: str, name: str, quantity: str) -> ChannelSlice:
        """Return the channels of a prognostic variable, which must be on all levels of the run or have no levels.

        Args:
            key: key of the entry that names the variable.
            name: name of the variable.
            quantity: physical quantity, such as ``pressure`` or ``temperature``, which determines the allowed units.

        Raises:
            ConfigError: if the variable has only some of the levels, units that are not allowed, or missing cells.
        """
        context = self._context
        output = context.channels.output
        rows = tuple(index for index, channel in enumerate(output) if channel.variable == name)
        levels = tuple(output[index].level for index in rows)
        # A variable without levels has a single channel, whose level is None.
        if levels != (None,) and levels != context.layers.levels:
            raise ConfigError(
                f"{context.key}.{key}: {name} has its levels from data.variable_options.{name}.levels, but a budget "
                f"needs the variable on all of data.levels; remove data.variable_options.{name}.levels"
            )
        self._require_unmasked(key, name)
        factor = self._find_factor(key, name, _SI_FACTORS[quantity], quantity)
        return ChannelSlice("output", rows, factor)

    def find_flux_channel(self, key: str, name: str, kind: str, sign: float) -> ChannelSlice:
        """Return the channel of a flux, with the factor that gives the amount per step in kg m-2 or J m-2.

        Args:
            key: key of the entry that names the variable.
            name: name of the variable, predicted or a forcing.
            kind: ``water`` or ``energy``, which determines the allowed units.
            sign: -1 to reverse the direction in which the flux is positive; otherwise 1.

        Raises:
            ConfigError: if the variable is instantaneous, has missing cells or units that are not allowed, or if it is
                a forcing over the previous step.
        """
        context = self._context
        group = "output"
        channels = context.channels.output
        if name not in {channel.variable for channel in channels}:
            group = "dynamic_forcing"
            channels = context.channels.group(group)
        # A flux has no levels, so it has exactly one channel.
        (row,) = [index for index, channel in enumerate(channels) if channel.variable == name]
        self._require_unmasked(key, name)
        # Solar radiation is computed as the sum over the window, in J m-2, so it needs no factor.
        if channels[row].source == "computed":
            if name != _SOLAR_RADIATION:
                raise ConfigError(f"{context.key}.{key}: {name} is not a flux")
            self._require_next_window(key, name, context.data.solar.window, "data.solar.window")
            return ChannelSlice(group, (row,), sign)
        options = context.data.options_of(name)
        if group == "dynamic_forcing":
            self._require_next_window(key, name, options.window, f"data.variable_options.{name}.window")
        # A deaccumulated variable is the sum over a step.
        temporal = options.temporal
        if temporal == "deaccumulate":
            temporal = "accumulate"
        if temporal == "instant":
            raise ConfigError(
                f"{context.key}.{key}: data.variable_options.{name}.temporal: {name} is instantaneous, but a budget "
                "needs a sum or mean over the step; set accumulate or mean, if the data are sums or means"
            )
        factor = self._find_factor(key, name, _FLUX_FACTORS[kind][temporal], f"flux of {kind}, {temporal}")
        # A mean over the step becomes a sum: the mean times the length of the step.
        seconds = 1.0
        if temporal == "mean":
            seconds = context.data.step_minutes * 60.0
        return ChannelSlice(group, (row,), sign * factor * seconds)

    def compute_surface_geopotential(self, key: str, name: str) -> Tensor:
        """Return the surface geopotential, (H, W) float64, m2 s-2.

        Args:
            key: key of the entry that names the variable.
            name: name of a static variable, a geopotential in m2 s-2 or a height in m.

        Raises:
            ConfigError: if the units are not allowed, or the variable has missing cells.
        """
        context = self._context
        static = context.channels.group("static")
        (row,) = [index for index, channel in enumerate(static) if channel.name == name]
        quantity = "geopotential or height of the surface"
        factor = self._find_factor(key, name, _SI_FACTORS[quantity], quantity)
        self._require_unmasked(key, name)
        ground_HW = np.asarray(context.static_CHW[row], dtype=np.float64) * factor
        return torch.from_numpy(ground_HW).to(context.device)

    def _find_factor(self, key: str, name: str, factors: dict[str, float], quantity: str) -> float:
        """Return the factor that converts a variable to SI units.

        Args:
            key: key of the entry that names the variable.
            name: name of the variable.
            factors: allowed unit -> its factor to SI units.
            quantity: physical quantity, for messages.

        Raises:
            ConfigError: if the variable has no units or units that are not allowed.
        """
        # Units in the config take precedence over units in the files.
        units = self._context.data.options_of(name).units
        if not units:
            units = self._context.attributes.get(name, {}).get("units", "")
        if normalise_units(units) not in factors:
            units_text = "without units"
            if units:
                units_text = f'in "{units}"'
            raise ConfigError(
                f"{self._context.key}.{key}: {name} is {units_text}; a budget needs {quantity} in one of the units "
                f"{', '.join(factors)}; choose a different variable, correct the units in the files, or set "
                f"data.variable_options.{name}.units"
            )
        return factors[normalise_units(units)]

    def _require_unmasked(self, key: str, name: str) -> None:
        """Raise ConfigError if a variable has missing cells, because a budget is a sum over all cells."""
        if name in self._context.masks:
            raise ConfigError(
                f"{self._context.key}.{key}: {name} has missing cells (data.variable_options.{name}.missing: "
                "fill_mean), but a budget is a sum over all cells; choose a different variable, or remove the budget"
            )

    def _require_next_window(self, key: str, name: str, window: str, window_key: str) -> None:
        """Raise ConfigError if a forcing is a sum or mean over the previous step instead of the step itself.

        Args:
            key: key of the entry that names the forcing.
            name: name of the forcing.
            window: ``next`` if the forcing of a frame is a sum or mean over the step that follows the frame.
            window_key: config key that sets `window`, for messages.
        """
        if window != "next":
            raise ConfigError(
                f"{self._context.key}.{key}: {window_key}: {window}: the forcing {name} is a sum or mean over the "
                "previous step, but a budget needs the sum or mean over the step itself; set next"
            )
