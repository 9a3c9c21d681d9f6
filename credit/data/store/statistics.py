"""Mean, standard deviation and range of every channel and of its change over a time step, in one pass.

The moments (number of values, mean, sum of squared deviations, minimum, maximum) of single fields are merged with the
formula of Chan, Golub and LeVeque (1983) in float64. Therefore the moments of parts of a period can be computed
separately. All cells have equal weight; missing cells of masked variables are excluded.

Letters of shapes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from credit.calendar import Calendar, format_duration
from credit.channels import Channel
from credit.config.sections.data import TransformConfig
from credit.data.store.outliers import Outlier, find_outliers
from credit.data.transforms import transform_channels
from credit.errors import DataError
from credit.utils.progress import ProgressBar

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

logger = logging.getLogger(__name__)

# Smallest standard deviation of the change, as a fraction of the standard deviation of the channel. Without this limit,
# a channel that hardly changes would have a very large weight in the loss.
TENDENCY_FLOOR = 0.01
# A warning is logged if the rounding error exceeds this fraction of the standard deviation of the change.
_MAX_ROUNDING_FRACTION = 0.3


@dataclass(frozen=True)
class Statistics:
    """Statistics of channels over a period.

    The statistics are computed from values in physical units or, for variables with a transform, transformed values.

    Attributes:
        names: (C,) names of the channels: first the time-varying channels, then the static channels.
        mean: (C,) float64 mean over cells and times; all cells have equal weight.
        std: (C,) float64 standard deviation over cells and times (divisor N, not N - 1).
        minimum: (C,) float64 smallest value.
        maximum: (C,) float64 largest value.
        tendency_mean: (C,) float64 mean of the change over one time step; 0 for static channels.
        tendency_std: (C,) float64 standard deviation of the change over one time step, at least 0.01 of `std`; 0 for
            static channels.
        count: (C,) int64 number of values.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray
    tendency_mean: np.ndarray
    tendency_std: np.ndarray
    count: np.ndarray

    def to_dict(self) -> dict[str, list]:
        """Return a JSON-serialisable mapping from the name of each attribute to its values."""
        return {field.name: np.asarray(getattr(self, field.name)).tolist() for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, list]) -> Statistics:
        """Build the statistics from a dictionary that `to_dict` returned."""
        arrays = {name: np.asarray(values) for name, values in data.items() if name != "names"}
        return cls(names=tuple(data["names"]), **arrays)

    def select(self, names: Iterable[str]) -> Statistics:
        """Return the statistics of the channels `names`, in the order of `names`.

        Raises:
            ValueError: if there are no statistics for a name.
        """
        names = tuple(names)
        rows = [self.names.index(name) for name in names]
        arrays = {field.name: getattr(self, field.name)[rows] for field in fields(self) if field.name != "names"}
        return Statistics(names=names, **arrays)


