"""Base classes of training losses.

A loss compares the normalised fields of all members of a forecast ensemble with the truth. A deterministic forecast is
an ensemble of one member.

Shape suffixes: B batch, M ensemble members, C output channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from credit.channels import ChannelMap
from credit.config.sections.loss import LossSection
from credit.grid import LatLonGrid

CoupledDim = Literal["cells", "channels"]


@dataclass(frozen=True)
class LossContext:
    """Weights, scales, channels and grid of the run, from which a loss is built.

    Attributes:
        channels: the channels of the run; dimension C has the order of ``channels.output``.
        grid: the grid of the fields, (H, W).
        area_CHW: (C, H, W) float64 cell areas as fractions of the valid area of each channel. The fractions of a
            channel sum to 1; the fraction of a masked cell is 0.
        cell_weight_CHW: (C, H, W) float64 weights of the cells in the mean over a channel. The weights equal
            `area_CHW`, or are all equal with ``loss.latitude_weights: false``. The weights of a channel sum to 1; the
            weight of a masked cell is 0.
        channel_weight_C: (C,) float64 weights of the channels from ``loss.weights`` and ``loss.level_weights``; the
            weights sum to 1.
        error_scale_C: (C,) float64 factor on the normalised error of each channel. With ``loss.scaling: tendency``,
            the factor of a prognostic channel is the standard deviation of its state divided by the standard deviation
            of its change in one time step. All other factors are 1.
        masks: name of a variable with missing cells -> (H, W) bool mask, True in the missing cells.
    """

    channels: ChannelMap
    grid: LatLonGrid
    area_CHW: np.ndarray
    cell_weight_CHW: np.ndarray
    channel_weight_C: np.ndarray
    error_scale_C: np.ndarray
    masks: Mapping[str, np.ndarray]

    def select(self, channels: slice, rows: slice, columns: slice | None = None) -> LossContext:
        """Return the context of a part of the fields; its weights are not rescaled, so they may sum to less than 1.

        Args:
            channels: output channels of the part.
            rows: latitude rows of the part.
            columns: longitude columns of the part; None for all columns.
        """
        grid = self.grid
        if columns is None:
            columns = slice(0, len(grid.lon))
        if (rows, columns) != (slice(0, len(grid.lat)), slice(0, len(grid.lon))):
            grid = grid.select(rows, columns)
        return LossContext(
            channels=self.channels.select_output(channels),
            grid=grid,
            area_CHW=self.area_CHW[channels, rows, columns],
            cell_weight_CHW=self.cell_weight_CHW[channels, rows, columns],
            channel_weight_C=self.channel_weight_C[channels],
            error_scale_C=self.error_scale_C[channels],
            masks={name: mask_HW[rows, columns] for name, mask_HW in self.masks.items()},
        )


class Loss(nn.Module):
    """Base class of all losses.

    A subclass stores constants that depend on the context as buffers (`register_constant`), so that they are moved to
    the device together with the loss. A loss has no trainable parameters.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.

    Attributes:
        coupled_dims: dimensions along which the loss cannot be computed part by part. "cells" means that a term of the
            loss depends on all rows and columns of a field (a global mean, a spherical-harmonic coefficient).
            "channels" means that a term depends on all channels of a cell. Along dimensions that are not listed, the
            loss is the sum of the losses of parts. Every term may depend on all members, but only on one sample. The
            default of this class is both dimensions.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset({"cells", "channels"})

    def __init__(self, context: LossContext, section: LossSection) -> None:
        super().__init__()

    def register_constant(self, name: str, array: np.ndarray) -> None:
        """Store an array as a float32 buffer in the attribute `name`, so it is moved to the device with the loss.

        Args:
            name: name of the attribute.
            array: values of any shape and real dtype; they are copied.
        """
        constant = torch.from_numpy(np.asarray(array, dtype=np.float32).copy())
        # The buffer is not persistent: checkpoints need no constants, because the config determines them.
        self.register_buffer(name, constant, persistent=False)

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the loss, a differentiable float32 scalar.

        Args:
            prediction_BMCHW: (B, M, C, H, W) normalised output of each member.
            target_BCHW: (B, C, H, W) normalised truth. Masked cells are 0 in both.
        """
        raise NotImplementedError


class WeightedLoss(Loss):
    """Base class of losses that are a weighted mean over cells (by area) and channels (by ``loss.weights``).

    Errors are divided by a standard deviation, so that channels of large variance do not dominate. The divisor is the
    standard deviation of a channel's state. For prognostic channels with ``loss.scaling: tendency``, the divisor is the
    standard deviation of the change in one time step.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.
    """

    def __init__(self, context: LossContext, section: LossSection) -> None:
        super().__init__(context, section)
        channel_weight_C11 = context.channel_weight_C[:, None, None]
        self.register_constant("weight_CHW", context.cell_weight_CHW * channel_weight_C11)
        self.register_constant("area_CHW", context.area_CHW)
        self.register_constant("channel_weight_C", context.channel_weight_C)
        self.register_constant("scale_C11", context.error_scale_C[:, None, None])

    def scaled_error(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return forecast minus truth (B, M, C, H, W), scaled by ``loss.scaling``, in float32 or a wider dtype.

        Args:
            prediction_BMCHW: normalised output of each member.
            target_BCHW: normalised truth.
        """
        dtype = torch.promote_types(prediction_BMCHW.dtype, torch.float32)
        # All members are compared with the same truth, so the truth gets a dimension M of length 1.
        return (prediction_BMCHW.to(dtype) - target_BCHW.to(dtype)[:, None]) * self.scale_C11

    def masked_error(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return `scaled_error` with 0 in cells in which a variable is missing, for losses that couple cells."""
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        return error_BMCHW.masked_fill(self.area_CHW == 0, 0.0)

    def weighted_mean(self, cost_BCHW: Tensor) -> Tensor:
        """Return the weighted mean of costs (B, C, H, W) over cells and channels, averaged over the batch, a scalar."""
        return (cost_BCHW * self.weight_CHW).sum() / cost_BCHW.shape[0]

    def global_mean(self, error_BMCHW: Tensor) -> Tensor:
        """Return the area-weighted mean (B, M, C) of each error field (B, M, C, H, W)."""
        return (error_BMCHW * self.area_CHW).sum(dim=(3, 4))


class PointwiseLoss(WeightedLoss):
    """Base class of losses that compute a cost from the error in each cell and average it.

    The mean is over batch, members, cells (by area) and channels (by ``loss.weights``). With
    ``loss.scaling: tendency``, the `mse` loss of a persistence forecast is about 1. A subclass defines `cost`.
    A subclass that overrides `forward` must set `coupled_dims`; otherwise cells and channels are treated as coupled.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config. The key ``global_mean``, if the section has it, is the weight of an
            additional term: the squared error of each channel's area mean.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # A class that defines `forward` may couple cells and channels, so both are treated as coupled by default.
        if "forward" in vars(cls) and "coupled_dims" not in vars(cls):
            cls.coupled_dims = Loss.coupled_dims

    def __init__(self, context: LossContext, section: LossSection) -> None:
        super().__init__(context, section)
        self._global_mean_weight = getattr(section, "global_mean", 0.0)
        if self._global_mean_weight:
            self.coupled_dims = self.coupled_dims | {"cells"}

    def cost(self, error_BMCHW: Tensor) -> Tensor:
        """Return the cost of the error in each cell, (B, M, C, H, W).

        Args:
            error_BMCHW: (B, M, C, H, W) forecast minus truth, normalised and scaled by ``loss.scaling``.
        """
        raise NotImplementedError

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted mean of the cost plus the ``global_mean`` term, a float32 scalar.

        Args:
            prediction_BMCHW: (B, M, C, H, W) normalised output of each member.
            target_BCHW: (B, C, H, W) normalised truth.
        """
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        # Members and samples have equal weights in the mean, so both become one dimension.
        loss = self.weighted_mean(self.cost(error_BMCHW).flatten(0, 1))
        if self._global_mean_weight:
            # The area mean of each channel is squared, so this term depends only on the bias of the whole field.
            mean_error_BMC = self.global_mean(error_BMCHW)
            mean_cost = (mean_error_BMC.square() * self.channel_weight_C).sum(dim=2).mean()
            loss = loss + self._global_mean_weight * mean_cost
        return loss
