"""Entries of ``model.postprocess``: what the output of every step is made to keep to, in training and in forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from credit.config.schema_base import Section
from credit.config.schema_data import DataConfig

Direction = Literal["down", "up"]


class ClampConfig(Section):
    """Bounds of a variable."""

    kind: Literal["clamp"] = Field(description="Values outside the bounds are set to them.")
    variable: str = Field(description="A prognostic or diagnostic variable.")
    minimum: float | None = Field(None, description="In its units; `data.variable_options.NAME.minimum` is the same.")
    maximum: float | None = Field(None, description="In its units; `data.variable_options.NAME.maximum` is the same.")

    @model_validator(mode="after")
    def _some_bound(self) -> ClampConfig:
        if self.minimum is None and self.maximum is None:
            raise ValueError("clamp needs minimum, maximum or both")
        if self.minimum is not None and self.maximum is not None and self.minimum >= self.maximum:
            raise ValueError(f"minimum {self.minimum:g} must be below maximum {self.maximum:g}")
        return self


class BudgetConfig(Section):
    """Keys of what every budget is made of."""

    kind: str
    surface_pressure: str = Field(description="Prognostic variable in Pa or hPa.")
    specific_humidity: str = Field("q", description="Prognostic variable on all levels, in kg kg-1 or g kg-1.")
    condensate: list[str] = Field(
        [], description="Further water on all levels (cloud water, ice, rain, snow), in the same units."
    )

    @property
    def water(self) -> list[str]:
        """All variables that are water in the air."""
        return [self.specific_humidity, *self.condensate]


class DryMassConfig(BudgetConfig):
    """The global mass of dry air stays what it was before the step."""

    kind: Literal["dry_mass"] = Field(description="Closed by a factor of surface pressure.")


class WaterConfig(BudgetConfig):
    """The global water of the air changes by evaporation minus precipitation."""

    kind: Literal["water"] = Field(description="Closed by a factor of precipitation, at least 0.")
    precipitation: str = Field(
        description="Predicted variable, never below 0, of the step: `temporal: accumulate` in m, mm or kg m-2, or "
        "`mean` in kg m-2 s-1, mm s-1, mm h-1, mm day-1 or m s-1."
    )
    evaporation: str = Field(description="Predicted variable of the step, in one of the same units.")
    evaporation_positive: Direction = Field(
        description="The direction in which it is positive: `down` in ERA5 (e, mer), `up` in CMIP (evspsbl)."
    )


class EnergyConfig(BudgetConfig):
    """The global energy of the air changes by the net flux through its top and the ground."""

    kind: Literal["energy"] = Field(description="Closed by a factor of temperature.")
    temperature: str = Field("t", description="Prognostic variable on all levels, in K.")
    eastward_wind: str = Field("u", description="Prognostic variable on all levels, in m s-1.")
    northward_wind: str = Field("v", description="Prognostic variable on all levels, in m s-1.")
    surface_geopotential: str = Field(description="Static variable: geopotential (m2 s-2) or height (m) of the ground.")
    top_down: list[str] = Field(
        [],
        description="Fluxes at the top of the atmosphere that are positive downwards, net or not, of the step: "
        "`temporal: accumulate` in J m-2 or `mean` in W m-2. Predicted, or `toa_incident_solar_radiation`.",
    )
    top_up: list[str] = Field([], description="Fluxes at the top that are positive upwards.")
    surface_down: list[str] = Field(
        [], description="Fluxes at the ground that are positive downwards: radiation, sensible and latent heat."
    )
    surface_up: list[str] = Field([], description="Fluxes at the ground that are positive upwards.")

    @model_validator(mode="after")
    def _some_fluxes(self) -> EnergyConfig:
        if not (self.top_down or self.top_up) or not (self.surface_down or self.surface_up):
            raise ValueError("energy needs fluxes at the top (top_down, top_up) and at the ground (surface_down, ...)")
        every = self.fluxes
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} listed twice among the fluxes; each has one direction")
        return self

    @property
    def fluxes(self) -> list[str]:
        """All fluxes."""
        return [*self.top_down, *self.top_up, *self.surface_down, *self.surface_up]


PostprocessConfig = Annotated[ClampConfig | DryMassConfig | WaterConfig | EnergyConfig, Field(discriminator="kind")]
# what closes a budget must not be changed after it
_ORDER = ("clamp", "dry_mass", "water", "energy")


def check_order(post: Sequence[ClampConfig | BudgetConfig]) -> None:
    """Refuse an order in which a later entry opens what an earlier one has closed.

    Raises:
        ValueError: naming the two.
    """
    kinds = [one.kind for one in post]
    for before, after in zip(kinds, kinds[1:], strict=False):
        if _ORDER.index(after) < _ORDER.index(before):
            raise ValueError(
                f"postprocess: {after} after {before} would open its budget again; the order is {', '.join(_ORDER)}"
            )
    for kind in _ORDER[1:]:
        if kinds.count(kind) > 1:
            raise ValueError(f"postprocess: {kind} is listed twice; once is enough")
    clamped = [one.variable for one in post if one.kind == "clamp"]
    twice = sorted({name for name in clamped if clamped.count(name) > 1})
    if twice:
        raise ValueError(
            f"postprocess: clamp of {', '.join(twice)} is listed twice; give minimum and maximum in one entry"
        )


def check_variables(post: Sequence[ClampConfig | BudgetConfig], data: DataConfig) -> None:
    """Refuse variables that are not in the part of ``data.variables`` that an entry needs.

    Raises:
        ValueError: naming key, variable and what it must be.
    """
    groups = data.variables
    on_levels = set(groups.prognostic.vars_3D)
    outputs = {*groups.prognostic.vars_2D, *groups.diagnostic.vars_2D}
    every = {*on_levels, *outputs, *groups.diagnostic.vars_3D}
    fluxes = outputs | set(groups.dynamic_forcing.vars_2D)
    for number, one in enumerate(post):
        if isinstance(one, ClampConfig):
            wanted = [("variable", [one.variable], every, "in prognostic or diagnostic")]
            for key in ("minimum", "maximum"):
                if getattr(one, key) is not None and getattr(data.field(one.variable), key) is not None:
                    raise ValueError(
                        f"model.postprocess.{number}.{key}: data.variable_options.{one.variable}.{key} says it "
                        "already; leave one out"
                    )
        else:
            wanted = [
                ("surface_pressure", [one.surface_pressure], set(groups.prognostic.vars_2D), "in prognostic.vars_2D"),
                ("specific_humidity", [one.specific_humidity], on_levels, "in prognostic.vars_3D"),
                ("condensate", one.condensate, on_levels, "in prognostic.vars_3D"),
            ]
        if isinstance(one, WaterConfig):
            for key in ("precipitation", "evaporation"):
                wanted.append((key, [getattr(one, key)], outputs, "in vars_2D of prognostic or diagnostic"))
        if isinstance(one, EnergyConfig):
            for key in ("temperature", "eastward_wind", "northward_wind"):
                wanted.append((key, [getattr(one, key)], on_levels, "in prognostic.vars_3D"))
            static = {*groups.static.vars_2D}
            wanted.append(("surface_geopotential", [one.surface_geopotential], static, "in static.vars_2D"))
            for key in ("top_down", "top_up", "surface_down", "surface_up"):
                where = "in vars_2D of prognostic, diagnostic or dynamic_forcing"
                wanted.append((key, getattr(one, key), fluxes, where))
        for key, names, known, where in wanted:
            for name in names:
                if name not in known:
                    raise ValueError(
                        f'model.postprocess.{number}.{key}: "{name}" must be {where} of data.variables; these are '
                        f"{', '.join(sorted(known)) or 'none'}"
                    )
