"""Choice of the cycle, waiting, exit codes, locks and scores of ``credit realtime``."""

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
def newest(monkeypatch: pytest.MonkeyPatch, sleeps: list[float]) -> datetime:
    """Time of the newest cycle; the clock of the command stands at 4 h and 30 minutes after it."""
    start = (CYCLE + timedelta(hours=4, minutes=30)).replace(tzinfo=UTC).timestamp()
    monkeypatch.setattr(clock.Clock, "seconds", lambda self: start + sum(sleeps))
    return CYCLE


def test_a_second_call_does_nothing(realtime, server, forecasts, config_path, newest) -> None:
    publish(server, build_file(newest))
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


def test_an_earlier_cycle_is_taken(realtime, server, forecasts, config_path, newest) -> None:
    damaged = build_file(newest)
    del damaged.messages["z250"]
    publish(server, damaged)
    publish(server, build_file(newest - timedelta(hours=6), 19))
    assert realtime(config_path).returncode == 3
    done = realtime(config_path, "realtime.on_incomplete=previous_cycle")
    assert done.returncode == 4
    assert "z250 (HGT:250 mb): not in the index" in done.stdout
    assert "earlier cycle 2026-11-26T18:00 made" in done.stdout
    assert read_status(config_path)["state"] == "earlier_cycle"
    assert read_status(config_path)["cycle"] == "2026-11-26T18:00"
    assert forecasts[0].inference.initial_times == ["2026-11-26T18:00"]
    # Again: nothing is made, and the exit code still says that the newest cycle has no forecast.
    assert realtime(config_path, "realtime.on_incomplete=previous_cycle").returncode == 4
    assert len(forecasts) == 1
    publish(server, build_file(newest))
    assert realtime(config_path, "realtime.on_incomplete=previous_cycle").returncode == 0
    assert len(forecasts) == 2


def test_no_cycle_is_complete(realtime, server, forecasts, config_path, newest) -> None:
    done = realtime(config_path, "realtime.on_incomplete=previous_cycle")
    assert done.returncode == 3
    # Up to max_age: 00, 18, 12 and 06 UTC.
    assert len({path for path, _ in server.requests}) == 4
    assert "analysis 2026-11-27T00:00: index: not on the server" in done.stderr.splitlines()[-1]


def test_a_late_cycle_is_waited_for(realtime, server, forecasts, config_path, newest, sleeps) -> None:
    def publish_later(handler) -> bool:
        if sum(sleeps) >= 1500 and not server.files:
            publish(server, build_file(newest))
        return False

    server.faults.append(publish_later)
    assert realtime(config_path, "--until", "05:30").returncode == 0
    assert sleeps == [300.0] * 5
    assert len(forecasts) == 1


def test_the_deadline_ends_the_wait(realtime, server, forecasts, config_path, newest, sleeps) -> None:
    publish(server, build_file(newest - timedelta(hours=6), 19))
    done = realtime(config_path, "--until", "20min", "realtime.on_incomplete=previous_cycle")
    assert sleeps == [300.0] * 4
    assert done.returncode == 4
    done = realtime(config_path, "--until", "20min")
    assert done.returncode == 3


def test_the_last_look_is_at_the_deadline(realtime, server, forecasts, config_path, newest, sleeps) -> None:
    def publish_later(handler) -> bool:
        if sum(sleeps) >= 1080 and not server.files:
            publish(server, build_file(newest))
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
    done = run_cycle()
    assert done.returncode == 0
    assert "2026-11-27T00:00 made" in done.stdout
    assert forecast_path.exists()
    # A forecast in another folder is another one.
    assert run_cycle("inference.folder=second").returncode == 0
    assert (config_path.parent / "second" / forecast_path.name).exists()


