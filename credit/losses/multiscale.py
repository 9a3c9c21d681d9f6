"""CRPS by spatial scale (Lang et al. 2025, arXiv:2506.10868): CRPS of a smoothed ensemble and of the finer details.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns,
N spherical-harmonic coefficients.
"""

from __future__ import annotations

import itertools
import math

from torch import Tensor

from credit.errors import ConfigError
from credit.losses.base import CoupledDim, LossContext, WeightedLoss
from credit.losses.crps import ensemble_crps
from credit.losses.registry import register_loss
from credit.losses.section import MultiscaleCRPSSection
from credit.physics.spherical_harmonics import EARTH_RADIUS_KM, compute_gaussian_response
from credit.physics.spherical_transform import SphericalTransform

# Largest factor by which a smoothing may multiply the shortest wave that the grid resolves. A smoothing with a larger
# factor would hardly change the resolved waves.
_LARGEST_RESPONSE = 0.5
# Smaller responses are below the rounding error of float32 relative to 1, the response of the mean.
_NEGLIGIBLE_RESPONSE = 1e-7


@register_loss("multiscale_crps", MultiscaleCRPSSection)
class MultiscaleCRPSLoss(WeightedLoss):
    """Weighted sum over scales of the mean CRPS of the cells (Lang et al. 2025, arXiv:2506.10868).

    The first scale is the ensemble smoothed with a Gaussian of the longest length. Each further scale is a difference:
    the ensemble smoothed with one length minus the ensemble smoothed with the next longer length. This difference
    contains the waves between the two lengths. Its value in a cell depends on neighbouring cells. So the score of the
    difference penalises members with a wrong amplitude of waves, unlike the CRPS of the field itself.

    The smoothing is computed in spherical-harmonic space. Smoothing is linear, so the error of each member is smoothed
    instead of the member and the truth. Cells in which a variable is missing have error 0 in the smoothing, and weight
    0 in the mean.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config, with `scales`, `scale_weights` and `alpha`.

    Raises:
        ConfigError: if the grid does not resolve the shortest length above 0.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset({"cells"})

    def __init__(self, context: LossContext, section: MultiscaleCRPSSection) -> None:
        super().__init__(context, section)
        self._alpha = section.alpha
        self.scale_weights = section.scale_weights or [1.0] * len(section.scales)
        self.transform = SphericalTransform(context.grid)
        _require_resolved(section.scales, self.transform.max_degree)
        # The last length is 0: the field itself, without a transform.
        degree_N = self.transform.degree_N.numpy()
        for number, length in enumerate(section.scales[:-1]):
            response_N = compute_gaussian_response(degree_N, length)
            # Products with tiny factors can be subnormal numbers, with which processors are slow.
            response_N[response_N < _NEGLIGIBLE_RESPONSE] = 0.0
            self.register_constant(f"response_{number}_N", response_N)

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted sum over scales of the mean CRPS, a scalar.

        Args:
            prediction_BMCHW: normalised output of each member.
            target_BCHW: normalised truth.
        """
        error_BMCHW = self.masked_error(prediction_BMCHW, target_BCHW)
        scores = []
        for error_of_scale_BMCHW in self.split_by_scale(error_BMCHW):
            scores.append(self.weighted_mean(ensemble_crps(error_of_scale_BMCHW, self._alpha)))
        return sum(weight * score for weight, score in zip(self.scale_weights, scores, strict=True))

    def split_by_scale(self, field_HW: Tensor) -> list[Tensor]:
        """Split fields (..., H, W) into a list of parts of the same shape, one per scale, whose sum is the fields."""
        coefficient_N = self.transform.analyse(field_HW)
        responses = [getattr(self, f"response_{number}_N") for number in range(len(self.scale_weights) - 1)]
        # The first scale is the field smoothed with the longest length; each further scale is the difference between
        # two successive smoothings.
        parts = [self.transform.synthesise(responses[0] * coefficient_N)]
        for longer_N, shorter_N in itertools.pairwise(responses):
            parts.append(self.transform.synthesise((shorter_N - longer_N) * coefficient_N))
        # The last part comes from the field itself, so it includes the waves that the grid does not resolve.
        parts.append(field_HW - self.transform.synthesise(responses[-1] * coefficient_N))
        return parts


def _require_resolved(scales: list[float], max_degree: int) -> None:
    """Raise ConfigError if the smoothing with the shortest length hardly changes the waves that the grid resolves.

    The smoothing must damp the shortest resolved wave to at most half of its amplitude.

    Args:
        scales: lengths of the smoothings in km, the longest first. The last length is 0 and is not checked.
        max_degree: largest spherical-harmonic degree that the grid resolves.

    Raises:
        ConfigError: if the shortest length above 0 is too short; the message names the shortest valid length.
    """
    shortest_length = scales[-2]
    if compute_gaussian_response(max_degree, shortest_length) > _LARGEST_RESPONSE:
        # Solve `compute_gaussian_response` for the length at which the response equals the limit.
        squared_wavenumber = max_degree * (max_degree + 1)
        allowed_length = EARTH_RADIUS_KM * math.sqrt(-2 * math.log(_LARGEST_RESPONSE) / squared_wavenumber)
        raise ConfigError(
            f"loss.scales: {shortest_length:g}km is too short for this grid, which resolves waves up to degree "
            f"{max_degree}; the shortest length before 0km must be at least {math.ceil(allowed_length)}km"
        )
