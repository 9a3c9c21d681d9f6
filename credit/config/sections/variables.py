"""Variables of the ``data`` section: their groups, options and transforms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from credit.channels import COMPUTED_DYNAMIC, COMPUTED_STATIC, DERIVED_VARIABLE_INPUTS
from credit.config.sections.base import Hour, StrictModel

# A level in `data.level_units`.
Level = Annotated[float, Field(gt=0)]


def _require_unique(levels: list[float]) -> list[float]:
    """Raise an error if a level is repeated; otherwise return the levels unchanged.

    Raises:
        ValueError: if a level is repeated.
    """
    repeated = sorted({level for level in levels if levels.count(level) > 1})
    if repeated:
        names = ", ".join(f"{level:g}" for level in repeated)
        raise ValueError(f"{names} is listed twice; list each level once")
    return levels


# Levels in the order of the channels, without duplicates.
Levels = Annotated[list[Level], AfterValidator(_require_unique)]

# Quantities that can be computed from other variables of the sources.
Derived = Literal[
    "geopotential", "mean_sea_level_pressure", "relative_humidity", "relative_humidity_water", "wind_speed"
]
# Derived variables that have no levels.
_DERIVED_WITHOUT_LEVELS = ("mean_sea_level_pressure", "wind_speed")


class GroupConfig(StrictModel):
    """Variables of one group."""

    vars_3D: list[str] = Field([], description="Variables on levels.")
    vars_2D: list[str] = Field([], description="Variables without levels.")


class VariablesConfig(StrictModel):
    """The variables of the model, grouped by role."""

    prognostic: GroupConfig = Field(
        description="Input and output of the model; in a rollout, the output of a step is the input of the next step."
    )
    diagnostic: GroupConfig = Field(GroupConfig(), description="Output only.")
    dynamic_forcing: GroupConfig = Field(
        GroupConfig(),
        description=f"Input only, varying in time. These are computed and need no data: {', '.join(COMPUTED_DYNAMIC)}.",
    )
    static: GroupConfig = Field(
        GroupConfig(),
        description=f"Input only, constant in time. These are computed and need no data: {', '.join(COMPUTED_STATIC)}.",
    )

    @model_validator(mode="after")
    def _require_prognostic(self) -> VariablesConfig:
        """Raise ValueError if the model has no prognostic variables."""
        if not (self.prognostic.vars_3D or self.prognostic.vars_2D):
            raise ValueError("prognostic needs at least one variable")
        return self


class VariableOptions(StrictModel):
    """Options of one variable."""

    levels: Levels | None = Field(None, description="Levels of this variable. Default: `data.levels`.")
    missing: Literal["error", "fill_mean"] = Field(
        "error",
        description="Treatment of missing values. `error`: a missing value stops the command. `fill_mean`: for cells "
        "that are always missing (sst over land). They are filled with the mean and excluded from loss "
        "and scores; the model gets the mask as static channel NAME_mask.",
    )
    temporal: Literal["instant", "mean", "accumulate", "deaccumulate"] = Field(
        "instant",
        description="Meaning of a value in the files: `instant`, or the mean or sum over a window that ends at its "
        "time. Shorter windows than the time step are combined. `deaccumulate`: values are sums since the "
        "start of a forecast.",
    )
    restarts: list[Hour] | None = Field(
        None,
        min_length=1,
        description="For `deaccumulate`: hours (UTC) at which the accumulation restarts from 0. Default: read from "
        "the time bounds in the files.",
    )
    window: Literal["past", "next"] = Field(
        "past",
        description="For forcing that is a mean or sum: window of the value that the step from t to t+dt reads. "
        "`past`: the window "
        "that ends at t. `next`: the window that ends at t+dt.",
    )
    in_forecast: Literal["climatology", "persist", "observed"] = Field(
        "persist",
        description="Values of a forcing from data after the initial time of a forecast. `persist`: the climatology "
        "plus the initial anomaly. `climatology`: the climatology. `observed`: the data at the valid time (prescribed "
        "forcing).",
    )
    minimum: float | None = Field(
        None,
        description="Lower bound of predictions (0 for humidity and precipitation). For a forcing from data: lower "
        "bound of its values after the initial time (0 for sea ice). Default: none.",
    )
    maximum: float | None = Field(None, description="Upper bound of the same values (1 for a fraction). Default: none.")
    valid_range: tuple[float, float] | None = Field(
        None,
        description="Smallest and largest valid value in the files, in the units of the run. Values outside are "
        "treated as missing, for example undeclared fill values (-999). Values inside are accepted "
        "without further checks. Default: impossible values stop the command.",
    )
    vector: Literal["auto", "yes", "no"] = Field(
        "auto",
        description="Treat the variable as a component of a vector, so that its sign changes across a pole. `auto`: "
        "decide by the standard_name.",
    )
    units: str | None = Field(
        None,
        min_length=1,
        description="Units of the run (`K`, `Pa`, `mm`). Values in other units are converted, which needs the extra "
        "`units`. Default: the units of the files.",
    )
    regrid: Literal["bilinear", "conservative", "nearest"] | None = Field(
        None,
        description="Interpolation method for `data.grid`; use `nearest` for masks and categories. Default: "
        "`data.regrid`.",
    )
    derive: Derived | None = Field(
        None,
        description="Compute the variable instead of reading it. `relative_humidity` is relative to water and ice as "
        "in ERA5, `relative_humidity_water` is relative to water.",
    )
    inputs: dict[str, str] = Field(
        {},
        description="For `derive`: input -> variable. Defaults: temperature: t, specific_humidity: q, eastward_wind: "
        "u, northward_wind: v.",
    )

    @property
    def derived_from(self) -> dict[str, str]:
        """Mapping from the role of each input, such as ``temperature``, to the name of the input variable.

        The derived variable has the grid and the times of the first input. The mapping is empty for a variable that is
        read from data.
        """
        if self.derive is None:
            return {}
        return DERIVED_VARIABLE_INPUTS[self.derive] | self.inputs

    def require_consistent(self, name: str) -> None:
        """Raise an error if options contradict each other.

        Args:
            name: name of the variable, for the message.

        Raises:
            ValueError: if two options contradict each other, or an option has no effect.
        """
        key = f"variable_options.{name}"
        if self.minimum is not None and self.maximum is not None and self.minimum >= self.maximum:
            raise ValueError(f"{key}: minimum {self.minimum:g} must be below maximum {self.maximum:g}")
        if self.valid_range is not None and self.valid_range[0] >= self.valid_range[1]:
            lower, upper = self.valid_range
            raise ValueError(f"{key}.valid_range: {lower:g} must be below {upper:g}")
        if self.restarts is not None and self.temporal != "deaccumulate":
            raise ValueError(f"{key}.restarts has no effect without temporal: deaccumulate")
        if self.window == "next" and self.temporal == "instant":
            raise ValueError(f"{key}.window has no effect with temporal: instant; set mean or accumulate")
        if self.inputs and self.derive is None:
            raise ValueError(f"{key}.inputs has no effect without derive")

    def require_derivable(self, name: str, has_levels: bool, is_predicted_or_read: bool) -> None:
        """Raise an error if the quantity in `derive` is not possible for the variable.

        Args:
            name: name of the variable, for the message.
            has_levels: True if the variable is on levels.
            is_predicted_or_read: True if the variable is prognostic, diagnostic, or a forcing that is not computed.

        Raises:
            ValueError: if an input is unknown, or the variable has the wrong group, levels or meaning in time.
        """
        if self.derive is None:
            return
        key = f"variable_options.{name}.derive: {self.derive}"
        inputs = DERIVED_VARIABLE_INPUTS[self.derive]
        for role in self.inputs:
            if role not in inputs:
                raise ValueError(f'{key} has no input "{role}"; its inputs are {", ".join(inputs)}')
        if not is_predicted_or_read:
            raise ValueError(
                f"{key} applies only to prognostic, diagnostic and forcing variables that are not computed"
            )
        if self.derive not in _DERIVED_WITHOUT_LEVELS and not has_levels:
            raise ValueError(f"{key} is a field on levels; list {name} in vars_3D")
        if self.derive == "mean_sea_level_pressure" and has_levels:
            raise ValueError(f"{key} has no levels; list {name} in vars_2D")
        if self.temporal != "instant":
            raise ValueError(f"{key} is computed from instantaneous fields; remove temporal: {self.temporal}")


class TransformConfig(StrictModel):
    """A function for a skewed variable. It is applied before normalisation and inverted in every output."""

    kind: Literal["log1p", "sqrt"] = Field(
        description="`log1p`: ln(1 + abs(x) / unit). `sqrt`: sqrt(abs(x) / unit). Both keep the sign of x."
    )
    unit: float = Field(
        1.0, gt=0, description="Scale of x, in units of the variable. For smaller values, log1p is nearly linear."
    )
