"""Losses of spherical-harmonic coefficients: the CRPS of an ensemble, and the adjusted mean squared error.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns, N coefficients,
L degrees.
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

# Far below the power of any degree of a normalised field: keeps the derivative of the root finite where power is 0.
_SMALLEST_POWER = 1e-20


class SpectralLoss(WeightedLoss):
    """Base class of losses of spherical-harmonic coefficients, weighted by channel.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.
        can_synthesise: whether the loss transforms coefficients back into fields.

    Raises:
        ConfigError: without area weights, which the harmonics imply.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset({"cells"})

    def __init__(self, context: LossContext, section: LossSection, can_synthesise: bool) -> None:
        super().__init__(context, section)
        # Not the key of the section: as a term of a sum, this loss has the weights of the sum.
        if not np.array_equal(context.cell_weight_CHW, context.area_CHW):
            raise ConfigError(
                f"loss.latitude_weights: false does not fit loss.kind {section.kind}, because spherical harmonics "
                "weight cells by their area; set it to true"
            )
        self.transform = SphericalTransform(context.grid, can_synthesise)

    def mean_over_channels(self, cost_BC: Tensor) -> Tensor:
        """Return the weighted sum over channels, averaged over the batch, a scalar."""
        return (cost_BC * self.channel_weight_C).sum(dim=1).mean()


@register_loss("spectral_crps", SpectralCRPSSection)
class SpectralCRPSLoss(SpectralLoss):
    """CRPS of the spherical-harmonic coefficients of the members, as the spectral term of FourCastNet 3.

    B. Bonev et al. 2025, arXiv:2507.12144. The coefficients are complex, and the score takes the absolute value of
    their differences, in the complex plane. It is then proper for amplitude and phase, and does not depend on the
    meridian that longitudes count from; the scores of real and imaginary part, added up, would.

    The loss is the sum over all coefficients, those with an order above 0 counted twice, divided by the root of their
    number, L + 1 if L is the largest degree. So its gradient with respect to the fields has the magnitude of that of
    ``crps`` on any grid, and its value is at most the root-mean-square error. The code of FourCastNet 3 (makani) does
    not divide: its weight of 0.1 is 0.1 (L + 1) here.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config, with `alpha`.
    """

    def __init__(self, context: LossContext, section: SpectralCRPSSection) -> None:
        super().__init__(context, section, can_synthesise=False)
        self._alpha = section.alpha

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """See the base class."""
        error_BMCHW = self.masked_error(prediction_BMCHW, target_BCHW)
        # The transform is linear: the coefficients of the error are the error of the coefficients.
        score_BCN = ensemble_crps(self.transform.analyse(error_BMCHW), self._alpha)
        score_BC = (score_BCN * self.transform.multiplicity_N).sum(dim=2) / (self.transform.max_degree + 1)
        return self.mean_over_channels(score_BC)


@register_loss("amse", AMSESection)
class AdjustedMeanSquaredError(SpectralLoss):
    """Squared error whose amplitude and phase parts are separate in each degree (Subich et al. 2025, arXiv:2501.19374).

    With the powers S_p and S_t of forecast and truth in one degree and their coherence c (correlation of the
    coefficients), the squared error is (sqrt S_p - sqrt S_t)^2 + 2 sqrt(S_p S_t) (1 - c). Its second term shrinks with
    S_p, so it rewards blur. Here this term is 2 max(S_p, S_t) (1 - c).

    The loss is the sum over degrees, plus the mean square of the part of the error that no degree holds: waves that the
    grid does not resolve would otherwise be free. It equals ``mse`` if all powers are right. With several members it is
    the mean of their losses.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.

    Raises:
        ConfigError: for a predicted variable with missing cells, whose power by degree is that of the coast lines.
    """

    def __init__(self, context: LossContext, section: AMSESection) -> None:
        super().__init__(context, section, can_synthesise=True)
        for channel, weight in zip(context.channels.output, context.channel_weight_C, strict=True):
            if channel.variable in context.masks and weight > 0:
                raise ConfigError(
                    f"loss.kind: amse compares power by degree, which {channel.variable} does not have, because cells "
                    "of it are missing; set its weight in loss.weights to 0, or choose another loss"
                )

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """See the base class."""
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        target_B1CHW = target_BCHW.float()[:, None] * self.scale_C11
        error_BMCN = self.transform.analyse(error_BMCHW)
        cost_BMCL = adjusted_squared_error(error_BMCN, self.transform.analyse(target_B1CHW), self.transform)
        unresolved_BMCHW = error_BMCHW - self.transform.synthesise(error_BMCN)
        unresolved_BMC = (unresolved_BMCHW.square() * self.area_CHW).sum(dim=(3, 4))
        return self.mean_over_channels((cost_BMCL.sum(dim=3) + unresolved_BMC).mean(dim=1))


def adjusted_squared_error(error_N: Tensor, target_N: Tensor, transform: SphericalTransform) -> Tensor:
    """Return the adjusted squared error of each degree, at least 0, in the square of the unit of the coefficients.

    Args:
        error_N: (..., N) complex coefficients of forecast minus truth.
        target_N: (..., N) coefficients of the truth; its leading dimensions broadcast to those of the error.
        transform: the transform that the coefficients come from.

    Returns:
        (..., L) real.
    """
    forecast_N = target_N + error_N
    power_L = transform.sum_by_degree(_product(forecast_N, forecast_N))
    target_power_L = transform.sum_by_degree(_product(target_N, target_N))
    amplitude_L = (power_L + _SMALLEST_POWER).sqrt()
    target_amplitude_L = (target_power_L + _SMALLEST_POWER).sqrt()
    # A good forecast differs little from the truth: differences of powers, and 1 - coherence, would be rounding errors
    # in float32. So both are computed from the coefficients of the error.
    power_difference_L = transform.sum_by_degree(_product(error_N, forecast_N + target_N))
    amplitude_cost_L = (power_difference_L / (amplitude_L + target_amplitude_L)).square()
    squared_error_L = transform.sum_by_degree(_product(error_N, error_N))
    one_minus_coherence_L = (squared_error_L - amplitude_cost_L) / (2.0 * amplitude_L * target_amplitude_L)
    # Rounding errors of a degree without power could leave the possible range.
    one_minus_coherence_L = one_minus_coherence_L.clamp(0.0, 2.0)
    return amplitude_cost_L + 2.0 * torch.maximum(power_L, target_power_L) * one_minus_coherence_L


def _product(first: Tensor, second: Tensor) -> Tensor:
    """Return the real part of the first number times the conjugate of the second."""
    return first.real * second.real + first.imag * second.imag
