"""Config sections of the built-in post-processes, entries of ``model.postprocess``."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from credit.config.sections.base import Duration
from credit.config.sections.data import DataConfig
from credit.config.sections.postprocess import PostprocessSection, require_variable_in

Direction = Literal["down", "up"]


class HyperdiffusionSection(PostprocessSection):
    """Damping of the shortest waves of prognostic channels after each step."""

    kind: Literal["hyperdiffusion"] = Field("hyperdiffusion", description="Damp the shortest waves.")
    time: Duration = Field("3h", description="E-folding time of the shortest wave that the grid resolves.")
    order: int = Field(
        8, ge=2, multiple_of=2, description="Exponent of the wavenumber; 8 is the fourth power of the Laplacian."
    )


class ClampSection(PostprocessSection):
    """Limits of a variable: values outside its minimum and maximum are set to these bounds after each step."""

    kind: Literal["clamp"] = Field(description="Set values outside the bounds to the bounds.")
    variable: str = Field(description="A prognostic or diagnostic variable.")
    minimum: float | None = Field(
        None,
        description="Lower bound in the units of the variable. Do not also set `data.variable_options.NAME.minimum`.",
    )
    maximum: float | None = Field(
        None,
        description="Upper bound in the units of the variable. Do not also set `data.variable_options.NAME.maximum`.",
    )

    @model_validator(mode="after")
    def _require_bounds(self) -> ClampSection:
        has_minimum = self.minimum is not None
        has_maximum = self.maximum is not None
        if not has_minimum and not has_maximum:
            raise ValueError("clamp needs minimum, maximum or both")
        if has_minimum and has_maximum and self.minimum >= self.maximum:
            raise ValueError(f"minimum {self.minimum:g} must be below maximum {self.maximum:g}")
        return self

    @property
    def subject(self) -> str:
        """Kind and variable of the entry, for messages; two entries must not have the same subject."""
        return f"clamp of {self.variable}"

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Raise ValueError if the variable is not predicted, or if ``data.variable_options`` also sets a bound."""
        groups = data.variables
        outputs = {
            *groups.prognostic.vars_3D,
            *groups.prognostic.vars_2D,
            *groups.diagnostic.vars_3D,
            *groups.diagnostic.vars_2D,
        }
        for bound in ("minimum", "maximum"):
            value = getattr(self, bound)
            data_value = getattr(data.options_of(self.variable), bound)
            if value is not None and data_value is not None:
                raise ValueError(
                    f"{key}.{bound}: data.variable_options.{self.variable}.{bound} also sets this bound; remove one"
                )
        require_variable_in(f"{key}.variable", self.variable, outputs, "in prognostic or diagnostic")


class BudgetSection(PostprocessSection):
    """Base section of the budget fixers, with the keys that all budgets have."""

    needs_whole_columns: ClassVar[bool] = True

    surface_pressure: str = Field(description="Surface pressure: a prognostic variable in Pa or hPa.")
    specific_humidity: str = Field(
        "q", description="Specific humidity: a prognostic variable on all levels, in kg kg-1 or g kg-1."
    )
    condensate: list[str] = Field(
        [], description="Other water variables on all levels (cloud water, ice, rain, snow), in the same units."
    )

    @property
    def water(self) -> list[str]:
        """Names of all variables of water in the air: specific humidity, then the condensates."""
        return [self.specific_humidity, *self.condensate]

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Raise ValueError if surface pressure or a water variable is not in ``data.variables.prognostic``."""
        prognostic = data.variables.prognostic
        require_variable_in(
            f"{key}.surface_pressure", self.surface_pressure, set(prognostic.vars_2D), "in prognostic.vars_2D"
        )
        on_levels = set(prognostic.vars_3D)
        require_variable_in(f"{key}.specific_humidity", self.specific_humidity, on_levels, "in prognostic.vars_3D")
        for name in self.condensate:
            require_variable_in(f"{key}.condensate", name, on_levels, "in prognostic.vars_3D")


class DryMassSection(BudgetSection):
    """Conservation of the global mass of dry air."""

    kind: Literal["dry_mass"] = Field(description="Close the budget by multiplying surface pressure by a factor.")


class WaterSection(BudgetSection):
    """Global water budget: the water of the air changes by evaporation minus precipitation."""

    kind: Literal["water"] = Field(
        description="Close the budget by multiplying precipitation by a factor that is at least 0."
    )
    precipitation: str = Field(
        description="Precipitation of the step: a predicted variable with a minimum of 0. `temporal: accumulate` in "
        "m, mm or kg m-2, or `mean` in kg m-2 s-1, mm s-1, mm h-1, mm day-1 or m s-1."
    )
    evaporation: str = Field(description="Evaporation of the step: a predicted variable in one of the same units.")
    evaporation_positive: Direction = Field(
        description="Direction in which evaporation is positive: `down` in ERA5 (e, mer), `up` in CMIP (evspsbl)."
    )

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Raise ValueError if a variable of the water budget is not in the required group of ``data.variables``."""
        super().require_variables(data, key)
        outputs = {*data.variables.prognostic.vars_2D, *data.variables.diagnostic.vars_2D}
        rule = "in vars_2D of prognostic or diagnostic"
        require_variable_in(f"{key}.precipitation", self.precipitation, outputs, rule)
        require_variable_in(f"{key}.evaporation", self.evaporation, outputs, rule)


