"""Base of the ``model`` section: the keys that every model has.

The section of each type of model is defined in the folder of the model and is registered together with its class
(`credit.models.registry.register_model`). The config contains no shapes or numbers of channels, because they are
derived from the data.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from credit.calendar import parse_duration
from credit.config.registry import MODELS, NOISES, POSTPROCESSES, RegisteredSection
from credit.config.sections.base import StrictModel, standardise_duration
from credit.config.sections.postprocess import PostprocessEntry, PostprocessSection, list_entries_by_key, require_order

# Type of `model.hyperdiffusion` and `inference.hyperdiffusion`. These sections need no key `kind`.
HyperdiffusionEntry = Annotated[
    SerializeAsAny[PostprocessSection],
    RegisteredSection(POSTPROCESSES, default="hyperdiffusion", base=PostprocessSection, only=("hyperdiffusion",)),
]


def _standardise_memory(value: object) -> object:
    """Return a value of ``memory``, the correlation time of noise, in its standard spelling.

    Args:
        value: ``step``, ``forecast`` or a duration; a duration of 0 becomes ``step``. Pydantic reports values of other
            types.

    Raises:
        ValueError: if the value is neither a duration nor ``step`` nor ``forecast``.
    """
    if value in ("step", "forecast"):
        return value
    # `standardise_duration` does not accept a duration of 0, such as 0, 0.0 or 0h.
    if not isinstance(value, bool) and re.fullmatch(r"0+(\.0*)?\s*[a-z]*", str(value)):
        return "step"
    return standardise_duration(value)


def _wrap_in_list(value: Any) -> Any:
    """Return a single value as a list of one value, and a list or tuple as a list."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


Memory = Annotated[str, BeforeValidator(_standardise_memory)]


class ModelNoiseSection(StrictModel):
    """Base class of the config sections of noise inside the network, with the keys that all kinds of noise have."""

    kind: str
    memory: Annotated[list[Memory], BeforeValidator(_wrap_in_list)] = Field(
        ["step"],
        min_length=1,
        description="Correlation time of the noise. `step` (or 0h): new noise at each step. A duration: the time "
        "after which the correlation has fallen to 1/e. `forecast`: the same noise for the whole forecast. With "
        "several values, the "
        "channels of the noise are divided evenly among them.",
    )

    def memory_minutes(self) -> list[float]:
        """Return the values of `memory` in minutes, in order: 0 for ``step``, infinity for ``forecast``."""
        special_minutes = {"step": 0.0, "forecast": float("inf")}
        minutes = []
        for memory in self.memory:
            if memory in special_minutes:
                minutes.append(special_minutes[memory])
            else:
                minutes.append(float(parse_duration(memory)))
        return minutes


ModelNoiseEntry = Annotated[SerializeAsAny[ModelNoiseSection], RegisteredSection(NOISES, base=ModelNoiseSection)]


def _convert_to_sections(value: Any) -> Any:
    """Return the value of ``model.noise`` (a kind, a section, or a list of these) as a list of sections.

    A kind alone becomes a section with this kind. None becomes an empty list.
    """
    sections = []
    for entry in _wrap_in_list(value):
        if isinstance(entry, str):
            sections.append({"kind": entry})
        elif entry is not None:
            sections.append(entry)
    return sections


# A kind, a section, or a list of kinds and sections.
ModelNoiseList = Annotated[list[ModelNoiseEntry], BeforeValidator(_convert_to_sections)]


def require_different_kinds(entries: list[ModelNoiseSection]) -> None:
    """Raise an error if a kind of noise is listed twice.

    Args:
        entries: entries of ``model.noise``.

    Raises:
        ValueError: if two entries have the same kind.
    """
    kinds = [entry.kind for entry in entries]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"model.noise: {kind} is listed twice; give it several values of memory instead")


class ModelSection(StrictModel):
    """Keys that every type of model has."""

    type: str = Field(description="Registered name of the model.")
    residual: bool = Field(
        True,
        description="The network predicts changes of prognostic channels: y = x_last + sigma_tendency * net. For "
        "diagnostic channels, y = mu + sigma * net.",
    )
    noise: ModelNoiseList = Field(
        [],
        description="Random numbers inside the network, which make the members of an ensemble differ: a kind, or a "
        "list of kinds with their keys.",
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
    def _require_postprocess_order(self) -> ModelSection:
        """Raise ValueError if a later post-process would undo an earlier post-process."""
        require_order(self.postprocess_entries, "model.postprocess")
        return self

    @model_validator(mode="after")
    def _require_different_noise_kinds(self) -> ModelSection:
        """Raise ValueError if a kind of noise is listed twice."""
        require_different_kinds(self.noise)
        return self

    # Keys that may change if a run begins with the weights of a run on a different grid.
    grid_keys: ClassVar[tuple[str, ...]] = ()

    def resolve(self, grid_shape: tuple[int, int]) -> ModelSection:
        """Return the section with each value `auto` replaced with a number that suits the grid.

        Args:
            grid_shape: number of rows and columns of the grid.

        Raises:
            ConfigError: if no number suits the grid.
        """
        return self

    def find_noise(self, kind: str) -> ModelNoiseSection | None:
        """Return the entry of `model.noise` with this kind; None if the model has no such noise."""
        for entry in self.noise:
            if entry.kind == kind:
                return entry
        return None

    @property
    def postprocess_entries(self) -> dict[str, PostprocessSection]:
        """Config key -> post-process, in order; the value of the key ``hyperdiffusion`` is the first entry."""
        return list_entries_by_key("model", self.hyperdiffusion, self.postprocess)


ModelEntry = Annotated[SerializeAsAny[ModelSection], RegisteredSection(MODELS, tag="type", base=ModelSection)]
