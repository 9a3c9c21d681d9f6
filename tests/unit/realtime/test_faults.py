"""Each fault of a server gives an exit code and one line that names the file, the field and the cycle."""

from __future__ import annotations

import email.utils
import gzip
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler

import numpy as np
import pytest

from tests.unit.realtime.conftest import CYCLE, publish, read_status
from tests.unit.realtime.faulty_server import FaultyServer, build_range_fault, send_answer
from tests.unit.realtime.grib_files import GRAVITY, GribFile, build_file, encode_message, grib_values, sample_fields

# Name of the analysis file on the server.
FILE = "gfs.20261127/00/anl"


def remove_from_index(server: FaultyServer, file: GribFile) -> None:
    lines = [line for line in file.gfs_index().splitlines() if ":HGT:500 mb" not in line]
    publish(server, file, "\n".join(lines))


def remove_from_file(server: FaultyServer, file: GribFile) -> None:
    del file.messages["z500"]
    publish(server, file)


def keep_old_index(server: FaultyServer, file: GribFile) -> None:
    old_index = file.gfs_index()
    # The new file has a shorter first record, so the offsets of later records differ.
    file.messages["msl"] = replace_values(file, "msl", bitsPerValue=12)
    publish(server, file, old_index)


def truncate_answers(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)

    server.faults.append(build_range_fault(send_truncated))


