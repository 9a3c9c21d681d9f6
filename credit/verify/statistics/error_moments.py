"""Area means of the errors of several forecasts and of the baselines at one valid time, in one pass over the fields.

An anomaly is the difference of a field from the climatology of its valid time.

Shapes: C channels, V wind vectors, R regions, H x W = P cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.config.sections.verification import BASELINES
from credit.data.climatology.climatology import Fields, LazyWeightedSum
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.kernels import (
    NUM_DAMPED_SUMS,
    NUM_FORECAST_SUMS,
    NUM_LENGTH_SUMS,
    NUM_TRUTH_SUMS,
    ErrorInputs,
    anomaly_sums,
    error_sums,
)

_PERSISTENCE, _DAMPED_PERSISTENCE, _CLIMATOLOGY = BASELINES


@dataclass(frozen=True)
class ReferenceFields:
    """Truth and climatology at one time.

    All fields are (C, H, W) or (C, P), in the units of the data. Masked cells may contain any value.

    Attributes:
        truth: fields of the truth.
        climatology: fields of the climatology, of the same dtype and shape as `truth`.
        truth_description: description of the truth for error messages.
        climatology_description: description of the climatology for error messages.
    """

    truth: np.ndarray
    climatology: Fields
    truth_description: str = "truth"
    climatology_description: str = "climatology"

    def by_description(self) -> dict[str, Fields]:
        """Return description -> fields for truth and climatology; `AreaMean` needs this dict for error messages."""
        return {self.truth_description: self.truth, self.climatology_description: self.climatology}


@dataclass(frozen=True)
class BaselineState:
    """Truth and anomaly at the initial time of a case; the baselines at all lead times are computed from them.

    Attributes:
        fields: (C, H, W) truth at the initial time; masked cells may contain any value.
        anomaly: (C, H, W) anomaly at the initial time, 0 in masked cells.
        mean: (C, R) area mean of the anomaly.
        variance: (C, R) area mean of the squared anomaly.
    """

    fields: np.ndarray
    anomaly: np.ndarray
    mean: np.ndarray
    variance: np.ndarray

    @classmethod
    def build(cls, area_mean: AreaMean, initial: ReferenceFields) -> BaselineState:
        """Build the state from the truth and the climatology at the initial time of a case.

        Args:
            area_mean: area means of the C channels.
            initial: truth and climatology at the initial time, (C, H, W) each.

        Raises:
            DataError: if a value is not finite in a cell that is not masked.
        """
        truth = initial.truth
        anomaly = np.empty(truth.shape, truth.dtype)

        def sum_channel(channel: int, out_KS: np.ndarray) -> None:
            truth_P = area_mean.channel_values(truth, channel)
            climatology_P = area_mean.channel_values(initial.climatology, channel)
            # Masked cells are 0 in both fields, so their anomaly is 0. The reshaped channel is a view of `anomaly`.
            np.subtract(truth_P, climatology_P, out=anomaly[channel].reshape(-1))
            anomaly_sums(truth_P, climatology_P, area_mean.segments, out_KS)

        mean, variance = area_mean.reduce_channels(2, sum_channel, initial.by_description())
        return cls(truth, anomaly, mean, variance)


@dataclass(frozen=True)
class ErrorMoments:
    """Area means of the errors of one forecast at one valid time; its deterministic scores are computed from them.

    Means are in the units of the channel; means of squares and products are in squared units.

    Attributes:
        error: (C, R) mean of forecast minus truth.
        absolute_error: (C, R) mean absolute error.
        squared_error: (C, R) mean squared error.
        forecast_variance: (C, R) mean square of the forecast's anomaly, without subtraction of its area mean.
        covariance: (C, R) mean product of the anomalies of forecast and truth.
        truth_anomaly: (C, R) mean anomaly of the truth.
        truth_variance: (C, R) mean square of the truth's anomaly, without subtraction of its area mean.
        speed_error: (V, R) mean of the forecast wind speed minus the true wind speed.
        vector_error_length: (V, R) mean length of the difference between the wind vectors of forecast and truth.
    """

    error: np.ndarray
    absolute_error: np.ndarray
    squared_error: np.ndarray
    forecast_variance: np.ndarray
    covariance: np.ndarray
    truth_anomaly: np.ndarray
    truth_variance: np.ndarray
    speed_error: np.ndarray
    vector_error_length: np.ndarray


def compute_error_moments(
    area_mean: AreaMean,
    reference: ReferenceFields,
    forecasts: Mapping[str, np.ndarray],
    descriptions: Mapping[str, str] | None = None,
    baselines: tuple[BaselineState, np.ndarray] | None = None,
) -> dict[str, ErrorMoments]:
    """Return the error moments of several forecasts at one valid time and, if requested, of the three baselines.

    The sums of the errors are computed first, and the moments of the forecast's anomaly are computed from these sums.
    An error that is computed from sums of anomalies would be a small difference of two large numbers and lose digits.

    Args:
        area_mean: area means of the C channels.
        reference: truth and climatology at the valid time.
        forecasts: forecast name -> (C, H, W) or (C, P) fields; masked cells may contain any value.
        descriptions: forecast name -> description of the forecast for error messages; the default is the name.
        baselines: (state at the initial time, (C,) factor of damped persistence); None to compute no baselines.

    Returns:
        Name of each forecast and, if requested, of each baseline -> error moments.

    Raises:
        DataError: if a value is not finite in a cell that is not masked.
    """
    # Error messages contain the description of the field that has a missing value.
    descriptions = descriptions or {}
    fields: dict[str, Fields] = {}
    for name, values in forecasts.items():
        fields[descriptions.get(name, name)] = values
    if baselines is None:
        state = None
        damping_C = np.zeros(len(area_mean.names))
    else:
        state, damping_C = baselines
        fields["truth at the initial time"] = state.fields
        # Persistence is treated like the other forecasts.
        forecasts = {_PERSISTENCE: state.fields, **forecasts}
    fields |= reference.by_description()
    inputs = _build_error_inputs(area_mean, reference, list(forecasts.values()), state, damping_C)

    def sum_group(channels: np.ndarray, channel_sums: np.ndarray, vector_sums: np.ndarray) -> None:
        scale = np.float32(1)
        if len(vector_sums):
            scale = choose_wind_scale([area_mean.channel_values(reference.truth, channel) for channel in channels])
        error_sums(inputs, channels, scale, area_mean.segments, channel_sums, vector_sums)
        # Squares of very large or very small winds overflow in float32; such winds are summed again in float64.
        if not np.isfinite(vector_sums).all():
            inputs_float64 = _convert_to_float64(inputs, channels)
            error_sums(inputs_float64, np.arange(2), scale, area_mean.segments, channel_sums, vector_sums)

    # Numbers of sums of each channel and of each wind vector. Climatology needs no channel sums except the truth's.
    num_channel_sums = NUM_TRUTH_SUMS + NUM_FORECAST_SUMS * len(forecasts)
    num_vector_sums = NUM_LENGTH_SUMS * len(forecasts)
    if state is not None:
        num_channel_sums += NUM_DAMPED_SUMS
        num_vector_sums += 2 * NUM_LENGTH_SUMS
    counts = num_channel_sums, num_vector_sums
    channel_means, vector_means = area_mean.reduce_channels_and_winds(counts, sum_group, fields)
    return _build_moments(list(forecasts), channel_means, vector_means, baselines)


def _build_moments(
    names: Sequence[str], channel_means: np.ndarray, vector_means: np.ndarray,
    baselines: tuple[BaselineState, np.ndarray] | None,
) -> dict[str, ErrorMoments]:  # fmt: skip
    """Compute the moments of forecasts and baselines from the area means of the sums of `error_sums`.

    Args:
        names: names of the forecasts in the order of their sums.
        channel_means: (number of sums, C, R) area means of the sums that `error_sums` writes for channels.
        vector_means: (number of sums, V, R) area means of the sums that `error_sums` writes for wind vectors.
        baselines: state and damping factor, see `compute_error_moments`.

    Returns:
        Name of each forecast and baseline -> error moments.
    """
    # If e is the error and a is the truth's anomaly, the forecast's anomaly is a + e.
    truth_anomaly, truth_variance, truth_absolute = channel_means[:NUM_TRUTH_SUMS]
    truth_moments = {"truth_anomaly": truth_anomaly, "truth_variance": truth_variance}
    moments = {}
    for number, name in enumerate(names):
        row = NUM_TRUTH_SUMS + NUM_FORECAST_SUMS * number
        error, squared, product, absolute = channel_means[row : row + NUM_FORECAST_SUMS]
        moments[name] = ErrorMoments(
            error=error,
            absolute_error=absolute,
            squared_error=squared,
            forecast_variance=truth_variance + 2 * product + squared,
            covariance=truth_variance + product,
            **truth_moments,
            **_select_vector_moments(vector_means, number),
        )
    if baselines is not None:
        state, damping_C = baselines
        # The sums of damped persistence follow the sums of the forecasts. Its anomaly is the damped initial anomaly.
        product, squared, absolute = channel_means[NUM_TRUTH_SUMS + NUM_FORECAST_SUMS * len(names) :]
        damping_C1 = damping_C[:, None]
        moments[_DAMPED_PERSISTENCE] = ErrorMoments(
            error=damping_C1 * state.mean - truth_anomaly,
            absolute_error=absolute,
            squared_error=squared,
            forecast_variance=damping_C1**2 * state.variance,
            covariance=damping_C1 * product,
            **truth_moments,
            **_select_vector_moments(vector_means, len(names)),
        )
        # The error of climatology is the truth's anomaly times -1.
        zeros = np.zeros_like(truth_anomaly)
        moments[_CLIMATOLOGY] = ErrorMoments(
            error=zeros - truth_anomaly,
            absolute_error=truth_absolute,
            squared_error=truth_variance,
            forecast_variance=zeros,
            covariance=zeros,
            **truth_moments,
            **_select_vector_moments(vector_means, len(names) + 1),
        )
    return moments


def _select_vector_moments(vector_means: np.ndarray, number: int) -> dict[str, np.ndarray]:
    """Return the moments of the wind vectors of one forecast: attribute of `ErrorMoments` -> (V, R).

    Args:
        vector_means: (number of sums, V, R) area means of the sums that `error_sums` writes for wind vectors.
        number: index of the forecast in the order of the sums.
    """
    error, absolute = vector_means[NUM_LENGTH_SUMS * number : NUM_LENGTH_SUMS * (number + 1)]
    return {"speed_error": error, "vector_error_length": absolute}


def _convert_to_float64(inputs: ErrorInputs, channels: np.ndarray) -> ErrorInputs:
    """Return the error inputs of selected channels, with all fields converted to float64.

    Args:
        inputs: error inputs of all channels.
        channels: indices of the channels to keep.
    """

    def convert(fields: np.ndarray) -> np.ndarray:
        return fields[channels].astype(np.float64)

    # Without baselines, the initial anomaly is empty and has no channels.
    initial_anomaly = inputs.initial_anomaly
    if len(initial_anomaly):
        initial_anomaly = convert(initial_anomaly)
    return ErrorInputs(
        truth=convert(inputs.truth),
        climatology_weights=inputs.climatology_weights,
        climatology_terms=tuple(map(convert, inputs.climatology_terms)),
        forecasts=tuple(map(convert, inputs.forecasts)),
        initial_anomaly=initial_anomaly,
        damping=inputs.damping[channels],
        valid=inputs.valid[channels],
        is_masked=inputs.is_masked[channels],
    )


def _build_error_inputs(
    area_mean: AreaMean, reference: ReferenceFields, forecasts: Sequence[np.ndarray], state: BaselineState | None,
    damping_C: np.ndarray,
) -> ErrorInputs:  # fmt: skip
    """Build the inputs of the kernel `error_sums`.

    Args:
        area_mean: area means of the C channels; only their masks are used.
        reference: truth and climatology at the valid time.
        forecasts: forecasts (C, H, W) or (C, P); masked cells may contain any value.
        state: truth and anomaly at the initial time; None if the baselines are not scored.
        damping_C: factor of damped persistence.
    """
    # If the climatology is a weighted sum, the kernel receives its terms and adds them up.
    climatology = reference.climatology
    if isinstance(climatology, LazyWeightedSum):
        weights = climatology.weights
        terms = climatology.fields
    else:
        weights = np.ones(1, np.float32)
        terms = [climatology]
    (truth,) = _flatten([reference.truth])
    # An initial anomaly of length 0 means that there are no baselines.
    initial_anomaly = truth[:0]
    if state is not None:
        (initial_anomaly,) = _flatten([state.anomaly])
    return ErrorInputs(
        truth=truth,
        climatology_weights=weights,
        climatology_terms=_flatten(terms),
        forecasts=_flatten(forecasts),
        initial_anomaly=initial_anomaly,
        damping=damping_C,
        valid=area_mean.valid_CP,
        is_masked=area_mean.is_masked,
    )


def _flatten(fields: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return fields (C, H, W) or (C, P) as contiguous, read-only arrays (C, P) of one dtype.

    Compiled code can loop over a tuple only if all its items have the same type.
    """
    dtype = np.result_type(*fields)
    flat = []
    for values in fields:
        # For the compiler, writable and read-only arrays have different types. A field from a cache or file may be
        # read-only, so all arrays are made read-only. The flag is set on a view and does not change the caller's array.
        values_CP = np.ascontiguousarray(values, dtype).reshape(len(values), -1).view()
        values_CP.flags.writeable = False
        flat.append(values_CP)
    return tuple(flat)


def choose_wind_scale(components: Sequence[np.ndarray]) -> np.float32:
    """Return a power of two by which winds are multiplied so that float32 can represent their squares.

    The largest scaled wind is about 1. The largest wind is estimated from a sample of the cells. If the wind in a cell
    outside the sample is much stronger, its scaled square overflows and its length is infinite. The caller must then
    repeat the sum in float64.

    Args:
        components: the two components of a wind vector, (P,) each.
    """
    # A sample of every 101st cell is enough, because the winds of a field have the same order of magnitude.
    largest_values = [np.abs(values[::101]).max() for values in components]
    # The largest value equals m * 2**exponent with m from 0.5 to 1.
    exponent = np.frexp(max(largest_values))[1]
    # The exponent is limited so that the power of two is a normal float32 number.
    limited_exponent = np.clip(exponent, -120, 120)
    return np.float32(np.ldexp(1.0, -limited_exponent))
