"""Existing forecasts: interrupted ones, and those of other settings, analyses or initial times."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import xarray as xr
import zarr

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.errors import ConfigError, CreditError, DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields, OutputOptions
from tests.unit.analytic_reader import ATTRIBUTES
from tests.unit.forecast.test_forecast_writer import GRID, INITIAL, LEADS, NAMES, make_writer, random_fields

FIRST, SECOND = (Calendar().parse(text) for text in INITIAL)
SUMS = ChannelMap.build(
    {
        "prognostic": {"vars_3D": [], "vars_2D": ["t2m"]},
        "diagnostic": {"vars_3D": [], "vars_2D": ["tp", "tp24", "total"]},
    },
    [],
    {},
    [],
)


def interrupt_after(number: int) -> Callable[[Path, Path], None]:
    """Return a replacement of `os.replace` that is interrupted after moving `number` files from a temporary store."""
    replace, moved = os.replace, []

    def rename(source: Path, target: Path) -> None:
        if ".zarr.part." in str(source) and ".zarr.part." not in str(target):
            if len(moved) == number:
                raise KeyboardInterrupt
            moved.append(target)
        replace(source, target)

    return rename


def read_contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_bounds_have_the_window_of_each_sum(tmp_path: Path, format: str) -> None:
    attributes = {**ATTRIBUTES, "tp24": ATTRIBUTES["tp"], "total": ATTRIBUTES["tp"]}
    fields = OutputFields(SUMS, GRID, Calendar(), attributes, 360, windows={"tp24": 1440, "total": 0})
    writer = ForecastWriter(tmp_path, fields, LEADS, [FIRST], OutputOptions(format=format))
    path = writer.write(FIRST, np.ones((3, 4, *GRID.shape), dtype=np.float32))
    opened = xr.open_dataset(path) if format == "netcdf" else xr.open_zarr(path, consolidated=False)
    widths = {"tp": [6, 6, 6], "tp24": [24, 24, 24], "total": [6, 12, 24]}
    with opened as dataset:
        valid = "time" if format == "netcdf" else "valid_time"
        assert "bounds" not in {**dataset[valid].attrs, **dataset[valid].encoding}
        for name, hours in widths.items():
            (time_name,) = [c for c in dataset[name].encoding["coordinates"].split() if c.startswith(f"{valid}_")]
            assert dataset[time_name].attrs["standard_name"] == "time"
            edges = dataset[{**dataset[time_name].attrs, **dataset[time_name].encoding}["bounds"]].values.reshape(3, 2)
            np.testing.assert_array_equal((edges[:, 1] - edges[:, 0]) / np.timedelta64(1, "h"), hours)
            np.testing.assert_array_equal(edges[:, 1], dataset[time_name].values.ravel())
            np.testing.assert_array_equal(dataset[time_name].values, dataset[valid].values)
            assert dataset[name].attrs["cell_methods"] == "time: sum"
        assert f"{valid}_" not in dataset["t2m"].encoding["coordinates"]


@pytest.mark.parametrize("split", ["day", "lead"])
def test_forecast_with_missing_files_is_refused(tmp_path: Path, split: str) -> None:
    """All forecasts lack the same lead times, so only the lead times recorded in the files reveal it."""
    writer = make_writer(tmp_path, split=split)
    for initial in (FIRST, SECOND):
        writer.put(initial, 0, random_fields()[0])
        if split == "day":
            writer.put(initial, 1, random_fields()[1])
    lost = "1 of 3 .* 24 h" if split == "day" else "2 of 3 .* 12 h"
    with pytest.raises(DataError, match=rf"from 2001-04-01T00:00 lacks {lost}.; run credit rollout again"):
        open_forecasts(tmp_path)


@pytest.mark.parametrize("split", ["day", "lead"])
def test_error_removes_all_files_of_a_forecast(tmp_path: Path, split: str) -> None:
    writer = make_writer(tmp_path, split=split)
    writer.write(FIRST, random_fields())
    expected = read_contents(tmp_path)
    writer.put(SECOND, 0, random_fields()[0])
    writer.put(SECOND, 1, random_fields()[1])
    assert read_contents(tmp_path).keys() > expected.keys()
    writer.close()
    assert read_contents(tmp_path) == expected


SETTINGS = [
    ({"variables": ["t"], "levels": [500]}, {"variables": ["t"], "levels": [850]}, "levels of t"),
    ({}, {"keep_bits": 3}, "inference.keep_bits"),
    ({}, {"compression": 5}, "inference.compression"),
    ({"compression": 5}, {"compression": 1}, "inference.compression"),
    ({}, {"lead_minutes": [360, 720, 1080]}, "lead times"),
    ({"variables": ["t", "t2m"]}, {"variables": ["t"]}, "variable t2m"),
    ({}, {"members": 2}, "dimensions of t2m"),
]


@pytest.mark.parametrize(("before", "now", "says"), SETTINGS)
def test_forecasts_with_other_settings_are_not_complete(tmp_path: Path, before: dict, now: dict, says: str) -> None:
    make_writer(tmp_path, **before).write(FIRST, random_fields())
    assert make_writer(tmp_path, **before).is_complete(FIRST)
    assert not make_writer(tmp_path, **now).is_complete(FIRST)
    make_writer(tmp_path / "store", format="zarr", **before)
    with pytest.raises(ConfigError, match=rf"zarr: differs .*{says}.*; choose a different inference.folder"):
        make_writer(tmp_path / "store", format="zarr", **now)


def test_files_of_other_lead_times_are_replaced(tmp_path: Path) -> None:
    make_writer(tmp_path, split="lead").write(FIRST, random_fields())
    shorter = make_writer(tmp_path, split="lead", lead_minutes=LEADS[1:])
    assert not shorter.is_complete(FIRST)
    shorter.write(FIRST, random_fields()[1:])
    assert shorter.is_complete(FIRST) and open_forecasts(tmp_path).lead_minutes.tolist() == LEADS[1:]


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_forecast_of_another_analysis_is_not_complete(tmp_path: Path, format: str) -> None:
    former, corrected = (lambda initial: f"{initial:016x}"), (lambda initial: f"{initial + (initial == FIRST):016x}")
    writer = make_writer(tmp_path, format=format, initial_state_checksum=former)
    for initial in (FIRST, SECOND):
        writer.write(initial, random_fields())
    resumed_writer, corrected_writer = (
        make_writer(tmp_path, format=format, initial_state_checksum=checksum) for checksum in (former, corrected)
    )
    assert resumed_writer.is_complete(FIRST) and resumed_writer.is_complete(SECOND)
    assert not corrected_writer.is_complete(FIRST) and corrected_writer.is_complete(SECOND)
    corrected_writer.write(FIRST, random_fields(1))
    assert corrected_writer.is_complete(FIRST) and not resumed_writer.is_complete(FIRST)
    assert len(open_forecasts(tmp_path).initial_minutes) == 2, "they are of one run"


def test_store_is_extended_by_later_initial_times(tmp_path: Path) -> None:
    third = SECOND + 1440
    options = {"format": "zarr", "initial_state_checksum": lambda initial: f"{initial:016x}", "windows": {"tp": 0}}
    once = make_writer(tmp_path / "once", initial_minutes=[FIRST, SECOND, third], **options)
    for seed, initial in enumerate((FIRST, SECOND, third)):
        once.write(initial, random_fields(seed))
        make_writer(tmp_path / "daily", initial_minutes=[initial], **options).write(initial, random_fields(seed))
    assert read_contents(tmp_path / "daily") == read_contents(tmp_path / "once")
    assert make_writer(tmp_path / "daily", initial_minutes=[SECOND], **options).is_complete(SECOND)
    assert open_forecasts(tmp_path / "daily").initial_minutes.tolist() == [FIRST, SECOND, third]
    with pytest.raises(ConfigError, match=r"up to 2001-04-03T00:30 but not 2001-04-01T12:00.*inference.folder"):
        make_writer(tmp_path / "daily", initial_minutes=[FIRST + 720], **options)


def test_killed_extension_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption at any rename, the store reads as before, and a new extension gives the same store."""
    start = tmp_path / "start"
    make_writer(start, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    expected = tmp_path / "expected"
    shutil.copytree(start, expected)
    make_writer(expected, format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
    number, count = 0, 1
    while number < count:
        folder = tmp_path / str(number)
        shutil.copytree(start, folder)
        with monkeypatch.context() as patched:
            patched.setattr("credit.forecast.io.zarr_store.os.replace", interrupt_after(number))
            try:
                make_writer(folder, format="zarr", initial_minutes=[SECOND])
            except KeyboardInterrupt:
                count += 1
                assert list(folder.glob("*.part.*"))
        if number < count - 1:
            archive = open_forecasts(folder)
            assert archive.initial_minutes.tolist() == [FIRST]
            np.testing.assert_array_equal(archive.read(FIRST), open_forecasts(start).read(FIRST))
        make_writer(folder, format="zarr", initial_minutes=[SECOND]).write(SECOND, random_fields(1))
        assert read_contents(folder) == read_contents(expected), "nothing is left of the killed run"
        number += 1
    assert number > 10


def append_initial_time(folders: list[Path], initial: int, start: Barrier, messages: Queue) -> None:
    """Append one initial time to each store when all processes are ready."""
    for folder in folders:
        start.wait()
        try:
            make_writer(folder, format="zarr", initial_minutes=[initial]).write(initial, random_fields(initial - FIRST))
        except CreditError as error:
            messages.put((folder, initial, str(error)))
        else:
            messages.put((folder, initial, ""))


def append_concurrently(folders: list[Path], times: list[int]) -> list[tuple[Path, int, str]]:
    """Append each initial time in a separate process; return folder, initial time and error message of each append."""
    spawn = multiprocessing.get_context("spawn")
    start, messages = spawn.Barrier(len(times)), spawn.Queue()
    jobs = [spawn.Process(target=append_initial_time, args=(folders, initial, start, messages)) for initial in times]
    for job in jobs:
        job.start()
    results = [messages.get(timeout=120) for _ in jobs for _ in folders]
    for job in jobs:
        job.join()
    return results


def test_concurrent_extensions_wait_for_the_lock(tmp_path: Path) -> None:
    """The second process sees the extended store of the first. It appends to it, or fails before it writes."""
    folders, appended_times = [tmp_path / str(number) for number in range(4)], [FIRST + 1440, FIRST + 2880]
    for folder in folders[:2]:
        make_writer(folder, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    results = append_concurrently(folders, appended_times)
    for number, folder in enumerate(folders):
        text = {initial: text for result_folder, initial, text in results if result_folder == folder}
        written = [initial for initial in appended_times if not text[initial]]
        assert appended_times[-1] in written
        assert written == appended_times or "a store can only be extended at its end" in text[appended_times[0]]
        archive = open_forecasts(folder)
        assert archive.initial_minutes.tolist() == ([FIRST] if number < 2 else []) + written
        for initial in archive.initial_minutes.tolist():
            read = archive.read(initial)[:, archive.channel_names.index("z500")]
            np.testing.assert_array_equal(read, random_fields(initial - FIRST)[:, NAMES.index("z500")])
        assert not list(folder.glob("*.part.*"))


def test_extension_follows_times_that_another_run_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST])

    @contextmanager
    def lock_after_another_run(path: Path) -> Iterator[bool]:
        """Let another run extend the store before this run gets the lock."""
        monkeypatch.undo()
        make_writer(tmp_path, format="zarr", initial_minutes=others).write(others[0], random_fields())
        yield True

    others = [SECOND]
    monkeypatch.setattr("credit.forecast.io.zarr_store.file_lock", lock_after_another_run)
    writer = make_writer(tmp_path, format="zarr", initial_minutes=[SECOND + 1440])
    writer.write(SECOND + 1440, random_fields(1))
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [SECOND, SECOND + 1440]
    others = [SECOND + 4 * 1440]
    monkeypatch.setattr("credit.forecast.io.zarr_store.file_lock", lock_after_another_run)
    with pytest.raises(ConfigError, match=r"up to 2001-04-06T00:30 but not 2001-04-05T00:30.*earlier times"):
        make_writer(tmp_path, format="zarr", initial_minutes=[SECOND + 3 * 1440])
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [SECOND, SECOND + 1440, SECOND + 4 * 1440]


def test_temporary_stores_of_killed_runs_are_removed(tmp_path: Path) -> None:
    stale = [tmp_path / f"forecasts.zarr.part.{host}" for host in (f"{socket.gethostname()}.1", "a.b-c.7", "a.b-c.8")]
    others = [tmp_path / f"forecasts.zarr.part{end}" for end in ("1", "s", "ial_copy")]
    for path in (*stale, *others):
        (path / "init_time").mkdir(parents=True)
    for path in (stale[1], *others):
        os.utime(path, (0, 0))
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST]).write(FIRST, random_fields())
    # A recent temporary store of another host may still be written.
    assert sorted(tmp_path.glob("*.part.*")) == [stale[2]]
    os.utime(stale[2], (0, 0))
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST])
    assert not list(tmp_path.glob("*.part.*")) and all(path.exists() for path in others)
    assert open_forecasts(tmp_path).initial_minutes.tolist() == [FIRST]


