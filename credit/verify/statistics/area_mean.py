"""CellMeans: area-weighted means over regions; which channels are the components of wind vectors.

Shapes: C channels, V wind vectors, X = C + V rows, R regions, P cells, S stretches of cells.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from credit.channels import Channel
from credit.errors import DataError
from credit.utils.threads import thread_map
from credit.verify.statistics.row_kernels import plain_sums, weigh

# usual names of components, of ECMWF, GRIB and WeatherBench 2, whose files of 10 m winds have no standard_name
_FORMS = (
    "{}", "{}10", "10{}", "{}100", "100{}",
    "{}_component_of_wind", "10m_{}_component_of_wind", "100m_{}_component_of_wind",
)  # fmt: skip
_COMPONENTS = {"eastward_wind": "u", "northward_wind": "v"} | {f.format(one): one for f in _FORMS for one in "uv"}
_NO_STANDARD_NAME = ("", "unknown")
# number of a channel, room for the K sums that are wanted of it, (K, S)
AddUp = Callable[[int, np.ndarray], None]
# numbers of one channel, (1,), or of a vector's components, (2,); room for their sums, (1 or 2, K, S), and for the
# vector's, (L, S), which for one channel is (0, S)
AddUpUnit = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


class AreaMean:
    """Area-weighted means over regions, masked cells left out with the weights renormalised.

    Args:
        channels: the C channels that fields have.
        masks: variable -> (H, W) bool, True where missing.
        weights: (R, H, W) from `credit.verify.statistics.regions.region_weights`.
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
        # vectors first, as they take longest
        single = sorted(set(range(len(channels))) - set(itertools.chain(*winds)))
        self._units = [(np.array(pair), number) for number, pair in enumerate(winds)]
        self._units += [(np.array([channel]), None) for channel in single]
        self.shape = len(channels) + len(winds), len(weights)
        self.masked = (~self.valid_CP).any(axis=1)
        *self.stretches, self._weights_SR = _cut(weights)
        self._norm_CR = self._weighted(self.valid_CP)

    def flatten(self, fields_CHW: np.ndarray, what: str) -> np.ndarray:
        """Return (C, P) float64 with masked cells set to 0.

        Raises:
            DataError: see `require_finite`.
        """
        self.require_finite(fields_CHW, what)
        flat = fields_CHW.reshape(self.valid_CP.shape).astype(np.float64)
        flat[~self.valid_CP] = 0.0
        return flat

    def require_finite(self, fields_CHW: np.ndarray, what: str) -> None:
        """Refuse fields of which a value outside the mask is missing.

        Raises:
            DataError: if there is one: `what` names the forecast and its time. A forecast that blew up must not pass
                for one with fewer cells.
        """
        flat_CP = fields_CHW.reshape(self.valid_CP.shape)
        for name, field_P, valid_P in zip(self.names, flat_CP, self.valid_CP, strict=True):
            wrong = int((~np.isfinite(field_P[valid_P])).sum())
            if wrong:
                raise DataError(
                    f"{what}: {name} is not finite outside its mask, in {wrong} of {int(valid_P.sum())} cells; if it "
                    "is always missing there, make the data missing there, too, or leave the variable out"
                )

    def cells(self, fields: np.ndarray, channel: int) -> np.ndarray:
        """Return the values of a channel of (C, H, W) or (C, P), (P,), 0 where it is masked."""
        own = fields[channel].reshape(-1)
        return np.where(self.valid_CP[channel], own, own.dtype.type(0)) if self.masked[channel] else own

    def of_channels(self, count: int, add_up: AddUp, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return K means over each region, (K, C, R) float64.

        Args:
            count: K.
            add_up: writes the sums over `stretches` that they are of.
            fields: what these are made of by name, (C, H, W) or (C, P), for the error.

        Raises:
            DataError: see `require_finite`.
        """
        sums = np.empty((count, *self._norm_CR.shape))

        def one(channel: int) -> None:
            add_up(channel, room := self._room(count))
            weigh(room, self._weights_SR, sums[:, channel])

        thread_map(one, len(self.names), count * self.valid_CP.shape[1])
        return self._means(sums, self._norm_CR, fields)

    def of_units(
        self, counts: tuple[int, int], add_up: AddUpUnit, fields: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return K means of each channel, (K, C, R), and L of each vector, (L, V, R), float64.

        A vector and its components are gone through together, while they are in the processor's cache.

        Args:
            counts: K and L.
            add_up: see `of_channels`.
            fields: see `of_channels`.

        Raises:
            DataError: see `require_finite`.
        """
        of_channels, of_vectors = (
            np.empty((count, items, self.shape[1]))
            for count, items in zip(counts, (len(self.names), len(self.u)), strict=True)
        )

        def one(unit: int) -> None:
            channels, vector = self._units[unit]
            rooms, of_vector = self._room(len(channels), counts[0]), self._room(counts[1] if vector is not None else 0)
            add_up(channels, rooms, of_vector)
            for channel, room in zip(channels, rooms, strict=True):
                weigh(room, self._weights_SR, of_channels[:, channel])
            if vector is not None:
                weigh(of_vector, self._weights_SR, of_vectors[:, vector])

        thread_map(one, len(self._units), counts[0] * self.valid_CP.shape[1])
        return self._means(of_channels, self._norm_CR, fields), self._means(of_vectors, self._norm_CR[self.u], fields)

    def _room(self, *shape: int) -> np.ndarray:
        return np.empty((*shape, len(self._weights_SR)))

    def _means(self, sums: np.ndarray, norm: np.ndarray, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        if not np.isfinite(sums).all():
            for what, own in fields.items():
                self.require_finite(np.asarray(own), what)
        return self._over_norm(sums, norm)

    def means_of_channel(self, values_KP: np.ndarray, channel: int) -> np.ndarray:
        """Return the means over each region of K fields that belong to one channel, (K, R)."""
        return self._over_norm(self._weighted(values_KP), self._norm_CR[channel])

    def with_vectors(self, means_CR: np.ndarray) -> np.ndarray:
        """Return (X, R): the channels' means, then for each vector the sum of its components'."""
        return np.concatenate([means_CR, means_CR[self.u] + means_CR[self.v]])

    def _weighted(self, values_KP: np.ndarray) -> np.ndarray:
        """Return the weighted sums over each region, (K, R) float64."""
        along = np.empty((len(values_KP), 1, len(self._weights_SR)))
        for values_P, out in zip(values_KP, along, strict=True):
            plain_sums(values_P, *self.stretches, out)
        sums = np.empty((len(values_KP), self.shape[1]))
        weigh(along[:, 0], self._weights_SR, sums)
        return sums

    @staticmethod
    def _over_norm(sums: np.ndarray, norm: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore"):  # a region without a valid cell has no mean
            return sums / norm


def _cut(weights_RHW: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the stretches of cells that all regions are made of, the first of each and that after its last, (S,), and
    the weight of their sums in each region, (S, R).

    Along a stretch, which lies in one row, the weights of all regions stay the same, so that few numbers are left to
    be weighted.
    """
    width = weights_RHW.shape[2]
    starts, stops, weights = [], [], []
    for row, own_RW in enumerate(weights_RHW.swapaxes(0, 1)):
        changes = np.flatnonzero((np.diff(own_RW) != 0).any(axis=0)) + 1
        for start, stop in itertools.pairwise([0, *changes.tolist(), width]):
            if own_RW[:, start].any():
                starts.append(row * width + start)
                stops.append(row * width + stop)
                weights.append(own_RW[:, start])
    return np.array(starts), np.array(stops), np.array(weights)


def wind_pairs(
    channels: Sequence[Channel], attributes: Mapping[str, Mapping[str, str]], masks: Mapping[str, np.ndarray]
) -> list[tuple[int, int, str]]:
    """Return (index of u, index of v, name of the pair's variable) of the horizontal winds among `channels`.

    Components belong together by standard_name, or usual names where the data have none, by level, mask and a name that
    differs in one letter only (u10, 10u, 10m_u_component_of_wind), for which the pair's has ``wind``.
    """

    def component(channel: Channel) -> str:
        said = attributes.get(channel.variable, {}).get("standard_name", "")
        return _COMPONENTS.get(said if said not in _NO_STANDARD_NAME else channel.variable, "")

    northward = {(name, c.level): i for i, c in enumerate(channels) if component(c) == "v" for name in _winds(c)}
    pairs = []
    for index, channel in enumerate(channels):
        names = [name for name in _winds(channel) if (name, channel.level) in northward]
        if component(channel) != "u" or not names:
            continue
        partner = northward[names[0], channel.level]
        if np.array_equal(masks.get(channel.variable), masks.get(channels[partner].variable)):
            pairs.append((index, partner, names[0]))
    return pairs


def _winds(channel: Channel) -> list[str]:
    """Return a variable's name with ``wind`` for each of its letters."""
    name = channel.variable
    return [f"{name[:place]}wind{name[place + 1 :]}" for place in range(len(name))]
