"""Tests of the statistics of published models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.channels import ChannelMap
from credit.errors import DataError
from credit.train.checkpoint.convert import PublishedFiles, read_statistics

CHANNELS = ChannelMap.build({"prognostic": {"vars_3D": ["t"], "vars_2D": ["sp"]}}, [500.0, 850.0])


def write_statistics(folder: Path, mean: list[float], std: list[float]) -> PublishedFiles:
    """Write the statistics of t on two levels and of sp."""
    for name, (*t, sp) in (("mean", mean), ("std", std)):
        dataset = xr.Dataset({"t": ("level", t), "sp": ((), sp)}, {"level": [500.0, 850.0]})
        dataset.to_netcdf(folder / f"{name}.nc")
    return PublishedFiles(folder / "weights.pt", folder / "mean.nc", folder / "std.nc", folder / "static.nc", {})


def test_statistics_missing_in_published_files_are_nan(tmp_path: Path) -> None:
    statistics = read_statistics(CHANNELS, write_statistics(tmp_path, [250.0, 280.0, 1e5], [15.0, 20.0, 1e4]))
    assert statistics.names == ("t500", "t850", "sp")
    np.testing.assert_array_equal(statistics.mean, [250.0, 280.0, 1e5])
    np.testing.assert_array_equal(statistics.std, [15.0, 20.0, 1e4])
    for values in (statistics.minimum, statistics.maximum, statistics.count):
        np.testing.assert_array_equal(values, np.full(3, np.nan))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_statistics_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    files = write_statistics(tmp_path, [250.0, value, 1e5], [15.0, 20.0, 1e4])
    with pytest.raises(DataError, match=f"mean.nc: the value of t for channel t850 is {value}; correct the file"):
        read_statistics(CHANNELS, files)
    files = write_statistics(tmp_path, [250.0, 280.0, 1e5], [15.0, 20.0, value])
    with pytest.raises(DataError, match=f"std.nc: the value of sp for channel sp is {value}; correct the file"):
        read_statistics(CHANNELS, files)
