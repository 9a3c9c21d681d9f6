"""What the output of a step is made to keep to: bounds of variables and the budgets of ``model.postprocess``.

Budgets are closed on physical fields in float64, between the last input frame and the output; only the channels that a
budget corrects are normalised again, all others keep every bit. A sample is whole on its rank, so ranks agree.
Shape suffixes: B batch, C channels, K layers, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from credit.data.normalize import Normalizer
from credit.forecast.postprocess import budgets
from credit.forecast.postprocess.budgets import ColumnIntegrator


@dataclass(frozen=True)
class ChannelSlice:
    """Where a variable lies among the channels.

    Attributes:
        group: ``output``, of which prognostic channels are the first, or ``dynamic_forcing``.
        rows: its channels there, side by side, in the order of the run's levels.
        factor: from its units to SI; of a flux, to what passes in a step, in kg m-2 or J m-2.
    """

    group: str
    rows: tuple[int, ...]
    factor: float = 1.0

    def __post_init__(self) -> None:
        assert self.rows == tuple(range(self.rows[0], self.rows[-1] + 1)), "no index has to go to the device"


class StepFields:
    """The fields of a step in SI units, float64, decoded where they are asked for.

    Args:
        normalizer: of the run.
        state_BCHW: the last input frame, normalised prognostic channels.
        forcing_BCHW: its dynamic forcing.
        output_BCHW: the normalised output.
    """

    def __init__(self, normalizer: Normalizer, state_BCHW: Tensor, forcing_BCHW: Tensor, output_BCHW: Tensor) -> None:
        self._normalizer, self._state, self._forcing = normalizer, state_BCHW, forcing_BCHW
        self.output_BCHW = output_BCHW
        self._known: dict[tuple[str, ChannelSlice], Tensor] = {}

    def before(self, place: ChannelSlice) -> Tensor:
        """Return a prognostic variable in the last input frame, (B, K, H, W)."""
        return self._decoded("prognostic", place, self._state)

    def after(self, place: ChannelSlice) -> Tensor:
        """Return a predicted variable, or the step's forcing, (B, K, H, W)."""
        return self._decoded(place.group, place, self._forcing if place.group != "output" else self.output_BCHW)

    def correct(self, place: ChannelSlice, values_BKHW: Tensor) -> None:
        """Put other values of a predicted variable in place."""
        encoded = self._normalizer.encode_rows(values_BKHW / place.factor, "output", place.rows)
        first, last = place.rows[0], place.rows[-1]
        self.output_BCHW = self.output_BCHW.slice_scatter(encoded, 1, first, last + 1)
        # what was written is what counts from here on: the values as float32 keeps them
        self._known.pop(("output", place), None)

    def _decoded(self, group: str, place: ChannelSlice, x_BCHW: Tensor) -> Tensor:
        key = (group, place)
        if key not in self._known:
            self._known[key] = self._normalizer.decode_rows(x_BCHW, group, place.rows) * place.factor
        return self._known[key]


class Fixer(Protocol):
    """Closes a budget in place of the output."""

    corrected: ChannelSlice

    def __call__(self, fields: StepFields, columns: ColumnIntegrator) -> None: ...


@dataclass(frozen=True)
class AirMass:
    """Surface pressure and the water in the air; the first of `water` is specific humidity."""

    pressure: ChannelSlice
    water: tuple[ChannelSlice, ...]

    def before(self, fields: StepFields) -> tuple[Tensor, Tensor]:
        """Return surface pressure (B, H, W) and all water (B, K, H, W) before the step."""
        return fields.before(self.pressure)[:, 0], sum(fields.before(one) for one in self.water)

    def after(self, fields: StepFields) -> tuple[Tensor, Tensor]:
        """Return the same after it."""
        return fields.after(self.pressure)[:, 0], sum(fields.after(one) for one in self.water)


class DryMassFixer:
    """Corrects surface pressure, so that the mass of dry air is what it was."""

    def __init__(self, air: AirMass) -> None:
        self._air, self.corrected = air, air.pressure

    def __call__(self, fields: StepFields, columns: ColumnIntegrator) -> None:
        """See the class."""
        wanted_B = budgets.dry_mass(columns, *self._air.before(fields))
        closed = budgets.close_dry_mass(columns, wanted_B, *self._air.after(fields))
        fields.correct(self.corrected, closed[:, None])


