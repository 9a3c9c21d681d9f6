"""Config sections of the built-in training objectives."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from credit.config.sections.trainer import ObjectiveSection


class DeterministicSection(ObjectiveSection):
    """Deterministic objective: the loss compares one forecast per sample with the truth."""

    kind: Literal["deterministic"] = Field("deterministic", description="One forecast per sample.")


class EnsembleObjectiveSection(ObjectiveSection):
    """Ensemble objective: the loss compares `trainer.members` forecasts per sample, which differ by `model.noise`."""

    shares_members: ClassVar[bool] = True
    kind: Literal["ensemble"] = Field("ensemble", description="Several forecasts per sample (`trainer.members`).")
