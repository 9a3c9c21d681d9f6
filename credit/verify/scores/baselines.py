"""Baselines that a forecast must beat: persistence, damped persistence, climatology.

Persistence is the truth at the initial time. Damped persistence is the climatology at the valid time plus the anomaly
(difference from the climatology) at the initial time, multiplied by a damping factor. The factor is fitted to the
training period for each lead time and channel.

Shapes: C channels, H x W cells, L lead times, N times.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from credit.config.sections.data import DataConfig
from credit.config.sections.verification import VerificationConfig
from credit.data.climatology.climatology import Climatology, Fields
from credit.data.climatology.file import load_climatology
from credit.data.climatology.stored import load_or_fit_climatology
from credit.data.splits import Split
from credit.grid import LatLonGrid
from credit.parallel.object_collectives import reduce_over_ranks
from credit.utils.progress import ProgressBar
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.error_moments import BaselineState, ReferenceFields
from credit.verify.statistics.kernels import product_sums

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

# Initial times spread over the training period; the damping factor then has an error of about 0.01.
_DAMPING_SAMPLES = 200
# Memory for anomalies while damping is fitted.
_ANOMALY_BYTES = 1 << 30


def build_climatology(
    config: VerificationConfig, data: DataConfig, reader: FieldReader, names: Sequence[str], train: Split
) -> tuple[Climatology, LatLonGrid]:
    """Return the climatology of the named channels, and the grid of its fields.

    The climatology is read from a file, taken from the training store, or fitted to the training period.

    Args:
        config: verification section, with the method of the climatology and the grid of the scores.
        data: data section of the run.
        reader: reader of the training data.
        names: names of the channels.
        train: the training period.

    Raises:
        ConfigError: if the training period is too short for the method.
        DataError: if the file or the climatology of the store cannot be used.
    """
    # A fitted climatology is on the grid of the data.
    if config.climatology.method != "file":
        return load_or_fit_climatology(reader, names, train, config.climatology), reader.grid
    channels_by_name = {channel.name: channel for channel in reader.channels.time_varying_stored}
    channels = [channels_by_name[name] for name in names]
    # Without a grid of the scores, the file must be on the grid of the data.
    grid = reader.grid if config.grid is None else None
    return load_climatology(config.climatology, data, channels, reader.calendar, reader.attributes, grid)


def fit_damping(
    fields: Callable[[int], np.ndarray],
    times: np.ndarray,
    climatology: Callable[[int], Fields],
    train: Split,
    leads: np.ndarray,
    area_mean: AreaMean,
) -> np.ndarray:
    """Collective: return the factor of damped persistence for each lead time and channel.

    The factor is the slope of a least-squares fit of the anomaly at the valid time to the anomaly at the initial time,
    over all cells and a sample of initial times. The initial times are distributed over the ranks. Each rank adds up
    the sums of all ranks in the order of time, so the result does not depend on the number of ranks.

    Args:
        fields: function of a time in minutes that returns the truth, (C, H, W) in the units of the data.
        times: (N,) times of the data in minutes.
        climatology: function of a time in minutes that returns the climatology, (C, H, W) in the units of the data.
        train: the training period, in which initial and valid times lie.
        leads: (L,) lead times in minutes.
        area_mean: area means with the globe as the only region.

    Returns:
        (L, C) float64, dimensionless. The factor is 0 for a lead time longer than the training period, so that damped
        persistence then is the climatology.

    Raises:
        DataError: if a value is not finite in a cell that is not masked.
    """
    train_times = times[(times >= train.first) & (times <= train.last)]
    sample = np.unique(np.linspace(0, len(train_times) - 1, _DAMPING_SAMPLES).astype(int))
    initial_times = train_times[sample]
    fit = _AnomalyProductSums(fields, climatology, set(train_times.tolist()), leads.tolist(), area_mean)

    def fit_share(rank: int, num_ranks: int) -> dict[int, np.ndarray]:
        share = np.array_split(initial_times, num_ranks)[rank]
        # Initial times are processed in groups whose anomalies fit in memory. A time that two groups need is read
        # twice.
        group_size = max(1, _ANOMALY_BYTES // (4 * area_mean.valid_CP.size))
        sums = {}
        for group in np.split(share, range(group_size, len(share), group_size)):
            sums |= fit.anomaly_sums(group.tolist(), hide_progress=rank > 0)
        return sums

    # The sums of all ranks are added in the order of time.
    if dist.is_initialized():
        sums_by_time = reduce_over_ranks(lambda: fit_share(dist.get_rank(), dist.get_world_size()), operator.or_)
    else:
        sums_by_time = fit_share(0, 1)
    sums_2LC = sum(sums_by_time[minutes] for minutes in initial_times.tolist())
    # The slope of the fit is the sum of the products divided by that of the squares.
    product, square = sums_2LC
    return np.divide(product, square, out=np.zeros_like(product), where=square > 0)


@dataclass(frozen=True)
class _AnomalyProductSums:
    """Computation of the mean products of initial and later anomalies, to which the damping is fitted.

    Attributes:
        fields: function of a time in minutes that returns the truth, (C, H, W).
        climatology: function of a time in minutes that returns the climatology, (C, H, W).
        train_times: times of the data in the training period, in minutes.
        leads: lead times in minutes.
        area_mean: area means with the globe as the only region.
    """

    fields: Callable[[int], np.ndarray]
    climatology: Callable[[int], Fields]
    train_times: set[int]
    leads: Sequence[int]
    area_mean: AreaMean

    def anomaly_sums(self, initial_times: Sequence[int], hide_progress: bool) -> dict[int, np.ndarray]:
        """Return initial time -> (2, L, C) global means of products of anomalies.

        The first row is the product of the anomalies at initial and valid time, the second row the squared anomaly at
        the initial time. Both are 0 for a lead time whose valid time is not in `train_times`. Times are read in
        increasing order, and an initial anomaly is kept in memory until its last valid time has been read.

        Args:
            initial_times: initial times in minutes.
            hide_progress: True hides the progress bar.
        """
        shape = 2, len(self.leads), len(self.area_mean.names)
        sums = {initial: np.zeros(shape) for initial in initial_times}
        # Valid time -> (initial time, index of the lead time) of the pairs that need the anomaly at this valid time.
        pairs_by_valid_time: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for initial in initial_times:
            for number, lead in enumerate(self.leads):
                if initial + lead in self.train_times:
                    pairs_by_valid_time[initial + lead].append((initial, number))
        # Initial time -> its last valid time, which the loop in increasing order writes last.
        last_valid_time = {}
        for minutes in sorted(pairs_by_valid_time):
            for initial, _ in pairs_by_valid_time[minutes]:
                last_valid_time[initial] = minutes

        # One pass over all times, in which the anomaly of a time is first a later one, then an initial one.
        states: dict[int, BaselineState] = {}
        times = sorted({*last_valid_time, *pairs_by_valid_time})
        # None hides the bar where the output is not a terminal.
        hide_bar = True if hide_progress else None
        for minutes in ProgressBar(times, "damping", disable=hide_bar):
            reference = ReferenceFields(
                self.fields(minutes), np.asarray(self.climatology(minutes)), "training data", "climatology"
            )
            if minutes in pairs_by_valid_time:
                pairs = pairs_by_valid_time[minutes]
                initial_anomalies = [states[initial].anomaly for initial, _ in pairs]
                products = self._products(initial_anomalies, reference)
                for (initial, number), product_C in zip(pairs, products, strict=True):
                    sums[initial][0, number] = product_C
                    # The globe is the only region, with the index 0.
                    sums[initial][1, number] = states[initial].variance[:, 0]
            # Initial times whose last lead time has been read are dropped.
            for initial in list(states):
                if last_valid_time[initial] <= minutes:
                    del states[initial]
            if minutes in last_valid_time:
                states[minutes] = BaselineState.build(self.area_mean, reference)
        return sums

    def _products(self, initial_anomalies: Sequence[np.ndarray], reference: ReferenceFields) -> np.ndarray:
        """Return the global means of the products of several initial anomalies with one later anomaly.

        Args:
            initial_anomalies: initial anomalies, (C, H, W) each.
            reference: truth and climatology at the later time.

        Returns:
            (number of initial anomalies, C) global means.
        """
        area_mean = self.area_mean

        def sum_channel(channel: int, out_KS: np.ndarray) -> None:
            truth_P = area_mean.channel_values(reference.truth, channel)
            anomaly_P = truth_P - area_mean.channel_values(reference.climatology, channel)
            for number, initial_anomaly in enumerate(initial_anomalies):
                initial_anomaly_P = initial_anomaly[channel].reshape(-1)
                # A slice, because the kernel writes into an array (1, S).
                product_sums(initial_anomaly_P, anomaly_P, area_mean.segments, out_KS[number : number + 1])

        means_KCR = area_mean.reduce_channels(len(initial_anomalies), sum_channel, reference.by_description())
        return means_KCR[:, :, 0]


def build_baseline_fields(
    initial_truth: np.ndarray, anomaly: np.ndarray, climatology: np.ndarray, damping: np.ndarray | float
) -> Mapping[str, np.ndarray]:
    """Return baseline name -> its forecast at one lead time, (...).

    Args:
        initial_truth: (...) truth at the initial time.
        anomaly: (...) difference of the truth from the climatology at the initial time.
        climatology: (...) climatology at the valid time.
        damping: factor of damped persistence at this lead time, a number or an array that broadcasts to the fields.
    """
    return {
        "persistence": initial_truth,
        "damped_persistence": climatology + damping * anomaly,
        "climatology": climatology,
    }
