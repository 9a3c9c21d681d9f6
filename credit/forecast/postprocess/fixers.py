"""Budget fixers: post-processes that close the global budgets of dry air, water and energy at every step.

A fixer compares the last input frame with the output, in physical units and float64. Only the channels that a fixer
corrects are normalised again; all other channels stay bitwise identical. With domain parallelism, the ranks exchange
only global means. The formulas are in `credit.forecast.postprocess.budgets`.

Shape suffixes: B batch, K layers, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from credit.errors import ConfigError
from credit.forecast.postprocess import budgets
from credit.forecast.postprocess.base import Postprocess, PostprocessContext, register_postprocess
from credit.forecast.postprocess.budgets import ColumnIntegrator
from credit.forecast.postprocess.clamp import find_output_bounds
from credit.forecast.postprocess.physical_fields import ChannelFinder, ChannelSlice, StepFields
from credit.forecast.postprocess.section import BudgetSection, DryMassSection, EnergySection, WaterSection
from credit.models.kernels.autocast import without_autocast


@dataclass(frozen=True)
class AirMassChannels:
    """Channels that determine the mass of the air and the mass of the water in the air.

    Attributes:
        pressure: channel of surface pressure.
        water: channels of specific humidity, then the channels of each condensate, such as cloud water.
    """

    pressure: ChannelSlice
    water: tuple[ChannelSlice, ...]

    def before(self, fields: StepFields) -> tuple[Tensor, Tensor]:
        """Return surface pressure (B, H, W) in Pa and total water (B, K, H, W) in kg kg-1 before the step."""
        return fields.before(self.pressure)[:, 0], sum(fields.before(water) for water in self.water)

    def after(self, fields: StepFields) -> tuple[Tensor, Tensor]:
        """Return surface pressure (B, H, W) in Pa and total water (B, K, H, W) in kg kg-1 after the step."""
        return fields.after(self.pressure)[:, 0], sum(fields.after(water) for water in self.water)


class BudgetFixer(Postprocess):
    """Base class of the post-processes that close a global budget.

    Adjacent fixers of the chain are merged, so they share the fields that were converted to physical units.

    Args:
        context: channels, units, grid and vertical layers of the run.
        section: config section of a budget.

    Raises:
        ConfigError: if a variable lacks levels, has missing cells, or has units that are not allowed.
    """

    def __init__(self, context: PostprocessContext, section: BudgetSection) -> None:
        super().__init__(context, section)
        assert context.layers is not None, "a run with budgets has layers"
        self._columns = ColumnIntegrator(context.layers, context.grid, context.device, context.domain)
        self._normalizer = context.normalizer
        self._channel_finder = ChannelFinder(context)
        pressure = self._channel_finder.find_field_channels("surface_pressure", section.surface_pressure, "pressure")
        water = []
        for name in section.water:
            water.append(self._channel_finder.find_field_channels("specific_humidity", name, "mass fraction of water"))
        self._air = AirMassChannels(pressure, tuple(water))
        # This fixer and the fixers merged into it, in the order of their application.
        self._sequence: list[BudgetFixer] = [self]

    def fix(self, fields: StepFields) -> None:
        """Close the budget: correct a variable in `fields` with `StepFields.correct`."""
        raise NotImplementedError

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """Return the output after this fixer and the fixers that are merged into it; see `Postprocess.forward`."""
        with without_autocast(output_BCHW):
            fields = StepFields(self._normalizer, output_BCHW, previous_BCHW, forcing_BCHW)
            for fixer in self._sequence:
                fixer.fix(fields)
        return fields.output_BCHW

    def merge(self, following: Postprocess) -> Postprocess | None:
        """Append the next entry to this fixer, if it is also a fixer, and return this fixer; otherwise return None."""
        if not isinstance(following, BudgetFixer):
            return None
        self._sequence = [*self._sequence, *following._sequence]
        return self

    def _set_corrected_variable(self, variable: ChannelSlice) -> None:
        """Set the variable that the fixer corrects; each subclass calls this method in its constructor."""
        self._corrected = variable
        self.corrected_channels = variable.rows


@register_postprocess("dry_mass", DryMassSection)
class DryMassFixer(BudgetFixer):
    """Fixer of the mass of dry air: multiplies surface pressure by one factor per sample.

    After the correction, the global mass of dry air is the same as before the step.
    """

    supports_domain = True

    def __init__(self, context: PostprocessContext, section: DryMassSection) -> None:
        super().__init__(context, section)
        self._set_corrected_variable(self._air.pressure)

    def fix(self, fields: StepFields) -> None:
        """Correct surface pressure in `fields`, so that the global mass of dry air does not change over the step."""
        target_B = budgets.compute_global_mean_dry_mass(self._columns, *self._air.before(fields))
        closed_BHW = budgets.close_dry_mass(self._columns, target_B, *self._air.after(fields))
        fields.correct(self._corrected, closed_BHW[:, None])


@register_postprocess("water", WaterSection)
class WaterFixer(BudgetFixer):
    """Fixer of the water in the air: multiplies precipitation by one factor per sample.

    After the correction, the global mean of precipitation equals the global mean of evaporation minus the change of the
    water in the air, in kg m-2 per step. If this difference is negative, precipitation is set to 0.

    Raises:
        ConfigError: if precipitation may be negative, because a factor cannot correct its sign.
    """

    supports_domain = True

    def __init__(self, context: PostprocessContext, section: WaterSection) -> None:
        super().__init__(context, section)
        # Water that leaves the air, kg m-2 per step.
        precipitation = self._channel_finder.find_flux_channel("precipitation", section.precipitation, "water", 1.0)
        minimum, _ = find_output_bounds(context, section.precipitation)
        if minimum < 0:
            raise ConfigError(
                f"{context.key}.precipitation: {section.precipitation} may be negative, but a factor cannot correct "
                f"the sign; set data.variable_options.{section.precipitation}.minimum: 0"
            )
        # Water that enters the air, kg m-2 per step: evaporation, positive upwards.
        sign = -1.0
        if section.evaporation_positive == "up":
            sign = 1.0
        self._evaporation = self._channel_finder.find_flux_channel("evaporation", section.evaporation, "water", sign)
        self._set_corrected_variable(precipitation)

    def fix(self, fields: StepFields) -> None:
        """Correct precipitation in `fields`, so that the global water budget of the step is closed."""
        columns = self._columns
        water_before_B = budgets.compute_global_mean_water(columns, *self._air.before(fields))
        water_after_B = budgets.compute_global_mean_water(columns, *self._air.after(fields))
        evaporated_B = columns.global_mean(fields.after(self._evaporation)[:, 0])
        target_B = evaporated_B - (water_after_B - water_before_B)
        closed_BHW = budgets.close_water(columns, target_B, fields.after(self._corrected)[:, 0])
        fields.correct(self._corrected, closed_BHW[:, None])


@register_postprocess("energy", EnergySection)
class EnergyFixer(BudgetFixer):
    """Fixer of the energy of the air: multiplies temperature by one factor per sample.

    After the correction, the energy of the air has changed over the step by the net flux through the top of the
    atmosphere and the surface.

    Raises:
        ConfigError: if a variable lacks levels, has missing cells, has units that are not allowed, or is an
            instantaneous flux.
    """

    supports_domain = True

    def __init__(self, context: PostprocessContext, section: EnergySection) -> None:
        super().__init__(context, section)
        channel_finder = self._channel_finder
        self._wind = (
            channel_finder.find_field_channels("eastward_wind", section.eastward_wind, "wind"),
            channel_finder.find_field_channels("northward_wind", section.northward_wind, "wind"),
        )
        # Energy that enters the air, J m-2 per step: downwards through the top, upwards through the surface.
        signs = {"top_down": 1.0, "top_up": -1.0, "surface_down": -1.0, "surface_up": 1.0}
        self._fluxes: list[ChannelSlice] = []
        for key, sign in signs.items():
            for name in getattr(section, key):
                self._fluxes.append(channel_finder.find_flux_channel(key, name, "energy", sign))
        temperature = channel_finder.find_field_channels("temperature", section.temperature, "temperature")
        self._ground_HW = channel_finder.compute_surface_geopotential(
            "surface_geopotential", section.surface_geopotential
        )
        self._set_corrected_variable(temperature)

    def fix(self, fields: StepFields) -> None:
        """Correct temperature in `fields`, so that the global energy budget of the step is closed."""
        heat_before_B, rest_before_B = self._compute_global_mean_energy(fields.before)
        heat_after_B, rest_after_B = self._compute_global_mean_energy(fields.after)
        net_flux_BHW = sum(fields.after(flux)[:, 0] for flux in self._fluxes)
        gained_B = self._columns.global_mean(net_flux_BHW)
        # Only the heat depends on temperature, so the heat must balance the fluxes and the change of all other energy.
        target_B = heat_before_B + gained_B - (rest_after_B - rest_before_B)
        closed_BKHW = budgets.close_energy(target_B, fields.after(self._corrected), heat_after_B)
        fields.correct(self._corrected, closed_BKHW)

    def _compute_global_mean_energy(self, read_variable: Callable[[ChannelSlice], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the global mean heat (cp T) of the air, and the global mean of its other energy, both (B,) in J m-2.

        Args:
            read_variable: method `StepFields.before` or `StepFields.after` of the fields of a step.
        """
        pressure_BHW = read_variable(self._air.pressure)[:, 0]
        # The budget ignores the energy of condensates.
        humidity_BKHW = read_variable(self._air.water[0])
        u_BKHW = read_variable(self._wind[0])
        v_BKHW = read_variable(self._wind[1])
        heat_B = budgets.compute_global_mean_heat(
            self._columns, pressure_BHW, read_variable(self._corrected), humidity_BKHW
        )
        rest_B = budgets.compute_global_mean_other_energy(
            self._columns, pressure_BHW, humidity_BKHW, u_BKHW, v_BKHW, self._ground_HW
        )
        return heat_B, rest_B
