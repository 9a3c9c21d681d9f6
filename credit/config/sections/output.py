"""Sections of forecast output: derived variables, settings of GRIB2, and products."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, field_validator, model_validator

from credit.channels import DERIVED_VARIABLE_INPUTS
from credit.config.registry import PRODUCTS, RegisteredSection
from credit.config.sections.base import Duration, StrictModel
from credit.errors import did_you_mean

# Kind of derived variables that are the sum of an output over several steps.
ACCUMULATION = "accumulation"
# Names of coordinates and of completion marks in forecast files of any format.
_RESERVED_NAMES = (
    r"(valid_)?time(_since_start|_\d.*)?|init_time|lead_time|prediction_timedelta|forecast_period|member|"
    r"forecast_reference_time|level(_.*)?|latitude|longitude|written|initial_fields|bnds|.*_bnds"
)


def require_valid_names(names: Iterable[str]) -> None:
    """Raise an error if forecast files cannot contain the name of a derived variable.

    Args:
        names: names of derived variables.

    Raises:
        ValueError: if a name has characters that netCDF does not allow, or is the name of a coordinate.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            raise ValueError(
                f'"{name}" is not a valid variable name: use letters, digits, underscore, dot, plus and hyphen'
            )
        if re.fullmatch(_RESERVED_NAMES, name):
            raise ValueError(f'"{name}" is the name of a coordinate of the files; choose a different name')


class DerivedVariableConfig(StrictModel):
    """A variable that is computed from the output of the model."""

    kind: Literal[
        "geopotential",
        "mean_sea_level_pressure",
        "relative_humidity",
        "relative_humidity_water",
        "wind_speed",
        "accumulation",
    ] = Field(description="Quantity to compute. `accumulation` is the sum of the variable in `of` over steps.")
    inputs: dict[str, str] = Field(
        {},
        description="Input -> variable. Defaults: temperature: t, specific_humidity: q, eastward_wind: u, "
        "northward_wind: v.",
    )
    of: str | None = Field(
        None, description="For `accumulation`: an output that is a sum over the step, such as precipitation."
    )
    over: Duration | None = Field(
        None,
        description="For `accumulation`: length of the window that ends at the lead time. Shorter lead times have "
        "missing values. Default: the window starts at the initial time.",
    )

    @model_validator(mode="after")
    def _require_fitting_inputs(self) -> DerivedVariableConfig:
        """Raise ValueError if the kind does not support a key or an input."""
        if (self.kind == ACCUMULATION) != (self.of is not None):
            raise ValueError(f"of: is required for kind {ACCUMULATION} and not allowed for other kinds")
        if self.kind != ACCUMULATION and self.over is not None:
            raise ValueError(f"over: only for kind {ACCUMULATION}")
        # Roles of the inputs, such as temperature. A config may assign a variable to a role.
        roles = DERIVED_VARIABLE_INPUTS.get(self.kind, {})
        for role in self.inputs:
            if role not in roles:
                choices = ", ".join(roles) or "none"
                raise ValueError(f'inputs: "{role}" is not among {choices}{did_you_mean(role, roles)}')
        return self

    @property
    def input_variables(self) -> dict[str, str]:
        """Mapping from the role of each input, such as ``temperature``, to the name of the input variable.

        The derived variable has the levels of the first input.
        """
        if self.of is not None:
            return {"amount": self.of}
        return DERIVED_VARIABLE_INPUTS[self.kind] | self.inputs


class GribParameterConfig(StrictModel):
    """GRIB2 parameter of a variable: a short name, or the numbers of WMO code table 4.2 with units."""

    parameter: str | None = Field(
        None, description="Short name of ecCodes of one of the built-in parameters, for example `gh` or `2t`."
    )
    discipline: int | None = Field(None, ge=0, le=254, description="Discipline (code table 0.0).")
    category: int | None = Field(None, ge=0, le=254, description="Category (code table 4.1).")
    number: int | None = Field(None, ge=0, le=254, description="Number (code table 4.2).")
    units: str | None = Field(
        None, description="Units of the values in the file. The values are converted to these units."
    )
    level_type: str | None = Field(
        None,
        description="Type of level of a variable without levels: `surface`, `meanSea`, `heightAboveGround`, "
        "`heightAboveSea`, `isobaricInhPa`, `entireAtmosphere` or `nominalTop`.",
    )
    level: float | None = Field(None, ge=0, description="Value of this level, in m or hPa.")

    @model_validator(mode="after")
    def _require_short_name_or_numbers(self) -> GribParameterConfig:
        """Raise ValueError unless either a short name or all numbers with units are given."""
        numbers = (self.discipline, self.category, self.number, self.units)
        num_given = sum(value is not None for value in numbers)
        if num_given != (0 if self.parameter is not None else len(numbers)):
            raise ValueError("give either parameter, or all of discipline, category, number and units")
        if self.level is not None and self.level_type is None:
            raise ValueError("level: needs level_type")
        return self


class GribConfig(StrictModel):
    """Identification and packing of GRIB2 files (`inference.format: grib2`)."""

    centre: int | str = Field(
        65535,
        description="Originating centre: number of WMO common code table C-11, or short name of ecCodes, such as "
        "`edzw`. Default: missing.",
    )
    sub_centre: int = Field(0, ge=0, le=65535, description="Sub-centre, as defined by the centre.")
    generating_process: int = Field(255, ge=0, le=255, description="Number of this model, as defined by the centre.")
    status: Literal["operational", "test", "research"] = Field(
        "research", description="Production status of the data (code table 1.3)."
    )
    packing: Literal["ccsds", "simple"] = Field(
        "ccsds", description="`ccsds` is compressed without loss. Older programs can also read `simple`."
    )
    bits: int = Field(
        16,
        ge=1,
        le=24,
        description="Bits per value. The largest error is the range of a field / (2^bits - 1). Variables in "
        "`precision` use the number of bits that their precision requires.",
    )
    precision: dict[str, float] = Field(
        {},
        description="Variable -> largest error of its values, in the units of the data. At most 24 bits are used, "
        "because this is the precision of the fields.",
    )
    parameters: dict[str, GribParameterConfig] = Field(
        {}, description="Variable -> GRIB2 parameter. Default: by the standard_name or the name of the variable."
    )

    @field_validator("precision")
    @classmethod
    def _require_positive(cls, precision: dict[str, float]) -> dict[str, float]:
        """Raise ValueError if an error in `precision` is not above 0."""
        for name, error in precision.items():
            if not error > 0:
                raise ValueError(f"{name}: {error} must be above 0")
        return precision


class ProductSection(StrictModel):
    """Base class of the config sections of forecast products, with the keys that every product has."""

    kind: str
    name: str = Field(description="Name of the product. The names of its files begin with this name.")

    @field_validator("name")
    @classmethod
    def _require_valid_name(cls, name: str) -> str:
        """Raise ValueError if netCDF or file names do not allow the name, or if it is the name of a coordinate."""
        require_valid_names([name])
        return name


ProductEntry = Annotated[SerializeAsAny[ProductSection], RegisteredSection(PRODUCTS, base=ProductSection)]


def _require_distinct_names(entries: list[ProductSection]) -> list[ProductSection]:
    """Raise ValueError if two products have the same name, because their files would replace each other."""
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f'the name "{name}" is given twice; products need different names')
    return entries


ProductList = Annotated[list[ProductEntry], AfterValidator(_require_distinct_names)]
