"""Ensembles for tests of their scores: three channels on a small grid, one of them masked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from credit.channels import ChannelMap
from credit.config.sections.verification import REGIONS
from credit.verify.statistics.area_mean import AreaMean
from credit.verify.statistics.ensemble_kernels import crps_from_sums, member_sums, vector_member_sums
from credit.verify.statistics.regions import region_weights
from tests.unit.analytic_reader import make_grid

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m", "sst"]}}, [500.0]).output
GRID = make_grid(8, 16)
CELLS = GRID.shape[0] * GRID.shape[1]
NAMES = ("global", "tropics", "extratropics_north", "extratropics_south")
_WEIGHTS_RHW = region_weights(GRID, {name: REGIONS[name] for name in NAMES})
WEIGHTS = xr.DataArray(_WEIGHTS_RHW.reshape(len(NAMES), -1), dims=("region", "cell"))
WINDS = [(0, 1)]  # for sums of vectors, z500 and t2m stand for components
MASK = np.random.default_rng(3).random(GRID.shape) < 0.3
MEANS = AreaMean(CHANNELS, {"sst": MASK}, _WEIGHTS_RHW, WINDS)
CASE_DIMS = ("case", "channel", "cell")
MEMBER_DIMS = ("case", "member", "channel", "cell")


@dataclass
class Cases:
    """Cases of an ensemble: members (K, M, C, N), truth and climatology (K, C, N), 0 where masked."""

    members: np.ndarray
    truth: np.ndarray
    normal: np.ndarray

    @property
    def labelled(self) -> tuple[xr.DataArray, xr.DataArray]:
        """Members and truth with names of dimensions, missing where masked."""
        valid = xr.DataArray(MEANS.valid_CP, dims=CASE_DIMS[1:])
        members = xr.DataArray(self.members, dims=MEMBER_DIMS).where(valid)
        return members, xr.DataArray(self.truth, dims=CASE_DIMS).where(valid)


def draw_cases(cases: int, members: int, spread: float = 1.0, seed: int = 0) -> Cases:
    """Return members and truth about a common centre; the truth deviates by 1 to 3, members by `spread` times that."""
    rng = np.random.default_rng(seed)
    shape = (len(CHANNELS), CELLS)
    deviation = rng.uniform(1, 3, (cases, 1, *shape))
    centre = 10 * rng.standard_normal((cases, 1, *shape)) + np.array([5e4, 280.0, 290.0])[:, None]
    draws = rng.standard_normal((cases, members + 1, *shape))
    draws[:, 1:] *= spread
    values = np.where(MEANS.valid_CP, centre + deviation * draws, 0.0)
    normal = np.where(MEANS.valid_CP, centre[:, 0] + 2 * rng.standard_normal((cases, *shape)), 0.0)
    return Cases(values[:, 1:], values[:, 0], normal)


def rainy(values: np.ndarray) -> np.ndarray:
    """Return anomalies of order 1 as precipitation that is zero about half of the time."""
    return np.maximum(values, 0.0) ** 2


def within(estimates: np.ndarray, expected: float, errors: float = 4.0) -> bool:
    """Return whether the mean of independent `estimates` is as expected, to so many standard errors."""
    return abs(estimates.mean() - expected) < errors * estimates.std(ddof=1) / np.sqrt(estimates.size)


def pooled(values: xr.DataArray) -> np.ndarray:
    """Return the area-weighted mean of (case, channel, cell) over cases and cells that are there, (C, R)."""
    return values.weighted(WEIGHTS).mean(["case", "cell"]).transpose("channel", "region").values


def crps_by_cell(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS of each cell, of members (M, N) and truth (N,): sums over one cell each."""
    # Each cell is a segment of its own.
    first_cells = np.arange(truth.size)
    out = np.empty((4 + len(members), truth.size))
    valid = np.ones(truth.size, dtype=bool)
    member_sums(members[:, None], 0, truth, valid, (first_cells, first_cells + 1), out)
    return crps_from_sums(out, len(members))


def energy_by_cell(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair energy score of each cell, of members (M, 2, N) and truth (2, N)."""
    first_cells = np.arange(truth.shape[1])
    out = np.empty((2, truth.shape[1]))
    valid = np.ones(truth.shape[1], dtype=bool)
    vector_member_sums(members, (0, 1), *truth, valid, np.float32(0.125), (first_cells, first_cells + 1), out)
    return crps_from_sums(out, len(members))
