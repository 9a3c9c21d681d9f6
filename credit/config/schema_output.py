"""What forecasts are brought to before they are written: pressure levels, derived variables, sums over hours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from credit.channels import DERIVED_FROM
from credit.config.schema_base import Section
from credit.config.schema_data import Duration
from credit.errors import did_you_mean

ACCUMULATION = "accumulation"
# of files' coordinates and marks, in any format
_TAKEN = (
    r"(valid_)?time(_since_start|_\d.*)?|init_time|lead_time|prediction_timedelta|forecast_period|member|"
    r"forecast_reference_time|level(_.*)?|latitude|longitude|written|initial_fields|bnds|.*_bnds"
)


def require_names(names: Iterable[str]) -> None:
    """Refuse names of derived variables that files cannot hold beside their coordinates.

    Raises:
        ValueError: naming the first of them.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            raise ValueError(
                f'"{name}" is no name of a variable: it may have letters, digits, underscore, dot, plus and hyphen'
            )
        if re.fullmatch(_TAKEN, name):
            raise ValueError(f'"{name}" is the name of a coordinate of the files; take another name')


class ProductConfig(Section):
    """A variable that is made of a forecast's outputs."""

    kind: Literal[
        "geopotential",
        "mean_sea_level_pressure",
        "relative_humidity",
        "relative_humidity_water",
        "wind_speed",
        "accumulation",
    ] = Field(description="How it is made. `accumulation` adds up what `of` names over the steps.")
    inputs: dict[str, str] = Field(
        {},
        description="Variables to make it of, where they have other names: temperature (t), specific_humidity (q), "
        "eastward_wind (u), northward_wind (v).",
    )
    of: str | None = Field(None, description="accumulation: an output that is a sum over the step.")
    over: Duration | None = Field(
        None, description="accumulation: the time before, missing until it has passed; default: since the initial time."
    )

    @model_validator(mode="after")
    def _inputs_fit(self) -> ProductConfig:
        if (self.kind == ACCUMULATION) != (self.of is not None):
            raise ValueError(f"of: goes with kind {ACCUMULATION}, and that with it")
        if self.kind != ACCUMULATION and self.over is not None:
            raise ValueError(f"over: goes with kind {ACCUMULATION}")
        known = DERIVED_FROM.get(self.kind, {})
        for role in self.inputs:
            if role not in known:
                raise ValueError(
                    f'inputs: "{role}" is not among {", ".join(known) or "none"}{did_you_mean(role, known)}'
                )
        return self

    @property
    def made_of(self) -> dict[str, str]:
        """Role -> variable, the field that others belong to first."""
        return {"amount": self.of} if self.of is not None else DERIVED_FROM[self.kind] | self.inputs