def truncate_file(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    server.files[FILE] = server.files[FILE][:30000]


def ignore_ranges(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    server.faults.append(build_range_fault(lambda handler: send_answer(handler, 200, file.content())))


def send_other_range(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    server.faults.append(
        build_range_fault(lambda handler: send_answer(handler, 206, b"GRIB", {"Content-Range": "bytes 77-80/90"}))
    )


def fail_with_503(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    server.faults.append(build_range_fault(lambda handler: send_answer(handler, 503, b"busy")))


def request_wait_of_a_day(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    server.faults.append(build_range_fault(lambda handler: send_answer(handler, 429, b"", {"Retry-After": "86400"})))


def publish_nothing(server: FaultyServer, file: GribFile) -> None:
    pass


def publish_index_alone(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)
    del server.files[FILE]


def publish_damaged_index(server: FaultyServer, file: GribFile) -> None:
    publish(server, file, file.gfs_index().replace(":d=2026", ":d="))


def replace_values(file: GribFile, name: str, scale: float = 1.0, **keys: object) -> bytes:
    """Return the message of a channel with values times `scale`, and with other keys."""
    values = grib_values(name, sample_fields(20)[name].values) * scale
    return encode_message(name, values, file.time, **keys)


def replace_message(name: str, **changes: object) -> Callable[[FaultyServer, GribFile], None]:
    def fault(server: FaultyServer, file: GribFile) -> None:
        file.messages[name] = replace_values(file, name, **changes)
        publish(server, file)

    return fault


def build_flip_fault(position: int) -> Callable[[FaultyServer, GribFile], None]:
    """Return a fault that flips two bits in one byte of the message of z500."""

    def fault(server: FaultyServer, file: GribFile) -> None:
        message = bytearray(file.messages["z500"])
        message[position] ^= 0b00100100
        file.messages["z500"] = bytes(message)
        publish(server, file)

    return fault


def set_constant(server: FaultyServer, file: GribFile) -> None:
    file.messages["z500"] = encode_message("z500", np.full((32, 64), 5600.0), file.time)
    publish(server, file)


def set_missing(server: FaultyServer, file: GribFile) -> None:
    values = grib_values("z500", sample_fields(20)["z500"].values).copy()
    values[3, 4] = np.nan
    file.messages["z500"] = encode_message("z500", values, file.time)
    publish(server, file)


def add_other_record(server: FaultyServer, file: GribFile) -> None:
    file.messages["z500'"] = encode_message("z500", grib_values("z500", sample_fields(21)["z500"].values), file.time)
    publish(server, file)


def read_range_header(handler: BaseHTTPRequestHandler) -> str:
    return handler.headers["Range"].replace("bytes=", "bytes ")


def compress_answers(server: FaultyServer, file: GribFile) -> None:
    publish(server, file)

    def send_compressed(handler: BaseHTTPRequestHandler) -> bool:
        send_answer(handler, 200, gzip.compress(file.gfs_index().encode()), {"Content-Encoding": "gzip"})
        return True

    server.faults.append(send_compressed)


def redirect_for_ever(server: FaultyServer, file: GribFile) -> None:
    def send_redirect(handler: BaseHTTPRequestHandler) -> bool:
        send_answer(handler, 302, b"", {"Location": handler.path})
        return True

    server.faults.append(send_redirect)


def write_hole(server: FaultyServer, file: GribFile) -> None:
    """A block of the file is not written yet. The length of the record and its ends are correct."""
    message = bytearray(file.messages["z500"])
    message[2000:2600] = bytes(600)
    file.messages["z500"] = bytes(message)
    publish(server, file)


def damage_length_of_last_record(server: FaultyServer, file: GribFile) -> None:
    """The header of the last record has a damaged length, which the index does not contain."""
    message = bytearray(file.messages["sst"])
    message[8] = 1
    file.messages["sst"] = bytes(message)
    publish(server, file)


FAULTS = {
    "length of the last record": (
        damage_length_of_last_record,
        "sst (TMP:surface): the record does not begin with a header",
    ),
    "record absent from the index": (remove_from_index, "z500 (HGT:500 mb): not in the index"),
    "field entirely missing": (remove_from_file, "z500 (HGT:500 mb): not in the index"),
    "index older than the file": (keep_old_index, "msl (PRMSL:mean sea level): the record has 6323 bytes, but its"),
    "index damaged": (publish_damaged_index, "line 1 of the index"),
    "answers truncated": (truncate_answers, "bytes arrived instead of 16, in each of 2 attempts"),
    "file truncated": (truncate_file, "sst: not read"),
    "Range ignored": (ignore_ranges, "so it would send the complete file"),
    "compressed answers": (compress_answers, "the server sends the file compressed (Content-Encoding: gzip)"),
    "endless redirection": (redirect_for_ever, "index: not read"),
    "another range": (send_other_range, "sends different bytes"),
    "503 for ever": (fail_with_503, "the server answers 503"),
    "429 with a long Retry-After": (request_wait_of_a_day, "there is no time to wait 86400 s"),
    "no file": (publish_nothing, "index: not on the server"),
    "index without file": (publish_index_alone, "sst: not on the server"),
    "flip of the start": (build_flip_fault(1), "z500 (HGT:500 mb): the record does not begin with GRIB"),
    "flip of the length": (build_flip_fault(14), "z500 (HGT:500 mb): the record has"),
    "flip of the end": (build_flip_fault(-2), "z500 (HGT:500 mb): the record does not end with 7777"),
    "hole in the values": (write_hole, "z500 (HGT:500 mb): a part of the record is empty"),
    "other parameter": (replace_message("z500", parameterNumber=4), "z500 (HGT:500 mb): the record has the parameters"),
    "other level": (
        replace_message("z500", scaledValueOfFirstFixedSurface=50100),
        "z500 (HGT:500 mb): the record is at isobaricInhPa 501",
    ),
    "other time": (replace_message("z500", dataDate=20261126), "z500 (HGT:500 mb): the record is valid at 2026-11-26"),
    "forecast step": (
        replace_message("z500", dataDate=20261126, dataTime=1800, stepRange="6"),
        "z500 (HGT:500 mb): the record is a forecast",
    ),
    "constant field": (set_constant, "z500 (HGT:500 mb): the value is 5600 everywhere"),
    "missing value": (set_missing, "z500 (HGT:500 mb): 1 of 2048 values are missing"),
    "two different records": (add_other_record, "z500 (HGT:500 mb): the index has two records with different content"),
    "hPa for Pa": (replace_message("msl", scale=0.01), "msl"),
    "geopotential for height": (replace_message("z500", scale=GRAVITY), "z"),
    "height of a tenth": (replace_message("z850", scale=1 / GRAVITY), "z850"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_call(name: str, run_cycle, server, forecasts, config_path) -> None:
    fault, message = FAULTS[name]
    fault(server, build_file(CYCLE))
    result = run_cycle()
    assert result.returncode == 3
    last_line = result.stderr.strip().splitlines()[-1]
    for text in (message, "2026-11-27T00:00", FILE):
        assert text in last_line
    assert forecasts == []
    assert read_status(config_path)["state"] == "failed"
    assert message in read_status(config_path)["message"]


def send_truncated(handler: BaseHTTPRequestHandler) -> None:
    send_answer(handler, 206, b"GRIB", {"Content-Length": "900", "Content-Range": f"{read_range_header(handler)}/*"})


def request_wait(retry_after: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return lambda handler: send_answer(handler, 429, b"", {"Retry-After": retry_after})


def test_temporary_errors_are_retried(run_cycle, server, forecasts, sleeps) -> None:
    publish(server, build_file(CYCLE))
    date = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=300), usegmt=True)
    # Each fault answers the first request that earlier faults do not answer.
    for answer in (
        request_wait("7"),
        request_wait(date),
        send_truncated,
        lambda handler: send_answer(handler, 503, b""),
    ):
        server.faults.append(build_range_fault(answer, times=1))
    assert run_cycle("realtime.retries=4").returncode == 0
    assert len(forecasts) == 1
    assert sleeps[0] == 7.0
    # The clock of the command has advanced by the first wait.
    assert 280 <= sleeps[1] <= 300
    # Exponential backoff, shortened at random by up to a quarter.
    assert 3 <= sleeps[2] <= 4
    assert 6 <= sleeps[3] <= 8


def test_redirections_are_followed(run_cycle, server, forecasts) -> None:
    publish(server, build_file(CYCLE))

    def send_redirect(handler: BaseHTTPRequestHandler) -> bool:
        if handler.path.startswith("/moved/"):
            send_answer(handler, 302, b"", {"Location": handler.path.removeprefix("/moved")})
            return True
        return False

    server.faults.append(send_redirect)
    assert run_cycle(f"realtime.url={server.url}/moved/gfs.{{date}}/{{cycle}}/anl").returncode == 0
    assert len(forecasts) == 1


def test_a_record_that_arrives_damaged_is_fetched_again(run_cycle, server, forecasts) -> None:
    file = build_file(CYCLE)
    publish(server, file)

    def send_damaged(handler: BaseHTTPRequestHandler) -> None:
        first, last = (int(text) for text in read_range_header(handler).removeprefix("bytes ").split("-"))
        body = bytearray(file.content()[first : last + 1])
        body[-1] ^= 1
        send_answer(handler, 206, bytes(body), {"Content-Range": f"{read_range_header(handler)}/*"})

    # The first request reads the length of the last record.
    server.faults.append(build_range_fault(lambda handler: server.faults.pop(0) and send_damaged(handler), times=1))
    assert run_cycle().returncode == 0
    assert len(forecasts) == 1


def test_one_of_two_times_is_missing(realtime, server, forecasts, config_path) -> None:
    """A lagged ensemble also needs the analysis 6 h earlier."""
    publish(server, build_file(CYCLE))
    overrides = ("inference.ensemble={members: 2, lagged: 6h}", "--cycle", "2026-11-27T00:00")
    result = realtime(config_path, *overrides)
    assert result.returncode == 3
    assert "analysis 2026-11-26T18:00: index: not on the server" in result.stderr
    assert "gfs.20261126/18/anl.idx" in result.stderr
    assert forecasts == []
    publish(server, build_file(CYCLE - timedelta(hours=6), 19))
    assert realtime(config_path, *overrides).returncode == 0
    paths = forecasts[0].data.sources[0].path
    assert [path[-14:] for path in paths] == ["20261126T18.nc", "20261127T00.nc"]
