"""Values far from all others: what is said of them, which times are judged, and that each advice works."""

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
SPOILT, WHEN = 13, "2000-01-04T06:00"


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writer, "_MAX_PART_TIMES", LENGTH)


def write_rain(folder: Path, spoilt: int | None = SPOILT, seed: int = 0) -> None:
    """Write 40 times of small positive values, one of them spoilt by a value of 1e7."""
    rain = 1e-3 * np.abs(random_fields(40, H, W, seed=seed) - 280) + 1e-4
    if spoilt is not None:
        rain[spoilt, 2, 3] = 1e7
    write_file(folder / "a.nc", {"rain": rain}, HOURS, attributes={"rain": {"units": "1"}})


def make(folder: Path, name: str = "store.zarr", **options: object) -> DataConfig:
    return make_config(folder / "a.nc", p2=["rain"], store=str(folder / name), **options)


def lose_chunk(store: Path, index: int) -> None:
    (store / "fields" / "c" / str(index) / "0" / "0" / "0").unlink()


def test_each_way_out_that_the_message_names_works(tmp_path: Path) -> None:
    write_rain(tmp_path)
    for name in ("corrected.zarr", "skipped.zarr"):
        with pytest.raises(DataError, match=f"{WHEN}: rain: a value of 1e[+]07 is") as caught:
            write_training_store(make(tmp_path, name))
    for advice in ("--redo-changed", "data.on_bad_time: skip", "rain.valid_range", "and name another data.store"):
        assert advice in str(caught.value)
    write_training_store(make(tmp_path, "skipped.zarr", on_bad_time="skip"))
    assert list(read_description(tmp_path / "skipped.zarr")["bad_times"]) == [WHEN]
    accepted = make(tmp_path, "accepted.zarr", variable_options={"rain": {"valid_range": [0.0, 1e8]}})
    assert open_store(write_training_store(accepted)).statistics.maximum[0] == 1e7
    write_rain(tmp_path, spoilt=None)
    corrected = write_training_store(make(tmp_path, "corrected.zarr"), redo_changed=True)
    assert open_store(corrected).statistics.maximum[0] < 1


def test_times_that_were_complete_before_are_not_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions up to 0.14 did not look for outliers."""
    write_rain(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(outliers, "_MAX_DEVIATIONS", np.inf)
        path = write_training_store(make(tmp_path))
    before = read_description(path)
    lose_chunk(path, SPOILT + 1)
    write_training_store(make(tmp_path))
    assert read_description(path) == before
    # Other statistics are made of the same fields.
    write_training_store(make(tmp_path, transforms={"rain": {"kind": "sqrt"}}))
    assert read_description(path)["statistics"] != before["statistics"]


def test_what_changed_files_give_is_judged(tmp_path: Path) -> None:
    write_rain(tmp_path, spoilt=None)
    path = write_training_store(make(tmp_path))
    write_rain(tmp_path, seed=5)
    with pytest.raises(DataError, match=f"{WHEN}: rain: a value of"):
        write_training_store(make(tmp_path), redo_changed=True)
    # Still so when the command is run again.
    with pytest.raises(DataError, match=f"{WHEN}: rain: a value of"):
        write_training_store(make(tmp_path))
    write_training_store(make(tmp_path, on_bad_time="skip"))
    assert list(read_description(path)["bad_times"]) == [WHEN]


def test_an_outlier_stays_bad_when_its_part_is_mended(tmp_path: Path) -> None:
    write_rain(tmp_path)
    conf = make(tmp_path, on_bad_time="skip")
    path = write_training_store(conf)
    before = read_description(path)
    lose_chunk(path, SPOILT + 1)
    write_training_store(conf)
    assert list(before["bad_times"]) == [WHEN]
    assert read_description(path) == before


def test_the_message_gives_physical_values_of_a_transformed_variable(tmp_path: Path) -> None:
    write_rain(tmp_path)
    with pytest.raises(DataError) as caught:
        write_training_store(make(tmp_path, transforms={"rain": {"kind": "sqrt", "unit": 2.0}}))
    assert "rain: a value of 1e+07 is" in str(caught.value)
    assert "standard deviations of the values with data.transforms from the usual 0.00" in str(caught.value)
