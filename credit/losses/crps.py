"""Continuous ranked probability score (CRPS) of an ensemble as a training loss.

For M members with errors e_j = x_j - y (forecast minus truth) in one cell,

    CRPS = 1/M sum_j |e_j| - c sum_{j<k} |e_j - e_k|,    c = (M - 1 + alpha) / (M^2 (M - 1)).

With alpha = 0, this is the score of the finite ensemble of M members, which depends on M. With alpha = 1, it estimates
the score of an infinite ensemble, and is called the fair score (Ferro 2014, doi:10.1002/qj.2270). But the fair score
gives a member no gradient if all other members equal the truth. With 0 < alpha < 1, the score is called almost fair
(Lang et al. 2024, arXiv:2412.15832).

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.losses.base import LossContext, WeightedLoss
from credit.losses.registry import register_loss
from credit.losses.section import CRPSSection


@register_loss("crps", CRPSSection)
class CRPSLoss(WeightedLoss):
    """Mean of the CRPS over batch, cells (by area) and channels (by weight).

    With a single member, the loss is the mean absolute error.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config. `global_mean` is the weight of an additional term: the CRPS of each
            channel's area mean.
    """

    def __init__(self, context: LossContext, section: CRPSSection) -> None:
        super().__init__(context, section)
        self._alpha = section.alpha
        self._global_mean_weight = section.global_mean
        # The CRPS itself is a sum over cells and channels; only the global mean needs all cells of a field.
        self.coupled_dims = frozenset()
        if self._global_mean_weight:
            self.coupled_dims = frozenset({"cells"})

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the mean CRPS, a scalar.

        Args:
            prediction_BMCHW: normalised output of each member.
            target_BCHW: normalised truth.
        """
        # The score needs the differences between members, which equal the differences between their errors.
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        score_BCHW = ensemble_crps(error_BMCHW, self._alpha)
        # Masked cells have weight 0 in all terms of the score, so the loss ignores their differences between members.
        loss = self.weighted_mean(score_BCHW)
        if self._global_mean_weight:
            mean_score_BC = ensemble_crps(self.global_mean(error_BMCHW), self._alpha)
            mean_loss = (mean_score_BC * self.channel_weight_C).sum(dim=1).mean()
            loss = loss + self._global_mean_weight * mean_loss
        return loss


def ensemble_crps(error: Tensor, alpha: float) -> Tensor:
    """Return the almost fair CRPS of each point, in the units of the error; the module docstring gives the formula.

    For complex errors, ``abs(e)`` is the magnitude. The score is then the energy score of the vector (real part,
    imaginary part), which is a proper score (Gneiting and Raftery 2007, doi:10.1198/016214506000001437).

    Args:
        error: (B, M, ...) forecast minus truth of each of the M members, real or complex, in single or double
            precision.
        alpha: 0 for the score of the finite ensemble, 1 for the fair score.

    Returns:
        (B, ...) real score, at least 0 for ``alpha`` from 0 to 1; the absolute error if M is 1.
    """
    if error.shape[1] == 1:
        return error[:, 0].abs()
    return _EnsembleCRPS.apply(error, alpha)


class _EnsembleCRPS(torch.autograd.Function):
    """Autograd function of the CRPS as a sum of non-negative terms, which avoids cancellation of rounded numbers.

        CRPS = 1 / (M (M - 1)) sum_{j<k} (|e_j| + |e_k| - (1 - eps) |e_j - e_k|),    eps = (1 - alpha) / M.

    The sum has a term for each pair of members j and k. The gradient has a closed form and is computed together with
    the score, because autograd would save several tensors for each pair. The derivative of |x| at 0 is defined as 0.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, error: Tensor, alpha: float) -> Tensor:
        num_members = error.shape[1]
        pair_weight = 1.0 / (num_members * (num_members - 1))
        difference_weight = 1.0 - (1.0 - alpha) / num_members
        magnitude = error.abs()
        score = torch.zeros_like(magnitude[:, 0])
        # Sum over k of sign(e_j - e_k): the number of smaller errors minus the number of larger errors. The sign of a
        # complex number is the number divided by its magnitude, which is the gradient of the magnitude.
        rank_balance = torch.zeros_like(error)
        # Each pass handles all pairs of one member with later members. So there are only M - 1 passes, and no temporary
        # tensor is larger than the ensemble.
        for j in range(num_members - 1):
            difference = error[:, j + 1 :] - error[:, j : j + 1]
            terms = magnitude[:, j + 1 :] + magnitude[:, j : j + 1] - difference_weight * difference.abs()
            score += terms.sum(1)
            sign = difference.sgn_()
            rank_balance[:, j] -= sign.sum(1)
            rank_balance[:, j + 1 :] += sign
        if ctx.needs_input_grad[0]:
            # The sum over pairs contains |e_j| in M - 1 terms and |e_j - e_k| in one term, so d CRPS / d e_j is
            # sign(e_j) / M - (1 - eps) / (M (M - 1)) sum_k sign(e_j - e_k).
            gradient = error.sgn().mul_(1.0 / num_members)
            gradient.sub_(rank_balance, alpha=pair_weight * difference_weight)
            ctx.save_for_backward(gradient)
        return score.mul_(pair_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_score: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_score.unsqueeze(1), None
