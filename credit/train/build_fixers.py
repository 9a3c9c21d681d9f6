"""From the entries of ``model.postprocess`` to what the stepper applies: channels, units, directions, layers."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from credit.config import Config
from credit.config.schema_postprocess import BudgetConfig, ClampConfig, EnergyConfig, WaterConfig
from credit.data.formats.units import plain
from credit.data.normalize import Normalizer
from credit.errors import ConfigError
from credit.forecast.postprocess.budgets import ColumnIntegrator
from credit.forecast.postprocess.fixers import (
    AirMass,
    ChannelSlice,
    DryMassFixer,
    EnergyFixer,
    Fixer,
    Fixers,
    WaterFixer,
)
from credit.physics.thermodynamics import GRAVITY
from credit.train.assets import ModelAssets

# quantity -> unit -> factor to SI
_UNITS = {
    "pressure": {"Pa": 1.0, "hPa": 100.0},
    "mass fraction of water": {"kg kg-1": 1.0, "1": 1.0, "g kg-1": 1e-3},
    "temperature": {"K": 1.0},
    "wind": {"m s-1": 1.0},
    "geopotential or height of the ground": {"m2 s-2": 1.0, "m": GRAVITY},
}
# the same by what a value stands for; a mean passes for as many seconds as the step has
_AMOUNTS = {
    "water": {
        "accumulate": {"kg m-2": 1.0, "mm": 1.0, "m": 1000.0},
        "mean": {
            "kg m-2 s-1": 1.0, "mm s-1": 1.0, "m s-1": 1000.0, "mm h-1": 1 / 3600, "mm hr-1": 1 / 3600,
            "mm day-1": 1 / 86400, "mm d-1": 1 / 86400, "kg m-2 day-1": 1 / 86400,
        },
    },
    "energy": {"accumulate": {"J m-2": 1.0}, "mean": {"W m-2": 1.0, "J m-2 s-1": 1.0}},
}  # fmt: skip
_SOLAR = "toa_incident_solar_radiation"


def output_bounds(config: Config, assets: ModelAssets) -> tuple[list[float], list[float]]:
    """Return least and largest physical value of each output channel, -inf and inf where there is none."""
    clamps = {one.variable: one for one in config.model.postprocess or [] if isinstance(one, ClampConfig)}
    least, most = [], []
    for channel in assets.channels.output:
        # each bound is in one of them at most
        said = [clamps.get(channel.variable), config.data.field(channel.variable)]
        least.append(next((one.minimum for one in said if one and one.minimum is not None), -math.inf))
        most.append(next((one.maximum for one in said if one and one.maximum is not None), math.inf))
    return least, most


def build_constraints(
    config: Config, assets: ModelAssets, normalizer: Normalizer, device: torch.device
) -> Fixers | None:
    """Return the run's budgets on `device`, None where ``model.postprocess`` has none.

    Raises:
        ConfigError: for a variable whose levels, units, temporal meaning or mask do not fit.
    """
    entries = _budgets(config)
    if not entries:
        return None
    assert assets.layers is not None, "assets of a run with budgets have layers"
    builder = _Builder(config, assets, device)
    constraints = [builder.build(number, one) for number, one in entries]
    return Fixers(ColumnIntegrator(assets.layers, assets.grid, device), normalizer, constraints)


def _budgets(config: Config) -> list[tuple[int, BudgetConfig]]:
    return [(number, one) for number, one in enumerate(config.model.postprocess or []) if isinstance(one, BudgetConfig)]


class _Builder:
    """Finds what the entries name."""

    def __init__(self, config: Config, assets: ModelAssets, device: torch.device) -> None:
        self._config, self._data, self._assets, self._device = config, config.data, assets, device
        self._seconds = config.data.step_minutes * 60.0

    def build(self, number: int, one: BudgetConfig) -> Fixer:
        """Return the budget of entry `number`."""
        here = f"model.postprocess.{number}"
        air = AirMass(
            self._field(f"{here}.surface_pressure", one.surface_pressure, "pressure"),
            tuple(self._field(f"{here}.specific_humidity", name, "mass fraction of water") for name in one.water),
        )
        if isinstance(one, WaterConfig):
            rain = self._flux(f"{here}.precipitation", one.precipitation, "water", 1.0)
            self._require_positive(f"{here}.precipitation", one.precipitation, rain)
            up = 1.0 if one.evaporation_positive == "up" else -1.0
            return WaterFixer(air, rain, self._flux(f"{here}.evaporation", one.evaporation, "water", up))
        if isinstance(one, EnergyConfig):
            u, v = (
                self._field(f"{here}.{key}", getattr(one, key), "wind") for key in ("eastward_wind", "northward_wind")
            )
            signs = {"top_down": 1.0, "top_up": -1.0, "surface_down": -1.0, "surface_up": 1.0}
            fluxes = [
                self._flux(f"{here}.{key}", name, "energy", sign)
                for key, sign in signs.items()
                for name in getattr(one, key)
            ]
            temperature = self._field(f"{here}.temperature", one.temperature, "temperature")
            ground_HW = self._ground(f"{here}.surface_geopotential", one.surface_geopotential)
            return EnergyFixer(air, temperature, (u, v), ground_HW, fluxes)
        return DryMassFixer(air)

    def _field(self, key: str, name: str, quantity: str) -> ChannelSlice:
        """Return a prognostic variable: on all levels, or surface pressure."""
        channels = self._assets.channels.output
        rows = tuple(row for row, channel in enumerate(channels) if channel.variable == name)
        levels = tuple(channels[row].level for row in rows)
        if levels != (None,) and levels != self._assets.layers.levels:
            raise ConfigError(
                f"{key}: {name} has levels of its own (data.variable_options.{name}.levels), and a budget needs it on "
                "all of data.levels; leave them out"
            )
        self._require_whole(key, name)
        return ChannelSlice("output", rows, self._factor(key, name, _UNITS[quantity], quantity))

    def _flux(self, key: str, name: str, kind: str, sign: float) -> ChannelSlice:
        """Return what passes in a step, positive into the air, as an amount."""
        channels, group = self._assets.channels.output, "output"
        if name not in {channel.variable for channel in channels}:
            channels, group = self._assets.channels.group("dynamic_forcing"), "dynamic_forcing"
        (row,) = (row for row, channel in enumerate(channels) if channel.variable == name)
        self._require_whole(key, name)
        if channels[row].source == "computed":
            if name != _SOLAR:
                raise ConfigError(f"{key}: {name} is no flux")
            self._require_next(key, name, self._data.solar.window, "data.solar.window")
            return ChannelSlice(group, (row,), sign)
        own = self._data.field(name)
        if group == "dynamic_forcing":
            self._require_next(key, name, own.window, f"data.variable_options.{name}.window")
        meaning = "accumulate" if own.temporal == "deaccumulate" else own.temporal
        if meaning == "instant":
            raise ConfigError(
                f"{key}: data.variable_options.{name}.temporal: {name} is instantaneous, and a budget needs what "
                "passes during the step; set accumulate or mean, if that is what the data are"
            )
        factor = self._factor(key, name, _AMOUNTS[kind][meaning], f"flux of {kind}, {meaning}")
        return ChannelSlice(group, (row,), sign * factor * (self._seconds if meaning == "mean" else 1.0))

    def _ground(self, key: str, name: str) -> Tensor:
        """Return the geopotential of the ground, (H, W) float64."""
        channels = self._assets.channels.group("static")
        (row,) = (row for row, channel in enumerate(channels) if channel.name == name)
        quantity = "geopotential or height of the ground"
        factor = self._factor(key, name, _UNITS[quantity], quantity)
        self._require_whole(key, name)
        ground_HW = np.asarray(self._assets.static_CHW[row], dtype=np.float64) * factor
        return torch.from_numpy(ground_HW).to(self._device)

    def _factor(self, key: str, name: str, known: dict[str, float], quantity: str) -> float:
        units = self._data.field(name).units or self._assets.attributes.get(name, {}).get("units", "")
        if plain(units) not in known:
            said = f'in "{units}"' if units else "without units"
            raise ConfigError(
                f"{key}: {name} is {said}; a budget takes {quantity} in {', '.join(known)}; correct the variable, "
                f"its units in the files, or convert them: data.variable_options.{name}.units"
            )
        return known[plain(units)]

    def _require_whole(self, key: str, name: str) -> None:
        if name in self._assets.masks:
            raise ConfigError(
                f"{key}: {name} has missing cells (data.variable_options.{name}.missing: fill_mean), and a budget is a "
                "sum over all; name another variable, or take the budget out"
            )

    @staticmethod
    def _require_next(key: str, name: str, window: str, where: str) -> None:
        if window != "next":
            raise ConfigError(
                f"{key}: {where}: {window}: the forcing {name} is that of the step before, and a budget needs that of "
                "the step; set next"
            )

    def _require_positive(self, key: str, name: str, place: ChannelSlice) -> None:
        least, _ = output_bounds(self._config, self._assets)
        if least[place.rows[0]] < 0:
            raise ConfigError(
                f"{key}: {name} may be negative, and a factor cannot mend that; set "
                f"data.variable_options.{name}.minimum: 0"
            )
