"""Detection of values that are more than a thousand standard deviations from the usual value of their channel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from credit.channels import Channel
from credit.config.sections.data import TransformConfig
from credit.data.transforms import invert_transform

# A value is an outlier if its distance from the usual value is more than this number of standard deviations.
_MAX_DEVIATIONS = 1000.0
# Fraction of the times that is excluded from the computation of the scale. The same fraction of bad times may be
# skipped.
_EXCLUDED_FRACTION = 0.05
# Smallest number of times for the check. With fewer times, the usual value is not reliable.
_MIN_TIMES = 10


@dataclass(frozen=True)
class Outlier:
    """Value that is far from all other values of its channel.

    Attributes:
        channel: name of the channel.
        variable: variable of the channel.
        value: the outlier, in physical units.
        usual: usual value of the channel, in physical units: the median over time of the field means.
        deviations: distance of `value` from `usual` in standard deviations. For a variable with a transform, distance
            and standard deviation are computed from transformed values.
        is_transformed: True if the variable has a transform.
    """

    channel: str
    variable: str
    value: float
    usual: float
    deviations: float
    is_transformed: bool

    def __str__(self) -> str:
        scale = ""
        if self.is_transformed:
            scale = " of the values with data.transforms"
        return (
            f"{self.channel}: a value of {self.value:.6g} is {self.deviations:.2g} standard deviations{scale} from the "
            f"usual {self.usual:.6g}"
        )


def find_outliers(
    moments_T5C: np.ndarray,
    channels: Sequence[Channel],
    unchecked_variables: Collection[str],
    transforms: Mapping[str, TransformConfig],
) -> dict[int, Outlier]:
    """Return the times with outliers, which are values far from all other values of their channel.

    The usual value of a channel is the median over time of the field means. The scale of a channel is the root mean
    square distance from the usual value, over all cells and the 95 % of the times with the smallest distance, so that
    outliers do not increase the scale. All levels of a variable use the largest scale of any level, because clouds and
    tracers are almost always 0 on some levels. A value is an outlier if its distance from the usual value is more than
    1000 times the scale. Nothing is checked if the scale is 0, or if there are fewer than 10 times.

    Args:
        moments_T5C: (T, 5, C) float64, the rows of `statistics.Moments.to_rows` for each time; the count is 0 at times
            without fields.
        channels: (C,) the channels.
        unchecked_variables: names of variables that are not checked, because the config declares their range.
        transforms: name -> transform of each variable whose moments are computed from transformed values.

    Returns:
        Index of each time with an outlier -> the first outlier at this time.
    """
    present = np.flatnonzero(moments_T5C[:, 0].min(axis=1) > 0)
    if len(present) < _MIN_TIMES:
        return {}
    count, mean, squares, minimum, maximum = moments_T5C[present].transpose(1, 0, 2)
    # Distance of each field from the usual state of its channel: root mean square over its cells.
    center_C = np.median(mean, axis=0)
    distance_TC = np.sqrt(squares / count + (mean - center_C) ** 2)
    # The scale is computed from the times closest to the usual state; then the largest scale of all levels is used.
    num_usual_times = len(present) - max(1, math.ceil(_EXCLUDED_FRACTION * len(present)))
    usual_distance_TC = np.sort(distance_TC, axis=0)[:num_usual_times]
    scale_C = np.sqrt((usual_distance_TC**2).mean(axis=0))
    scale_by_variable: dict[str, float] = {}
    for channel, scale in zip(channels, scale_C, strict=True):
        scale_by_variable[channel.variable] = max(scale, scale_by_variable.get(channel.variable, 0.0))
    is_judged_C = np.array([channel.variable not in unchecked_variables for channel in channels])
    scale_C = np.array([scale_by_variable[channel.variable] for channel in channels])
    # The extreme values of each field, compared with the scale.
    below_TC = center_C - minimum
    above_TC = maximum - center_C
    outliers: dict[int, Outlier] = {}
    is_far_TC = np.maximum(below_TC, above_TC) > _MAX_DEVIATIONS * scale_C
    for time, row in np.argwhere(is_far_TC & (scale_C > 0) & is_judged_C):
        value = minimum[time, row] if below_TC[time, row] > above_TC[time, row] else maximum[time, row]
        usual = center_C[row]
        channel = channels[row]
        deviations = abs(value - usual) / scale_C[row]
        transform = transforms.get(channel.variable)
        if transform is not None:
            # Users compare the value with the file and with valid_range, which are in physical units.
            value = invert_transform(value, transform)
            usual = invert_transform(usual, transform)
        outlier = Outlier(
            channel.name, channel.variable, float(value), float(usual), float(deviations), transform is not None
        )
        outliers.setdefault(int(present[time]), outlier)
    return outliers
