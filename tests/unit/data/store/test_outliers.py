"""Tests of the outlier check: the message, the times that are checked, and each recommended solution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.config.sections.data import DataConfig
from credit.data.store import outliers, store_writer
from credit.data.store.preprocess import write_training_store
from credit.data.store.store_reader import open_store, read_description
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W, LENGTH = 8, 16, 8
HOURS = np.arange(40) * 6
OUTLIER_INDEX, OUTLIER_TIME = 13, "2000-01-04T06:00"


@pytest.fixture(autouse=True)
def _shorten_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)


def write_rain(folder: Path, outlier_index: int | None = OUTLIER_INDEX, seed: int = 0) -> None:
    """Write 40 times of small positive values. One time has a value of 1e7."""
    rain = 1e-3 * np.abs(random_fields(40, H, W, seed=seed) - 280) + 1e-4
    if outlier_index is not None:
        rain[outlier_index, 2, 3] = 1e7
    write_file(folder / "a.nc", {"rain": rain}, HOURS, attributes={"rain": {"units": "1"}})


def make_conf(folder: Path, name: str = "store.zarr", **options: object) -> DataConfig:
    return make_config(folder / "a.nc", p2=["rain"], store=str(folder / name), **options)


def delete_chunk(store: Path, index: int) -> None:
    (store / "fields" / "c" / str(index) / "0" / "0" / "0").unlink()


def test_each_recommended_solution_works(tmp_path: Path) -> None:
    write_rain(tmp_path)
    for name in ("corrected.zarr", "skipped.zarr"):
        with pytest.raises(DataError, match=f"{OUTLIER_TIME}: rain: a value of 1e[+]07 is") as error_info:
            write_training_store(make_conf(tmp_path, name))
    for advice in ("--redo-changed", "data.on_bad_time: skip", "rain.valid_range", "and name another data.store"):
        assert advice in str(error_info.value)
    write_training_store(make_conf(tmp_path, "skipped.zarr", on_bad_time="skip"))
    assert list(read_description(tmp_path / "skipped.zarr")["bad_times"]) == [OUTLIER_TIME]
    accepting_conf = make_conf(tmp_path, "accepted.zarr", variable_options={"rain": {"valid_range": [0.0, 1e8]}})
    assert open_store(write_training_store(accepting_conf)).statistics.maximum[0] == 1e7
    write_rain(tmp_path, outlier_index=None)
    corrected_store = write_training_store(make_conf(tmp_path, "corrected.zarr"), redo_changed=True)
    assert open_store(corrected_store).statistics.maximum[0] < 1


def test_times_that_were_complete_before_are_not_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions up to 0.14 did not check for outliers."""
    write_rain(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(outliers, "_MAX_DEVIATIONS", np.inf)
        path = write_training_store(make_conf(tmp_path))
    before = read_description(path)
    delete_chunk(path, OUTLIER_INDEX + 1)
    write_training_store(make_conf(tmp_path))
    assert read_description(path) == before
    # A transform needs new statistics of the same fields.
    write_training_store(make_conf(tmp_path, transforms={"rain": {"kind": "sqrt"}}))
    assert read_description(path)["statistics"] != before["statistics"]


def test_times_of_changed_files_are_checked(tmp_path: Path) -> None:
    write_rain(tmp_path, outlier_index=None)
    path = write_training_store(make_conf(tmp_path))
    write_rain(tmp_path, seed=5)
    with pytest.raises(DataError, match=f"{OUTLIER_TIME}: rain: a value of"):
        write_training_store(make_conf(tmp_path), redo_changed=True)
    # Repeating the command gives the same error.
    with pytest.raises(DataError, match=f"{OUTLIER_TIME}: rain: a value of"):
        write_training_store(make_conf(tmp_path))
    write_training_store(make_conf(tmp_path, on_bad_time="skip"))
    assert list(read_description(path)["bad_times"]) == [OUTLIER_TIME]


def test_outlier_stays_bad_when_its_part_is_repaired(tmp_path: Path) -> None:
    write_rain(tmp_path)
    conf = make_conf(tmp_path, on_bad_time="skip")
    path = write_training_store(conf)
    before = read_description(path)
    delete_chunk(path, OUTLIER_INDEX + 1)
    write_training_store(conf)
    assert list(before["bad_times"]) == [OUTLIER_TIME]
    assert read_description(path) == before


def test_the_message_gives_physical_values_of_a_transformed_variable(tmp_path: Path) -> None:
    write_rain(tmp_path)
    with pytest.raises(DataError) as error_info:
        write_training_store(make_conf(tmp_path, transforms={"rain": {"kind": "sqrt", "unit": 2.0}}))
    assert "rain: a value of 1e+07 is" in str(error_info.value)
    assert "standard deviations of the values with data.transforms from the usual 0.00" in str(error_info.value)
