"""Config sections of the built-in losses."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from credit.config.sections.loss import SHARED_KEYS, LossSection, LossTermEntry, Weight


def strip_km(value: object) -> object:
    """Return a string such as ``800km`` without its unit, so pydantic can parse it; return other values unchanged."""
    if isinstance(value, str):
        return value.strip().removesuffix("km")
    return value


# Length in km, given as a number or as a string such as "800km".
Length = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(strip_km)]


class PointwiseSection(LossSection):
    """Pointwise loss: a function of the normalised error in each cell, with a weighted mean over cells and channels."""

    kind: Literal["mse", "mae", "huber"] = Field("mse", description="Squared error, absolute error or Huber loss.")
    huber_delta: float = Field(
        1.0, gt=0, description="Error at which the Huber loss becomes linear, in normalised units."
    )
    global_mean: float = Field(
        0.0,
        ge=0,
        description="Weight of an additional term: the squared error of each channel's global mean. Errors of the "
        "mean have almost no effect on the pointwise loss, but accumulate in a long rollout. With a weight "
        "of 100, they have an effect.",
    )


class EnsembleScoreSection(LossSection):
    """Base section of losses that compare the members of an ensemble with the truth and with each other."""

    alpha: float = Field(
        0.95,
        ge=0,
        le=1,
        description="1 for the fair score, 0 for the score of the finite ensemble. With 1, the last member has no "
        "gradient if all other members equal the truth, so training is more stable with values slightly below 1.",
    )

    @property
    def needs_members(self) -> bool:
        """True, because the score compares the members of an ensemble."""
        return True


class CRPSSection(EnsembleScoreSection):
    """Continuous ranked probability score (CRPS) of an ensemble (`trainer.members`).

    The loss is the mean of the CRPS over cells (weighted by area) and channels (weighted by `loss.weights`).
    """

    kind: Literal["crps"] = Field("crps", description="Continuous ranked probability score of the members.")
    global_mean: float = Field(
        0.0, ge=0, description="Weight of the CRPS of each channel's global mean, added to the loss."
    )


class SpectralCRPSSection(EnsembleScoreSection):
    """CRPS of spherical-harmonic coefficients. Use it together with `crps`, as a term of a `sum`.

    The loss ignores degrees that the grid does not resolve. Missing cells of a variable are treated as cells with
    error 0.
    """

    kind: Literal["spectral_crps"] = Field(
        "spectral_crps", description="CRPS of the members' spherical-harmonic coefficients."
    )

    @property
    def depends_on_resolution(self) -> bool:
        """True, because the grid determines the number of spherical harmonics."""
        return True


class MultiscaleCRPSSection(EnsembleScoreSection):
    """CRPS of the field smoothed with the longest length, plus the CRPS of the details that each shorter length adds.

    Missing cells of a variable have error 0 when the errors are smoothed, and weight 0 in the mean.
    """

    kind: Literal["multiscale_crps"] = Field("multiscale_crps", description="CRPS of each range of scales.")
    scales: list[Length] = Field(
        min_length=2,
        description="Smoothing lengths in km, the longest first, such as `[800km, 400km, 0km]`. Each length is the "
        "standard deviation of a Gaussian filter. The last length is `0km`: the field without smoothing.",
    )
    scale_weights: list[Weight] | None = Field(
        None, description="Weights of the scores of the `scales`, in the same order. Default: 1 for each scale."
    )

    @model_validator(mode="after")
    def _require_descending_scales(self) -> MultiscaleCRPSSection:
        is_descending = all(longer > shorter for longer, shorter in itertools.pairwise(self.scales))
        if not is_descending or self.scales[-1] != 0:
            shown_scales = ", ".join(f"{length:g}km" for length in self.scales)
            raise ValueError(
                f"loss.scales: [{shown_scales}] must descend and end with 0km (the field itself), so that the loss "
                "includes all scales"
            )
        weights = self.scale_weights
        if weights is None:
            return self
        has_weight_per_scale = len(weights) == len(self.scales)
        if not has_weight_per_scale or not any(weights):
            raise ValueError(
                f"loss.scale_weights: {weights} must have one weight for each of the {len(self.scales)} loss.scales, "
                "and at least one weight must be above 0"
            )
        return self

    @property
    def depends_on_resolution(self) -> bool:
        """True, because the grid determines the number of spherical harmonics."""
        return True


class AMSESection(LossSection):
    """Adjusted mean squared error (arXiv:2501.19374), for fine-tuning a deterministic network against blur.

    The amplitude of each spherical-harmonic degree is compared separately from its phases. So if the position of a wave
    is uncertain, a forecast with a smaller amplitude does not have a smaller loss.
    """

    kind: Literal["amse"] = Field("amse", description="Adjusted mean squared error.")

    @property
    def depends_on_resolution(self) -> bool:
        """True, because the grid determines the number of spherical harmonics."""
        return True


class SumSection(LossSection):
    """Weighted sum of several losses. The keys that all losses have are set in this section and apply to every term."""

    kind: Literal["sum"] = Field("sum", description="Weighted sum of the losses in `terms`.")
    terms: list[LossTermEntry] = Field(min_length=1, description="The losses, each with its `kind` and its `weight`.")

    @model_validator(mode="after")
    def _require_shared_keys_here(self) -> SumSection:
        for number, term in enumerate(self.terms):
            misplaced_keys = []
            for key in sorted(SHARED_KEYS):
                # A saved config contains all keys of a term, mostly with their defaults. So a shared key of a term is
                # an error only if its value differs from both the default and the value of the sum.
                default = type(term).model_fields[key].get_default(call_default_factory=True)
                if getattr(term, key) not in (default, getattr(self, key)):
                    misplaced_keys.append(key)
            if misplaced_keys:
                raise ValueError(
                    f"loss.terms.{number} sets {', '.join(misplaced_keys)}, but all terms share this key; set it "
                    "directly under loss"
                )
        return self

    @property
    def needs_members(self) -> bool:
        """True if a term in `terms` compares the members of an ensemble."""
        return any(term.needs_members for term in self.terms)

    @property
    def depends_on_resolution(self) -> bool:
        """True if a term in `terms` has constants that depend on the grid's resolution."""
        return any(term.depends_on_resolution for term in self.terms)
