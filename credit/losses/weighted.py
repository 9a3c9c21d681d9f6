"""The training loss: a pointwise loss in normalised space, weighted by cell area, variable and level."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from credit.channels import ChannelMap
from credit.config.schema_trainer import LossConfig
from credit.errors import ConfigError, did_you_mean
from credit.losses.pointwise import pointwise_loss


class WeightedLoss(nn.Module):
    """Mean of a pointwise loss over batch, cells (by area) and channels (by weight); of order 1 at the start.

    The error of a prognostic channel is measured in standard deviations of its own tendency (``loss.scaling:
    tendency``, so that persistence scores 1 with `mse`) or of its state; each channel and level has its own, so none
    dominates because its variance differs from that of the others. ``loss.global_mean`` adds the squared error of each
    channel's area mean, in the same unit.

    Args:
        conf: the loss section.
        area_HW: cell areas, any scale.
        channel_weight_C: weight of each output channel, any scale.
        error_scale_C: factor on the error in normalised units before the pointwise loss.
        valid_CHW: bool; cells that count. Weights are renormalised over them.
    """

    def __init__(
        self,
        conf: LossConfig,
        area_HW: np.ndarray,
        channel_weight_C: np.ndarray,
        error_scale_C: np.ndarray,
        valid_CHW: np.ndarray,
    ) -> None:
        super().__init__()
        share_C = channel_weight_C / channel_weight_C.sum()
        area_CHW = _sum_to_one(valid_CHW * area_HW)
        cells_CHW = area_CHW if conf.latitude_weights else _sum_to_one(valid_CHW.astype(np.float64))
        for name, array in (
            ("weight_CHW", cells_CHW * share_C[:, None, None]),
            ("area_CHW", area_CHW),
            ("share_C", share_C),
            ("scale_C11", error_scale_C[:, None, None]),
        ):
            self.register_buffer(name, torch.from_numpy(array.astype(np.float32)), persistent=False)
        self._pointwise, self._global_mean = pointwise_loss(conf.kind, conf.huber_delta), conf.global_mean

    def forward(self, prediction_BCHW: torch.Tensor, target_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of normalised fields, float32."""
        error = (prediction_BCHW.float() - target_BCHW.float()) * self.scale_C11
        pointwise = self._pointwise(error)
        loss = (pointwise * self.weight_CHW).sum() / prediction_BCHW.shape[0]
        if self._global_mean:
            mean_BC = (error * self.area_CHW).sum(dim=(2, 3))
            loss = loss + self._global_mean * (mean_BC.square() * self.share_C).sum(dim=1).mean()
        return loss


def _sum_to_one(cells_CHW: np.ndarray) -> np.ndarray:
    return cells_CHW / cells_CHW.sum(axis=(1, 2), keepdims=True)


def build_loss(
    conf: LossConfig,
    channels: ChannelMap,
    area_HW: np.ndarray,
    tendency_scale_C: np.ndarray,
    masks: Mapping[str, np.ndarray],
) -> WeightedLoss:
    """Return the loss of a run.

    Args:
        conf: the loss section.
        channels: the channels.
        area_HW: cell areas.
        tendency_scale_C: (C_prognostic,) standard deviation of the tendency over that of the state.
        masks: variable -> (H, W) bool, True where it is missing.
    """
    output = channels.output
    names = {c.name for c in output} | {c.variable for c in output}
    for name in conf.weights:
        if name not in names:
            raise ConfigError(f'loss.weights: "{name}" is no output{did_you_mean(name, names)}')
    weight = np.array([conf.weights.get(c.name, conf.weights.get(c.variable, 1.0)) for c in output], dtype=np.float64)
    if conf.level_weights == "pressure":
        # mean 1 over the levels of a variable, so that variables keep their balance
        for variable in {c.variable for c in output if c.level is not None}:
            rows = [i for i, c in enumerate(output) if c.variable == variable]
            levels = np.array([output[i].level for i in rows])
            weight[rows] *= levels / levels.mean()
    scale = np.ones(len(output))
    if conf.scaling == "tendency":
        scale[channels.output_slice("prognostic")] = 1.0 / np.asarray(tendency_scale_C, dtype=np.float64)
    everywhere = np.zeros_like(area_HW, dtype=bool)
    valid = np.stack([~masks.get(c.variable, everywhere) for c in output])
    return WeightedLoss(conf, np.asarray(area_HW, dtype=np.float64), weight, scale, valid)