class WaterFixer:
    """Corrects precipitation, so that it is evaporation minus the change of the water in the air.

    Args:
        air: of the budget.
        precipitation: leaves the air, kg m-2.
        evaporation: enters it, kg m-2; its factor has the sign.
    """

    def __init__(self, air: AirMass, precipitation: ChannelSlice, evaporation: ChannelSlice) -> None:
        self._air, self.corrected, self._evaporation = air, precipitation, evaporation

    def __call__(self, fields: StepFields, columns: ColumnIntegrator) -> None:
        """See the class."""
        before, after = (budgets.water_mass(columns, *one(fields)) for one in (self._air.before, self._air.after))
        evaporated = columns.global_mean(fields.after(self._evaporation)[:, 0])
        closed = budgets.close_water(columns, evaporated - (after - before), fields.after(self.corrected)[:, 0])
        fields.correct(self.corrected, closed[:, None])


class EnergyFixer:
    """Corrects temperature, so that the energy of the air changes by what passes through its top and the ground.

    Args:
        air: of the budget.
        temperature: on all levels.
        wind: eastward and northward.
        ground_HW: geopotential of the ground, m2 s-2.
        fluxes: into the air, J m-2; their factors have the signs.
    """

    def __init__(
        self,
        air: AirMass,
        temperature: ChannelSlice,
        wind: tuple[ChannelSlice, ChannelSlice],
        ground_HW: Tensor,
        fluxes: Sequence[ChannelSlice],
    ) -> None:
        self._air, self.corrected, self._wind = air, temperature, wind
        self._ground_HW, self._fluxes = ground_HW, tuple(fluxes)

    def __call__(self, fields: StepFields, columns: ColumnIntegrator) -> None:
        """See the class."""
        heat_before, rest_before = self._energy(columns, self._air.before(fields)[0], fields.before)
        heat_after, rest_after = self._energy(columns, self._air.after(fields)[0], fields.after)
        gained = columns.global_mean(sum(fields.after(one)[:, 0] for one in self._fluxes))
        wanted_B = heat_before + gained - (rest_after - rest_before)
        fields.correct(self.corrected, budgets.close_energy(wanted_B, fields.after(self.corrected), heat_after))

    def _energy(
        self, columns: ColumnIntegrator, pressure_BHW: Tensor, of: Callable[[ChannelSlice], Tensor]
    ) -> tuple[Tensor, Tensor]:
        humidity, wind = of(self._air.water[0]), [of(one) for one in self._wind]
        return (
            budgets.heat(columns, pressure_BHW, of(self.corrected), humidity),
            budgets.other_energy(columns, pressure_BHW, humidity, *wind, self._ground_HW),
        )


class Fixers:
    """Closes budgets one after the other.

    Args:
        columns: how to sum.
        normalizer: of the run.
        constraints: in their order.

    Attributes:
        corrected: rows of the output that a budget corrects.
    """

    def __init__(self, columns: ColumnIntegrator, normalizer: Normalizer, constraints: Sequence[Fixer]) -> None:
        self._columns, self._normalizer, self._constraints = columns, normalizer, tuple(constraints)
        self.corrected = sorted({row for one in constraints for row in one.corrected.rows})

    def __call__(self, state_BCHW: Tensor, forcing_BCHW: Tensor, output_BCHW: Tensor) -> Tensor:
        """Return the normalised output (B, C_out, H, W), float32, with all budgets closed.

        Args:
            state_BCHW: normalised prognostic channels of the last input frame.
            forcing_BCHW: normalised dynamic forcing of the step.
            output_BCHW: normalised output.
        """
        with torch.autocast(output_BCHW.device.type, enabled=False):
            fields = StepFields(self._normalizer, state_BCHW, forcing_BCHW, output_BCHW)
            for constraint in self._constraints:
                constraint(fields, self._columns)
        return fields.output_BCHW
