"""What is added up of forecasts and baselines at one lead time.

Shapes: C channels, V wind vectors, R regions, P cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from credit.config.schema_verification import BASELINES
from credit.data.climatology.climatology import Fields, LazyWeightedSum
from credit.verify.scores.baseline_state import BaselineState
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.error_kernel import OF_DAMPED, OF_FORECAST, OF_TRUTH, OF_VECTOR, unit_sums

_PERSISTENCE, _DAMPED, _CLIMATOLOGY = BASELINES


@dataclass(frozen=True)
class Moments:
    """Area means of one field, of which its planes in `DeterministicStatistics` are made.

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


def error_moments(
    means: AreaMean,
    truth: np.ndarray,
    normal: Fields,
    forecasts: Mapping[str, np.ndarray],
    names: Mapping[str, Fields],
    baselines: tuple[BaselineState, np.ndarray] | None = None,
) -> dict[str, Moments]:
    """Return the moments of several forecasts at one valid time, and of the baselines where they are wanted.

    Fields are (C, H, W) or (C, P), whatever where masked.

    Args:
        means: of the C channels.
        truth: the truth.
        normal: the climatology, made in the truth's type.
        forecasts: by name; at least one where there are no baselines.
        names: what errors call these fields.
        baselines: what they are made of, and (C,) r of damped persistence.

    Raises:
        DataError: if a value outside the mask is missing.
    """
    beginning, r_C = baselines or (None, np.zeros(len(means.names)))
    if beginning is not None:
        forecasts = {_PERSISTENCE: beginning.fields, **forecasts}
    known = _Known.of(means, truth, normal, list(forecasts.values()), beginning, r_C)

    def add_up(channels: np.ndarray, rooms: np.ndarray, of_vector: np.ndarray) -> None:
        scale = scale_of([means.cells(truth, channel) for channel in channels]) if len(of_vector) else np.float32(1)
        unit_sums(channels, *known, scale, *means.stretches, rooms, of_vector)
        if not np.isfinite(of_vector).all():  # float32 may not hold it
            unit_sums(np.arange(2), *known.double(channels), scale, *means.stretches, rooms, of_vector)

    count, rows = len(forecasts), OF_TRUTH + OF_FORECAST * len(forecasts)
    both = (rows + OF_DAMPED, OF_VECTOR * (count + 2)) if beginning is not None else (rows, OF_VECTOR * count)
    found, vectors = means.of_units(both, add_up, names)
    true, lengths = found[:OF_TRUTH], vectors.reshape(len(vectors) // OF_VECTOR, OF_VECTOR, *vectors.shape[1:])
    own = found[OF_TRUTH:rows].reshape(count, OF_FORECAST, *found.shape[1:])
    moments = {name: Moments.of_error(true, own[n], lengths[n]) for n, name in enumerate(forecasts)}
    if beginning is not None:
        (product, *errors), r_C1, nothing = found[rows:], r_C[:, None], np.zeros_like(true[0])
        damped = r_C1 * beginning.mean, r_C1**2 * beginning.variance, r_C1 * product, *errors
        moments[_DAMPED] = Moments.of_anomaly(true, damped, lengths[count])
        # its error is the truth's anomaly with the other sign
        moments[_CLIMATOLOGY] = Moments.of_anomaly(true, (nothing, nothing, nothing, *true[1:]), lengths[count + 1])
    return moments


class _Known(NamedTuple):
    """What `credit.verify.statistics.error_kernel` goes through, see there."""

    truth: np.ndarray
    weights: np.ndarray
    parts: tuple[np.ndarray, ...]
    forecasts: tuple[np.ndarray, ...]
    first: np.ndarray
    r: np.ndarray
    valid: np.ndarray
    masked: np.ndarray

    @classmethod
    def of(
        cls, means: AreaMean, truth: np.ndarray, normal: Fields, forecasts: Sequence[np.ndarray],
        beginning: BaselineState | None, r_C: np.ndarray,
    ) -> Self:  # fmt: skip
        """Return the same of fields of any shape."""
        weights, parts = np.ones(1, np.float32), [normal]
        if isinstance(normal, LazyWeightedSum):
            weights, parts = normal.weights, normal.parts
        (true,) = _flat([truth])
        first = true[:0] if beginning is None else _flat([beginning.anomaly])[0]
        return cls(true, weights, _flat(parts), _flat(forecasts), first, r_C, means.valid_CP, means.masked)

    def double(self, channels: np.ndarray) -> Self:
        """Return some channels in float64."""

        def take(own: np.ndarray) -> np.ndarray:
            return own[channels].astype(np.float64)

        parts, forecasts = (tuple(map(take, own)) for own in (self.parts, self.forecasts))
        first = take(self.first) if len(self.first) else self.first
        few = (own[channels] for own in (self.r, self.valid, self.masked))
        return self._make((take(self.truth), self.weights, parts, forecasts, first, *few))


def _flat(fields: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return fields as (C, P) of one type, as compiled code wants those that it goes through in a loop."""
    dtype = np.result_type(*fields)
    flat = tuple(np.ascontiguousarray(own, dtype).reshape(len(own), -1).view() for own in fields)
    for own in flat:
        own.flags.writeable = False
    return flat


def scale_of(components: Sequence[np.ndarray]) -> np.float32:
    """Return a power of two that brings fields to about 1, by some of their values.

    Where others are so much larger that float32 does not hold their squares, lengths come out infinite.
    """
    largest = max(np.abs(own[::101]).max() for own in components)
    return np.float32(np.ldexp(1.0, -np.clip(np.frexp(largest)[1], -120, 120)))
