"""Losses of spherical-harmonic coefficients: the CRPS of an ensemble, and the adjusted mean squared error.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns,
N spherical-harmonic coefficients, L degrees.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from credit.config.sections.loss import LossSection
from credit.errors import ConfigError
from credit.losses.base import CoupledDim, LossContext, WeightedLoss
from credit.losses.crps import ensemble_crps
from credit.losses.registry import register_loss
from credit.losses.section import AMSESection, SpectralCRPSSection
from credit.physics.spherical_transform import SphericalTransform

# Number that is added to the power under a square root, so that the derivative of the root is finite if the power is 0.
# The number is far below the power of any degree of a normalised field.
_SMALLEST_POWER = 1e-20


class SpectralLoss(WeightedLoss):
    """Base class of losses of spherical-harmonic coefficients, weighted by channel.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.
        can_synthesise: True if the loss also transforms coefficients back to fields.

    Raises:
        ConfigError: if ``loss.latitude_weights`` is false, because spherical harmonics weight cells by their area.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset({"cells"})

    def __init__(self, context: LossContext, section: LossSection, can_synthesise: bool) -> None:
        super().__init__(context, section)
        # Compare the weights instead of reading ``section.latitude_weights``, because a term of a sum uses the weights
        # of the sum, not of its own section.
        if not np.array_equal(context.cell_weight_CHW, context.area_CHW):
            raise ConfigError(
                f"loss.latitude_weights: false does not fit loss.kind {section.kind}, because spherical harmonics "
                "weight cells by their area; set it to true"
            )
        self.transform = SphericalTransform(context.grid, can_synthesise)

    def mean_over_channels(self, cost_BC: Tensor) -> Tensor:
        """Return the weighted mean of costs (B, C) over channels, averaged over the batch, a scalar."""
        return (cost_BC * self.channel_weight_C).sum(dim=1).mean()


@register_loss("spectral_crps", SpectralCRPSSection)
class SpectralCRPSLoss(SpectralLoss):
    """CRPS of the spherical-harmonic coefficients of the members, like the spectral term of FourCastNet 3.

    Source: Bonev et al. 2025, arXiv:2507.12144. The coefficients are complex, and the score uses the absolute value of
    their differences in the complex plane. So the score is proper for amplitude and phase, and does not depend on the
    choice of the prime meridian. The sum of the scores of real and imaginary part would depend on this choice.

    The loss is the sum of the scores of all coefficients, divided by the square root of their number. Coefficients with
    an order above 0 are counted twice, so the divisor is n + 1 if n is the largest degree. With this divisor, the
    gradient with respect to the fields is about as large as the gradient of ``crps`` on any grid, and the loss is at
    most the root-mean-square error. The code of FourCastNet 3 (makani) does not divide by n + 1. Its weight of 0.1
    corresponds to the weight 0.1 (n + 1) of this loss.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config, with `alpha`.
    """

    def __init__(self, context: LossContext, section: SpectralCRPSSection) -> None:
        super().__init__(context, section, can_synthesise=False)
        self._alpha = section.alpha

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted mean of the spectral CRPS over channels and batch, a scalar.

        Args:
            prediction_BMCHW: normalised output of each member.
            target_BCHW: normalised truth.
        """
        error_BMCHW = self.masked_error(prediction_BMCHW, target_BCHW)
        # The transform is linear: the coefficients of the error are the error of the coefficients.
        score_BCN = ensemble_crps(self.transform.analyse(error_BMCHW), self._alpha)
        # The square root of the number of coefficients, counted with their multiplicity.
        divisor = self.transform.max_degree + 1
        score_BC = (score_BCN * self.transform.multiplicity_N).sum(dim=2) / divisor
        return self.mean_over_channels(score_BC)


@register_loss("amse", AMSESection)
class AdjustedMeanSquaredError(SpectralLoss):
    """Squared error that separates amplitude and phase in each degree (Subich et al. 2025, arXiv:2501.19374).

    Let S_p and S_t be the powers of forecast and truth in one degree, and c their coherence (the correlation of their
    coefficients). The squared error is (sqrt S_p - sqrt S_t)^2 + 2 sqrt(S_p S_t) (1 - c). Its second term becomes
    smaller if S_p is smaller, so the squared error rewards blur. In this loss, the second term is
    2 max(S_p, S_t) (1 - c).

    The loss is the sum over degrees, plus the mean square of the unresolved part of the error: the waves beyond the
    largest degree. If forecast and truth have the same power in each degree, the loss equals ``mse``. With several
    members, the loss is the mean of the members' losses.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.

    Raises:
        ConfigError: if a variable with a weight above 0 has missing cells, because the edges of the missing regions
            would dominate its power by degree.
    """

    def __init__(self, context: LossContext, section: AMSESection) -> None:
        super().__init__(context, section, can_synthesise=True)
        for channel, weight in zip(context.channels.output, context.channel_weight_C, strict=True):
            if channel.variable in context.masks and weight > 0:
                raise ConfigError(
                    f"loss.kind: amse compares power by degree, which is not defined for {channel.variable}, because "
                    "it has missing cells; set its weight in loss.weights to 0, or choose another loss"
                )

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted mean of the adjusted squared error, a scalar.

        Args:
            prediction_BMCHW: normalised output of each member.
            target_BCHW: normalised truth.
        """
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        target_B1CHW = target_BCHW.float()[:, None] * self.scale_C11
        error_BMCN = self.transform.analyse(error_BMCHW)
        cost_BMCL = adjusted_squared_error(error_BMCN, self.transform.analyse(target_B1CHW), self.transform)
        # The unresolved part is the error minus its synthesis from all degrees.
        unresolved_BMCHW = error_BMCHW - self.transform.synthesise(error_BMCN)
        unresolved_BMC = (unresolved_BMCHW.square() * self.area_CHW).sum(dim=(3, 4))
        return self.mean_over_channels((cost_BMCL.sum(dim=3) + unresolved_BMC).mean(dim=1))