def test_concurrent_extensions_without_locks_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse_lock(path: Path) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("credit.forecast.io.zarr_store.file_lock", refuse_lock)
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST])
    replace, others = os.replace, []

    def rename(source: Path, target: Path) -> None:
        """Let another run append between the writes of this run's initial times and of their number."""
        if Path(target) == tmp_path / "forecasts.zarr" / "init_time" / "zarr.json" and not others:
            others.append(SECOND + 1440)
            monkeypatch.setattr("credit.utils.temporary.socket.gethostname", lambda: "elsewhere")
            make_writer(tmp_path, format="zarr", initial_minutes=others)
        replace(source, target)

    monkeypatch.setattr("credit.forecast.io.zarr_store.os.replace", rename)
    with pytest.raises(CreditError, match="another run has just appended other initial times"):
        make_writer(tmp_path, format="zarr", initial_minutes=[SECOND])
    assert "forecasts.zarr: its file system has no locks (No locks available)" in caplog.text


def test_run_stops_if_another_run_replaced_its_initial_times(tmp_path: Path) -> None:
    make_writer(tmp_path, format="zarr", initial_minutes=[FIRST])
    writer = make_writer(tmp_path, format="zarr", initial_minutes=[SECOND])
    init = zarr.open_group(tmp_path / "forecasts.zarr", mode="r+")["init_time"]
    init[1] = SECOND + 1440  # as if another run had written in between
    with pytest.raises(CreditError, match="another run has just appended other initial times"):
        writer.write(SECOND, random_fields())
    assert not writer.is_complete(SECOND)