@dataclass(frozen=True)
class Moments:
    """Moments of the values of channels, from which `Statistics` are computed.

    The moments of two sets of values can be merged into the moments of all values.

    Attributes:
        count: (C,) int64 number of values.
        mean: (C,) float64 mean in units of the channel; 0 if there are no values.
        squares: (C,) float64 sum of squared deviations from the mean, in squared units of the channel.
        minimum: (C,) float64 smallest value; infinity if there are no values.
        maximum: (C,) float64 largest value; minus infinity if there are no values.
    """

    count: np.ndarray
    mean: np.ndarray
    squares: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray

    @classmethod
    def empty(cls, num_channels: int) -> Moments:
        """Return the moments of an empty set of values."""
        zero_C = np.zeros(num_channels)
        infinity_C = np.full(num_channels, np.inf)
        return cls(zero_C.astype(np.int64), zero_C, zero_C, infinity_C, -infinity_C)

    @classmethod
    def of_fields(cls, fields_CHW: np.ndarray, valid_CHW: np.ndarray, before_CHW: np.ndarray | None = None) -> Moments:
        """Compute the moments of fields, or of the change between two times, in float64.

        Args:
            fields_CHW: (C, H, W) float32 fields.
            valid_CHW: (C, H, W) bool, False in cells that are excluded.
            before_CHW: (C, H, W) float32 fields of an earlier time, for the moments of the change since this time; None
                for the moments of `fields_CHW`.
        """
        rows = np.zeros((5, len(fields_CHW)))
        # The channels are processed one by one, because a single channel fits into the CPU cache.
        for channel, (field, valid) in enumerate(zip(fields_CHW, valid_CHW, strict=True)):
            values = field.astype(np.float64)
            if before_CHW is not None:
                values -= before_CHW[channel]
            # Selection with a mask copies the values, so a field without masked cells is only flattened.
            values = values.ravel() if valid.all() else values[valid]
            # A channel without any valid cell has the mean 0.
            mean = values.sum() / max(1, values.size)
            lowest = values.min(initial=np.inf)
            highest = values.max(initial=-np.inf)
            # The squared deviations from the mean replace the values, to save memory.
            values -= mean
            values *= values
            squares = values.sum()
            rows[:, channel] = values.size, mean, squares, lowest, highest
        return cls.from_rows(rows)

    def to_rows(self) -> np.ndarray:
        """Return count, mean, squares, minimum and maximum as the rows of an array, (5, C) float64."""
        return np.stack([self.count.astype(np.float64), self.mean, self.squares, self.minimum, self.maximum])

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> Moments:
        """Build the moments from an array (5, C) that `to_rows` returned."""
        return cls(rows[0].astype(np.int64), *rows[1:])

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of two sets of values, with the formula of Chan, Golub and LeVeque (1983)."""
        total = self.count + other.count
        # Fraction of all values that belong to `other`; 0 if there are no values.
        other_fraction = np.divide(other.count, total, out=np.zeros(len(total)), where=total > 0)
        mean_difference = other.mean - self.mean
        # The difference between the means of the two sets increases the squared deviations from the common mean.
        squares_between = mean_difference**2 * self.count * other_fraction
        return Moments(
            count=total,
            mean=self.mean + mean_difference * other_fraction,
            squares=self.squares + other.squares + squares_between,
            minimum=np.minimum(self.minimum, other.minimum),
            maximum=np.maximum(self.maximum, other.maximum),
        )

    def std(self) -> np.ndarray:
        """Return the standard deviation (divisor N), (C,) float64; 0 if there are no values."""
        variance = np.divide(self.squares, self.count, out=np.zeros(len(self.count)), where=self.count > 0)
        return np.sqrt(variance)


def fit_statistics(
    reader: FieldReader,
    first_minutes: int,
    last_minutes: int,
    step_minutes: int,
    packing_steps: Mapping[str, float] | None = None,
    progress: bool = True,
    transforms: Mapping[str, TransformConfig] | None = None,
    unchecked_variables: Collection[str] = (),
) -> Statistics:
    """Compute the statistics of a period in one pass over its fields.

    Args:
        reader: reader of the fields.
        first_minutes: first time of the period in minutes since 1900.
        last_minutes: last time of the period in minutes since 1900, inclusive.
        step_minutes: time step in minutes; changes are computed between times that are exactly one step apart.
        packing_steps: mapping from the name of each packed variable to the difference of adjacent packed values, in
            units of the variable; None if no variable is packed. A warning is logged if rounding is a large part of a
            change.
        progress: True to show a progress bar on a terminal.
        transforms: mapping from the name of a variable to its transform; None if no variable has a transform.
        unchecked_variables: names of variables that are not checked for outliers, such as variables whose range the
            config declares.

    Raises:
        DataError: if no two times of the period differ by one time step, an output channel is constant, or a value is
            an outlier (see `credit.data.store.outliers`).
    """
    transforms = transforms or {}
    channels = reader.channels.time_varying_stored
    time_indices = np.flatnonzero((reader.times >= first_minutes) & (reader.times <= last_minutes))
    valid_CHW = build_valid_mask(reader, channels)
    state = tendency = Moments.empty(len(valid_CHW))
    # Minutes and transformed fields of the times at which the change to a later time may begin.
    recent: deque[tuple[int, np.ndarray]] = deque()
    rows_of_times: list[np.ndarray] = []
    # With None, the bar is shown only on a terminal.
    is_hidden = None if progress else True
    bar = ProgressBar(reader.times[time_indices].tolist(), desc="statistics", unit="time", disable=is_hidden)
    for minutes, fields_CHW in zip(bar, reader.read_each(time_indices), strict=True):
        transformed_CHW = transform_channels(fields_CHW, channels, transforms)
        moments = Moments.of_fields(transformed_CHW, valid_CHW)
        rows_of_times.append(moments.to_rows())
        state = state.merge(moments)
        # Times that are too early for this change are too early for all later changes.
        begin_of_change = minutes - step_minutes
        while recent and recent[0][0] < begin_of_change:
            recent.popleft()
        if recent and recent[0][0] == begin_of_change:
            tendency = tendency.merge(Moments.of_fields(transformed_CHW, valid_CHW, recent[0][1]))
        recent.append((minutes, transformed_CHW))
    if rows_of_times:
        outliers = find_outliers(np.stack(rows_of_times), channels, unchecked_variables, transforms)
        _require_no_outlier(outliers, reader.times[time_indices], reader.calendar)
    return build_statistics_from_moments(
        reader, state, tendency, (first_minutes, last_minutes), step_minutes, packing_steps, transforms
    )


def _require_no_outlier(outliers: Mapping[int, Outlier], times: np.ndarray, calendar: Calendar) -> None:
    """Raise `DataError` about the first outlier; do nothing if there are no outliers.

    Args:
        outliers: mapping from the index of a time in `times` to its outlier.
        times: (N,) minutes since 1900.
        calendar: calendar of the times.
    """
    # The first outlier raises an error and ends the loop.
    for row, outlier in outliers.items():
        raise DataError(
            f"{calendar.format(times[row])}: {outlier}; correct the file, or set "
            f"data.variable_options.{outlier.variable}.valid_range: [least, greatest]: values outside this range are "
            "treated as missing, values inside are accepted"
        )


def build_statistics_from_moments(
    reader: FieldReader,
    state: Moments,
    tendency: Moments,
    period: tuple[int, int],
    step_minutes: int,
    packing_steps: Mapping[str, float] | None,
    transforms: Mapping[str, TransformConfig],
) -> Statistics:
    """Compute the statistics of a period from moments that have already been computed; see `fit_statistics`.

    Args:
        reader: reader that provides static fields, masks and channels.
        state: moments of the time-varying fields over the period.
        tendency: moments of the changes of these fields over one time step.
        period: first and last time in minutes since 1900.
        step_minutes: time step in minutes.
        packing_steps: as in `fit_statistics`.
        transforms: as in `fit_statistics`.

    Raises:
        DataError: if no two times of the period differ by one time step, or an output channel is constant.
    """
    if not tendency.count.all():
        is_in_period = (reader.times >= period[0]) & (reader.times <= period[1])
        span = "..".join(map(reader.calendar.format, period))
        raise DataError(
            f"statistics of {span}: of {is_in_period.sum()} times, no two differ by {format_duration(step_minutes)}; "
            "check data.splits.train and data.timestep"
        )
    static_channels = reader.channels.static_stored
    static_CHW = transform_channels(reader.static(), static_channels, transforms)
    static = Moments.of_fields(static_CHW, build_valid_mask(reader, static_channels))
    _require_varying_channels(reader, state)
    # Transformed values are not packed with a constant step.
    steps = {name: step for name, step in (packing_steps or {}).items() if name not in transforms}
    for warning in describe_coarse_packing(reader.channels.time_varying_stored, tendency.std(), steps):
        logger.warning(warning)
    return _join_moments(reader, state, tendency, static)


def build_valid_mask(reader: FieldReader, channels: tuple[Channel, ...]) -> np.ndarray:
    """Return (C, H, W) bool: True where a channel has values, False in masked cells."""
    valid_CHW = np.ones((len(channels), *reader.grid.shape), dtype=bool)
    for row, channel in enumerate(channels):
        if channel.variable in reader.masks:
            valid_CHW[row] = ~reader.masks[channel.variable]
    return valid_CHW


def _require_varying_channels(reader: FieldReader, state: Moments) -> None:
    """Raise DataError if an output channel is constant in space and time, so that its standard deviation is 0."""
    names = []
    # The output channels are the first of the time-varying channels; forcing may be constant.
    is_constant_C = state.minimum == state.maximum
    for channel, is_constant in zip(reader.channels.output, is_constant_C, strict=False):
        if is_constant:
            names.append(channel.name)
    if names:
        raise DataError(
            f"{', '.join(names)}: constant in the complete training period, so there is nothing to learn; remove the "
            "variable from data.variables, or check the files"
        )


def _join_moments(reader: FieldReader, state: Moments, tendency: Moments, static: Moments) -> Statistics:
    """Return the statistics of all channels: first the time-varying channels, then the static channels.

    Args:
        reader: reader that provides the channels.
        state: moments of the time-varying fields.
        tendency: moments of the changes of these fields over one time step.
        static: moments of the static fields.
    """
    names = [channel.name for channel in reader.channels.time_varying_stored]
    static_names = [channel.name for channel in reader.channels.static_stored]
    std = state.std()
    tendency_std = tendency.std()
    # For a channel that hardly changes, the standard deviation of the change is raised, see `TENDENCY_FLOOR`.
    floor = TENDENCY_FLOOR * std
    for row in np.flatnonzero(tendency_std < floor):
        logger.info(
            "%s: tendency_std %.3g raised to %g of std, %.3g", names[row], tendency_std[row], TENDENCY_FLOOR, floor[row]
        )
    # Static channels do not change.
    zeros = np.zeros(len(static.count))
    return Statistics(
        names=(*names, *static_names),
        mean=np.concatenate([state.mean, static.mean]),
        std=np.concatenate([std, static.std()]),
        minimum=np.concatenate([state.minimum, static.minimum]),
        maximum=np.concatenate([state.maximum, static.maximum]),
        tendency_mean=np.concatenate([tendency.mean, zeros]),
        tendency_std=np.concatenate([np.maximum(tendency_std, floor), zeros]),
        count=np.concatenate([state.count, static.count]),
    )


def describe_coarse_packing(
    channels: Sequence[Channel], tendency_std: np.ndarray, steps: Mapping[str, float]
) -> list[str]:
    """Return a warning for each prognostic channel whose change over a time step consists largely of rounding errors.

    Only prognostic variables are checked, because only these are predicted as a change.

    A change is the difference of two rounded values. If adjacent packed values differ by s, each rounded value has a
    uniformly distributed error with the standard deviation s / sqrt(12), so the difference has an error of s / sqrt(6).
    A warning is returned if this error exceeds 0.3 of the standard deviation of the change.

    Args:
        channels: (C,) the time-varying channels.
        tendency_std: (C,) standard deviation of the change over a time step, computed from the data.
        steps: mapping from the name of each packed variable to the difference s of adjacent packed values, in units of
            the variable.
    """
    warnings = []
    for channel, change_std in zip(channels, tendency_std, strict=True):
        if channel.group != "prognostic":
            continue
        # A variable that is not packed has no rounding errors.
        step = steps.get(channel.variable, 0.0)
        rounding_std = step / np.sqrt(6.0)
        if rounding_std > _MAX_ROUNDING_FRACTION * change_std:
            warnings.append(
                f"{channel.name}: values in the files are rounded to {step:g}, which causes an error of "
                f"{rounding_std:.3g} in the change over a time step (standard deviation {change_std:.3g}); a large "
                "part of the change is rounding: use the variable as dynamic forcing, or use files with more digits"
            )
    return warnings
