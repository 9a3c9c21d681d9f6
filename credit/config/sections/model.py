"""The ``model`` section. Shapes, channel counts and window fits are derived elsewhere, never typed here.

The section of a kind of model stands in the model's own folder and is registered with its class
(`credit.models.registry.register_model`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from credit.calendar import parse_duration
from credit.config.registry import MODELS, NOISES, POSTPROCESSES, RegisteredSection
from credit.config.sections.base import StrictModel, canonical_duration
from credit.config.sections.postprocess import PostprocessEntry, PostprocessSection, list_entries_by_key, require_order

# Type of `model.hyperdiffusion` and `inference.hyperdiffusion`, which need not name their kind
HyperdiffusionEntry = Annotated[
    SerializeAsAny[PostprocessSection],
    RegisteredSection(POSTPROCESSES, default="hyperdiffusion", base=PostprocessSection, only=("hyperdiffusion",)),
]


def _canonical_memory(value: object) -> object:
    """Return the one spelling of a memory: ``step``, ``forecast`` or a duration."""
    if value in ("step", "forecast"):
        return value
    if not isinstance(value, bool) and re.fullmatch(r"0+(\.0*)?\s*[a-z]*", str(value)):
        return "step"
    return canonical_duration(value)


def _as_list_of_values(value: Any) -> Any:
    """Return a single value as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


Memory = Annotated[str, BeforeValidator(_canonical_memory)]


class ModelNoiseSection(StrictModel):
    """Keys that every kind of noise has."""

    kind: str
    memory: Annotated[list[Memory], BeforeValidator(_as_list_of_values)] = Field(
        ["step"],
        min_length=1,
        description="How long a draw lasts: `step` (or 0h) draws anew at each step, a duration is the time after which "
        "the correlation has fallen to 1/e, `forecast` keeps the draw for the whole forecast. With several values, the "
        "channels of the noise are divided evenly among them.",
    )

    def memory_minutes(self) -> list[float]:
        """Return the memories in minutes: 0 for `step`, infinity for `forecast`."""
        minutes = {"step": 0.0, "forecast": float("inf")}
        return [minutes[memory] if memory in minutes else float(parse_duration(memory)) for memory in self.memory]


ModelNoiseEntry = Annotated[SerializeAsAny[ModelNoiseSection], RegisteredSection(NOISES, base=ModelNoiseSection)]


def _as_list(value: Any) -> Any:
    """Return one kind, by its name or its section, as a list of sections."""
    entries = value if isinstance(value, list | tuple) else [value]
    return [{"kind": entry} if isinstance(entry, str) else entry for entry in entries if entry is not None]


# A kind, a section, or a list of them.
ModelNoiseList = Annotated[list[ModelNoiseEntry], BeforeValidator(_as_list)]


def require_different_kinds(entries: list[ModelNoiseSection]) -> None:
    """Refuse a kind of noise that is listed twice.

    Raises:
        ValueError: naming it.
    """
    kinds = [entry.kind for entry in entries]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"model.noise: {kind} is listed twice; give it several values of memory instead")


class ModelSection(StrictModel):
    """Keys that every model has."""

    type: str = Field(description="Registered name of the model.")
    residual: bool = Field(
        True,
        description="The network predicts changes of prognostic channels: y = x_last + sigma_tendency * net. For "
        "diagnostic channels, y = mu + sigma * net.",
    )
    noise: ModelNoiseList = Field(
        [],
        description="Random numbers inside the network, by which the members of an ensemble differ: a kind, or a list "
        "of kinds with their keys.",
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

    @model_validator(mode="after")
    def _noise_of_different_kinds(self) -> ModelSection:
        require_different_kinds(self.noise)
        return self

    def find_noise(self, kind: str) -> ModelNoiseSection | None:
        """Return the entry of `model.noise` of a kind, None if the model has no such noise."""
        return next((entry for entry in self.noise if entry.kind == kind), None)

    @property
    def postprocess_entries(self) -> dict[str, PostprocessSection]:
        """Entries of the list in order, by their config keys, with `hyperdiffusion` as the first."""
        return list_entries_by_key("model", self.hyperdiffusion, self.postprocess)


ModelEntry = Annotated[SerializeAsAny[ModelSection], RegisteredSection(MODELS, tag="type", base=ModelSection)]
