"""Consolidated metadata of a store: correct after interruptions and concurrent extensions."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from credit.calendar import Calendar
from credit.forecast.io.forecast_reader import open_forecasts
from tests.unit.forecast.test_forecast_writer import INITIAL, NAMES, make_writer, random_fields
from tests.unit.forecast.test_resumed_forecasts import append_at_once, contents, stop_after

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
DAY = 1440


def opened(folder: Path) -> xr.Dataset:
    """Return a store as a user of xarray opens it, who lets no warning pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return xr.open_zarr(folder / "forecasts.zarr", chunks=None).load()


def as_arrays_say(folder: Path) -> xr.Dataset:
    return xr.open_zarr(folder / "forecasts.zarr", consolidated=False, chunks=None).load()


@pytest.mark.parametrize("options", [{}, {"layout": "weatherbench2"}, {"members": 2, "compression": 1, "keep_bits": 9}])
def test_store_opens_without_a_warning(tmp_path: Path, options: dict, recwarn: pytest.WarningsRecorder) -> None:
    for number, initial in enumerate((FIRST, SECOND, SECOND + DAY)):
        writer = make_writer(tmp_path, format="zarr", initial_minutes=[initial], **options)
        for lead, member in np.ndindex(3, options.get("members", 1)):
            writer.put(initial, lead, random_fields(number)[lead], member)
        found = opened(tmp_path)
        assert found["t2m"].shape[0] == number + 1
        assert not np.isnan(found["t2m"].values).any()
        xr.testing.assert_identical(found, as_arrays_say(tmp_path))
    assert not recwarn.list, "neither making nor extending it warns"


def test_killed_extension_leaves_the_store_at_its_former_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    make_writer(start, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    before, number, is_killed = opened(start), 0, True
    while is_killed:
        folder = tmp_path / str(number)
        shutil.copytree(start, folder)
        with monkeypatch.context() as patched:
            patched.setattr("credit.forecast.io.zarr_store.os.replace", stop_after(number))
            try:
                make_writer(folder, format="zarr", initial_minutes=[SECOND])
                is_killed = False
            except KeyboardInterrupt:
                xr.testing.assert_identical(opened(folder), before)
        number += 1
    assert number > 10


def stop_consolidation(path: Path) -> None:
    raise KeyboardInterrupt


def test_next_run_repairs_missing_consolidation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("killed", "expected"):
        make_writer(tmp_path / folder, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    before = opened(tmp_path / "killed")
    make_writer(tmp_path / "expected", format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
    with monkeypatch.context() as patched:
        patched.setattr("credit.forecast.io.zarr_store.write_consolidated_metadata", stop_consolidation)
        with pytest.raises(KeyboardInterrupt):
            make_writer(tmp_path / "killed", format="zarr", initial_minutes=[SECOND])
    xr.testing.assert_identical(opened(tmp_path / "killed"), before)
    # writers and readers of ours go by the arrays
    assert open_forecasts(tmp_path / "killed").initial_minutes.tolist() == [FIRST]
    again = make_writer(tmp_path / "killed", format="zarr", initial_minutes=[SECOND])
    xr.testing.assert_identical(opened(tmp_path / "killed"), as_arrays_say(tmp_path / "killed"))
    again.write(SECOND, random_fields(1))
    assert contents(tmp_path / "killed") == contents(tmp_path / "expected")


def test_reader_ignores_outdated_consolidation(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    root = tmp_path / "forecasts.zarr" / "zarr.json"
    stale = root.read_bytes()
    make_writer(tmp_path, format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
    root.write_bytes(stale)
    assert opened(tmp_path).sizes["init_time"] == 1
    archive = open_forecasts(tmp_path)
    assert archive.initial_minutes.tolist() == [FIRST, SECOND]
    read = archive.read(SECOND)[:, archive.channel_names.index("z500")]
    np.testing.assert_array_equal(read, random_fields(1)[:, NAMES.index("z500")])
    assert make_writer(tmp_path, format="zarr", initial_minutes=[SECOND]).is_complete(SECOND)
    assert opened(tmp_path).sizes["init_time"] == 2, "who opens it to write brings it up to date"


def test_continued_store_of_an_earlier_version_is_consolidated(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    root = tmp_path / "forecasts.zarr" / "zarr.json"
    plain = json.loads(root.read_text())
    del plain["consolidated_metadata"], plain["attributes"]["history"]
    root.write_text(json.dumps(plain))
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [FIRST]
    again = make_writer(tmp_path, format="zarr", initial_minutes=[SECOND])
    assert again.is_complete(FIRST)
    again.write(SECOND, random_fields(1))
    xr.testing.assert_identical(opened(tmp_path), as_arrays_say(tmp_path))
    assert "history" not in zarr.open_group(tmp_path / "forecasts.zarr", mode="r").attrs, "it was made by another"


def test_concurrent_extensions_keep_the_store_consolidated(tmp_path: Path) -> None:
    folders, wanted = [tmp_path / str(number) for number in range(3)], [SECOND + DAY, SECOND + 2 * DAY]
    for folder in folders:
        make_writer(folder, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    results = append_at_once(folders, wanted)
    for folder in folders:
        written = 1 + sum(not text for where, _, text in results if where == folder)
        found = opened(folder)
        assert found.sizes["init_time"] == written >= 2 and found["written"].values.all()
        xr.testing.assert_identical(found, as_arrays_say(folder))
        assert not [name for name in os.listdir(folder / "forecasts.zarr") if "partial" in name]