def test_files_of_two_analyses_are_refused(tmp_path: Path) -> None:
    for folder, mark in (("a", "0" * 16), ("b", "1" * 16)):
        make_writer(tmp_path / folder, split="lead", initial_state_checksum=lambda _, mark=mark: mark).write(
            FIRST, random_fields()
        )
    file = sorted((tmp_path / "b").iterdir())[0]
    shutil.copy(file, tmp_path / "a" / file.name)
    with pytest.raises(DataError, match="its analysis differs from the analysis of the forecast's other files"):
        open_forecasts(tmp_path / "a")


def test_files_of_an_earlier_analysis_are_removed(tmp_path: Path) -> None:
    make_writer(tmp_path, split="lead", initial_state_checksum=lambda _: "0" * 16).write(FIRST, random_fields())
    resumed_writer = make_writer(tmp_path, split="lead", initial_state_checksum=lambda _: "1" * 16)
    resumed_writer.put(FIRST, 0, random_fields()[0])  # killed here
    assert len([path for path in tmp_path.iterdir() if path.suffix == ".nc"]) == 1


def test_every_file_has_the_lead_times_as_attribute(tmp_path: Path) -> None:
    make_writer(tmp_path, split="lead").write(FIRST, random_fields())
    for path in tmp_path.iterdir():
        with netCDF4.Dataset(path) as dataset:
            assert dataset.lead_minutes == "360, 720, 1440"


