"""Initial states equal the file on the server, and fetching them needs few bytes and little memory."""

from __future__ import annotations

import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import eccodes
import numpy as np
import pytest

from credit.calendar import Calendar
from credit.config import Config, load_config
from credit.data.formats.units import Conversion
from credit.grid import LatLonGrid
from credit.realtime.analysis import AnalysisContent, write_analysis
from credit.realtime.clock import Clock
from credit.realtime.fetch.fetcher import AnalysisFile, RecordFetcher
from credit.realtime.fetch.records import RecordRequest
from credit.realtime.fetch.transport import HttpClient
from credit.realtime.initial_state import load_checkpoint_metadata, open_initial_state
from tests.unit.realtime.conftest import CYCLE, publish
from tests.unit.realtime.faulty_server import FaultyServer
from tests.unit.realtime.grib_files import GRAVITY, GribFile, build_file, encode_message, sample_fields

REQUESTED_CHANNELS = ("msl", "z850", "t850", "z500", "z250", "t2m", "sst")
MINUTES = Calendar().parse("2026-11-27T00:00")


def decode_directly(file: GribFile, name: str) -> np.ndarray:
    """Return a field of a file, decoded with ecCodes, in the units and the cell order of the model."""
    handle = eccodes.codes_new_from_message(file.messages[name])
    values = eccodes.codes_get_values(handle).astype(np.float32)
    lat = eccodes.codes_get_array(handle, "distinctLatitudes")
    lon = eccodes.codes_get_array(handle, "longitudes")[: eccodes.codes_get(handle, "Ni")]
    eccodes.codes_release(handle)
    lat = np.sort(lat)[::-1]
    _, axis_order = LatLonGrid.from_coords(lat, lon)
    field_HW = axis_order.apply(values.reshape(len(lat), len(lon)))
    return Conversion(GRAVITY, 0.0).apply(field_HW) if name.startswith("z") else field_HW


def read_initial_state(forecast_config: Config) -> dict[str, np.ndarray]:
    """Return the prognostic fields and the sea surface temperature that a forecast starts from, by channel."""
    model = load_checkpoint_metadata(forecast_config)
    frames = open_initial_state(model, forecast_config)
    names = [channel.name for channel in model.assets.channels.group("prognostic")]
    fields = dict(zip(names, frames.prognostic(MINUTES), strict=True))
    fields["sst"] = frames.forcing(MINUTES)[0]
    # Over land, the training data have no values.
    fields["land"] = model.assets.masks["sst"]
    return fields


def require_equal(fields: dict[str, np.ndarray], file: GribFile) -> None:
    """Require that an initial state equals the fields of a file bit for bit."""
    for name in REQUESTED_CHANNELS:
        expected_HW = decode_directly(file, name)
        if name == "sst":
            expected_HW = np.where(fields["land"], np.nan, expected_HW)
        np.testing.assert_array_equal(fields[name], expected_HW)


@pytest.mark.parametrize("first_longitude", [0.0, -180.0])
def test_initial_state_equals_fields_of_file(run_cycle, server, forecasts, first_longitude: float) -> None:
    file = build_file(CYCLE, first_longitude=first_longitude)
    publish(server, file)
    assert run_cycle().returncode == 0
    fields = read_initial_state(forecasts[0])
    require_equal(fields, file)
    # The file has heights in 24 bits, whose rounding error is a fraction of 1 m2 s-2 of geopotential.
    np.testing.assert_allclose(fields["z500"], sample_fields(20)["z500"].values, atol=0.02)
    assert np.isnan(fields["sst"]).any()


def test_open_data_of_ecmwf(run_cycle, server, forecasts, tmp_path: Path) -> None:
    file = build_file(CYCLE, centre="ecmf")
    server.files["20261127/00z/anl.grib2"] = file.content()
    server.files["20261127/00z/anl.index"] = file.ecmwf_index().encode()
    result = run_cycle(
        "realtime.format=ecmwf_index",
        f"realtime.url={server.url}/{{date}}/{{cycle}}z/anl.grib2",
        "realtime.fields={sst: {param: skt}}",
    )
    assert result.returncode == 0, result.stderr
    require_equal(read_initial_state(forecasts[0]), file)
    # The index has the length of every record, so only requested records are fetched.
    assert server.bytes_sent == sum(len(file.messages[name]) for name in REQUESTED_CHANNELS)


