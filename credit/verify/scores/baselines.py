"""Baselines that a forecast must beat: persistence, damped persistence, climatology."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist

from credit.config.schema_data import DataConfig
from credit.config.schema_verification import VerificationConfig
from credit.data.climatology.climatology import Climatology, Fields
from credit.data.climatology.file import load_climatology
from credit.data.climatology.stored import load_or_fit_climatology
from credit.data.splits import Split
from credit.grid import LatLonGrid
from credit.parallel.object_collectives import together
from credit.utils.progress import ProgressBar
from credit.verify.scores.baseline_state import BaselineState
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.row_kernels import product_sums

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

_DAMPING_SAMPLES = 200  # initial times spread over the training period; r then has an error of about 0.01
_HELD_BYTES = 1 << 30  # of anomalies, while damping is fitted


def build_climatology(
    conf: VerificationConfig, data: DataConfig, reader: FieldReader, names: Sequence[str], train: Split
) -> tuple[Climatology, LatLonGrid]:
    """Return the climatology of the channels `names`, a file's, the store's or fitted, and the grid that it is on.

    Raises:
        ConfigError: if the training period cannot carry it.
        DataError: if the file is not what is needed.
    """
    if conf.climatology.method != "file":
        return load_or_fit_climatology(reader, names, train, conf.climatology), reader.grid
    by_name = {channel.name: channel for channel in reader.channels.stored}
    channels = [by_name[name] for name in names]
    grid = reader.grid if conf.grid is None else None
    return load_climatology(conf.climatology, data, channels, reader.calendar, reader.attributes, grid)


def fit_damping(
    fields: Callable[[int], np.ndarray],
    times: np.ndarray,
    normal: Callable[[int], Fields],
    train: Split,
    leads: np.ndarray,
    means: AreaMean,
) -> np.ndarray:
    """Return r of damped persistence: the least-squares slope of the anomaly at t + lead on that at t; collective.

    Ranks share the training data, and each adds up what all have found in the order of one process. Times are gone
    through in order, with the anomalies of the initial times that some lead time still reaches beyond; there are as
    many in a group of initial times as a gibibyte holds, and what two groups need is read twice.

    Args:
        fields: minutes -> (C, H, W) truth.
        times: (N,) times that the data have.
        normal: minutes -> (C, H, W) climatology, what anomalies are taken from.
        train: the period; both ends of a pair lie in it.
        leads: (L,) lead times in minutes.
        means: area weights of the globe alone, and masks.

    Returns:
        (L, C) float64, pooled over cells and times; 0, which is climatology, where the period has no pair of times.
    """
    inside = times[(times >= train.first) & (times <= train.last)]
    chosen = inside[np.unique(np.linspace(0, len(inside) - 1, _DAMPING_SAMPLES).astype(int))]
    known = set(inside.tolist())

    def pair_sums(starts: list[int], hidden: bool | None) -> dict[int, np.ndarray]:
        """Return for each start the products and the square of the anomalies, (2, L, C)."""
        found = {start: np.zeros((2, len(leads), len(means.names))) for start in starts}
        ends: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, (number, lead) in itertools.product(starts, enumerate(leads.tolist())):
            if start + lead in known:
                ends[start + lead].append((start, number))
        last = {start: minutes for minutes in sorted(ends) for start, _ in ends[minutes]}
        begun: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # anomaly, means of its square
        for minutes in ProgressBar(sorted({*last, *ends}), "damping", disable=hidden):
            given = {"training data": fields(minutes), "climatology": np.asarray(normal(minutes))}
            if minutes in ends:
                products = _products(means, [begun[start][0] for start, _ in ends[minutes]], given)
                for (start, number), product in zip(ends[minutes], products, strict=True):
                    found[start][:, number] = product, begun[start][1]
            begun = {start: own for start, own in begun.items() if last[start] > minutes}
            if minutes in last:
                own = BaselineState.of(means, given)
                begun[minutes] = own.anomaly, own.variance[:, 0]
        return found

    def fit(rank: int, ranks: int) -> dict[int, np.ndarray]:
        mine = np.array_split(chosen, ranks)[rank]
        size = max(1, _HELD_BYTES // (4 * means.valid_CP.size))
        groups = np.split(mine, range(size, len(mine), size))
        return {start: sums for group in groups for start, sums in pair_sums(group.tolist(), rank > 0 or None).items()}

    parts = together(lambda: fit(dist.get_rank(), dist.get_world_size())) if dist.is_initialized() else [fit(0, 1)]
    by_start = {start: found for part in parts for start, found in part.items()}
    product, square = sum(by_start[start] for start in chosen.tolist())
    return np.divide(product, square, out=np.zeros_like(product), where=square > 0)


def _products(means: AreaMean, firsts: Sequence[np.ndarray], given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the means of the products of anomalies (C, H, W) with a later one, in the first region, (len(firsts), C).

    Args:
        means: of the C channels.
        firsts: the anomalies, 0 where masked.
        given: what the later one is of, and the climatology that it is taken from, by what errors call them.
    """
    later, normal = given.values()

    def add_up(channel: int, out_KS: np.ndarray) -> None:
        anomaly = means.cells(later, channel) - means.cells(normal, channel)
        for number, first in enumerate(firsts):
            product_sums(first[channel].reshape(-1), anomaly, *means.stretches, out_KS[number : number + 1])

    return means.of_channels(len(firsts), add_up, given)[:, :, 0]


def baseline_fields(
    initial: np.ndarray, anomaly: np.ndarray, normal: np.ndarray, damping: np.ndarray | float
) -> dict[str, np.ndarray]:
    """Return baseline -> forecast for one lead time, in fields of any shape.

    Args:
        initial: truth at the initial time.
        anomaly: its anomaly.
        normal: climatology at the valid time.
        damping: r of this lead time, for each field.
    """
    return {"persistence": initial, "damped_persistence": normal + damping * anomaly, "climatology": normal}
