"""Config sections of the built-in losses."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.sections.loss import SHARED_KEYS, LossSection, LossTermEntry


class PointwiseSection(LossSection):
    """A loss that is a function of the normalised error in each cell, averaged with weights."""

    kind: Literal["mse", "mae", "huber"] = Field("mse", description="Squared error, absolute error or Huber loss.")
    huber_delta: float = Field(
        1.0, gt=0, description="Error at which the Huber loss becomes linear, in normalised units."
    )
    global_mean: float = Field(
        0.0,
        ge=0,
        description="Weight of an additional term: the squared error of each channel's global mean. Errors of the "
        "mean are too small to matter in the pointwise loss, but accumulate in a long rollout. A weight "
        "of 100 makes them visible.",
    )


class CRPSSection(LossSection):
    """The continuous ranked probability score of an ensemble (`trainer.members`), averaged with weights."""

    kind: Literal["crps"] = Field("crps", description="Continuous ranked probability score of the members.")
    alpha: float = Field(
        0.95,
        ge=0,
        le=1,
        description="1 for the fair score, 0 for the score of the members as they are. With 1, the last member has no "
        "gradient when all others equal the truth, so values slightly below 1 train more steadily.",
    )
    global_mean: float = Field(
        0.0, ge=0, description="Weight of the CRPS of each channel's global mean, added to the loss."
    )

    @property
    def needs_members(self) -> bool:
        """True: the score compares the members of an ensemble."""
        return True


class SumSection(LossSection):
    """Several losses, added up. The keys that all losses share stand here, and are used for every term."""

    kind: Literal["sum"] = Field("sum", description="Weighted sum of the losses in `terms`.")
    terms: list[LossTermEntry] = Field(min_length=1, description="The losses, each with its `kind` and its `weight`.")

    @model_validator(mode="after")
    def _require_shared_keys_here(self) -> SumSection:
        for number, term in enumerate(self.terms):
            misplaced_keys = []
            for key in sorted(SHARED_KEYS):
                # A saved config has every key of a term, most of them with their defaults.
                default = type(term).model_fields[key].get_default(call_default_factory=True)
                if getattr(term, key) not in (default, getattr(self, key)):
                    misplaced_keys.append(key)
            if misplaced_keys:
                raise ValueError(
                    f"loss.terms.{number} sets {', '.join(misplaced_keys)}, which all terms share; set it under loss"
                )
        return self

    @property
    def needs_members(self) -> bool:
        """True if one of the terms compares the members of an ensemble."""
        return any(term.needs_members for term in self.terms)
