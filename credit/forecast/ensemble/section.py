"""Config sections of the built-in perturbations of an ensemble."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from credit.calendar import parse_duration
from credit.config.sections.base import Duration
from credit.config.sections.inference import InitialPerturbationSection, TendencyPerturbationSection


class GaussianOrBredSection(InitialPerturbationSection):
    """Built-in perturbations of the initial states of ensemble members: Gaussian noise or bred vectors."""

    kind: Literal["gaussian", "correlated", "bred"] = Field(
        "correlated",
        description="`gaussian`: independent noise in each cell. `correlated`: noise with the correlation length "
        "`length`. `bred`: bred vectors, which grow in `cycles` forecasts before the initial time.",
    )
    length: float = Field(
        500.0, gt=0, description="Correlation length in km, for `correlated` and for the first perturbation of `bred`."
    )
    cycles: int = Field(3, ge=1, description="For `bred`: number of cycles, each with a forecast and a rescaling.")
    cycle: Duration = Field(
        "24h",
        description="For `bred`: length of a cycle. The default is rounded up to a multiple of `data.timestep`.",
    )

    @property
    def cycle_minutes(self) -> int:
        """Length of a breeding cycle in minutes."""
        return parse_duration(self.cycle)

    def analysis_lags_minutes(self) -> list[int]:
        """Return the lags (minutes before the initial time) of the analyses to read, starting with the lag 0.

        For bred vectors, each breeding cycle also reads the analysis at its start.
        """
        num_cycles = self.cycles if self.kind == "bred" else 0
        return [number * self.cycle_minutes for number in range(num_cycles + 1)]

    def durations_to_check(self) -> dict[str, str]:
        """Return the durations that must be multiples of the time step, by key; for bred vectors, the cycle length."""
        if self.kind != "bred":
            return {}
        return {"cycle": self.cycle}

    def describe(self) -> str:
        """Return a description of the perturbations, for the attributes of forecast files."""
        text = super().describe()
        if self.kind != "gaussian":
            text += f", {self.length:g} km"
        if self.kind == "bred":
            text += f", {self.cycles} cycles of {self.cycle}"
        return text


class SPPTSection(TendencyPerturbationSection):
    """Stochastically perturbed tendencies: the change over a step is multiplied by 1 + r.

    r is a random field that is correlated in space and time, the same for all variables.
    """

    kind: Literal["sppt"] = Field("sppt", description="Stochastically perturbed tendencies.")
    amplitude: float = Field(0.5, gt=0, description="Standard deviation of r; r is limited to [-1, 1].")
    length: float = Field(500.0, gt=0, description="Correlation length of r in km.")
    time: Duration = Field("6h", description="Correlation time of r, after which the correlation has decreased to 1/e.")

    def describe(self) -> str:
        """Return a description of the perturbations, for the attributes of forecast files."""
        return f"changes times 1 + {self.amplitude:g} r, r of {self.length:g} km and {self.time}"
