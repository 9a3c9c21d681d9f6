"""Inputs of derived output variables: channels of the output, levels, surface pressure and surface geopotential.

Shape suffixes: C channels, K levels of the model from the top down, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.channels import ChannelMap
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig
from credit.data.formats.cf import match_levels
from credit.data.formats.units import Conversion
from credit.data.sources.derived_variables import find_si_conversion
from credit.data.sources.levels.hybrid_coefficients import MEAN_SURFACE_PA, PA_PER_LEVEL_UNIT, load_coefficients
from credit.data.sources.required_variables import SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import ConfigError, did_you_mean
from credit.physics.vertical import HybridLevels, LevelMapping

_STANDARD_NAMES = {
    SURFACE_PRESSURE: ("surface_air_pressure",),
    SURFACE_GEOPOTENTIAL: ("surface_geopotential", "geopotential", "surface_altitude"),
}


@dataclass(frozen=True)
class RecipeInput:
    """One input of a derived variable.

    Attributes:
        channel_index: indices of the input's channels in the model's output, from the top level down.
        si_conversion: conversion to SI units; None if the values are already in SI units, or the formula works in any
            units.
    """

    channel_index: list[int]
    si_conversion: Conversion | None

    def select(self, fields_CHW: np.ndarray) -> np.ndarray:
        """Return the fields of this input from the network's output, converted to SI units, (K, H, W).

        Args:
            fields_CHW: the network's output in physical units.
        """
        fields_KHW = fields_CHW[self.channel_index]
        if self.si_conversion is None:
            return fields_KHW
        return self.si_conversion.apply(fields_KHW)


class OutputInputs:
    """Finder of the inputs of derived variables among the model's outputs and static fields.

    In all methods, the argument `key` is the config key that needs the input; error messages name it.

    Args:
        conf: config section ``inference``.
        data: config section ``data``.
        channels: channels of the model.
        attributes: name of a variable -> its ``units``, ``standard_name``, ``temporal``.
        static_CHW: static channels that come from data, in physical units.
    """

    def __init__(
        self,
        conf: InferenceConfig,
        data: DataConfig,
        channels: ChannelMap,
        attributes: Mapping[str, Mapping[str, str]],
        static_CHW: np.ndarray,
    ) -> None:
        self._conf = conf
        self._data = data
        self._channels = channels
        self._attributes = attributes
        self._static_CHW = static_CHW

    @property
    def is_hybrid(self) -> bool:
        """True if the levels of the run are model levels."""
        return self._data.level_units == "model_level"

    def attributes_of(self, name: str) -> Mapping[str, str]:
        """Return the attributes of a variable; an empty mapping if it has none."""
        return self._attributes.get(name, {})

    def channel_indices(self, name: str, key: str) -> list[int]:
        """Return the indices of a variable's channels in the model's output, one for each of its levels.

        Args:
            name: name of the variable.
            key: config key that names the variable, for messages.

        Raises:
            ConfigError: if the variable is not an output.
        """
        output = self._channels.output
        indices = [index for index, channel in enumerate(output) if channel.variable == name]
        if not indices:
            outputs = sorted({channel.variable for channel in output})
            raise ConfigError(
                f"{key}: {name} is not an output{did_you_mean(name, outputs)}; name other variables in inputs"
            )
        return indices

    def levels_of(self, name: str, key: str) -> list[float | None]:
        """Return the levels of a variable's output channels; ``[None]`` for a variable without levels.

        Raises:
            ConfigError: if the variable is not an output.
        """
        return [self._channels.output[index].level for index in self.channel_indices(name, key)]

    def si_conversion(self, key: str, role: str, name: str) -> Conversion | None:
        """Return the conversion of a variable to SI units; None if the units are already SI units.

        Args:
            key: config key, for messages.
            role: role of the variable in the formula, such as ``temperature``, which determines the allowed units.
            name: name of the variable.

        Raises:
            ConfigError: if the units of the variable are not among the units that its role allows.
        """
        return find_si_conversion(role, name, self.attributes_of(name), key)

    def find_level_mapping(
        self, key: str, name: str, pressures: Sequence[float] | None
    ) -> tuple[LevelMapping, list[int]]:
        """Return the levels of a variable, and the vertical interpolation from these levels to pressure levels.

        Args:
            key: config key, for messages.
            name: name of an output on levels.
            pressures: target pressure levels in hPa; None to keep the variable's levels.

        Returns:
            The levels with their interpolation, and the indices that sort the variable's levels from the top down.

        Raises:
            ConfigError: if `pressures` is given for a variable on pressure levels, if a pressure level is above the
                uppermost level, or if the coefficients of model levels are unknown.
        """
        values = self.levels_of(name, key)
        if self.is_hybrid:
            run_levels = self._load_run_levels(key)
            levels = run_levels.select(match_levels(run_levels.values, values, name, "", key))
        elif pressures is not None:
            raise ConfigError(f"{key}: data.levels are already pressure levels; use inference.levels to select levels")
        else:
            levels = HybridLevels.from_pressures(values, PA_PER_LEVEL_UNIT[self._data.level_units])
        # The pressure of a model level varies with surface pressure, so levels are sorted by their pressure for a mean
        # surface pressure.
        mean_surface = np.array(MEAN_SURFACE_PA)
        order = np.argsort(levels.pressure(mean_surface), kind="stable")
        target = None
        if pressures is not None:
            top_hpa = levels.select(order[:1]).pressure(mean_surface)[0] / PA_PER_LEVEL_UNIT["hPa"]
            # The tolerance allows for rounding of the coefficients of model levels.
            if min(pressures) < 0.999 * top_hpa:
                raise ConfigError(
                    f"{key}: {min(pressures):g} hPa is above the uppermost level of {name} ({top_hpa:g} hPa), but "
                    "fields are not extrapolated upwards; remove this level"
                )
            target = HybridLevels.from_pressures(pressures, PA_PER_LEVEL_UNIT["hPa"])
        original_order = tuple(np.argsort(order).tolist())
        return LevelMapping(levels.select(order), target, original_order), order.tolist()

    def _load_run_levels(self, key: str) -> HybridLevels:
        """Return all model levels of the file ``data.coefficients``; raise ConfigError if this key is not set."""
        if self._data.coefficients is None:
            raise ConfigError(
                f"{key}: the pressure of data.levels, which are model levels, is unknown; set data.coefficients"
            )
        return load_coefficients(Path(self._data.coefficients), "data.coefficients")

    def find_surface_pressure(self, key: str) -> RecipeInput:
        """Return the input for surface pressure.

        The variable is ``inference.surface_pressure`` or, by default, the output with the standard name of surface
        pressure.

        Raises:
            ConfigError: if the configured name is not an output; or if no name is configured, and no output or several
                outputs have the standard name.
        """
        without_levels = [channel.variable for channel in self._channels.output if channel.level is None]
        candidates = list(dict.fromkeys(without_levels))
        name = self._find_variable(key, SURFACE_PRESSURE, self._conf.surface_pressure, candidates, "an output")
        return RecipeInput(self.channel_indices(name, key), self.si_conversion(key, SURFACE_PRESSURE, name))

    def find_surface_geopotential(self, key: str, required: bool) -> np.ndarray | None:
        """Return the surface geopotential, (H, W) in m2 s-2; None if there is none and it is not required.

        The variable is ``inference.surface_geopotential`` or, by default, the static variable with a matching standard
        name.

        Args:
            key: config key, for messages.
            required: True to raise an error if there is no surface geopotential.

        Raises:
            ConfigError: if the configured name is not a static variable of the data, if several static variables have a
                matching standard name, or if the field is required and missing.
        """
        names = [channel.variable for channel in self._channels.static_stored]
        configured = self._conf.surface_geopotential
        if not required and configured is None and not self._find_by_standard_name(SURFACE_GEOPOTENTIAL, names):
            return None
        name = self._find_variable(key, SURFACE_GEOPOTENTIAL, configured, names, "a static variable of the data")
        field_HW = self._static_CHW[names.index(name)]
        si_conversion = self.si_conversion(key, SURFACE_GEOPOTENTIAL, name)
        if si_conversion is None:
            return field_HW
        return si_conversion.apply(field_HW)

    def _find_variable(self, key: str, role: str, configured: str | None, candidates: Sequence[str], kind: str) -> str:
        """Return the configured variable of a role or, by default, the only candidate with a matching standard name.

        Args:
            key: config key, for messages.
            role: ``surface_pressure`` or ``surface_geopotential``, which is also a key in section ``inference``.
            configured: value of this key; None if it is not set.
            candidates: names of the variables to choose from.
            kind: description of the candidates, for messages, such as "an output".

        Raises:
            ConfigError: if the configured variable is not a candidate; or if no variable is configured, and no
                candidate or several candidates have a matching standard name.
        """
        if configured is not None:
            if configured in candidates:
                return configured
            problem = f'"{configured}" is not among'
        else:
            matching = self._find_by_standard_name(role, candidates)
            if len(matching) == 1:
                return matching[0]
            problem = f"{key} needs this variable, but the choice is ambiguous among"
        names = ", ".join(candidates) or "no variable"
        hint = did_you_mean(configured or "", candidates)
        raise ConfigError(f"inference.{role}: {problem} {names}{hint}; name {kind}")

    def _find_by_standard_name(self, role: str, names: Sequence[str]) -> list[str]:
        """Return the variables in `names` whose standard name matches a role."""
        standard_names = _STANDARD_NAMES[role]
        return [name for name in names if self.attributes_of(name).get("standard_name") in standard_names]
