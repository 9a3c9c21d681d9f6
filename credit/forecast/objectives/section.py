"""Config sections of the built-in training objectives."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from credit.config.sections.trainer import ObjectiveSection


class DeterministicSection(ObjectiveSection):
    """Deterministic rollout: one forecast per sample, compared with the truth."""

    kind: Literal["deterministic"] = Field("deterministic", description="One forecast per sample.")


class EnsembleObjectiveSection(ObjectiveSection):
    """Rollout of `trainer.members` forecasts per sample, which differ by the noise in `model.noise`."""

    shares_members: ClassVar[bool] = True
    kind: Literal["ensemble"] = Field("ensemble", description="Several forecasts per sample (`trainer.members`).")
