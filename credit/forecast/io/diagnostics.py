"""Output diagnostics: variables that are computed from the network's output before a forecast is written.

``inference.pressure_levels`` interpolates variables on model levels to pressure levels. ``inference.derive`` adds
derived variables and sums over several steps. The computation runs on the host in float64, with the same formulas as
derived variables of the data (`credit.data.sources.derived_variables`).

Shape suffixes: C channels, K levels of the model from the top down, L written levels, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from credit.calendar import Calendar, format_duration, parse_duration
from credit.channels import Channel, ChannelMap
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig
from credit.config.sections.output import ACCUMULATION, DerivedVariableConfig
from credit.data.sources.derived_variables import build_derived_attributes, compute_derived, find_extrapolated_quantity
from credit.data.sources.levels.level_mapping import require_full_column
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import ConfigError
from credit.forecast.io.output_inputs import OutputInputs, RecipeInput
from credit.forecast.io.running_sums import RunningSum, RunningSums
from credit.forecast.io.schema import SINCE_START, OutputFields
from credit.forecast.rollout import ForecastStart
from credit.grid import LatLonGrid
from credit.physics.vertical import LevelMapping

# Derived variables that need all levels down to the surface, and derived variables that need pressure.
_NEEDS_GROUND = ("geopotential", "mean_sea_level_pressure")
_NEEDS_PRESSURE = ("relative_humidity", "relative_humidity_water")


@dataclass(frozen=True)
class _Copy:
    """Recipe for channels of the model's output that are written unchanged.

    Attributes:
        channel_index: indices of the channels in the model's output.
    """

    channel_index: list[int]


@dataclass(frozen=True)
class _Recipe:
    """Recipe that computes a variable (L, H, W) from one step's output; L is 1 for a variable without levels.

    Attributes:
        kind: kind of the derived variable; None for interpolation to pressure levels.
        quantity: interpolated quantity, which determines the extrapolation below the surface; empty if `kind` is given.
        level_mapping: levels and vertical interpolation; None if the recipe needs no pressure and no interpolation.
        inputs: role of an input in the formula, such as ``temperature`` -> the input.
    """

    kind: str | None
    quantity: str
    level_mapping: LevelMapping | None
    inputs: Mapping[str, RecipeInput]


class OutputDiagnostics:
    """Calculator of the written fields from the network's output of a step.

    Args:
        conf: config section ``inference``.
        data: config section ``data``.
        channels: channels of the model.
        attributes: name of a variable -> its ``units``, ``standard_name``, ``temporal``.
        static_CHW: static channels that come from data, in physical units.
        last_lead: last lead time in minutes; afterwards, the running sums of a forecast are deleted.
        masks: name of a variable -> (H, W) bool, True where it is always missing.

    Attributes:
        channels: channel map whose output channels are written.
        attributes: name of a written variable -> its attributes.
        level_units: units of the written levels.
        masks: masks of the written variables; a derived variable is missing where one of its inputs is missing.
        windows: name of a sum -> length of its window in minutes, or `credit.forecast.io.schema.SINCE_START` for a sum
            since the initial time. Sums without an entry are over one step.

    Raises:
        ConfigError: if a variable cannot be computed from the output; the message names the key.
    """

    def __init__(
        self,
        conf: InferenceConfig,
        data: DataConfig,
        channels: ChannelMap,
        attributes: Mapping[str, Mapping[str, str]],
        static_CHW: np.ndarray,
        last_lead: int,
        masks: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._conf = conf
        self._level_units = data.level_units
        self._model_channels = channels
        self._inputs = OutputInputs(conf, data, channels, attributes, static_CHW)
        self._step_minutes = data.step_minutes
        self._last_lead = last_lead
        # Surface geopotential (H, W) in m2 s-2; None if no interpolation or derived variable uses it.
        self._ground_HW: np.ndarray | None = None
        self.level_units = data.level_units
        if conf.pressure_levels is not None:
            self.level_units = "hPa"
        self.attributes = {name: dict(values) for name, values in attributes.items()}
        self.masks = dict(masks or {})
        self.windows: dict[str, int] = {}

        # One entry for each variable that is written, in the order of the channels.
        self._recipes: list[_Copy | _Recipe | RunningSum] = []
        written: list[Channel] = []
        variables = list(dict.fromkeys(channel.variable for channel in channels.output))
        for name in variables:
            written += self._add_output(name)
        for name, derived_config in conf.derive.items():
            if name in variables:
                raise ConfigError(f"inference.derive.{name}: {name} is already an output; choose a different name")
            written += self._add_derived(name, derived_config)
        # A variable without levels may have the name of a channel on levels: u10 is the wind at 10 m, and u at 10 hPa.
        # The units are appended to distinguish them, as in `ChannelMap.build`.
        names_2d = {channel.variable for channel in written if channel.level is None}
        for index, channel in enumerate(written):
            if channel.level is not None and channel.name in names_2d:
                written[index] = replace(channel, name=f"{channel.name}{self.level_units}")
        self._is_plain = conf.pressure_levels is None and not conf.derive
        self.channels = channels if self._is_plain else ChannelMap(written)
        sums = [recipe for recipe in self._recipes if isinstance(recipe, RunningSum)]
        self._running_sums = RunningSums(sums, last_lead)

    def output_fields(self, grid: LatLonGrid, calendar: Calendar) -> OutputFields:
        """Return the description of the fields that `compute` returns.

        Args:
            grid: grid of the model.
            calendar: calendar of the times.
        """
        return OutputFields(
            channels=self.channels,
            grid=grid,
            calendar=calendar,
            attributes=self.attributes,
            step_minutes=self._step_minutes,
            level_units=self.level_units,
            masks=self.masks,
            windows=self.windows,
        )

    @property
    def global_attributes(self) -> dict[str, str]:
        """Global attributes that describe the diagnostics and distinguish files with different diagnostics."""
        attributes = {}
        if self._conf.pressure_levels is not None:
            levels = ", ".join(f"{level:g}" for level in self._conf.pressure_levels)
            attributes["pressure_levels"] = f"{levels} hPa"
        variables = []
        for name, derived_config in self._conf.derive.items():
            text = f"{name}: {derived_config.kind} of {', '.join(derived_config.input_variables.values())}"
            if derived_config.over is not None:
                text += f" over {derived_config.over}"
            variables.append(text)
        if variables:
            attributes["derived"] = "; ".join(variables)
        return attributes

    @property
    def needs_every_step(self) -> bool:
        """True if `compute` must also be called for steps that are not written."""
        return self._running_sums.num_sums > 0

    def reset(self) -> None:
        """Delete the running sums of all forecasts, so that forecasts can be restarted."""
        self._running_sums.reset()

    def compute(self, start: ForecastStart, lead_minutes: int, fields_CHW: np.ndarray) -> np.ndarray:
        """Return the fields to write at a lead time. With running sums, call this method for every step, in order.

        Args:
            start: start of the forecast.
            lead_minutes: lead time in minutes.
            fields_CHW: the network's output in physical units, float32.

        Returns:
            (C', H, W) float32 in physical units; C' are the output channels of the attribute `channels`. A sum is NaN
            if its window begins before the initial time.
        """
        if self._is_plain:
            return fields_CHW
        sums = iter(self._running_sums.accumulate(start, lead_minutes, fields_CHW))
        written = []
        for recipe in self._recipes:
            if isinstance(recipe, _Copy):
                written.append(fields_CHW[recipe.channel_index])
            elif isinstance(recipe, RunningSum):
                written.append(next(sums))
            else:
                written.append(self._compute_variable(recipe, fields_CHW))
        return np.concatenate(written)

    def _compute_variable(self, recipe: _Recipe, fields_CHW: np.ndarray) -> np.ndarray:
        """Return the variable of a recipe, (L, H, W) float32, computed from the network's output in physical units."""
        inputs = {role: recipe_input.select(fields_CHW) for role, recipe_input in recipe.inputs.items()}
        if SURFACE_PRESSURE in inputs:
            inputs[SURFACE_PRESSURE] = inputs[SURFACE_PRESSURE][0]
        if self._ground_HW is not None:
            inputs[SURFACE_GEOPOTENTIAL] = self._ground_HW
        # An interpolated variable is converted back to its original units; a derived variable stays in SI units.
        from_si = None
        if recipe.kind is None:
            from_si = recipe.inputs[FIELD].si_conversion
        return compute_derived(recipe.kind, recipe.quantity, recipe.level_mapping, inputs, from_si)

    def _add_output(self, name: str) -> list[Channel]:
        """Add the recipe that copies an output variable or interpolates it to pressure levels; return its channels."""
        key = "inference.pressure_levels"
        channel_index = self._inputs.channel_indices(name, key)
        channels = [self._model_channels.output[index] for index in channel_index]
        pressures = self._conf.pressure_levels
        if pressures is None or channels[0].level is None:
            self._recipes.append(_Copy(channel_index))
            return [Channel(channel.name, name, channel.level, "diagnostic") for channel in channels]
        level_mapping, order = self._inputs.find_level_mapping(key, name, pressures)
        quantity = find_extrapolated_quantity(name, self._inputs.attributes_of(name).get("standard_name", ""))
        is_temperature = quantity == "temperature"
        si_conversion = None
        if is_temperature:
            si_conversion = self._inputs.si_conversion(key, "temperature", name)
        inputs = {
            FIELD: RecipeInput([channel_index[position] for position in order], si_conversion),
            SURFACE_PRESSURE: self._inputs.find_surface_pressure(key),
        }
        self._store_ground_geopotential(key, required=is_temperature)
        self._recipes.append(_Recipe(None, quantity, level_mapping, inputs))
        return _build_channels(name, pressures)

    def _add_derived(self, name: str, derived_config: DerivedVariableConfig) -> list[Channel]:
        """Add the recipe of the derived variable `name`, and return its channels.

        Raises:
            ConfigError: if the variable cannot be computed from its inputs.
        """
        key = f"inference.derive.{name}"
        kind = derived_config.kind
        needs_ground = kind in _NEEDS_GROUND
        if needs_ground and not self._inputs.is_hybrid:
            raise ConfigError(
                f"{key}: {kind} is computed on model levels, down to the surface, but data.level_units is "
                f"{self._level_units} (pressure levels): remove this key"
            )
        roles = derived_config.input_variables
        self._add_mask(key, name, list(roles.values()))
        if kind == ACCUMULATION:
            return self._add_sum(key, name, derived_config)

        self.attributes[name] = build_derived_attributes(kind)

        # Levels. The derived variable has the levels of the first input.
        first_variable = next(iter(roles.values()))
        levels = self._inputs.levels_of(first_variable, key)
        has_levels = levels[0] is not None
        needs_column = needs_ground or kind in _NEEDS_PRESSURE
        if needs_column and not has_levels:
            raise ConfigError(
                f"{key}: {first_variable} has no levels, but {kind} is computed from variables with levels; name "
                "variables with levels in inputs"
            )
        level_mapping = None
        order = list(range(len(levels)))
        pressures = None
        if has_levels:
            if kind != "mean_sea_level_pressure":
                pressures = self._conf.pressure_levels
            if needs_column or pressures is not None:
                level_mapping, order = self._inputs.find_level_mapping(key, first_variable, pressures)
        if needs_ground:
            require_full_column(level_mapping.levels, name, first_variable, key)
            self._store_ground_geopotential(key, required=True)
        if kind == "mean_sea_level_pressure":
            # Mean sea level pressure is extrapolated from the lowest level.
            order = order[-1:]
            level_mapping = LevelMapping(level_mapping.levels.select([-1]), None)

        # Inputs and channels.
        inputs = self._build_recipe_inputs(key, roles, order)
        if level_mapping is not None and (needs_ground or self._inputs.is_hybrid):
            inputs[SURFACE_PRESSURE] = self._inputs.find_surface_pressure(key)
        self._recipes.append(_Recipe(kind, "", level_mapping, inputs))
        if kind == "mean_sea_level_pressure":
            return _build_channels(name, [None])
        return _build_channels(name, levels if pressures is None else pressures)

    def _add_mask(self, key: str, name: str, variables: Sequence[str]) -> None:
        """Mask a derived variable in the cells in which one of its inputs is always missing.

        Raises:
            ConfigError: if one of the inputs `variables` is not an output of the model.
        """
        for variable in variables:
            self._inputs.channel_indices(variable, key)
        input_masks = [self.masks[variable] for variable in variables if variable in self.masks]
        if input_masks:
            self.masks[name] = np.logical_or.reduce(input_masks)

    def _build_recipe_inputs(self, key: str, roles: Mapping[str, str], order: Sequence[int]) -> dict[str, RecipeInput]:
        """Return the inputs of a recipe by role. The first input is the interpolated field, with the role ``FIELD``.

        Args:
            key: config key, for messages.
            roles: role in the formula, such as ``temperature`` -> name of the variable.
            order: indices that sort the levels of the variables from the top down.

        Raises:
            ConfigError: if the variables are not on the same levels, or have units of a different quantity.
        """
        first_variable = next(iter(roles.values()))
        levels = self._inputs.levels_of(first_variable, key)
        inputs: dict[str, RecipeInput] = {}
        for role, variable in roles.items():
            channel_index = self._inputs.channel_indices(variable, key)
            if self._inputs.levels_of(variable, key) != levels:
                raise ConfigError(
                    f"{key}: {variable} and {first_variable} are not on the same levels; choose inputs with the same "
                    "levels"
                )
            input_role = role
            if not inputs:
                input_role = FIELD
            si_conversion = self._inputs.si_conversion(key, role, variable)
            inputs[input_role] = RecipeInput([channel_index[position] for position in order], si_conversion)
        return inputs

    def _add_sum(self, key: str, name: str, derived_config: DerivedVariableConfig) -> list[Channel]:
        """Add the recipe of a sum over several steps, and return its channel in a list.

        Raises:
            ConfigError: if the summed variable is not accumulated over the step or has levels, or if the period is not
                a multiple of the time step or is longer than the forecast.
        """
        variable = derived_config.of
        over = derived_config.over
        channel_index = self._inputs.channel_indices(variable, key)
        attributes = self._inputs.attributes_of(variable)
        if attributes.get("temporal") != "accumulate":
            raise ConfigError(
                f"{key}.of: {variable} is not a sum over the step (data.variable_options.{variable}.temporal: "
                "accumulate or deaccumulate); only sums can be added up"
            )
        if len(channel_index) > 1:
            raise ConfigError(f"{key}.of: {variable} has levels; only a variable without levels can be added up")
        # Without `over`, the sum begins at the initial time. With `over`, the window must be a multiple of the time
        # step and not longer than the forecast.
        num_steps = None
        self.windows[name] = SINCE_START
        if over is not None:
            window = parse_duration(over)
            num_steps, remainder = divmod(window, self._step_minutes)
            if remainder:
                raise ConfigError(
                    f"{key}.over: {over} is not a multiple of data.timestep {format_duration(self._step_minutes)}"
                )
            if window > self._last_lead:
                raise ConfigError(
                    f"{key}.over: {over} is longer than the last lead time that is written, "
                    f"{format_duration(self._last_lead)}, so {name} would be missing everywhere; shorten the window, "
                    "or make the forecast longer (inference.lead_time, lead_times)"
                )
            self.windows[name] = window
        period = "since the initial time"
        if over is not None:
            period = f"over the {over} before"
        self.attributes[name] = {
            "units": attributes.get("units", ""),
            "long_name": f"{variable} {period}",
            "temporal": "accumulate",
        }
        if attributes.get("standard_name"):
            self.attributes[name]["standard_name"] = attributes["standard_name"]
        self._recipes.append(RunningSum(channel_index[0], num_steps))
        return _build_channels(name, [None])

    def _store_ground_geopotential(self, key: str, required: bool) -> None:
        """Find and store the surface geopotential for all recipes; raise ConfigError if it is required but missing."""
        ground_HW = self._inputs.find_surface_geopotential(key, required)
        if ground_HW is not None:
            self._ground_HW = ground_HW


def _build_channels(name: str, levels: Sequence[float | None]) -> list[Channel]:
    """Return a diagnostic channel for each level of the variable `name`; the level None means "without levels"."""
    channels = []
    for level in levels:
        channel_name = name if level is None else f"{name}{level:g}"
        channels.append(Channel(channel_name, name, level, "diagnostic"))
    return channels
