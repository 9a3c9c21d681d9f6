"""Projection of latitude to channels. A convolution is the same in all rows, so the network needs latitude as input.

Shape suffixes: H rows, C channels, F features.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from credit.parallel.host_copy import to_device

NUM_FEATURES = 4


class LatitudeProjection(nn.Linear):
    """Learned function of latitude with one value for each channel and row, to be added to a field.

    The function is linear in sin(lat), cos(lat), sin(2 lat) and cos(2 lat). The Coriolis parameter is proportional to
    sin(lat), the width of a cell to cos(lat).

    Args:
        lat: (H,) latitude of the rows in degrees north.
        channels: channels of the field.

    Attributes:
        rows: rows that this rank computes; all rows of the grid without domain parallelism.
    """

    def __init__(self, lat: np.ndarray, channels: int) -> None:
        super().__init__(NUM_FEATURES, channels, bias=False)
        self.rows = range(len(lat))
        angle_H = np.deg2rad(lat)
        # The features are an array, because a tensor would lose its values if the network is built on the meta device.
        self._features_HF = np.stack(
            [np.sin(angle_H), np.cos(angle_H), np.sin(2 * angle_H), np.cos(2 * angle_H)], axis=1
        )

    def forward(self) -> Tensor:
        """Return the values (C, H, 1), which broadcast to fields (B, C, H, W)."""
        features_HF = torch.from_numpy(self._features_HF[self.rows.start : self.rows.stop]).to(self.weight.dtype)
        return super().forward(to_device(features_HF, self.weight.device)).T.unsqueeze(-1)
