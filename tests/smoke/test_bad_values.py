"""Invalid values in the data stop every command, or their times are skipped. A run without a finite score fails."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from credit.data.store.store_reader import open_store
from tests.smoke.conftest import write_world

CELLS = ("time", "latitude", "longitude")
SHORT = ("trainer.max_steps=2", "trainer.validate_every=1")


def replace_value(folder: Path, name: str, index: tuple, value: float, units: str) -> None:
    """Write data.nc again with some values of a variable replaced."""
    with xr.open_dataset(folder / "data.nc", decode_times=False) as data:
        values = data[name].values
    values[index] = value
    (folder / "data.nc").unlink()  # A command of this process may still have the file open.
    write_world(folder / "data.nc", **{name: (CELLS, values, {"units": units})})


@pytest.mark.parametrize("fill", [9.96921e36, 1e20, -999.0])
@pytest.mark.parametrize(("index", "when"), [(40, "2000-01-11T00:00"), (130, "2000-02-02T12:00")])
def test_undeclared_fill_value_is_refused(small_run: Path, command, fill: float, index: int, when: str) -> None:
    """The value is in the training or the validation period. Both solutions that the message names work."""
    config = small_run / "config.yml"
    replace_value(small_run, "rain", (index, slice(3, 5), 7), fill, "mm")
    message = f"data.nc: rain at {when}: 2 of 512 values are {np.float32(fill):.6g}, the first at latitude 50.625"
    for arguments in (["check", config], ["train", config, *SHORT], ["preprocess", config, "data.store=begun.zarr"]):
        process = command(*arguments)
        assert process.returncode == 2, process.stdout
        assert (
            message in process.stdout + process.stderr
            and "data.variable_options.rain.valid_range" in process.stdout + process.stderr
        )
    skip, declare = "data.on_bad_time=skip", "data.variable_options.rain.valid_range=[0, 10]"
    repeated = command("preprocess", config, "data.store=begun.zarr", declare)
    assert repeated.returncode == 2 and "valid_range: None in the store, [0.0, 10.0] in the config" in repeated.stderr
    for name, options in (("skipped.zarr", [skip]), ("declared.zarr", [skip, declare])):
        written = command("preprocess", config, f"data.store={name}", *options)
        assert written.returncode == 0 and f"{when} is left out" in written.stderr
        assert len(open_store(name).times) == 199
    checked = command("check", config, "data.store=other.zarr", skip)
    assert checked.returncode == 0 and "1 of these times are bad and will be left out" in checked.stdout


def test_outlier_within_limits_is_refused(small_run: Path, command) -> None:
    """The value is within the limits of its units. With `skip`, store and statistics do not contain its time."""
    config, plain = small_run / "config.yml", "data.transforms={}"
    replace_value(small_run, "rain", (50, 3, 3), 3e5, "mm d-1")
    message = "2000-01-13T12:00: rain: a value of 300000 is"
    for arguments in (["train", config, *SHORT, plain], ["preprocess", config, plain, "data.store=store.zarr"]):
        process = command(*arguments)
        assert process.returncode == 2 and message in process.stderr
    skipped = command("preprocess", config, plain, "data.store=store.zarr", "data.on_bad_time=skip")
    assert skipped.returncode == 0 and message in skipped.stderr
    store = open_store("store.zarr")
    assert len(store.times) == 199
    row = store.statistics.names.index("rain")
    assert store.statistics.maximum[row] < 2 and store.statistics.tendency_std[row] < 1


def test_wrong_unit_in_later_file_is_refused(small_run: Path, command) -> None:
    """The second file has values in degrees Celsius, but its units attribute is K."""
    with xr.open_dataset(small_run / "data.nc", decode_times=False) as data:
        data.isel(time=slice(0, 60)).to_netcdf(small_run / "part_1.nc")
        late = data.isel(time=slice(60, 200))
        late["t2m"].values -= 273.15
        late.to_netcdf(small_run / "part_2.nc")
    (small_run / "data.nc").unlink()
    config, source = small_run / "config.yml", f"data.sources.0.path={small_run}/part_*.nc"
    for arguments in (["check"], ["train", *SHORT], ["preprocess", "data.store=store.zarr"]):
        result = command(arguments[0], config, source, *arguments[1:])
        assert result.returncode == 2, result.stdout
        assert "part_2.nc: t2m at 2000-01-16T00:00: 512 of 512 values are outside the limits of temperature in K" in (
            result.stdout + result.stderr
        )


def test_fill_value_stops_rollout_and_verify(small_run: Path, command) -> None:
    config, start = small_run / "config.yml", "inference.initial_times=[2000-02-10]"
    assert command("train", config, *SHORT).returncode == 0
    assert command("rollout", config, start).returncode == 0
    replace_value(small_run, "t2m", (160, 3, 7), -999.0, "K")
    for name, arguments in (("rollout", [start, "inference.folder=again"]), ("verify", [])):
        result = command(name, config, *arguments)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "data.nc: t2m at 2000-02-10T00:00: 1 of 512 values are -999" in result.stderr


def test_run_without_finite_monitor_fails(small_run: Path, command) -> None:
    """The config declares the huge values as valid, so scores overflow. The run fails in both attempts."""
    replace_value(small_run, "rain", (slice(124, 148), 3, 3), 1e37, "mm")
    accepted = ("data.variable_options.rain.valid_range=[0, 1.0e38]", "data.transforms={}")
    for attempt in range(2):
        result = command("train", small_run / "config.yml", *SHORT, *accepted, "trainer.monitor=loss")
        assert result.returncode == 1, result.stderr
        assert "trainer.monitor: loss was finite in none of 2 validations" in result.stderr
        assert "done" not in result.stdout
        # The second attempt has no validation left to run.
        assert attempt == 1 or "step 1: not finite in validation: loss" in result.stderr
        status = json.loads((small_run / "run" / "STATUS").read_text())
        assert status["status"] == "failed" and "loss was finite in none" in status["reason"]
    assert not (small_run / "run" / "checkpoints" / "best").exists()
