"""Tests of valid times and values of datasets in memory."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from credit.api.datasets import find_valid_times, open_dataset_reader
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config

TIMES = np.array(["2000-01-01T00", "2000-01-01T06"], dtype="datetime64[ns]")


def build_dataset(**coordinates: object) -> xr.Dataset:
    field = (("time", "latitude", "longitude"), np.full((2, 8, 16), 280.0, np.float32), {"units": "K"})
    lat, lon = np.linspace(78.75, -78.75, 8), np.arange(16) * 22.5
    return xr.Dataset({"t2m": field}, {"time": TIMES, "latitude": lat, "longitude": lon, **coordinates})


def test_valid_times_are_preferred_to_initial_times() -> None:
    valid_times = TIMES + np.timedelta64(6, "h")
    name, times = find_valid_times(build_dataset(valid_time=("time", valid_times)), "initial")
    assert name == "time" and (times.values == valid_times).all()


@pytest.mark.parametrize("lead", [np.timedelta64(24, "h"), xr.Variable((), 24.0, {"standard_name": "forecast_period"})])
def test_a_nonzero_lead_time_is_refused(lead: object) -> None:
    with pytest.raises(DataError, match="initial: step is a lead time that is not 0"):
        find_valid_times(build_dataset(step=lead), "initial")
    find_valid_times(build_dataset(step=np.timedelta64(0, "h")), "initial")


def test_initial_times_are_refused_as_valid_times() -> None:
    dataset = build_dataset().rename(time="forecast_reference_time")
    with pytest.raises(DataError, match="forecast_reference_time contains initial times of forecasts"):
        find_valid_times(dataset, "initial")


def test_packed_values_are_refused() -> None:
    dataset = build_dataset()
    dataset["t2m"].attrs["scale_factor"] = 0.1
    with pytest.raises(DataError, match="initial: t2m has the attribute scale_factor, so its values are packed"):
        open_dataset_reader(make_config("unused", p2=["t2m"]), dataset, "initial")


def test_order_of_cells_and_calendar_may_differ() -> None:
    dataset = build_dataset()
    dataset["t2m"][:, 0, 0] = 300.0
    flipped_dataset = dataset.isel(latitude=slice(None, None, -1)).assign_coords(
        longitude=(dataset["longitude"] + 180) % 360 - 180
    )
    for fields in (
        dataset,
        flipped_dataset.sortby("longitude"),
        flipped_dataset.convert_calendar("noleap", use_cftime=True),
    ):
        reader = open_dataset_reader(make_config("unused", p2=["t2m"]), fields, "initial")
        values = reader.read(1)
        assert values[0, 0, 0] == 300.0 and (values == 280.0).sum() == 8 * 16 - 1
        assert len(reader.times) == 2
