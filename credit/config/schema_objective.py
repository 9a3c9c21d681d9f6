"""Base of ``trainer.objective``: what one training step asks of the model."""

from __future__ import annotations

from typing import Annotated

from pydantic import SerializeAsAny

from credit.config.registry import OBJECTIVES, RegisteredSection
from credit.config.schema_base import StrictModel


class ObjectiveSection(StrictModel):
    """Keys that every training objective has."""

    kind: str


ObjectiveEntry = Annotated[
    SerializeAsAny[ObjectiveSection], RegisteredSection(OBJECTIVES, default="deterministic", base=ObjectiveSection)
]


def default_objective() -> ObjectiveSection:
    """Return the objective of a config that names none: a deterministic rollout."""
    return OBJECTIVES.find_section("deterministic").model_validate({"kind": "deterministic"})