def test_temporary_files_of_killed_runs_are_removed(tmp_path: Path) -> None:
    host, running, gone = socket.gethostname(), os.getpid(), 2**22 + 1  # above the largest process id of Linux
    names = [
        f"forecast_2001-04-01T00.nc.part{end}" for end in (f".{host}.{running}", f".{host}.{gone}", ".a.b-c.7", "")
    ]
    for name in names:
        (tmp_path / name).touch()
    make_writer(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[2], names[3]}
    others = ["forecast_2001-04-01T00.nc.partial", "forecast_2001-04-01T00.nc.part.md5"]
    for name in [names[0], *names[2:], *others]:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    make_writer(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {names[0], *others}


def use_former_level_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the names that versions up to 0.14 gave to sets of levels: level, level_2, ..."""

    def name_level(levels: dict[str, tuple[float, ...]], values: tuple[float, ...], variable: str) -> str:
        known_dim = next((dim for dim, level_values in levels.items() if level_values == values), None)
        dim = known_dim or (f"level_{len(levels) + 1}" if levels else "level")
        levels[dim] = values
        return dim

    monkeypatch.setattr("credit.forecast.io.schema._find_or_add_level_dim", name_level)


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_forecasts_with_numbered_levels_are_read_and_continued(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"format": format, "masks": {}}
    with monkeypatch.context() as patched:
        use_former_level_names(patched)
        make_writer(tmp_path, initial_minutes=[FIRST], **options).write(FIRST, random_fields())
    writer = make_writer(tmp_path, initial_minutes=[FIRST, SECOND], **options)
    assert writer.is_complete(FIRST)
    writer.write(SECOND, random_fields(1))
    archive = open_forecasts(tmp_path)
    assert archive.initial_minutes.tolist() == [FIRST, SECOND]
    for seed, initial in enumerate((FIRST, SECOND)):
        for number in range(len(LEADS)):
            order = [NAMES.index(name) for name in archive.channel_names]
            expected = random_fields(seed)[number][order]
            np.testing.assert_array_equal(archive.read_members(initial, number)[0], expected)
    if format == "zarr":
        with xr.open_zarr(tmp_path / "forecasts.zarr") as dataset:
            assert dataset["z"].dims == ("init_time", "lead_time", "level_2", "latitude", "longitude")
    # Different levels with the same former name are not taken for equal.
    with monkeypatch.context() as patched:
        use_former_level_names(patched)
        make_writer(tmp_path / "other", format=format, initial_minutes=[FIRST], levels=[500.0]).write(
            FIRST, random_fields()
        )
    if format == "zarr":
        with pytest.raises(ConfigError, match="levels of"):
            make_writer(tmp_path / "other", format=format, initial_minutes=[FIRST])
    else:
        assert not make_writer(tmp_path / "other", format=format, initial_minutes=[FIRST]).is_complete(FIRST)
