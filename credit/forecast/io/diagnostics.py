"""Products: what is written of a forecast beside, or instead of, the network's outputs.

Variables on model levels are brought to pressure levels, others are derived, sums over hours are added up; all on the
host, in float64 inside, by the formulas that read data (`credit.data.sources.derived_variables`).
Shapes: C channels, K levels from the top down, L wanted levels, H rows, W columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from credit.calendar import format_duration, parse_duration
from credit.channels import Channel, ChannelMap
from credit.config.schema_data import DataConfig
from credit.config.schema_forecast import InferenceConfig
from credit.config.schema_output import ACCUMULATION, ProductConfig
from credit.data.formats.cf import match_levels
from credit.data.formats.units import Conversion
from credit.data.sources.derived_variables import compute_derived, derived_attributes, interpolation_kind, si_conversion
from credit.data.sources.hybrid_coefficients import MEAN_SURFACE_PA, load_coefficients
from credit.data.sources.level_mapping import require_full_column
from credit.data.sources.required_variables import FIELD, SURFACE_GEOPOTENTIAL, SURFACE_PRESSURE
from credit.errors import ConfigError, did_you_mean
from credit.forecast.io.schema import SINCE_START
from credit.forecast.rollout import ForecastStart
from credit.physics.vertical import Column, HybridLevels

_PASCAL = {"hPa": 100.0, "Pa": 1.0}
_GROUND_NAMES = {
    SURFACE_PRESSURE: ("surface_air_pressure",),
    SURFACE_GEOPOTENTIAL: ("surface_geopotential", "geopotential", "surface_altitude"),
}
_NEEDS_GROUND = ("geopotential", "mean_sea_level_pressure")
_NEEDS_PRESSURE = ("relative_humidity", "relative_humidity_water")


@dataclass(frozen=True)
class _Input:
    """A variable that something is made of: its output channels from the top down, and what brings it to SI."""

    rows: list[int]
    si: Conversion | None

    def of(self, fields_CHW: np.ndarray) -> np.ndarray:
        fields = fields_CHW[self.rows]
        return fields if self.si is None else self.si.apply(fields)


@dataclass(frozen=True)
class _Recipe:
    """How a variable is made, (L, H, W) of the outputs; `kind` None is interpolation."""

    kind: str | None
    quantity: str
    column: Column | None
    inputs: Mapping[str, _Input]


@dataclass(frozen=True)
class _Sum:
    """A sum over hours: of which channel, and over how many steps, None for all since the initial time."""

    row: int
    steps: int | None


class OutputDiagnostics:
    """Turns a step's outputs into what is written.

    Args:
        conf: section inference.
        data: section data.
        channels: of the model.
        attributes: variable -> ``units``, ``standard_name``, ``temporal``.
        static_CHW: the static channels that come from data, in physical units.
        last_lead: the last lead time in minutes, after which a forecast's sums are forgotten.
        masks: variable -> (H, W) bool, True where it is always missing.

    Attributes:
        channels: whose outputs are what is written.
        attributes: of these, too.
        level_units: of their levels.
        masks: of what is written; a derived variable is missing where one of its inputs is.
        windows: variable -> minutes that it is a sum over, `credit.forecast.io.schema.SINCE_START` for all since the
            initial time; those that are not named are over a step.

    Raises:
        ConfigError: for a product that cannot be made of the outputs, naming the key.
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
        self._conf, self._data, self._model, self._static_CHW = conf, data, channels, static_CHW
        self._known = attributes
        self._step, self._last, self._ground = data.step_minutes, last_lead, None
        self.level_units = "hPa" if conf.pressure_levels is not None else data.level_units
        self.attributes = {name: dict(own) for name, own in attributes.items()}
        self.masks = dict(masks or {})
        self.windows: dict[str, int] = {}
        self._recipes: list[_Recipe | _Sum | list[int]] = []  # channels that are kept as they are: their rows
        made: list[Channel] = []
        variables = list(dict.fromkeys(channel.variable for channel in channels.output))
        for name in variables:
            made += self._add_output(name)
        for name, own in conf.derive.items():
            if name in variables:
                raise ConfigError(f"inference.derive.{name}: {name} is an output already; choose another name")
            made += self._add_derived(name, own)
        self._is_plain = conf.pressure_levels is None and not conf.derive
        flat = {channel.variable for channel in made if channel.level is None}
        # as ChannelMap.build tells u at 10 hPa from u10
        made = [
            replace(c, name=f"{c.name}{self.level_units}") if c.level is not None and c.name in flat else c
            for c in made
        ]
        self.channels = channels if self._is_plain else ChannelMap(made)
        self._earlier: dict[tuple[int, int], list[deque[np.ndarray]]] = {}  # initial time, member -> fields of each sum

    @property
    def described(self) -> dict[str, str]:
        """What was made, in words, for the files' global attributes; it tells these from other files."""
        found = {}
        if self._conf.pressure_levels is not None:
            found["pressure_levels"] = f"{', '.join(f'{level:g}' for level in self._conf.pressure_levels)} hPa"
        if self._conf.derive:
            made = {name: f"{own.kind} of {', '.join(own.made_of.values())}" for name, own in self._conf.derive.items()}
            over = {name: f" over {own.over}" for name, own in self._conf.derive.items() if own.over is not None}
            found["derived"] = "; ".join(f"{name}: {what}{over.get(name, '')}" for name, what in made.items())
        return found

    @property
    def needs_every_step(self) -> bool:
        """Whether steps matter that are not written."""
        return any(isinstance(own, _Sum) for own in self._recipes)

    def begin(self) -> None:
        """Forget the sums of forecasts that were not made to their end."""
        self._earlier.clear()

    def make(self, start: ForecastStart, lead_minutes: int, fields_CHW: np.ndarray) -> np.ndarray:
        """Return what is written at a lead time, (C', H, W) float32.

        Sums need every step of a start, in order.

        Args:
            start: of the forecast.
            lead_minutes: lead time.
            fields_CHW: the outputs in physical units.
        """
        if self._is_plain:
            return fields_CHW
        parts, sums = [], iter(self._sums(start, lead_minutes, fields_CHW))
        for own in self._recipes:
            if isinstance(own, list):
                parts.append(fields_CHW[own])
            elif isinstance(own, _Sum):
                parts.append(next(sums))
            else:
                inputs = {role: one.of(fields_CHW) for role, one in own.inputs.items()}
                if SURFACE_PRESSURE in inputs:
                    inputs[SURFACE_PRESSURE] = inputs[SURFACE_PRESSURE][0]
                if self._ground is not None:
                    inputs[SURFACE_GEOPOTENTIAL] = self._ground
                back = own.inputs[FIELD].si if own.kind is None else None
                parts.append(compute_derived(own.kind, own.quantity, own.column, inputs, back))
        return np.concatenate(parts)

    def _sums(self, start: ForecastStart, lead_minutes: int, fields_CHW: np.ndarray) -> list[np.ndarray]:
        sums = [own for own in self._recipes if isinstance(own, _Sum)]
        if not sums:
            return []
        key = start.initial, start.member
        kept = self._earlier.setdefault(key, [deque(maxlen=own.steps or 1) for own in sums])
        found = []
        for own, earlier in zip(sums, kept, strict=True):
            field = fields_CHW[own.row].astype(np.float64)
            if own.steps is None:
                earlier.append(field + earlier[0] if earlier else field)
                total = earlier[0]
            else:
                earlier.append(field)
                total = sum(earlier) if len(earlier) == own.steps else np.full_like(field, np.nan)
            found.append(total.astype(np.float32)[None])
        if lead_minutes >= self._last:
            del self._earlier[key]
        return found

    def _add_output(self, name: str) -> list[Channel]:
        """Keep an output as it is, or bring it to pressure levels."""
        rows = self._rows(name)
        channels = [self._model.output[row] for row in rows]
        wanted = self._conf.pressure_levels
        if wanted is None or channels[0].level is None:
            self._recipes.append(rows)
            return [Channel(c.name, name, c.level, "diagnostic") for c in channels]
        here = "inference.pressure_levels"
        column, order = self._column(here, name, wanted)
        quantity = interpolation_kind(name, self._known.get(name, {}).get("standard_name", ""))
        si = self._si(here, "temperature", name) if quantity == "temperature" else None
        inputs = {FIELD: _Input([rows[k] for k in order], si), SURFACE_PRESSURE: self._pressure(here)}
        self._find_ground(here, required=quantity == "temperature")
        self._recipes.append(_Recipe(None, quantity, column, inputs))
        return self._channels(name, wanted)

    def _add_derived(self, name: str, own: ProductConfig) -> list[Channel]:
        """Plan a derived variable."""
        here = f"inference.derive.{name}"
        if own.kind in _NEEDS_GROUND and not self._is_hybrid:
            raise ConfigError(
                f"{here}: {own.kind} is computed on model levels, down to the ground; data.level_units is "
                f"{self._data.level_units}, levels of pressure: leave it out"
            )
        for variable in own.made_of.values():
            self._rows(variable, here)
        missing = [self.masks[variable] for variable in own.made_of.values() if variable in self.masks]
        if missing:
            self.masks[name] = np.logical_or.reduce(missing)
        if own.kind == ACCUMULATION:
            return self._add_sum(here, name, own)
        self.attributes[name] = derived_attributes(own.kind)
        roles = list(own.made_of.items())
        field = roles[0][1]
        levels = [self._model.output[row].level for row in self._rows(field)]
        if levels[0] is None and own.kind in (*_NEEDS_GROUND, *_NEEDS_PRESSURE):
            raise ConfigError(
                f"{here}: {field} has no levels, and {own.kind} is made of variables that have; name others in inputs"
            )
        inputs: dict[str, _Input] = {}
        column, order, wanted = None, [0], None
        if levels[0] is not None:
            wanted = self._conf.pressure_levels if own.kind != "mean_sea_level_pressure" else None
            if own.kind in (*_NEEDS_GROUND, *_NEEDS_PRESSURE) or wanted is not None:
                column, order = self._column(here, field, wanted)
            else:
                order = list(range(len(levels)))
        if own.kind in _NEEDS_GROUND:
            require_full_column(column.levels, name, field, here)
            self._find_ground(here, required=True)
        if own.kind == "mean_sea_level_pressure":
            order, column = order[-1:], Column(column.levels.take([-1]), None)
        for number, (role, variable) in enumerate(roles):
            rows = self._rows(variable)
            if [self._model.output[row].level for row in rows] != levels:
                raise ConfigError(f"{here}: {variable} and {field} are not on the same levels")
            inputs[FIELD if number == 0 else role] = _Input([rows[k] for k in order], self._si(here, role, variable))
        if column is not None and (own.kind in _NEEDS_GROUND or self._is_hybrid):
            inputs[SURFACE_PRESSURE] = self._pressure(here)
        self._recipes.append(_Recipe(own.kind, "", column, inputs))
        if own.kind == "mean_sea_level_pressure":
            return self._channels(name, [None])
        return self._channels(name, levels if wanted is None else wanted)

    def _add_sum(self, here: str, name: str, own: ProductConfig) -> list[Channel]:
        rows, known = self._rows(own.of), self._known.get(own.of, {})
        if known.get("temporal") != "accumulate":
            raise ConfigError(
                f"{here}.of: {own.of} is no sum over the step (data.fields.{own.of}.temporal: accumulate or "
                "deaccumulate); only such can be added up"
            )
        if len(rows) > 1:
            raise ConfigError(f"{here}.of: {own.of} has levels; only a variable without can be added up")
        steps, self.windows[name] = None, SINCE_START
        if own.over is not None:
            self.windows[name] = parse_duration(own.over)
            steps, rest = divmod(self.windows[name], self._step)
            if rest:
                raise ConfigError(
                    f"{here}.over: {own.over} is not a multiple of data.timestep {format_duration(self._step)}"
                )
            if self.windows[name] > self._last:
                raise ConfigError(
                    f"{here}.over: {own.over} is longer than the last lead time that is written, "
                    f"{format_duration(self._last)}, so that {name} would be missing everywhere; make it shorter, or "
                    "the forecast longer (inference.lead_time, lead_times)"
                )
        when = "since the initial time" if own.over is None else f"over the {own.over} before"
        self.attributes[name] = {
            "units": known.get("units", ""),
            "long_name": f"{own.of} {when}",
            "temporal": "accumulate",
        }
        if known.get("standard_name"):
            self.attributes[name]["standard_name"] = known["standard_name"]
        self._recipes.append(_Sum(rows[0], steps))
        return self._channels(name, [None])

    @property
    def _is_hybrid(self) -> bool:
        return self._data.level_units == "model_level"

    def _column(self, here: str, name: str, wanted: Sequence[float] | None) -> tuple[Column, list[int]]:
        """Return how `wanted` levels are made of a variable's, and the order of its levels from the top down."""
        values = [self._model.output[row].level for row in self._rows(name)]
        if self._is_hybrid:
            levels = self._run_levels(here).take(match_levels(self._run_levels(here).values, values, name, "", here))
        elif wanted is not None:
            raise ConfigError(f"{here}: data.levels are pressure levels already; inference.levels chooses among them")
        else:
            levels = HybridLevels.of_pressures(values, _PASCAL[self._data.level_units])
        order = np.argsort(levels.pressure(np.array(MEAN_SURFACE_PA)), kind="stable")
        top = levels.take(order[:1]).pressure(np.array(MEAN_SURFACE_PA))[0] / _PASCAL["hPa"]
        if wanted is not None and min(wanted) < 0.999 * top:
            raise ConfigError(
                f"{here}: {min(wanted):g} hPa lies above the uppermost level of {name} ({top:g} hPa), and nothing is "
                "extrapolated upwards; leave it out"
            )
        onto = None if wanted is None else HybridLevels.of_pressures(wanted, _PASCAL["hPa"])
        return Column(levels.take(order), onto, tuple(np.argsort(order).tolist())), order.tolist()

    def _run_levels(self, here: str) -> HybridLevels:
        if self._data.coefficients is None:
            raise ConfigError(
                f"{here}: the pressure of data.levels, which are model levels, is not known; set data.coefficients"
            )
        return load_coefficients(Path(self._data.coefficients), "data.coefficients")

    def _pressure(self, here: str) -> _Input:
        candidates = list(dict.fromkeys(c.variable for c in self._model.output if c.level is None))
        name = self._of_ground(here, SURFACE_PRESSURE, self._conf.surface_pressure, candidates)
        return _Input(self._rows(name, here), self._si(here, SURFACE_PRESSURE, name))

    def _find_ground(self, here: str, required: bool) -> None:
        """Find the geopotential of the ground, (H, W)."""
        names = [channel.variable for channel in self._model.static_stored]
        if not required and self._conf.surface_geopotential is None and not self._matching(SURFACE_GEOPOTENTIAL, names):
            return
        name = self._of_ground(here, SURFACE_GEOPOTENTIAL, self._conf.surface_geopotential, names)
        si, field = self._si(here, SURFACE_GEOPOTENTIAL, name), self._static_CHW[names.index(name)]
        self._ground = field if si is None else si.apply(field)

    def _of_ground(self, here: str, role: str, asked: str | None, names: Sequence[str]) -> str:
        found = [asked] if asked in names else self._matching(role, names) if asked is None else []
        if len(found) != 1:
            what = f'"{asked}" is not among' if asked is not None else f"{here} needs it, and it is not clear which of"
            raise ConfigError(
                f"inference.{role}: {what} {', '.join(names) or 'no variable'}{did_you_mean(asked or '', names)}; name "
                f"{'an output' if role == SURFACE_PRESSURE else 'a static variable of the data'}"
            )
        return found[0]

    def _matching(self, role: str, names: Sequence[str]) -> list[str]:
        return [n for n in names if self._known.get(n, {}).get("standard_name") in _GROUND_NAMES[role]]

    def _si(self, here: str, role: str, name: str) -> Conversion | None:
        return si_conversion(role, name, self._known.get(name, {}), here)

    def _rows(self, name: str, here: str = "") -> list[int]:
        rows = [row for row, channel in enumerate(self._model.output) if channel.variable == name]
        if not rows:
            outputs = sorted({channel.variable for channel in self._model.output})
            raise ConfigError(
                f"{here}: {name} is no output{did_you_mean(name, outputs)}; inputs names what to make it of"
            )
        return rows

    @staticmethod
    def _channels(name: str, levels: Sequence[float | None]) -> list[Channel]:
        return [Channel(name if level is None else f"{name}{level:g}", name, level, "diagnostic") for level in levels]
