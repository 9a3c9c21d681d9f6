"""Beginning: what the baselines of one case are made of at every lead time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from credit.data.climatology.climatology import Fields
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.row_kernels import anomaly_sums


@dataclass(frozen=True)
class BaselineState:
    """What the baselines of one case are made of at every lead time.

    Attributes:
        fields: (C, H, W) truth at the initial time, whatever where masked.
        anomaly: (C, H, W) its anomaly, 0 where masked.
        mean: (C, R) area means of the anomaly.
        variance: (C, R) area means of its square.
    """

    fields: np.ndarray
    anomaly: np.ndarray
    mean: np.ndarray
    variance: np.ndarray

    @classmethod
    def of(cls, means: AreaMean, given: Mapping[str, Fields]) -> Self:
        """Return that of truth and climatology at the initial time, each (C, H, W), by what errors call them.

        Raises:
            DataError: if a value outside the mask is missing.
        """
        fields, normal = given.values()
        anomaly = np.empty(fields.shape, fields.dtype)

        def add_up(channel: int, out_KS: np.ndarray) -> None:
            known = means.cells(fields, channel), means.cells(normal, channel)
            np.subtract(*known, out=anomaly[channel].reshape(-1))
            anomaly_sums(*known, *means.stretches, out_KS)

        mean, variance = means.of_channels(2, add_up, given)
        return cls(fields, anomaly, mean, variance)
