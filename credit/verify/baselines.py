"""Baselines that a forecast must beat: persistence, damped persistence, climatology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from tqdm import tqdm

from credit.config.schema_data import DataConfig
from credit.config.schema_forecast import VerificationConfig
from credit.data.climatology import Climatology
from credit.data.climatology_file import load_climatology
from credit.data.climatology_store import obtain_climatology
from credit.data.splits import Split
from credit.grid import LatLonGrid
from credit.parallel.verdict import together
from credit.verify.cell_means import CellMeans

if TYPE_CHECKING:
    from credit.data.reader import FieldReader

BASELINES = ("persistence", "damped_persistence", "climatology")
_DAMPING_SAMPLES = 200  # initial times spread over the training period; r then has an error of about 0.01


def build_climatology(
    conf: VerificationConfig, data: DataConfig, reader: FieldReader, names: Sequence[str], train: Split
) -> tuple[Climatology, LatLonGrid]:
    """Return the climatology of the channels `names`, a file's, the store's or fitted, and the grid that it is on.

    Raises:
        ConfigError: if the training period cannot carry it.
        DataError: if the file is not what is needed.
    """
    if conf.climatology.method != "file":
        return obtain_climatology(reader, names, train, conf.climatology), reader.grid
    by_name = {channel.name: channel for channel in reader.channels.stored}
    channels = [by_name[name] for name in names]
    grid = reader.grid if conf.grid is None else None
    return load_climatology(conf.climatology, data, channels, reader.clock, reader.attributes, grid)


def fit_damping(
    fields: Callable[[int], np.ndarray],
    times: np.ndarray,
    normal: Callable[[int], np.ndarray],
    train: Split,
    leads: np.ndarray,
    means: CellMeans,
) -> np.ndarray:
    """Return r of damped persistence: the least-squares slope of the anomaly at t + lead on that at t; collective.

    Ranks share the training data, and each adds up what all have found in the order of one process.

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

    def anomaly(minutes: int) -> np.ndarray:
        return means.flatten(fields(minutes) - normal(minutes), "training data")

    def pair_sums(start: int) -> np.ndarray:
        product, square = found = np.zeros((2, len(leads), len(means.names)))
        pairs = [number for number, lead in enumerate(leads.tolist()) if start + lead in known]
        if pairs:
            first = anomaly(start)
            square[pairs] = means.mean(first**2)[:, 0]
            for number in pairs:
                product[number] = means.mean(first * anomaly(start + int(leads[number])))[:, 0]
        return found

    def fit(rank: int, ranks: int) -> dict[int, np.ndarray]:
        mine = tqdm(chosen.tolist()[rank::ranks], "damping", disable=True if rank else None)
        return {start: pair_sums(start) for start in mine}

    parts = together(lambda: fit(dist.get_rank(), dist.get_world_size())) if dist.is_initialized() else [fit(0, 1)]
    by_start = {start: found for part in parts for start, found in part.items()}
    product, square = sum(by_start[start] for start in chosen.tolist())
    return np.divide(product, square, out=np.zeros_like(product), where=square > 0)


def baseline_fields(
    initial: np.ndarray, normal_initial: np.ndarray, normal_valid: np.ndarray, damping: np.ndarray
) -> dict[str, np.ndarray]:
    """Return baseline -> (C, N) forecast for one lead time.

    Args:
        initial: (C, N) truth at the initial time.
        normal_initial: (C, N) climatology at the initial time.
        normal_valid: (C, N) climatology at the valid time.
        damping: (C,) r of this lead time.
    """
    return {
        "persistence": initial,
        "damped_persistence": normal_valid + damping[:, None] * (initial - normal_initial),
        "climatology": normal_valid,
    }
