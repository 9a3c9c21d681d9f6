"""Stability of long forecasts: the day at which the variability of a channel leaves the range of the truth.

The variability is measured in two ways, each relative to the truth: by the standard deviation over all cells of the
field, and by the standard deviation of its eddies. Eddies are the deviations from the zonal mean (Lorenz 1955).

The standard deviation of the field shows drifts and growth. In most channels, the contrast between equator and poles
dominates this measure. It therefore stays large even if the forecast has lost its weather systems. The standard
deviation of the eddies then becomes small.

Shapes: C channels, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from credit.calendar import format_duration, parse_duration
from credit.config import Config
from credit.data.reader import FieldReader
from credit.errors import ConfigError
from credit.forecast.forecast_source import ForecastSource
from credit.forecast.io.forecast_reader import open_forecasts
from credit.grid import LatLonGrid
from credit.train.build.open_data import open_data_and_splits

# Folder of the long forecast in the folder of a run.
LONG_RUN_FOLDER = "long_run"
# Accepted range of the standard deviation over all cells in the forecast, divided by the same quantity in the truth.
# Below the range, the forecast has collapsed to a smooth state; above the range, the forecast grows without bound.
MIN_RATIO = 0.5
MAX_RATIO = 2.0
# Largest number of times of the truth over which the standard deviations are averaged.
_MAX_TRUTH_TIMES = 24
_DAY_MINUTES = 1440
FIELD = "field"
EDDIES = "eddies"
# (measure, channel) -> standard deviation of the truth
TruthDeviations = dict[tuple[str, str], float]


@dataclass(frozen=True)
class StabilityCurve:
    """Global variability of one channel in the long forecast of a run.

    Attributes:
        name: name of the run.
        seed: seed of the run.
        channel: name of the channel.
        measure: ``field`` for the field itself, or ``eddies`` for its deviations from the zonal mean.
        days: lead times in days.
        ratios: standard deviation over all cells at each lead time, divided by the same quantity in the truth. NaN if a
            value of the field is not finite.
    """

    name: str
    seed: str
    channel: str
    measure: str
    days: list[float]
    ratios: list[float]

    @property
    def exit_day(self) -> float | None:
        """First day on which the ratio is not finite or is outside `MIN_RATIO` to `MAX_RATIO`; None without one."""
        for day, ratio in zip(self.days, self.ratios, strict=True):
            if not MIN_RATIO <= ratio <= MAX_RATIO:
                return day
        return None

    @property
    def nonfinite_day(self) -> float | None:
        """First day on which a value of the field is not finite; None if all values are finite."""
        for day, ratio in zip(self.days, self.ratios, strict=True):
            if not np.isfinite(ratio):
                return day
        return None


def require_valid_long_run_length(text: str, config: Config) -> None:
    """Raise a ConfigError if the length of the long forecast is not a multiple of the time step.

    Args:
        text: value of ``--long-run``, a duration such as ``60d``.
        config: config of a run.
    """
    if parse_duration(text, "--long-run") % config.data.step_minutes:
        raise ConfigError(
            f"--long-run {text}: must be a multiple of data.timestep {config.data.timestep}, for example 60d"
        )


def build_long_run_overrides(config: Config, forecast_folder: Path, length: str) -> tuple[str, ...]:
    """Return the overrides of ``credit rollout`` that make one long forecast with daily output.

    Args:
        config: config of the run.
        forecast_folder: folder of the forecasts of the run; the long forecast starts at their first initial time.
        length: length of the long forecast, a duration such as ``60d``.

    Raises:
        DataError: if the folder has no forecasts.
    """
    archive = open_forecasts(forecast_folder)
    start = archive.calendar.format(int(archive.initial_minutes[0]))
    # With a time step that does not divide a day, every step is written.
    step_minutes = config.data.step_minutes
    every = step_minutes if _DAY_MINUTES % step_minutes else _DAY_MINUTES
    return (
        f"inference.folder={LONG_RUN_FOLDER}",
        f'inference.initial_times=["{start}"]',
        f"inference.lead_time={format_duration(parse_duration(length))}",
        "inference.lead_times=null",
        f"inference.output_every={format_duration(every)}",
    )


def measure_truth_deviations(config: Config, channels: Sequence[str]) -> TruthDeviations:
    """Return the standard deviations over all cells of each channel, averaged over times of the training period.

    Args:
        config: config of the data that are used as the truth.
        channels: names of output channels.

    Raises:
        DataError: if the data cannot be read.
    """
    reader, splits = open_data_and_splits(config)
    train = splits["train"]
    is_in_period = (reader.times >= train.first) & (reader.times <= train.last)
    indices = np.flatnonzero(is_in_period)
    # Times spread over the whole period contain all seasons.
    num_times = min(_MAX_TRUTH_TIMES, len(indices))
    indices = indices[np.linspace(0, len(indices) - 1, num_times).astype(int)]
    return _average_deviations(reader, indices.tolist(), channels)


def _average_deviations(reader: FieldReader, indices: Sequence[int], channels: Sequence[str]) -> TruthDeviations:
    """Return (measure, channel) -> standard deviation over all cells, averaged over times.

    Args:
        reader: reader of the truth.
        indices: indices of the times in the reader.
        channels: names of the channels.
    """
    names = [channel.name for channel in reader.channels.time_varying_stored]
    rows = [names.index(channel) for channel in channels]
    deviations = []
    for fields_CHW in reader.read_each(indices):
        deviations.append(compute_deviations(fields_CHW[rows], reader.grid))
    mean_2C = np.mean(deviations, axis=0)
    truth = {}
    for measure, values in zip((FIELD, EDDIES), mean_2C.tolist(), strict=True):
        truth |= {(measure, channel): value for channel, value in zip(channels, values, strict=True)}
    return truth


def compute_deviations(fields_CHW: np.ndarray, grid: LatLonGrid) -> np.ndarray:
    """Return the area-weighted standard deviations of each field and of its eddies, (2, C) float64.

    Args:
        fields_CHW: fields, (C, H, W), NaN in missing cells.
        grid: grid of the fields.
    """
    fields = fields_CHW.astype(np.float64)
    is_valid = ~np.isnan(fields)
    # A row without a valid cell has the mean 0, which is not used.
    num_valid = np.maximum(is_valid.sum(axis=2, keepdims=True), 1)
    row_means = np.where(is_valid, fields, 0.0).sum(axis=2, keepdims=True) / num_valid
    return np.stack([compute_spatial_deviation(fields, grid), compute_spatial_deviation(fields - row_means, grid)])


def compute_spatial_deviation(fields_CHW: np.ndarray, grid: LatLonGrid) -> np.ndarray:
    """Return the area-weighted standard deviation of each channel over all cells that are not missing, (C,) float64.

    Args:
        fields_CHW: fields, (C, H, W), NaN in missing cells; infinite values are not allowed.
        grid: grid of the fields.
    """
    fields = fields_CHW.astype(np.float64)
    weights = grid.masked_area_weights(~np.isnan(fields))
    values = np.where(np.isnan(fields), 0.0, fields)
    mean = (weights * values).sum(axis=(1, 2), keepdims=True)
    return np.sqrt((weights * (values - mean) ** 2).sum(axis=(1, 2)))


def measure_long_run(name: str, seed: str, folder: Path, truth: TruthDeviations) -> list[StabilityCurve]:
    """Return the stability curves of each channel in the long forecast of a run.

    For an ensemble, the first member is measured.

    Args:
        name: name of the run.
        seed: seed of the run.
        folder: folder of the long forecast.
        truth: standard deviations of the truth, from `measure_truth_deviations`.

    Raises:
        DataError: if the forecast cannot be read.
    """
    archive = open_forecasts(folder)
    channels = [channel for measure, channel in truth if measure == FIELD and channel in archive.channel_names]
    rows = [archive.channel_names.index(channel) for channel in channels]
    deviations_T2C = _compute_deviations_by_lead(archive, rows)
    days = (archive.lead_minutes / _DAY_MINUTES).tolist()
    curves = []
    for number, measure in enumerate((FIELD, EDDIES)):
        for row, channel in enumerate(channels):
            ratios = deviations_T2C[:, number, row] / truth[measure, channel]
            curves.append(StabilityCurve(name, seed, channel, measure, days, ratios.tolist()))
    return curves


def _compute_deviations_by_lead(archive: ForecastSource, rows: Sequence[int]) -> np.ndarray:
    """Return the standard deviations of fields and eddies at each of T lead times, (T, 2, C).

    NaN where the field of a channel is not finite.

    Args:
        archive: the long forecast.
        rows: indices of the C channels in the forecast.
    """
    initial_minutes = int(archive.initial_minutes[0])
    first_missing_CHW = None
    deviations = []
    for lead_index in range(len(archive.lead_minutes)):
        fields_CHW = archive.read_members(initial_minutes, lead_index)[0][list(rows)]
        is_missing_CHW = np.isnan(fields_CHW)
        if first_missing_CHW is None:
            # Cells that are missing at the first lead time are always missing, such as land in a sea surface variable.
            first_missing_CHW = is_missing_CHW
        is_lost_CHW = (is_missing_CHW & ~first_missing_CHW) | np.isinf(fields_CHW)
        is_finite_C = ~is_lost_CHW.any(axis=(1, 2)) & ~is_missing_CHW.all(axis=(1, 2))
        deviations_2C = np.full((2, len(rows)), np.nan)
        if is_finite_C.any():
            deviations_2C[:, is_finite_C] = compute_deviations(fields_CHW[is_finite_C], archive.grid)
        deviations.append(deviations_2C)
    return np.array(deviations)
