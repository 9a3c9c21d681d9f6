"""What is added up of forecasts and baselines at one lead time.

Shapes: C channels, V wind vectors, R regions, P cells, S stretches of cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from credit.verify.cell_means import CellMeans
from credit.verify.row_sums import anomaly_sums, error_sums, length_sums

_OF_TRUTH = 3  # sums of the truth's anomaly


@dataclass(frozen=True)
class Moments:
    """Area means of one field that its planes in `credit.verify.sums.ScoreSums` are made of.

    Attributes:
        truth: mean, mean square and mean size of the truth's anomaly, each (C, R).
        channels: mean error, absolute and squared error, mean square of the forecast's anomaly and its product with the
            truth's, each (C, R).
        vectors: mean error of the length and length of the error, each (V, R).
    """

    truth: Sequence[np.ndarray]
    channels: Sequence[np.ndarray]
    vectors: Sequence[np.ndarray]

    @classmethod
    def of_error(cls, truth: Sequence[np.ndarray], own: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> Self:
        """Return those of a field given the means of its error, the error's square, its product with the truth's
        anomaly and its size; exact for small errors.
        """
        error, squared, product, absolute = own
        return cls(
            truth,
            (error, absolute, squared, truth[1] + 2 * product + squared, truth[1] + product),
            vectors,
        )

    @classmethod
    def of_anomaly(cls, truth: Sequence[np.ndarray], own: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> Self:
        """Return those of a field given the means of its anomaly, the anomaly's square, its product with the truth's,
        the error's square and its size; exact for small anomalies.
        """
        anomaly, variance, product, squared, absolute = own
        return cls(truth, (anomaly - truth[0], absolute, squared, variance, product), vectors)


class ScoredField(Protocol):
    """A forecast or baseline, which tells what is to be added up of a channel.

    Attributes:
        count: K, how many sums.
    """

    count: int

    def values(self, channel: int) -> np.ndarray:
        """Return its values, (P,), 0 where masked."""

    def add_up(self, channel: int, truth_P: np.ndarray, normal_P: np.ndarray, out_KS: np.ndarray) -> None:
        """Write the sums of a channel; truth and climatology are 0 where masked."""

    def moments(self, truth: Sequence[np.ndarray], own: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> Moments:
        """Return the moments, given the means of what `add_up` writes; `truth` and `vectors` are those of `Moments`."""


@dataclass(frozen=True)
class Forecast:
    """A forecast, (C, H, W) or (C, P), whatever where masked."""

    means: CellMeans
    fields: np.ndarray
    count = 4

    def values(self, channel: int) -> np.ndarray:
        """See `ScoredField`."""
        return self.means.cells(self.fields, channel)

    def add_up(self, channel: int, truth_P: np.ndarray, normal_P: np.ndarray, out_KS: np.ndarray) -> None:
        """See `ScoredField`."""
        error_sums(self.values(channel), truth_P, normal_P, *self.means.stretches, out_KS)

    def moments(self, truth: Sequence[np.ndarray], own: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> Moments:
        """See `ScoredField`."""
        return Moments.of_error(truth, own, vectors)


def moments_of(
    means: CellMeans, scored: Mapping[str, ScoredField], truth: np.ndarray, normal: np.ndarray,
    fields: Mapping[str, np.ndarray],
) -> dict[str, Moments]:  # fmt: skip
    """Return the moments of several fields at one valid time.

    Args:
        means: of the C channels.
        scored: the fields by name.
        truth: (C, H, W) or (C, P), whatever where masked.
        normal: likewise, the climatology.
        fields: these and all that the fields are made of by what errors call them.

    Raises:
        DataError: if a value outside the mask is missing.
    """

    def add_up(channel: int, out_KS: np.ndarray) -> None:
        known = means.cells(truth, channel), means.cells(normal, channel)
        anomaly_sums(*known, *means.stretches, out_KS[:_OF_TRUTH])
        first = _OF_TRUTH
        for own in scored.values():
            own.add_up(channel, *known, out_KS[first : first + own.count])
            first += own.count

    def lengths(vector: int, out_KS: np.ndarray) -> None:
        pair = means.winds[vector]
        true = [means.cells(truth, channel) for channel in pair]
        scale = scale_of(true)
        for number, field in enumerate(scored.values()):
            own, out = [field.values(channel) for channel in pair], out_KS[2 * number : 2 * number + 2]
            length_sums(*own, *true, scale, *means.stretches, out)
            if not np.isfinite(out).all():  # float32 may not hold it
                double = [one.astype(np.float64) for one in (*own, *true)]
                length_sums(*double, scale, *means.stretches, out)

    found = means.of_channels(_OF_TRUTH + sum(own.count for own in scored.values()), add_up, fields)
    vectors = means.of_vectors(2 * len(scored), lengths, fields)
    moments, first = {}, _OF_TRUTH
    for number, (name, own) in enumerate(scored.items()):
        moments[name] = own.moments(found[:_OF_TRUTH], found[first : first + own.count], vectors[2 * number :][:2])
        first += own.count
    return moments


def scale_of(components: Sequence[np.ndarray]) -> np.float32:
    """Return a power of two that brings fields to about 1, by some of their values.

    Where others are so much larger that float32 does not hold their squares, lengths come out infinite.
    """
    largest = max(np.abs(own[::101]).max() for own in components)
    return np.float32(np.ldexp(1.0, -np.clip(np.frexp(largest)[1], -120, 120)))
