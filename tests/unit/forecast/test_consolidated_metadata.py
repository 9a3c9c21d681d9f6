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
from tests.unit.forecast.test_resumed_forecasts import append_concurrently, interrupt_after, read_contents

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
DAY = 1440


def open_without_warning(folder: Path) -> xr.Dataset:
    """Return a store as xarray opens it; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return xr.open_zarr(folder / "forecasts.zarr", chunks=None).load()


def open_without_consolidated_metadata(folder: Path) -> xr.Dataset:
    return xr.open_zarr(folder / "forecasts.zarr", consolidated=False, chunks=None).load()


@pytest.mark.parametrize("options", [{}, {"layout": "weatherbench2"}, {"members": 2, "compression": 1, "keep_bits": 9}])
def test_store_opens_without_a_warning(tmp_path: Path, options: dict, recwarn: pytest.WarningsRecorder) -> None:
    for number, initial in enumerate((FIRST, SECOND, SECOND + DAY)):
        writer = make_writer(tmp_path, format="zarr", initial_minutes=[initial], **options)
        for lead, member in np.ndindex(3, options.get("members", 1)):
            writer.put(initial, lead, random_fields(number)[lead], member)
        dataset = open_without_warning(tmp_path)
        assert dataset["t2m"].shape[0] == number + 1
        assert not np.isnan(dataset["t2m"].values).any()
        xr.testing.assert_identical(dataset, open_without_consolidated_metadata(tmp_path))
    assert not recwarn.list, "neither making nor extending it warns"


def test_killed_extension_leaves_the_store_at_its_former_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "start"
    make_writer(start, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    before, number, is_killed = open_without_warning(start), 0, True
    while is_killed:
        folder = tmp_path / str(number)
        shutil.copytree(start, folder)
        with monkeypatch.context() as patched:
            patched.setattr("credit.forecast.io.zarr_store.os.replace", interrupt_after(number))
            try:
                make_writer(folder, format="zarr", initial_minutes=[SECOND])
                is_killed = False
            except KeyboardInterrupt:
                xr.testing.assert_identical(open_without_warning(folder), before)
        number += 1
    assert number > 10


def raise_interrupt(path: Path) -> None:
    raise KeyboardInterrupt


def test_next_run_repairs_missing_consolidation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("killed", "expected"):
        make_writer(tmp_path / folder, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    before = open_without_warning(tmp_path / "killed")
    make_writer(tmp_path / "expected", format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
    with monkeypatch.context() as patched:
        patched.setattr("credit.forecast.io.zarr_store.write_consolidated_metadata", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_writer(tmp_path / "killed", format="zarr", initial_minutes=[SECOND])
    xr.testing.assert_identical(open_without_warning(tmp_path / "killed"), before)
    # Writers and readers of this package use the arrays and not the consolidated metadata.
    assert open_forecasts(tmp_path / "killed").initial_minutes.tolist() == [FIRST]
    resumed_writer = make_writer(tmp_path / "killed", format="zarr", initial_minutes=[SECOND])
    xr.testing.assert_identical(
        open_without_warning(tmp_path / "killed"), open_without_consolidated_metadata(tmp_path / "killed")
    )
    resumed_writer.write(SECOND, random_fields(1))
    assert read_contents(tmp_path / "killed") == read_contents(tmp_path / "expected")


def test_reader_ignores_outdated_consolidation(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    root = tmp_path / "forecasts.zarr" / "zarr.json"
    stale = root.read_bytes()
    make_writer(tmp_path, format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
    root.write_bytes(stale)
    assert open_without_warning(tmp_path).sizes["init_time"] == 1
    archive = open_forecasts(tmp_path)
    assert archive.initial_minutes.tolist() == [FIRST, SECOND]
    read = archive.read(SECOND)[:, archive.channel_names.index("z500")]
    np.testing.assert_array_equal(read, random_fields(1)[:, NAMES.index("z500")])
    assert make_writer(tmp_path, format="zarr", initial_minutes=[SECOND]).is_complete(SECOND)
    assert open_without_warning(tmp_path).sizes["init_time"] == 2, "who opens it to write brings it up to date"


def test_continued_store_of_an_earlier_version_is_consolidated(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    root = tmp_path / "forecasts.zarr" / "zarr.json"
    metadata = json.loads(root.read_text())
    del metadata["consolidated_metadata"], metadata["attributes"]["history"]
    root.write_text(json.dumps(metadata))
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [FIRST]
    resumed_writer = make_writer(tmp_path, format="zarr", initial_minutes=[SECOND])
    assert resumed_writer.is_complete(FIRST)
    resumed_writer.write(SECOND, random_fields(1))
    xr.testing.assert_identical(open_without_warning(tmp_path), open_without_consolidated_metadata(tmp_path))
    assert "history" not in zarr.open_group(tmp_path / "forecasts.zarr", mode="r").attrs, "it was made by another"


def test_concurrent_extensions_keep_the_store_consolidated(tmp_path: Path) -> None:
    folders, appended_times = [tmp_path / str(number) for number in range(3)], [SECOND + DAY, SECOND + 2 * DAY]
    for folder in folders:
        make_writer(folder, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    results = append_concurrently(folders, appended_times)
    for folder in folders:
        num_written = 1 + sum(not error for result_folder, _, error in results if result_folder == folder)
        dataset = open_without_warning(folder)
        assert dataset.sizes["init_time"] == num_written >= 2 and dataset["written"].values.all()
        xr.testing.assert_identical(dataset, open_without_consolidated_metadata(folder))
        assert not [name for name in os.listdir(folder / "forecasts.zarr") if "partial" in name]
