"""What is added up of forecasts and baselines at one lead time, of all of them in one pass over the cells.

Shapes: C channels, V wind vectors, R regions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, Self

import numpy as np

from credit.verify.cell_means import CellMeans, Pair


@dataclass(frozen=True)
class Moments:
    """Area means of one field that its planes in `credit.verify.sums.ScoreSums` are made of.

    Attributes:
        truth: mean and mean square of the truth's anomaly, each (C, R).
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
    """A forecast or baseline of (C, H, W), which tells what is to be added up of some rows of a channel.

    Attributes:
        count: how many means `pairs` is for.
    """

    count: int

    def values(self, channel: int, rows: slice, out: np.ndarray) -> np.ndarray:
        """Return the values, whatever where masked, in `out` if they are not in memory."""

    def pairs(self, channel: int, rows: slice, true: np.ndarray, room: np.ndarray) -> Iterator[Pair]:
        """Yield what means are wanted of; `true` is the truth's anomaly, to be left as it is, `room` is for a field."""

    def moments(self, truth: Sequence[np.ndarray], own: Sequence[np.ndarray], vectors: Sequence[np.ndarray]) -> Moments:
        """Return the moments, given the means that `pairs` is for; `truth` and `vectors` are those of `Moments`."""


@dataclass(frozen=True)
class Forecast:
    """A forecast, (C, H, W), beside the truth at its valid time."""

    means: CellMeans
    fields: np.ndarray
    truth: np.ndarray
    count = 4

    def values(self, channel: int, rows: slice, out: np.ndarray) -> np.ndarray:
        """See `ScoredField`."""
        return self.fields[channel, rows]

    def pairs(self, channel: int, rows: slice, true: np.ndarray, room: np.ndarray) -> Iterator[Pair]:
        """See `ScoredField`."""
        error = self.means.apart(self.fields, self.truth, channel, rows, room)
        yield error, None
        yield error, error
        yield error, true
        yield np.abs(error, out=error), None

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
        truth: (C, H, W), whatever where masked.
        normal: likewise, the climatology.
        fields: these and all that the fields are made of, (C, H, W), by what errors call them.

    Raises:
        DataError: if a value outside the mask is missing.
    """

    def pairs(channel: int, rows: slice, room: np.ndarray) -> Iterator[Pair]:
        true = means.apart(truth, normal, channel, rows, room[0])
        yield true, None
        yield true, true
        for own in scored.values():
            yield from own.pairs(channel, rows, true, room[1])

    def lengths(vector: int, rows: slice, room: np.ndarray) -> Iterator[Pair]:
        channels, spare = means.winds[vector], room[2:]
        true = [truth[channel, rows] for channel in channels]
        yield means.length(*true, vector, rows, room), None
        for field in scored.values():
            own = [field.values(channel, rows, out) for channel, out in zip(channels, spare, strict=True)]
            yield means.length(*own, vector, rows, room), None
            error = [np.subtract(one, other, out=out) for one, other, out in zip(own, true, spare, strict=True)]
            yield means.length(*error, vector, rows, room), None

    count = 2 + sum(own.count for own in scored.values())
    mean, square, *rest = means.of_products(count, pairs, fields)
    true_length, *vectors = means.of_vector_products(1 + 2 * len(scored), lengths, fields)
    found, lengths_found, moments = iter(rest), iter(vectors), {}
    for name, own in scored.items():
        length, away = islice(lengths_found, 2)
        moments[name] = own.moments((mean, square), list(islice(found, own.count)), (length - true_length, away))
    return moments
