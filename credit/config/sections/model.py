"""The ``model`` section. Shapes, channel counts and window fits are derived elsewhere, never typed here.

The section of a kind of model stands in the model's own folder and is registered with its class
(`credit.models.registry.register_model`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SerializeAsAny, model_validator

from credit.config.registry import MODELS, POSTPROCESSES, RegisteredSection
from credit.config.sections.base import StrictModel
from credit.config.sections.postprocess import PostprocessEntry, PostprocessSection, list_entries_by_key, require_order

# Type of `model.hyperdiffusion` and `inference.hyperdiffusion`, which need not name their kind
HyperdiffusionEntry = Annotated[
    SerializeAsAny[PostprocessSection],
    RegisteredSection(POSTPROCESSES, default="hyperdiffusion", base=PostprocessSection, only=("hyperdiffusion",)),
]


class ModelSection(StrictModel):
    """Keys that every model has."""

    type: str = Field(description="Registered name of the model.")
    residual: bool = Field(
        True,
        description="The network predicts changes of prognostic channels: y = x_last + sigma_tendency * net. For "
        "diagnostic channels, y = mu + sigma * net.",
    )
    hyperdiffusion: HyperdiffusionEntry | None = Field(
        None,
        description="Damping of the shortest waves of prognostic channels at every step, for forecasts of weeks. This "
        "is a short form of the first entry of `model.postprocess`; `{}` uses the defaults.",
    )
    postprocess: list[PostprocessEntry] | None = Field(
        None,
        min_length=1,
        description="Post-processing of the output of every step, in training and in forecasts. The order is: "
        "hyperdiffusion, clamps, then the budgets of dry air, water and energy. Kinds of plugins may be "
        "at any position.",
    )

    @model_validator(mode="after")
    def _postprocess_in_order(self) -> ModelSection:
        require_order(self.postprocess_entries, "model.postprocess")
        return self

    @property
    def postprocess_entries(self) -> dict[str, PostprocessSection]:
        """Entries of the list in order, by their config keys, with `hyperdiffusion` as the first."""
        return list_entries_by_key("model", self.hyperdiffusion, self.postprocess)


ModelEntry = Annotated[SerializeAsAny[ModelSection], RegisteredSection(MODELS, tag="type", base=ModelSection)]
