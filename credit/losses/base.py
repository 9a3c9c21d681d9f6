"""Base classes of training losses.

A loss sees normalised fields of all members of a forecast ensemble; a deterministic forecast has one member.
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
    """Everything that a loss is built from, apart from its own config section.

    Attributes:
        channels: the channels of the run; ``channels.output`` gives the order of C.
        grid: the grid of the fields, (H, W).
        area_CHW: (C, H, W) cell areas as fractions of the valid area of each channel, summing to 1 over each channel,
            float64.
        cell_weight_CHW: (C, H, W) weight of each cell in a channel's mean, summing to 1 over each, float64: `area_CHW`,
            or equal weights with ``loss.latitude_weights: false``. Masked cells have 0.
        channel_weight_C: (C,) weight of each channel by ``loss.weights`` and ``loss.level_weights``, summing to 1,
            float64.
        error_scale_C: (C,) factor on the normalised error of each channel by ``loss.scaling``, float64. With
            ``tendency`` it is, for prognostic channels, the standard deviation of the state over that of a time step's
            change; otherwise 1.
        masks: variable -> (H, W) bool, True where the variable is missing.
    """

    channels: ChannelMap
    grid: LatLonGrid
    area_CHW: np.ndarray
    cell_weight_CHW: np.ndarray
    channel_weight_C: np.ndarray
    error_scale_C: np.ndarray
    masks: Mapping[str, np.ndarray]

    def select(self, channels: slice, rows: slice) -> LossContext:
        """Return the context of a part of the fields; its weights add up to the part's share of the whole.

        Args:
            channels: output channels of the part.
            rows: latitude rows of the part.
        """
        grid = self.grid
        if rows != slice(0, len(grid.lat)):
            grid = LatLonGrid(grid.lat[rows], grid.lon, grid.lat_bounds[rows.start : rows.stop + 1])
        return LossContext(
            channels=self.channels.select_output(channels),
            grid=grid,
            area_CHW=self.area_CHW[channels, rows],
            cell_weight_CHW=self.cell_weight_CHW[channels, rows],
            channel_weight_C=self.channel_weight_C[channels],
            error_scale_C=self.error_scale_C[channels],
            masks={name: mask_HW[rows] for name, mask_HW in self.masks.items()},
        )


class Loss(nn.Module):
    """Base class of all losses.

    Constants that depend on the context are buffers (`register_constant`), so that they move with the loss to its
    device. A loss has no trainable parameters.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config.

    Attributes:
        coupled_dims: the dimensions that one term of the loss needs whole. With "cells", a term compares sums over all
            rows and columns of a field (a global mean, a spherical-harmonic coefficient); with "channels", a term
            compares all channels of a cell. Of dimensions that are not listed, a part can be computed without the rest:
            the loss is the sum of those of the parts. The members are always needed together, and samples never are.
            A class that derives from this one directly couples both, unless it sets the attribute.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset({"cells", "channels"})

    def __init__(self, context: LossContext, section: LossSection) -> None:
        super().__init__()

    def register_constant(self, name: str, array: np.ndarray) -> None:
        """Make an array available as a float32 tensor in the attribute `name`, on the device of the loss.

        Args:
            name: name of the attribute.
            array: values of any shape and real dtype; they are copied.
        """
        constant = torch.from_numpy(np.asarray(array, dtype=np.float32).copy())
        # Not persistent: the constants follow from the config and do not belong into checkpoints.
        self.register_buffer(name, constant, persistent=False)

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the loss, a float32 scalar with a gradient.

        Args:
            prediction_BMCHW: (B, M, C, H, W) normalised output of each member.
            target_BCHW: (B, C, H, W) normalised truth. Masked cells are 0 in both.
        """
        raise NotImplementedError


class WeightedLoss(Loss):
    """Base class of losses that are a mean over cells (by area) and channels (by weight).

    The error of a prognostic channel is measured in standard deviations of its own tendency, the change in one time
    step (``loss.scaling: tendency``), or else of its state, so that channels of large variance do not dominate.

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
        """Return forecast minus truth, (B, M, C, H, W), in the unit of ``loss.scaling``; at least float32."""
        dtype = torch.promote_types(prediction_BMCHW.dtype, torch.float32)
        return (prediction_BMCHW.to(dtype) - target_BCHW.to(dtype)[:, None]) * self.scale_C11

    def masked_error(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return `scaled_error` with 0 in the cells where a variable is missing, for losses that combine cells."""
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        return error_BMCHW.masked_fill(self.area_CHW == 0, 0.0)

    def weighted_mean(self, cost_BCHW: Tensor) -> Tensor:
        """Return the mean over the batch of the weighted sum over cells and channels, a scalar."""
        return (cost_BCHW * self.weight_CHW).sum() / cost_BCHW.shape[0]

    def global_mean(self, error_BMCHW: Tensor) -> Tensor:
        """Return the area mean of each field, (B, M, C)."""
        return (error_BMCHW * self.area_CHW).sum(dim=(3, 4))


class PointwiseLoss(WeightedLoss):
    """Mean of a function of the error over batch, members, cells (by area) and channels (by weight).

    With ``loss.scaling: tendency``, persistence scores 1 under `mse`. A subclass defines `cost`. One that replaces
    `forward` by something that combines cells or channels sets `coupled_dims`.

    Args:
        context: weights, scales and grid of the run.
        section: the loss section of the config. If it has the key ``global_mean``, that is the weight of an added term:
            the squared error of each channel's area mean.
    """

    coupled_dims: frozenset[CoupledDim] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Another way to combine the costs may couple anything, unless the class says what.
        if "forward" in vars(cls) and "coupled_dims" not in vars(cls):
            cls.coupled_dims = Loss.coupled_dims

    def __init__(self, context: LossContext, section: LossSection) -> None:
        super().__init__(context, section)
        self._global_mean_weight = getattr(section, "global_mean", 0.0)
        if self._global_mean_weight:
            self.coupled_dims = self.coupled_dims | {"cells"}

    def cost(self, error_BMCHW: Tensor) -> Tensor:
        """Return the cost of the error in each cell, in the same shape.

        Args:
            error_BMCHW: (B, M, C, H, W) forecast minus truth, in the unit of ``loss.scaling``.
        """
        raise NotImplementedError

    def forward(self, prediction_BMCHW: Tensor, target_BCHW: Tensor) -> Tensor:
        """Return the weighted mean of the cost of the error, a float32 scalar; see the base class."""
        error_BMCHW = self.scaled_error(prediction_BMCHW, target_BCHW)
        loss = self.weighted_mean(self.cost(error_BMCHW).flatten(0, 1))
        if self._global_mean_weight:
            # The area mean of each channel is taken before squaring, so only a bias of the whole field counts.
            mean_error_BMC = self.global_mean(error_BMCHW)
            mean_cost = (mean_error_BMC.square() * self.channel_weight_C).sum(dim=2).mean()
            loss = loss + self._global_mean_weight * mean_cost
        return loss
