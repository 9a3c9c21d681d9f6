"""Variables that are computed from a forecast's output before it is written: derived variables and sums over hours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from credit.channels import DERIVED_VARIABLE_INPUTS
from credit.config.sections.base import Duration, StrictModel
from credit.errors import did_you_mean

# Kind of a derived variable that is the sum of an output over several steps.
ACCUMULATION = "accumulation"
# Names of coordinates and of markers in forecast files, in any format.
_RESERVED_NAMES = (
    r"(valid_)?time(_since_start|_\d.*)?|init_time|lead_time|prediction_timedelta|forecast_period|member|"
    r"forecast_reference_time|level(_.*)?|latitude|longitude|written|initial_fields|bnds|.*_bnds"
)


def require_valid_names(names: Iterable[str]) -> None:
    """Refuse names of derived variables that forecast files cannot contain.

    Args:
        names: names of derived variables.

    Raises:
        ValueError: if a name has characters that netCDF does not allow, or is the name of a coordinate.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            raise ValueError(
                f'"{name}" is not a name for a variable: use letters, digits, underscore, dot, plus and hyphen'
            )
        if re.fullmatch(_RESERVED_NAMES, name):
            raise ValueError(f'"{name}" is the name of a coordinate of the files; take another name')


class DerivedVariableConfig(StrictModel):
    """A variable that is computed from the output of the model."""

    kind: Literal[
        "geopotential",
        "mean_sea_level_pressure",
        "relative_humidity",
        "relative_humidity_water",
        "wind_speed",
        "accumulation",
    ] = Field(description="Quantity to compute. `accumulation` is the sum of the variable `of` over steps.")
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
        """Refuse keys and inputs that the kind does not have."""
        if (self.kind == ACCUMULATION) != (self.of is not None):
            raise ValueError(f"of: is needed for kind {ACCUMULATION}, and for that alone")
        if self.kind != ACCUMULATION and self.over is not None:
            raise ValueError(f"over: is for kind {ACCUMULATION}")
        # Roles of the inputs, such as temperature; a config may assign another variable to a role than the default.
        roles = DERIVED_VARIABLE_INPUTS.get(self.kind, {})
        for role in self.inputs:
            if role not in roles:
                choices = ", ".join(roles) or "none"
                raise ValueError(f'inputs: "{role}" is not among {choices}{did_you_mean(role, roles)}')
        return self

    @property
    def input_variables(self) -> dict[str, str]:
        """Variable of each input, by its role, such as ``temperature``.

        The derived variable has the levels of the first input.
        """
        if self.of is not None:
            return {"amount": self.of}
        return DERIVED_VARIABLE_INPUTS[self.kind] | self.inputs