@pytest.mark.slow
def test_forecasts_that_cannot_be_scored_are_a_warning(realtime, server, config_path) -> None:
    later = CYCLE + timedelta(hours=6)
    publish(server, build_file(CYCLE, 20))
    publish(server, build_file(later, 21))
    for time, lead_time in ((CYCLE, "12h"), (later, "18h")):
        done = realtime(config_path, "--cycle", f"{time:%Y-%m-%dT%H:%M}", f"inference.lead_time={lead_time}")
        assert done.returncode == 0, done.stderr
    assert "scoring failed" in done.stderr
    assert "lead times of the forecast differ" in done.stderr
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
        done = realtime(
            config_path,
            "--cycle",
            f"{time:%Y-%m-%dT%H:%M}",
            f"inference.format={output_format}",
            "inference.products=[{name: warmth, kind: map, of: t2m, lead_times: [6h]}]",
        )
        assert done.returncode == 0, done.stderr
        assert "already existed" in realtime(*done.args, "--quiet").stdout
    folder = config_path.parent / "forecasts" / "products"
    assert len(list(folder.glob("*/warmth*.png"))) == 2
    records = read_json_lines(config_path.parent / "realtime" / "scores.jsonl")
    assert [record["lead_hours"] for record in records] == [6.0]
    assert set(records[0]["channels"]) == {"z850", "z500", "z250", "t850", "t2m", "msl"}


def test_a_shift_may_be_a_warning(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    # Possible values of z500, but seven standard deviations below those of training.
    file.messages["z500"] = encode_message("z500", 0.6 * grib_values("z500", sample_fields(20)["z500"].values), CYCLE)
    publish(server, file)
    refused = run_cycle()
    assert refused.returncode == 3
    assert "z500: mean -" in refused.stderr and "differs from the training data" in refused.stderr
    assert forecasts == []
    warned = run_cycle("realtime.on_shift=warn")
    assert warned.returncode == 0
    assert "WARNING" in warned.stderr and "z500: mean -" in warned.stderr
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
    done = run_cycle()
    assert done.returncode == 2
    assert "one process, but 2 were started" in done.stderr


def test_the_section_is_needed(realtime, trained_run) -> None:
    done = realtime(trained_run / "config.yml")
    assert done.returncode == 2
    assert "realtime: the section is missing" in done.stderr


def test_check_refuses_what_an_analysis_lacks(config_path) -> None:
    report = CheckReport()
    check_realtime(load_config(config_path), report)
    assert report.messages == []
    assert report.notes[0].startswith("realtime: 7 records of each analysis (gfs_idx)")
    check_realtime(load_config(config_path, ["realtime.fields={}"]), report)
    assert "no built-in record of sst" in report.messages[0]


def candidates(now: str, deadline: str | None = None, **keys: object) -> list[str]:
    """Return the candidates at a time as text."""
    calendar = Calendar()
    conf = RealtimeConfig(format="gfs_idx", url=URL, **keys)
    cycles = list_candidate_cycles(conf, calendar.parse(now), calendar.parse(deadline or now))
    return [calendar.format(cycle)[5:13] for cycle in cycles]


def test_candidates() -> None:
    assert candidates("2026-11-27T04:00") == ["11-27T00"]
    assert candidates("2026-11-27T03:59") == ["11-26T18"]
    assert candidates("2026-11-27T03:00", "2026-11-27T05:30") == ["11-27T00"]
    earlier = candidates("2026-11-27T04:00", on_incomplete="previous_cycle", max_age="12h")
    assert earlier == ["11-27T00", "11-26T18"]
    assert candidates("2026-11-27T11:00", cycles=[0, 12]) == ["11-27T00"]
    with pytest.raises(CycleError, match="max_age 8h"):
        candidates("2026-11-27T11:00", cycles=[0, 12], max_age="8h")


def test_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime(2026, 11, 27, 4, 30, 20, tzinfo=UTC).timestamp()
    monkeypatch.setattr(Clock, "seconds", lambda self: now)
    for text, seconds in {"05:30": 3580, "90min": 5400, "04:00": -1820, "23:30": -5 * 3600 - 20}.items():
        a_clock = Clock()
        a_clock.set_deadline(text)
        assert a_clock.deadline - now == seconds
    for text in ("25:00", "soon"):
        with pytest.raises(ConfigError, match="--until"):
            Clock().set_deadline(text)


def test_a_cycle_must_be_one_of_the_list() -> None:
    conf = RealtimeConfig(format="gfs_idx", url=URL)
    assert parse_cycle("2026-11-27T06:00", conf) == Calendar().parse("2026-11-27T06:00")
    with pytest.raises(ConfigError, match="realtime.cycles"):
        parse_cycle("2026-11-27T07:00", conf)


def test_an_incomplete_line_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path) == []
    append_json_lines(path, [{"a": 1}])
    with path.open("a") as file:
        file.write('{"a": 2')
    assert read_json_lines(path) == [{"a": 1}]
    append_json_lines(path, [{"a": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 3}]