class EnergySection(BudgetSection):
    """Global energy budget: the energy of the air changes by the net flux through its top and the surface."""

    kind: Literal["energy"] = Field(description="Close the budget by multiplying temperature by a factor.")
    temperature: str = Field("t", description="Temperature: a prognostic variable on all levels, in K.")
    eastward_wind: str = Field("u", description="Eastward wind: a prognostic variable on all levels, in m s-1.")
    northward_wind: str = Field("v", description="Northward wind: a prognostic variable on all levels, in m s-1.")
    surface_geopotential: str = Field(
        description="Geopotential (m2 s-2) or height (m) of the surface: a static variable."
    )
    top_down: list[str] = Field(
        [],
        description="Fluxes of the step at the top of the atmosphere that are positive downwards. `temporal: "
        "accumulate` in J m-2 or `mean` in W m-2; predicted variables or `toa_incident_solar_radiation`.",
    )
    top_up: list[str] = Field([], description="Fluxes at the top of the atmosphere that are positive upwards.")
    surface_down: list[str] = Field(
        [], description="Fluxes at the surface that are positive downwards: radiation, sensible and latent heat."
    )
    surface_up: list[str] = Field([], description="Fluxes at the surface that are positive upwards.")

    @model_validator(mode="after")
    def _require_fluxes(self) -> EnergySection:
        has_top_fluxes = self.top_down or self.top_up
        has_surface_fluxes = self.surface_down or self.surface_up
        if not has_top_fluxes or not has_surface_fluxes:
            raise ValueError("energy needs fluxes at the top (top_down, top_up) and at the surface (surface_down, ...)")
        fluxes = [*self.top_down, *self.top_up, *self.surface_down, *self.surface_up]
        repeated = sorted({name for name in fluxes if fluxes.count(name) > 1})
        if repeated:
            raise ValueError(f"{', '.join(repeated)} listed twice among the fluxes; each has one direction")
        return self

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Raise ValueError if a variable of the energy budget is not in the required group of ``data.variables``."""
        super().require_variables(data, key)
        groups = data.variables
        on_levels = set(groups.prognostic.vars_3D)
        for name in ("temperature", "eastward_wind", "northward_wind"):
            require_variable_in(f"{key}.{name}", getattr(self, name), on_levels, "in prognostic.vars_3D")
        require_variable_in(
            f"{key}.surface_geopotential", self.surface_geopotential, set(groups.static.vars_2D), "in static.vars_2D"
        )
        # A flux may also be a forcing, such as the solar radiation at the top of the atmosphere.
        fluxes = {*groups.prognostic.vars_2D, *groups.diagnostic.vars_2D, *groups.dynamic_forcing.vars_2D}
        rule = "in vars_2D of prognostic, diagnostic or dynamic_forcing"
        for direction in ("top_down", "top_up", "surface_down", "surface_up"):
            for name in getattr(self, direction):
                require_variable_in(f"{key}.{direction}", name, fluxes, rule)
