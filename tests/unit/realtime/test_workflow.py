"""Workflow of ``credit realtime``: choice of the cycle, waiting, exit codes, locks and scores."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import netCDF4
import numpy as np
import pytest
import scores.continuous
import xarray as xr

from credit.calendar import Calendar
from credit.cli.check.report import CheckReport
from credit.cli.check.settings import check_realtime
from credit.config import load_config
from credit.config.realtime_section import RealtimeConfig
from credit.errors import ConfigError, CycleError
from credit.realtime import clock
from credit.realtime.clock import Clock
from credit.realtime.cycles import list_candidate_cycles, parse_cycle
from credit.realtime.json_lines import append_json_lines, read_json_lines
from tests.unit.realtime.conftest import CYCLE, publish, read_status, write_config
from tests.unit.realtime.grib_files import build_file, encode_message, grib_values, sample_fields

URL = "http://localhost/{date}/{cycle}"


@pytest.fixture
def newest_cycle(monkeypatch: pytest.MonkeyPatch, sleeps: list[float]) -> datetime:
    """Time of the newest cycle. The clock of the command starts 4 h and 30 minutes after it."""
    start = (CYCLE + timedelta(hours=4, minutes=30)).replace(tzinfo=UTC).timestamp()
    monkeypatch.setattr(clock.Clock, "seconds", lambda self: start + sum(sleeps))
    return CYCLE


def test_a_second_call_does_nothing(realtime, server, forecasts, config_path, newest_cycle) -> None:
    publish(server, build_file(newest_cycle))
    first = realtime(config_path)
    assert first.returncode == 0
    assert "forecast of cycle 2026-11-27T00:00 made" in first.stdout
    assert read_status(config_path)["state"] == "done"
    num_requests = len(server.requests)
    second = realtime(config_path)
    assert second.returncode == 0
    assert "already existed" in second.stdout
    assert len(server.requests) == num_requests
    assert len(forecasts) == 1


def test_earlier_cycle_replaces_incomplete_one(realtime, server, forecasts, config_path, newest_cycle) -> None:
    damaged = build_file(newest_cycle)
    del damaged.messages["z250"]
    publish(server, damaged)
    publish(server, build_file(newest_cycle - timedelta(hours=6), 19))
    assert realtime(config_path).returncode == 3
    result = realtime(config_path, "realtime.on_incomplete=previous_cycle")
    assert result.returncode == 4
    assert "z250 (HGT:250 mb): not in the index" in result.stdout
    assert "earlier cycle 2026-11-26T18:00 made" in result.stdout
    assert read_status(config_path)["state"] == "earlier_cycle"
    assert read_status(config_path)["cycle"] == "2026-11-26T18:00"
    assert forecasts[0].inference.initial_times == ["2026-11-26T18:00"]
    # A second call makes no forecast, and its exit code still means that the newest cycle has none.
    assert realtime(config_path, "realtime.on_incomplete=previous_cycle").returncode == 4
    assert len(forecasts) == 1
    publish(server, build_file(newest_cycle))
    assert realtime(config_path, "realtime.on_incomplete=previous_cycle").returncode == 0
    assert len(forecasts) == 2


def test_no_cycle_is_complete(realtime, server, forecasts, config_path, newest_cycle) -> None:
    result = realtime(config_path, "realtime.on_incomplete=previous_cycle")
    assert result.returncode == 3
    # The command tries all cycles up to max_age: 00, 18, 12 and 06 UTC.
    assert len({path for path, _ in server.requests}) == 4
    assert "analysis 2026-11-27T00:00: index: not on the server" in result.stderr.splitlines()[-1]


def test_a_late_cycle_is_waited_for(realtime, server, forecasts, config_path, newest_cycle, sleeps) -> None:
    def publish_later(handler) -> bool:
        if sum(sleeps) >= 1500 and not server.files:
            publish(server, build_file(newest_cycle))
        return False

    server.faults.append(publish_later)
    assert realtime(config_path, "--until", "05:30").returncode == 0
    assert sleeps == [300.0] * 5
    assert len(forecasts) == 1


def test_the_deadline_ends_the_wait(realtime, server, forecasts, config_path, newest_cycle, sleeps) -> None:
    publish(server, build_file(newest_cycle - timedelta(hours=6), 19))
    result = realtime(config_path, "--until", "20min", "realtime.on_incomplete=previous_cycle")
    assert sleeps == [300.0] * 4
    assert result.returncode == 4
    result = realtime(config_path, "--until", "20min")
    assert result.returncode == 3


def test_last_request_is_at_the_deadline(realtime, server, forecasts, config_path, newest_cycle, sleeps) -> None:
    def publish_later(handler) -> bool:
        if sum(sleeps) >= 1080 and not server.files:
            publish(server, build_file(newest_cycle))
        return False

    server.faults.append(publish_later)
    assert realtime(config_path, "--until", "19min").returncode == 0
    assert sum(sleeps) == pytest.approx(19 * 60)


@pytest.mark.slow
def test_two_calls_at_once_make_one_forecast(server, trained_run, tmp_path: Path) -> None:
    publish(server, build_file(CYCLE))
    config_path = write_config(tmp_path / "run", trained_run, server)
    words = [sys.executable, "-m", "credit.cli.main", "realtime", str(config_path), "--cycle", "2026-11-27T00:00"]
    calls = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [call.communicate(timeout=300) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], outputs
    texts = sorted(output.splitlines()[-1] for output, _ in outputs)
    assert [text.removeprefix("forecast of cycle 2026-11-27T00:00 ") for text in texts] == ["already existed", "made"]
    assert len(read_json_lines(tmp_path / "run" / "realtime" / "cycles.jsonl")) == 1
    assert len(list((tmp_path / "run" / "forecasts").glob("*.nc"))) == 1


def test_forecasts_are_scored_against_the_next_analysis(realtime, server, config_path) -> None:
    later = CYCLE + timedelta(hours=6)
    publish(server, build_file(CYCLE, 20))
    publish(server, build_file(later, 21))
    for time in (CYCLE, later, later):
        assert realtime(config_path, "--cycle", f"{time:%Y-%m-%dT%H:%M}").returncode == 0
    run = config_path.parent
    records = read_json_lines(run / "realtime" / "scores.jsonl")
    assert [(record["initial_time"], record["lead_hours"]) for record in records] == [("2026-11-27T00:00", 6.0)]
    with netCDF4.Dataset(run / "forecasts" / "forecast_2026-11-27T00.nc") as file:
        forecast_HW = file["t2m"][0].filled(np.nan)
    truth_HW = sample_fields(21)["t2m"].values
    bounds = np.deg2rad(np.linspace(90, -90, 33))
    weights = xr.DataArray(-np.diff(np.sin(bounds)), dims="lat")
    pair = [xr.DataArray(field, dims=("lat", "lon")) for field in (forecast_HW, truth_HW)]
    expected = {
        "rmse": np.sqrt(scores.continuous.mse(*pair, weights=weights).item()),
        "bias": scores.continuous.additive_bias(*pair, weights=weights).item(),
    }
    assert records[0]["channels"]["t2m"]["units"] == "K"
    for name, value in expected.items():
        # The truth is packed in 24 bits.
        assert records[0]["channels"]["t2m"][name] == pytest.approx(value, rel=1e-4)


def test_a_forecast_that_was_removed_is_made_again(run_cycle, server, config_path) -> None:
    publish(server, build_file(CYCLE))
    forecast_path = config_path.parent / "forecasts" / "forecast_2026-11-27T00.nc"
    assert run_cycle().returncode == 0
    (forecast_path.parent / "forecast_2026-11-26T00.nc").write_bytes(forecast_path.read_bytes())
    forecast_path.unlink()
    result = run_cycle()
    assert result.returncode == 0
    assert "2026-11-27T00:00 made" in result.stdout
    assert forecast_path.exists()
    # A forecast in another folder is a new forecast.
    assert run_cycle("inference.folder=second").returncode == 0
    assert (config_path.parent / "second" / forecast_path.name).exists()


@pytest.mark.slow
def test_forecasts_that_cannot_be_scored_are_a_warning(realtime, server, config_path) -> None:
    later = CYCLE + timedelta(hours=6)
    publish(server, build_file(CYCLE, 20))
    publish(server, build_file(later, 21))
    for time, lead_time in ((CYCLE, "12h"), (later, "18h")):
        result = realtime(config_path, "--cycle", f"{time:%Y-%m-%dT%H:%M}", f"inference.lead_time={lead_time}")
        assert result.returncode == 0, result.stderr
    assert "scoring failed" in result.stderr
    assert "lead times of the forecast differ" in result.stderr
    assert read_status(config_path)["state"] == "done"
    assert (
        "lead times of the forecast differ"
        in read_json_lines(config_path.parent / "realtime" / "cycles.jsonl")[-1]["scoring_error"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["grib2", "zarr"])
def test_products_and_other_formats(realtime, server, config_path, output_format: str) -> None:
    later = CYCLE + timedelta(hours=6)
    publish(server, build_file(CYCLE, 20))
    publish(server, build_file(later, 21))
    for time in (CYCLE, later):
        result = realtime(
            config_path,
            "--cycle",
            f"{time:%Y-%m-%dT%H:%M}",
            f"inference.format={output_format}",
            "inference.products=[{name: warmth, kind: map, of: t2m, lead_times: [6h]}]",
        )
        assert result.returncode == 0, result.stderr
        assert "already existed" in realtime(*result.args, "--quiet").stdout
    folder = config_path.parent / "forecasts" / "products"
    assert len(list(folder.glob("*/warmth*.png"))) == 2
    records = read_json_lines(config_path.parent / "realtime" / "scores.jsonl")
    assert [record["lead_hours"] for record in records] == [6.0]
    assert set(records[0]["channels"]) == {"z850", "z500", "z250", "t850", "t2m", "msl"}


def test_shift_can_be_a_warning(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    # The values of z500 are possible, but seven standard deviations below those of training.
    file.messages["z500"] = encode_message("z500", 0.6 * grib_values("z500", sample_fields(20)["z500"].values), CYCLE)
    publish(server, file)
    refused_result = run_cycle()
    assert refused_result.returncode == 3
    assert "z500: mean -" in refused_result.stderr and "differs from the training data" in refused_result.stderr
    assert forecasts == []
    warned_result = run_cycle("realtime.on_shift=warn")
    assert warned_result.returncode == 0
    assert "WARNING" in warned_result.stderr and "z500: mean -" in warned_result.stderr
    assert len(forecasts) == 1


def test_several_ranks_are_refused(run_cycle, forecasts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    result = run_cycle()
    assert result.returncode == 2
    assert "one process, but 2 were started" in result.stderr


def test_missing_section_is_refused(realtime, trained_run) -> None:
    result = realtime(trained_run / "config.yml")
    assert result.returncode == 2
    assert "realtime: the section is missing" in result.stderr


def test_check_refuses_variables_without_record(config_path) -> None:
    report = CheckReport()
    check_realtime(load_config(config_path), report)
    assert report.messages == []
    assert report.notes[0].startswith("realtime: 7 records of each analysis (gfs_idx)")
    check_realtime(load_config(config_path, ["realtime.fields={}"]), report)
    assert "no built-in record of sst" in report.messages[0]


def format_candidates(now: str, deadline: str | None = None, **keys: object) -> list[str]:
    """Return the candidate cycles at a time as text."""
    calendar = Calendar()
    realtime_config = RealtimeConfig(format="gfs_idx", url=URL, **keys)
    cycles = list_candidate_cycles(realtime_config, calendar.parse(now), calendar.parse(deadline or now))
    return [calendar.format(cycle)[5:13] for cycle in cycles]


def test_candidates() -> None:
    assert format_candidates("2026-11-27T04:00") == ["11-27T00"]
    assert format_candidates("2026-11-27T03:59") == ["11-26T18"]
    assert format_candidates("2026-11-27T03:00", "2026-11-27T05:30") == ["11-27T00"]
    earlier = format_candidates("2026-11-27T04:00", on_incomplete="previous_cycle", max_age="12h")
    assert earlier == ["11-27T00", "11-26T18"]
    assert format_candidates("2026-11-27T11:00", cycles=[0, 12]) == ["11-27T00"]
    with pytest.raises(CycleError, match="max_age 8h"):
        format_candidates("2026-11-27T11:00", cycles=[0, 12], max_age="8h")


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 11, 27, 4, 30, 20, tzinfo=UTC).timestamp()
    monkeypatch.setattr(Clock, "seconds", lambda self: now)
    for text, seconds in {"05:30": 3580, "90min": 5400, "04:00": -1820, "23:30": -5 * 3600 - 20}.items():
        command_clock = Clock()
        command_clock.set_deadline(text)
        assert command_clock.deadline - now == seconds
    for text in ("25:00", "soon"):
        with pytest.raises(ConfigError, match="--until"):
            Clock().set_deadline(text)


def test_a_cycle_must_be_one_of_the_list() -> None:
    realtime_config = RealtimeConfig(format="gfs_idx", url=URL)
    assert parse_cycle("2026-11-27T06:00", realtime_config) == Calendar().parse("2026-11-27T06:00")
    with pytest.raises(ConfigError, match="realtime.cycles"):
        parse_cycle("2026-11-27T07:00", realtime_config)


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path) == []
    append_json_lines(path, [{"a": 1}])
    with path.open("a") as file:
        file.write('{"a": 2')
    assert read_json_lines(path) == [{"a": 1}]
    append_json_lines(path, [{"a": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 3}]