def test_a_finer_analysis_is_averaged(run_cycle, server, forecasts) -> None:
    """Each coarse cell is the mean of 2 x 2 fine cells, which have equal values here."""
    coarse = build_file(CYCLE)
    fine = GribFile(CYCLE)
    for name in coarse.messages:
        values_HW = np.repeat(np.repeat(decode_directly(coarse, name), 2, axis=0), 2, axis=1)
        if name.startswith("z"):
            values_HW = values_HW / GRAVITY
        # The edges of the fine cells are edges of the coarse cells if the first column is shifted by a quarter cell.
        fine.messages[name] = encode_message(name, values_HW, CYCLE, first_longitude=-360 / 64 / 4)
    publish(server, fine)
    assert run_cycle().returncode == 0
    fields = read_initial_state(forecasts[0])
    for name in ("msl", "z500", "t2m"):
        np.testing.assert_allclose(fields[name], decode_directly(coarse, name), rtol=2e-6)


def test_adjacent_records_are_fetched_together(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    publish(server, file)
    assert run_cycle().returncode == 0
    requested_bytes = sum(len(file.messages[name]) for name in REQUESTED_CHANNELS)
    assert requested_bytes <= server.bytes_sent <= 1.02 * requested_bytes
    # Two records that are not requested divide the others into three ranges. One more request reads the last length.
    assert len([path for path, byte_range in server.requests if byte_range]) == 4


def test_equal_duplicates_are_one_record(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    file.messages["z500'"] = file.messages["z500"]
    publish(server, file)
    assert run_cycle().returncode == 0
    require_equal(read_initial_state(forecasts[0]), file)


def test_restart_fetches_only_missing_records(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    publish(server, file)
    num_requests = 0

    def fail_from_the_fourth(handler: BaseHTTPRequestHandler) -> bool:
        nonlocal num_requests
        num_requests += handler.headers.get("Range") is not None
        if num_requests >= 4:
            handler.send_error(500)
        return num_requests >= 4

    server.faults.append(fail_from_the_fourth)
    assert run_cycle("realtime.retries=0").returncode == 3
    first_bytes = server.bytes_sent
    server.faults.clear()
    assert run_cycle("realtime.retries=0").returncode == 0
    # Both calls ask for the length of the last record, in 16 bytes.
    total_bytes = sum(len(file.messages[name]) for name in REQUESTED_CHANNELS)
    assert total_bytes / 2 < first_bytes < total_bytes
    assert server.bytes_sent == total_bytes + 2 * 16
    require_equal(read_initial_state(forecasts[0]), file)


def test_records_of_another_address_are_not_used(run_cycle, server, forecasts) -> None:
    """A call for one address leaves records with the grid and the names of those at the second address."""
    publish(server, build_file(CYCLE, 20))
    file = build_file(CYCLE, 25)
    publish(server, file, name="other")
    server.files["gfs.20261127/00/anl"] = build_file(CYCLE, 20).content()[:-100]
    assert run_cycle("realtime.retries=0").returncode == 3
    assert run_cycle(f"realtime.url={server.url}/gfs.{{date}}/{{cycle}}/other").returncode == 0
    require_equal(read_initial_state(forecasts[0]), file)


def test_records_of_an_earlier_file_are_not_used(run_cycle, server, forecasts) -> None:
    """The first call fails, and the server replaces file and index before the second call."""
    publish(server, build_file(CYCLE, 20))
    server.files["gfs.20261127/00/anl"] = build_file(CYCLE, 20).content()[:-100]
    assert run_cycle("realtime.retries=0").returncode == 3
    file = build_file(CYCLE, 25)
    file.messages["rh850"] = encode_message("rh850", sample_fields(25)["rh850"].values, CYCLE, bitsPerValue=12)
    publish(server, file)
    assert run_cycle("realtime.retries=0").returncode == 0
    require_equal(read_initial_state(forecasts[0]), file)


def join_fields(*messages: bytes) -> bytes:
    """Return one GRIB message with the fields of several that have the same grid."""
    content = messages[0][16:-4]
    for message in messages[1:]:
        # Sections 0, 1 and 3 are common; a field begins with section 4.
        position = 16
        while message[position + 4] != 4:
            position += int.from_bytes(message[position : position + 4], "big")
        content += message[position:-4]
    return messages[0][:8] + (len(content) + 20).to_bytes(8, "big") + content + b"7777"


def test_both_components_of_wind_in_one_message(server: FaultyServer, tmp_path: Path) -> None:
    """NCEP may write both components into one message; its index gives them the numbers 1.1 and 1.2."""
    values_HW = np.random.default_rng(1).normal(0, 10, (32, 64))
    east = encode_message("u500", values_HW, CYCLE)
    north = encode_message("u500", 2 * values_HW, CYCLE, parameterNumber=3)
    message = join_fields(east, north)
    index = ""
    for number, param in enumerate(("UGRD", "VGRD"), start=1):
        index += f"1.{number}:0:d={CYCLE:%Y%m%d%H}:{param}:500 mb:anl:\n"
    index += f"2:{len(message)}:d={CYCLE:%Y%m%d%H}:TMP:500 mb:anl:\n"
    publish(server, GribFile(CYCLE, {"u500": message, "t500": east}), index)
    requests = [
        RecordRequest(f"{name}500", name, 500.0, param, "500 mb", (name,), "pressure", 500.0, False)
        for name, param in (("u", "UGRD"), ("v", "VGRD"))
    ]
    url = f"{server.url}/gfs.20261127/00/anl"
    fetcher = RecordFetcher(
        AnalysisFile(MINUTES, url, f"{url}.idx", "gfs_idx"), requests, tmp_path, HttpClient(0, 10, Clock())
    )
    fetcher.fetch()
    assert server.bytes_sent == len(message)
    for request, factor in zip(requests, (1, 2), strict=True):
        np.testing.assert_allclose(fetcher.read(request).values_HW, factor * values_HW, atol=1e-4)


def test_memory_peak_is_limited(server: FaultyServer, tmp_path: Path) -> None:
    """The memory peak is at most about the size of all fields in float32."""
    levels = [25.0 * number for number in range(1, 41)]
    noise = np.random.default_rng(1).normal(250, 10, (181, 360))
    file = GribFile(CYCLE)
    lines = []
    offset = 0
    for level in levels:
        message = encode_message("t850", noise, CYCLE, scaledValueOfFirstFixedSurface=int(100 * level))
        file.messages[f"t{level:g}"] = message
        lines.append(f"1:{offset}:d={CYCLE:%Y%m%d%H}:TMP:{level:g} mb:anl:")
        offset += len(message)
    publish(server, file, "\n".join(lines))
    requests = [
        RecordRequest(f"t{level:g}", "t", level, "TMP", f"{level:g} mb", ("t",), "pressure", level, False)
        for level in levels
    ]
    name = f"{server.url}/gfs.20261127/00/anl"
    source = AnalysisFile(MINUTES, name, f"{name}.idx", "gfs_idx")
    fetcher = RecordFetcher(source, requests, tmp_path / "records", HttpClient(0, 10, Clock()))
    tracemalloc.start()
    try:
        fetcher.fetch()
        write_analysis(tmp_path / "t.nc", AnalysisContent(MINUTES, name, requests, {}), fetcher.read)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 1.2 * 4 * noise.size * len(levels)


def damage_at_random(rng: random.Random, file: GribFile) -> tuple[str, bytes]:
    """Return the index and the content of a file after random deletions."""
    rows = file.rows()
    content = file.content()
    index = file.gfs_index().splitlines()
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        kind = rng.choice(["line", "record", "bytes", "end", "hole"])
        number = rng.randrange(len(rows))
        _, offset, length = rows[number]
        if kind == "line" and len(index) > 1:
            del index[rng.randrange(len(index))]
        elif kind == "record":
            content = content[:offset] + content[offset + length :]
        elif kind == "bytes":
            first = rng.randrange(len(content))
            content = content[:first] + content[first + rng.randrange(1, 5000) :]
        elif kind == "end":
            content = content[: rng.randrange(len(content) // 2, len(content))]
        else:
            # A hole, as in a file of which some blocks are not written yet.
            first = rng.randrange(len(content))
            num_zeros = min(rng.randrange(512, 4096), len(content) - first)
            content = content[:first] + bytes(num_zeros) + content[first + num_zeros :]
    return "\n".join(index), content


def run_campaign(run_cycle: Callable, server: FaultyServer, forecasts: list[Config], seeds: range) -> tuple[int, int]:
    """Run the command on damaged files; return how often a forecast would have been made, and how often not.

    Every forecast must start from the fields of the undamaged file, bit for bit.
    """
    file = build_file(CYCLE)
    num_forecasts = 0
    for seed in seeds:
        server.reset()
        forecasts.clear()
        index, content = damage_at_random(random.Random(seed), file)
        publish(server, file, index)
        server.files["gfs.20261127/00/anl"] = content
        result = run_cycle("realtime.retries=0")
        assert result.returncode == (0 if forecasts else 3), result.stderr
        if forecasts:
            require_equal(read_initial_state(forecasts[0]), file)
            num_forecasts += 1
        shutil.rmtree(Path(load_config(result.args[0]).save_loc) / "realtime")
    return num_forecasts, len(seeds) - num_forecasts


@pytest.mark.slow
def test_random_deletions_never_change_the_initial_state(run_cycle, server, forecasts) -> None:
    seeds = range(int(os.environ.get("REALTIME_DELETIONS", "12")))
    num_forecasts, num_refused = run_campaign(run_cycle, server, forecasts, seeds)
    print(f"{num_forecasts} forecasts, {num_refused} refused")
    assert num_forecasts >= len(seeds) // 12
    assert num_refused >= len(seeds) // 3


@pytest.mark.slow
def test_flipped_bits_in_descriptions_never_change_the_initial_state(run_cycle, server, forecasts) -> None:
    """A flipped bit in the description of a field never changes the state; one in its values may remain unnoticed.

    GRIB has no checksum. The values are sections 5 to 7 of the message.
    """
    file = build_file(CYCLE)
    rng = random.Random(5)
    num_refused = 0
    num_flips = int(os.environ.get("REALTIME_FLIPS", "12"))
    for _ in range(num_flips):
        server.reset()
        forecasts.clear()
        name = rng.choice(REQUESTED_CHANNELS)
        message = bytearray(file.messages[name])
        section_5 = message.index(b"\x00\x00\x00\x15\x05")
        is_in_values = rng.random() < 0.3
        position = rng.randrange(section_5, len(message) - 4) if is_in_values else rng.randrange(section_5)
        message[position] ^= 1 << rng.randrange(8)
        damaged_file = GribFile(CYCLE, file.messages | {name: bytes(message)})
        publish(server, damaged_file)
        result = run_cycle("realtime.retries=0")
        assert result.returncode == (0 if forecasts else 3), result.stderr
        num_refused += not forecasts
        if forecasts:
            fields = read_initial_state(forecasts[0])
            assert all(np.isfinite(fields[channel]).all() for channel in REQUESTED_CHANNELS if channel != "sst")
            if not is_in_values:
                require_equal(fields, file)
        shutil.rmtree(Path(load_config(result.args[0]).save_loc) / "realtime")
    print(f"{num_refused} of {num_flips} flips refused")
    assert num_refused > num_flips // 4
