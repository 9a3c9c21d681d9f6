"""Baselines to which forecasts are compared: persistence, damped persistence, climatology.

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

# Number of initial times to which the damping is fitted. The damping factor then has an error of about 0.01.
_DAMPING_SAMPLES = 200
# Memory in bytes for anomalies during the fit of the damping.
_ANOMALY_BYTES = 1 << 30


def build_climatology(
    config: VerificationConfig, data: DataConfig, reader: FieldReader, names: Sequence[str], train: Split
) -> tuple[Climatology, LatLonGrid]:
    """Return the climatology of the named channels, and the grid of its fields.

    The climatology is read from a file or from the training store, or is fitted to the training period.

    Args:
        config: config section `verification`; it defines the method of the climatology and the grid of the scores.
        data: config section `data` of the run.
        reader: reader of the training data.
        names: names of the channels.
        train: the training period.

    Raises:
        ConfigError: if the training period is too short for the method of the climatology.
        DataError: if the climatology of the file or of the store cannot be used.
    """
    # A fitted climatology is on the grid of the data.
    if config.climatology.method != "file":
        return load_or_fit_climatology(reader, names, train, config.climatology), reader.grid
    channels_by_name = {channel.name: channel for channel in reader.channels.time_varying_stored}
    channels = [channels_by_name[name] for name in names]
    # Without the key `verification.grid`, the file must be on the grid of the data.
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

    The factor is the slope of a least-squares fit over all cells and a sample of initial times. The fit predicts the
    anomaly at the valid time from the anomaly at the initial time. The initial times are distributed over the ranks.
    Each rank then adds the sums of all initial times in chronological order, so the result does not depend on the
    number of ranks.

    Args:
        fields: function of a time in minutes that returns the truth, (C, H, W) in the units of the data.
        times: (N,) times of the data in minutes.
        climatology: function of a time in minutes that returns the climatology, (C, H, W) in the units of the data.
        train: the training period; it contains all initial and valid times of the fit.
        leads: (L,) lead times in minutes.
        area_mean: area means with the globe as the only region.

    Returns:
        (L, C) float64, dimensionless factors. For a lead time longer than the training period the factor is 0, so
        damped persistence is then the climatology.

    Raises:
        DataError: if a value is not finite in a cell that is not masked.
    """
    train_times = times[(times >= train.first) & (times <= train.last)]
    sample = np.unique(np.linspace(0, len(train_times) - 1, _DAMPING_SAMPLES).astype(int))
    initial_times = train_times[sample]
    fit = _AnomalyProducts(fields, climatology, set(train_times.tolist()), leads.tolist(), area_mean)

    def fit_share(rank: int, num_ranks: int) -> dict[int, np.ndarray]:
        share = np.array_split(initial_times, num_ranks)[rank]
        # Initial times are processed in groups, so that the anomalies of a group fit in memory. A time that two groups
        # need is read twice.
        group_size = max(1, _ANOMALY_BYTES // (4 * area_mean.valid_CP.size))
        sums = {}
        for group in np.split(share, range(group_size, len(share), group_size)):
            sums |= fit.average_anomaly_products(group.tolist(), hide_progress=rank > 0)
        return sums

    # The sums of all initial times are added in chronological order.
    if dist.is_initialized():
        sums_by_time = reduce_over_ranks(lambda: fit_share(dist.get_rank(), dist.get_world_size()), operator.or_)
    else:
        sums_by_time = fit_share(0, 1)
    sums_2LC = sum(sums_by_time[minutes] for minutes in initial_times.tolist())
    # The slope of the fit is the sum of the products divided by the sum of the squares.
    product, square = sums_2LC
    return np.divide(product, square, out=np.zeros_like(product), where=square > 0)


@dataclass(frozen=True)
class _AnomalyProducts:
    """Computation of global means of products of anomalies, to which the damping is fitted.

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

    def average_anomaly_products(self, initial_times: Sequence[int], hide_progress: bool) -> dict[int, np.ndarray]:
        """Return initial time -> (2, L, C) global means of products of anomalies.

        Row 0 is the product of the anomalies at the initial time and at the valid time. Row 1 is the squared anomaly at
        the initial time. Both rows are 0 for a lead time if its valid time is not in `train_times`. Times are read in
        increasing order, and an initial anomaly is kept in memory until its last valid time has been read.

        Args:
            initial_times: initial times in minutes.
            hide_progress: True to hide the progress bar.
        """
        shape = 2, len(self.leads), len(self.area_mean.names)
        sums = {initial: np.zeros(shape) for initial in initial_times}
        # Valid time -> list of (initial time, index of the lead time) that have this valid time.
        pairs_by_valid_time: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for initial in initial_times:
            for number, lead in enumerate(self.leads):
                if initial + lead in self.train_times:
                    pairs_by_valid_time[initial + lead].append((initial, number))
        # Initial time -> last valid time. The loop is in increasing order, so the last assignment has the last time.
        last_valid_time = {}
        for minutes in sorted(pairs_by_valid_time):
            for initial, _ in pairs_by_valid_time[minutes]:
                last_valid_time[initial] = minutes

        # The loop uses the anomaly of each time first as an anomaly at a valid time, then at an initial time.
        states: dict[int, BaselineState] = {}
        times = sorted({*last_valid_time, *pairs_by_valid_time})
        # With None, the progress bar is shown only if the output is a terminal.
        hide_bar = True if hide_progress else None
        for minutes in ProgressBar(times, "damping", disable=hide_bar):
            reference = ReferenceFields(
                self.fields(minutes), np.asarray(self.climatology(minutes)), "training data", "climatology"
            )
            if minutes in pairs_by_valid_time:
                pairs = pairs_by_valid_time[minutes]
                initial_anomalies = [states[initial].anomaly for initial, _ in pairs]
                products = self._average_products_at(initial_anomalies, reference)
                for (initial, number), product_C in zip(pairs, products, strict=True):
                    sums[initial][0, number] = product_C
                    # The globe is the only region, so its index is 0.
                    sums[initial][1, number] = states[initial].variance[:, 0]
            # An initial anomaly is removed after its last valid time.
            for initial in list(states):
                if last_valid_time[initial] <= minutes:
                    del states[initial]
            if minutes in last_valid_time:
                states[minutes] = BaselineState.build(self.area_mean, reference)
        return sums

    def _average_products_at(self, initial_anomalies: Sequence[np.ndarray], reference: ReferenceFields) -> np.ndarray:
        """Return the global means of the products of several initial anomalies with the anomaly at one valid time.

        Args:
            initial_anomalies: anomalies at the initial times, (C, H, W) each.
            reference: truth and climatology at the valid time.

        Returns:
            (number of initial anomalies, C) global means.
        """
        area_mean = self.area_mean

        def sum_channel(channel: int, out_KS: np.ndarray) -> None:
            truth_P = area_mean.channel_values(reference.truth, channel)
            anomaly_P = truth_P - area_mean.channel_values(reference.climatology, channel)
            for number, initial_anomaly in enumerate(initial_anomalies):
                initial_anomaly_P = initial_anomaly[channel].reshape(-1)
                # The slice is (1, S), the shape that the kernel needs.
                product_sums(initial_anomaly_P, anomaly_P, area_mean.segments, out_KS[number : number + 1])

        means_KCR = area_mean.reduce_channels(len(initial_anomalies), sum_channel, reference.by_description())
        return means_KCR[:, :, 0]


def build_baseline_fields(
    initial_truth: np.ndarray, anomaly: np.ndarray, climatology: np.ndarray, damping: np.ndarray | float
) -> Mapping[str, np.ndarray]:
    """Return baseline name -> forecast of the baseline at one lead time, (...).

    Args:
        initial_truth: (...) truth at the initial time.
        anomaly: (...) difference of the truth from the climatology at the initial time.
        climatology: (...) climatology at the valid time.
        damping: factor of damped persistence at the lead time, a number or an array that broadcasts to the fields.
    """
    return {
        "persistence": initial_truth,
        "damped_persistence": climatology + damping * anomaly,
        "climatology": climatology,
    }
