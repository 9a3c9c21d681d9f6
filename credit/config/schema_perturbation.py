"""Bases of the sections of an ensemble's perturbations (`credit.forecast.ensemble.base.register_perturbation`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SerializeAsAny

from credit.config.registry import PERTURBATIONS, RegisteredSection
from credit.config.schema_base import StrictModel


class InitialPerturbationSection(StrictModel):
    """Keys that every perturbation of the initial states has."""

    kind: str
    amplitude: float = Field(
        0.3,
        gt=0,
        description="Standard deviation, as a multiple of the standard deviation of each channel's change over a step.",
    )

    def analysis_lags_minutes(self) -> list[int]:
        """Return how long before its start a forecast reads analyses: 0 is the analysis that it starts from."""
        return [0]

    def step_multiples(self) -> dict[str, str]:
        """Return the durations that must be multiples of ``data.timestep``, by key."""
        return {}

    def describe(self) -> str:
        """Return text that tells the forecasts of this perturbation from those of another."""
        return f"{self.kind} perturbations of {self.amplitude:g} deviations of change"


class TendencyPerturbationSection(StrictModel):
    """Keys that every perturbation of the tendencies has."""

    kind: str

    def describe(self) -> str:
        """Return text that tells the forecasts of this perturbation from those of another."""
        return f"{self.kind} perturbations of the tendencies"


InitialPerturbationEntry = Annotated[
    SerializeAsAny[InitialPerturbationSection],
    RegisteredSection(PERTURBATIONS, default="correlated", base=InitialPerturbationSection),
]
TendencyPerturbationEntry = Annotated[
    SerializeAsAny[TendencyPerturbationSection],
    RegisteredSection(PERTURBATIONS, default="sppt", base=TendencyPerturbationSection),
]
