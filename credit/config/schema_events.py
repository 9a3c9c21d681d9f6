"""Events whose probabilities are scored: a channel beyond a threshold."""

from __future__ import annotations

from pydantic import Field, model_validator

from credit.config.schema_base import Section

_LIMITS = ("above", "below", "above_quantile", "below_quantile")


class EventConfig(Section):
    """An event: a channel's value beyond one limit, a number or a quantile of the climate of each cell."""

    channel: str = Field(description="The channel (`tp`, `t2m`, `z500`), one of those that are scored.")
    above: float | None = Field(None, description="The event is a value above this, in the units of the data.")
    below: float | None = Field(None, description="The event is a value below this, in the units of the data.")
    above_quantile: float | None = Field(
        None,
        description="The event is a value above this quantile, between 0 and 1, of the training period at each cell in "
        "the season of the valid time.",
    )
    below_quantile: float | None = Field(None, description="The event is a value below this quantile, likewise.")

    @model_validator(mode="after")
    def _one_limit(self) -> EventConfig:
        given = [name for name in _LIMITS if getattr(self, name) is not None]
        if len(given) != 1:
            has = f"has {' and '.join(given)}" if given else "has no limit"
            raise ValueError(f"{has}; an event has exactly one of {', '.join(_LIMITS)}")
        for name in ("above_quantile", "below_quantile"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{name}: {value:g} is not between 0 and 1; the ninetieth percentile is 0.9")
        return self