def adjusted_squared_error(error_N: Tensor, target_N: Tensor, transform: SphericalTransform) -> Tensor:
    """Return the adjusted squared error of each spherical-harmonic degree; see `AdjustedMeanSquaredError`.

    Args:
        error_N: (..., N) complex spherical-harmonic coefficients of forecast minus truth.
        target_N: (..., N) coefficients of the truth, which broadcast to the shape of `error_N`.
        transform: the transform that computed the coefficients.

    Returns:
        (..., L) real cost of each of the L degrees, at least 0, in the square of the unit of the coefficients.
    """
    forecast_N = target_N + error_N
    power_L = transform.sum_by_degree(_real_product(forecast_N, forecast_N))
    target_power_L = transform.sum_by_degree(_real_product(target_N, target_N))
    amplitude_L = (power_L + _SMALLEST_POWER).sqrt()
    target_amplitude_L = (target_power_L + _SMALLEST_POWER).sqrt()
    # For a good forecast, the difference of powers and 1 - coherence are tiny differences of large numbers. In float32,
    # they would be dominated by rounding errors, so both are computed from the coefficients of the error.
    power_difference_L = transform.sum_by_degree(_real_product(error_N, forecast_N + target_N))
    amplitude_cost_L = (power_difference_L / (amplitude_L + target_amplitude_L)).square()
    squared_error_L = transform.sum_by_degree(_real_product(error_N, error_N))
    one_minus_coherence_L = (squared_error_L - amplitude_cost_L) / (2.0 * amplitude_L * target_amplitude_L)
    # In a degree without power, rounding errors could move the value out of its possible range.
    one_minus_coherence_L = one_minus_coherence_L.clamp(0.0, 2.0)
    return amplitude_cost_L + 2.0 * torch.maximum(power_L, target_power_L) * one_minus_coherence_L


def _real_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the real part of the product of `first` and the complex conjugate of `second`, elementwise."""
    return first.real * second.real + first.imag * second.imag
