"""Baselines that a forecast must beat: persistence, damped persistence, climatology.

Shapes: C channels, H x W cells, L lead times, N times.
"""

from __future__ import annotations

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
from credit.parallel.object_collectives import run_on_all_ranks
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
    """Return the climatology of the channels `names`, and its grid.

    It is read from a file, taken from the training store, or fitted to the training period.

    Args:
        config: verification section with the method and the grid of the scores.
        data: data section of the run.
        reader: reader of the training data.
        names: names of the channels.
        train: the training period.

    Raises:
        ConfigError: if the training period is too short for it.
        DataError: if the file is not as required.
    """
    # A fitted climatology is on the grid of the data.
    if config.climatology.method != "file":
        return load_or_fit_climatology(reader, names, train, config.climatology), reader.grid
    channels_by_name = {channel.name: channel for channel in reader.channels.time_varying_stored}
    channels = [channels_by_name[name] for name in names]
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
    """Collective: return the factor of damped persistence, the least-squares slope of the anomaly on the initial one.

    Ranks share the initial times, and each adds up the sums of all ranks in the order of a single process, so the
    result does not depend on their number.

    Args:
        fields: minutes -> (C, H, W) truth in the units of the data.
        times: (N,) times of the data in minutes.
        climatology: minutes -> (C, H, W), from which anomalies are taken.
        train: the period; both times of a pair lie in it.
        leads: (L,) lead times in minutes.
        area_mean: area weights of the globe alone, and masks.

    Returns:
        (L, C) float64 without unit, pooled over cells and times; 0, which is climatology, where the period has no pair
        of times.

    Raises:
        DataError: if a value outside the mask is missing.
    """
    train_times = times[(times >= train.first) & (times <= train.last)]
    sample = np.unique(np.linspace(0, len(train_times) - 1, _DAMPING_SAMPLES).astype(int))
    initial_times = train_times[sample]
    fit = _AnomalyProductSums(fields, climatology, set(train_times.tolist()), leads.tolist(), area_mean)

    def fit_share(rank: int, num_ranks: int) -> dict[int, np.ndarray]:
        share = np.array_split(initial_times, num_ranks)[rank]
        # As many initial times are processed together as fit in memory; times that two groups need are read twice.
        group_size = max(1, _ANOMALY_BYTES // (4 * area_mean.valid_CP.size))
        sums = {}
        for group in np.split(share, range(group_size, len(share), group_size)):
            sums |= fit.anomaly_sums(group.tolist(), hide_progress=rank > 0)
        return sums

    if dist.is_initialized():
        shares = run_on_all_ranks(lambda: fit_share(dist.get_rank(), dist.get_world_size()))
    else:
        shares = [fit_share(0, 1)]
    # The sums of all ranks are added in the order of time.
    sums_by_time = {}
    for share in shares:
        sums_by_time |= share
    product, square = sum(sums_by_time[minutes] for minutes in initial_times.tolist())
    return np.divide(product, square, out=np.zeros_like(product), where=square > 0)


@dataclass(frozen=True)
class _AnomalyProductSums:
    """Products of anomalies with those at later times.

    Attributes:
        fields: minutes -> (C, H, W) truth.
        climatology: minutes -> (C, H, W).
        train_times: times of the training period.
        leads: lead times in minutes.
        area_mean: area weights of the globe alone, and masks.
    """

    fields: Callable[[int], np.ndarray]
    climatology: Callable[[int], Fields]
    train_times: set[int]
    leads: Sequence[int]
    area_mean: AreaMean

    def anomaly_sums(self, initial_times: Sequence[int], hide_progress: bool) -> dict[int, np.ndarray]:
        """Return for each initial time the means of the anomalies' product and of the initial square, (2, L, C).

        Times are read in order. An initial anomaly is kept until its last lead time has been read.
        """
        # Pairs of initial time and lead time by the valid time at which they need the anomaly.
        shape = 2, len(self.leads), len(self.area_mean.names)
        sums = {initial: np.zeros(shape) for initial in initial_times}
        pairs_by_valid_time: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for initial in initial_times:
            for number, lead in enumerate(self.leads):
                if initial + lead in self.train_times:
                    pairs_by_valid_time[initial + lead].append((initial, number))
        last_valid_time = {}
        for minutes in sorted(pairs_by_valid_time):
            for initial, _ in pairs_by_valid_time[minutes]:
                last_valid_time[initial] = minutes

        # One pass over all times, in which the anomaly of a time is first a later one, then an initial one.
        states: dict[int, BaselineState] = {}
        times = sorted({*last_valid_time, *pairs_by_valid_time})
        for minutes in ProgressBar(times, "damping", disable=True if hide_progress else None):
            reference = ReferenceFields(
                self.fields(minutes), np.asarray(self.climatology(minutes)), "training data", "climatology"
            )
            if minutes in pairs_by_valid_time:
                pairs = pairs_by_valid_time[minutes]
                products = self._products([states[initial].anomaly for initial, _ in pairs], reference)
                for (initial, number), product_C in zip(pairs, products, strict=True):
                    sums[initial][0, number] = product_C
                    sums[initial][1, number] = states[initial].variance[:, 0]
            # Initial times whose last lead time has been read are dropped.
            states = {initial: state for initial, state in states.items() if last_valid_time[initial] > minutes}
            if minutes in last_valid_time:
                states[minutes] = BaselineState.build(self.area_mean, reference)
        return sums

    def _products(self, initial_anomalies: Sequence[np.ndarray], reference: ReferenceFields) -> np.ndarray:
        """Return the global means of the products of initial anomalies (C, H, W) with a later one, (N, C)."""
        means = self.area_mean

        def sum_channel(channel: int, out_KS: np.ndarray) -> None:
            truth_P = means.channel_values(reference.truth, channel)
            anomaly_P = truth_P - means.channel_values(reference.climatology, channel)
            for number, initial_anomaly in enumerate(initial_anomalies):
                product_sums(
                    initial_anomaly[channel].reshape(-1), anomaly_P, means.segments, out_KS[number : number + 1]
                )

        return means.reduce_channels(len(initial_anomalies), sum_channel, reference.by_description())[:, :, 0]


def build_baseline_fields(
    initial_truth: np.ndarray, anomaly: np.ndarray, climatology: np.ndarray, damping: np.ndarray | float
) -> Mapping[str, np.ndarray]:
    """Return baseline -> forecast for one lead time, in fields of any shape.

    Args:
        initial_truth: truth at the initial time.
        anomaly: anomaly at the initial time.
        climatology: climatology at the valid time.
        damping: factor of this lead time, for each field.
    """
    return {
        "persistence": initial_truth,
        "damped_persistence": climatology + damping * anomaly,
        "climatology": climatology,
    }
