"""Random ensembles for tests of ensemble scores: three channels on a small grid, one of them masked."""

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
# In tests of vector scores, z500 and t2m stand for the two components of the wind.
WINDS = [(0, 1)]
MASK = np.random.default_rng(3).random(GRID.shape) < 0.3
MEANS = AreaMean(CHANNELS, {"sst": MASK}, _WEIGHTS_RHW, WINDS)
CASE_DIMS = ("case", "channel", "cell")
MEMBER_DIMS = ("case", "member", "channel", "cell")


@dataclass
class Cases:
    """Ensemble cases: members (K, M, C, N), truth and climatology `normal` (K, C, N), 0 in masked cells."""

    members: np.ndarray
    truth: np.ndarray
    normal: np.ndarray

    @property
    def labelled(self) -> tuple[xr.DataArray, xr.DataArray]:
        """Members and truth with named dimensions, NaN in masked cells."""
        valid = xr.DataArray(MEANS.valid_CP, dims=CASE_DIMS[1:])
        members = xr.DataArray(self.members, dims=MEMBER_DIMS).where(valid)
        return members, xr.DataArray(self.truth, dims=CASE_DIMS).where(valid)


def draw_cases(cases: int, members: int, spread: float = 1.0, seed: int = 0) -> Cases:
    """Draw truth, members and climatology from normal distributions.

    In each cell, truth and members have the same mean. The standard deviation of the truth is 1 to 3, and that of the
    members is `spread` times as large. The standard deviation of the climatology is 2.
    """
    rng = np.random.default_rng(seed)
    shape = (len(CHANNELS), CELLS)
    deviation = rng.uniform(1, 3, (cases, 1, *shape))
    mean = 10 * rng.standard_normal((cases, 1, *shape)) + np.array([5e4, 280.0, 290.0])[:, None]
    draws = rng.standard_normal((cases, members + 1, *shape))
    draws[:, 1:] *= spread
    values = np.where(MEANS.valid_CP, mean + deviation * draws, 0.0)
    normal = np.where(MEANS.valid_CP, mean[:, 0] + 2 * rng.standard_normal((cases, *shape)), 0.0)
    return Cases(values[:, 1:], values[:, 0], normal)


def to_precipitation(values: np.ndarray) -> np.ndarray:
    """Convert anomalies of order 1 to precipitation, which is zero in about half of the cells."""
    return np.maximum(values, 0.0) ** 2


def is_mean_consistent(estimates: np.ndarray, expected: float, num_standard_errors: float = 4.0) -> bool:
    """Return whether the mean of independent estimates is within some standard errors of the expectation."""
    return abs(estimates.mean() - expected) < num_standard_errors * estimates.std(ddof=1) / np.sqrt(estimates.size)


def average_over_cases(values: xr.DataArray) -> np.ndarray:
    """Return the area-weighted mean of (case, channel, cell) over cases and cells that are not NaN, (C, R)."""
    return values.weighted(WEIGHTS).mean(["case", "cell"]).transpose("channel", "region").values


def compute_crps_by_cell(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair CRPS of each cell for members (M, N) and truth (N,)."""
    # The sums are over segments of cells; here each cell is one segment.
    first_cells = np.arange(truth.size)
    out = np.empty((4 + len(members), truth.size))
    valid = np.ones(truth.size, dtype=bool)
    member_sums(members[:, None], 0, truth, valid, (first_cells, first_cells + 1), out)
    return crps_from_sums(out, len(members))


def compute_energy_score_by_cell(members: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the standard and the fair energy score of each cell for members (M, 2, N) and truth (2, N)."""
    first_cells = np.arange(truth.shape[1])
    out = np.empty((2, truth.shape[1]))
    valid = np.ones(truth.shape[1], dtype=bool)
    vector_member_sums(members, (0, 1), *truth, valid, np.float32(0.125), (first_cells, first_cells + 1), out)
    return crps_from_sums(out, len(members))
