"""Energy of GPUs by a library that stands in for NVML: its counter, its gaps, and which GPU is asked."""

from __future__ import annotations

import logging
import math
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from credit.train.monitor import gpu_energy
from credit.train.monitor.gpu_energy import RankEnergyMeter, open_gpu

FIRST, SECOND = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-aaaaaaaaaaaa"
SLICE = "bbbbbbbb-cccc-dddd-eeee-ffffffffffff"


class Refusal(Exception):
    """As pynvml's NVMLError."""


class Library:
    """Two GPUs, the second of which has a slice; by index they would be the wrong way round.

    Args:
        counter: whether the GPUs count energy, as they do from Volta on.
    """

    NVMLError = Refusal

    def __init__(self, counter: bool = True) -> None:
        self.counter, self.works = counter, True
        self.millijoules = {"first": 5_000_000, "second": 7_000_000}
        self.milliwatts = {"first": 300_000, "second": 700_000}

    def nvmlInit(self) -> None:
        if not self.works:
            raise Refusal("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        handles = {f"GPU-{FIRST}": "first", f"GPU-{SECOND}": "second", f"MIG-{SLICE}": "slice"}
        if uuid not in handles:
            raise Refusal("Not Found")
        return handles[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return {"slice": "second"}[handle]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return {"first": f"GPU-{FIRST}", "second": f"GPU-{SECOND}"}[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counter:
            raise Refusal("Not Supported")
        return self.millijoules[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.works:
            raise Refusal("GPU is lost")
        return self.milliwatts[handle]


def test_the_counter_from_the_start_of_the_run() -> None:
    library = Library()
    _, gpu = open_gpu(library, FIRST)
    library.millijoules["first"] += 1_500
    assert gpu.pop_joules() == 1.5
    assert gpu.pop_joules() == 0.0
    # the driver was loaded again
    library.millijoules["first"] = 250
    assert gpu.pop_joules() == 0.25


@pytest.mark.parametrize(("uuid", "handle"), [(FIRST, "first"), (SECOND, "second"), (SLICE, "second")])
def test_the_gpu_is_found_by_its_uuid(uuid: str, handle: str) -> None:
    library = Library()
    name, gpu = open_gpu(library, uuid)
    library.millijoules[handle] += 3_000
    assert (name, gpu.pop_joules()) == (library.nvmlDeviceGetUUID(handle), 3.0)


def test_power_times_time_without_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    library = Library(counter=False)
    _, gpu = open_gpu(library, FIRST)
    now, library.milliwatts["first"] = 110.0, 500_000
    assert gpu.pop_joules() == pytest.approx(10 * 400)
    now = 112.0
    assert gpu.pop_joules() == pytest.approx(2 * 500)
    library.works = False
    assert math.isnan(gpu.pop_joules())


def on_gpu(monkeypatch: pytest.MonkeyPatch, library: object, ranks: list, rank: int) -> RankEnergyMeter:
    """Return the meter of a rank whose GPU is the first; `ranks` are the GPUs that the ranks have."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=FIRST))
    monkeypatch.setattr(gpu_energy, "current_rank", lambda: rank)

    def run_on_all_ranks(what):
        assert what() == ranks[rank]
        return ranks

    monkeypatch.setattr(gpu_energy, "run_on_all_ranks", run_on_all_ranks)
    return RankEnergyMeter(torch.device("cuda", 0))


def test_ranks_that_share_a_gpu_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library, name = Library(), f"GPU-{FIRST}"
    meters = [on_gpu(monkeypatch, library, [name, name], rank) for rank in (0, 1)]
    library.millijoules["first"] += 2_000
    assert [meter.pop_joules() for meter in meters] == [2.0, 0.0]


def test_without_the_library_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert math.isnan(on_gpu(monkeypatch, None, [None], 0).pop_joules())
    assert "[energy]" in caplog.text
    library = Library()
    library.works = False
    assert math.isnan(on_gpu(monkeypatch, library, [None], 0).pop_joules())
    assert "Driver Not Loaded" in caplog.text
    assert math.isnan(RankEnergyMeter(torch.device("cpu")).pop_joules())
