"""CellMeans: area-weighted means over regions; which channels are the components of wind vectors.

Shapes: C channels, V wind vectors, X = C + V rows, R regions, P cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError


class CellMeans:
    """Area-weighted means over regions, masked cells left out with the weights renormalised.

    Args:
        channels: the C channels that fields have.
        masks: variable -> (H, W) bool, True where missing.
        weights: (R, H, W) from `credit.verify.regions.region_weights`.
        winds: (index of u, index of v) of V wind vectors among the channels, whose masks are equal.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        masks: Mapping[str, np.ndarray],
        weights: np.ndarray,
        winds: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.names = [channel.name for channel in channels]
        everywhere = np.ones(weights.shape[1:], dtype=bool)
        valid = [~masks[c.variable] if c.variable in masks else everywhere for c in channels]
        self.valid_CP = np.stack(valid).reshape(len(channels), -1)
        self.u, self.v = (np.array([pair[i] for pair in winds], dtype=int) for i in (0, 1))
        self.shape = len(channels) + len(winds), len(weights)
        self._whole = bool(self.valid_CP.all())
        self._grid = weights.shape[1:]
        # columns between which no region begins or ends are added first: few numbers are left to be weighted
        changes = (np.diff(weights, axis=2) != 0).any(axis=(0, 1))
        self._starts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        self._weights_SR = weights[:, :, self._starts].reshape(len(weights), -1).T
        self._norm_CR = self._weighted(self.valid_CP)

    def flatten(self, fields_CHW: np.ndarray, what: str) -> np.ndarray:
        """Return (C, P) float64 with masked cells set to 0.

        Raises:
            DataError: if a value outside the mask is missing: `what` names the forecast and its time. A forecast that
                blew up must not pass for one with fewer cells.
        """
        flat = fields_CHW.reshape(self.valid_CP.shape)
        if not self._whole:
            flat = np.where(self.valid_CP, flat, np.float32(0))
        if not np.isfinite(flat).all():
            name = self.names[int(np.flatnonzero(~np.isfinite(flat).all(axis=1))[0])]
            raise DataError(f"{what}: {name} is not finite outside its mask")
        return flat.astype(np.float64)

    def mean(self, values_CP: np.ndarray) -> np.ndarray:
        """Return the means over each region, (C, R); `values_CP` must be 0 where masked."""
        return self._over_norm(self._weighted(values_CP), self._norm_CR)

    def means_of_channel(self, values_KP: np.ndarray, channel: int) -> np.ndarray:
        """Return the means over each region of K fields that belong to one channel, (K, R)."""
        return self._over_norm(self._weighted(values_KP), self._norm_CR[channel])

    def vector_mean(self, values_VP: np.ndarray) -> np.ndarray:
        """Return the means over each region of what belongs to the vectors, (V, R)."""
        return self._over_norm(self._weighted(values_VP), self._norm_CR[self.u])

    def with_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Return (X, R): the channels' means, then for each vector the sum of its components'."""
        return np.concatenate([means_CR, means_CR[self.u] + means_CR[self.v]])

    def _weighted(self, values_KP: np.ndarray) -> np.ndarray:
        """Return the weighted sums over each region, (K, R) float64."""
        values = values_KP.reshape(len(values_KP), *self._grid)
        if len(self._starts) == 1:
            along = values.sum(axis=2, dtype=np.float64)
        else:
            along = np.add.reduceat(values, self._starts, axis=2, dtype=np.float64)
        return along.reshape(len(values), len(self._weights_SR)) @ self._weights_SR

    @staticmethod
    def _over_norm(sums: np.ndarray, norm: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a region without a valid cell has no mean
            return sums / norm


def wind_pairs(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], masks: Mapping[str, np.ndarray]
) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the pair's variable) of the horizontal winds among `channels`.

    Components belong together by standard_name, level, mask and a name that differs in its first letter only.
    """

    def component(channel: Channel) -> str | None:
        name = attributes.get(channel.variable, {}).get("standard_name", "")
        return {"eastward_wind": "u", "northward_wind": "v"}.get(name)

    northward = {(c.variable[1:], c.level): i for i, c in enumerate(channels) if component(c) == "v"}
    pairs = []
    for index, channel in enumerate(channels):
        partner = northward.get((channel.variable[1:], channel.level))
        if component(channel) != "u" or partner is None:
            continue
        if np.array_equal(masks.get(channel.variable), masks.get(channels[partner].variable)):
            pairs.append((index, partner, f"wind{channel.variable[1:]}"))
    return pairs
