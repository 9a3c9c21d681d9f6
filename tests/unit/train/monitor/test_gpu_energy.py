"""Tests of the energy of GPUs with a fake NVML: energy counter, power, errors, and the choice of the GPU."""

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


class FakeNvmlError(Exception):
    """Stand-in for pynvml's NVMLError."""


class FakeNvml:
    """Fake NVML with two GPUs, the second of which has a MIG slice; only the UUID identifies a GPU.

    Args:
        counter: whether the GPUs count energy, as they do from Volta on.
    """

    NVMLError = FakeNvmlError

    def __init__(self, counter: bool = True) -> None:
        self.counter, self.works = counter, True
        self.millijoules = {"first": 5_000_000, "second": 7_000_000}
        self.milliwatts = {"first": 300_000, "second": 700_000}

    def nvmlInit(self) -> None:
        if not self.works:
            raise FakeNvmlError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        handles = {f"GPU-{FIRST}": "first", f"GPU-{SECOND}": "second", f"MIG-{SLICE}": "slice"}
        if uuid not in handles:
            raise FakeNvmlError("Not Found")
        return handles[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return {"slice": "second"}[handle]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return {"first": f"GPU-{FIRST}", "second": f"GPU-{SECOND}"}[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.counter:
            raise FakeNvmlError("Not Supported")
        return self.millijoules[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.works:
            raise FakeNvmlError("GPU is lost")
        return self.milliwatts[handle]


def test_energy_is_the_increase_of_the_counter() -> None:
    library = FakeNvml()
    _, gpu = open_gpu(library, FIRST)
    library.millijoules["first"] += 1_500
    assert gpu.pop_joules() == 1.5
    assert gpu.pop_joules() == 0.0
    # The driver was loaded again, which resets the counter.
    library.millijoules["first"] = 250
    assert gpu.pop_joules() == 0.25


@pytest.mark.parametrize(("uuid", "handle"), [(FIRST, "first"), (SECOND, "second"), (SLICE, "second")])
def test_the_gpu_is_found_by_its_uuid(uuid: str, handle: str) -> None:
    library = FakeNvml()
    name, gpu = open_gpu(library, uuid)
    library.millijoules[handle] += 3_000
    assert (name, gpu.pop_joules()) == (library.nvmlDeviceGetUUID(handle), 3.0)


def test_energy_without_a_counter_is_mean_power_times_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_seconds = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: fake_seconds)
    library = FakeNvml(counter=False)
    _, gpu = open_gpu(library, FIRST)
    fake_seconds, library.milliwatts["first"] = 110.0, 500_000
    assert gpu.pop_joules() == pytest.approx(10 * 400)
    fake_seconds = 112.0
    assert gpu.pop_joules() == pytest.approx(2 * 500)
    library.works = False
    assert math.isnan(gpu.pop_joules())


def build_meter(monkeypatch: pytest.MonkeyPatch, library: object, gpus_by_rank: list, rank: int) -> RankEnergyMeter:
    """Return the meter of a rank whose GPU is the first; `gpus_by_rank` has the names of all ranks' GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=FIRST))
    monkeypatch.setattr(gpu_energy, "current_rank", lambda: rank)

    def run_on_all_ranks(function):
        assert function() == gpus_by_rank[rank]
        return gpus_by_rank

    monkeypatch.setattr(gpu_energy, "run_on_all_ranks", run_on_all_ranks)
    return RankEnergyMeter(torch.device("cuda", 0))


def test_ranks_that_share_a_gpu_count_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library, name = FakeNvml(), f"GPU-{FIRST}"
    meters = [build_meter(monkeypatch, library, [name, name], rank) for rank in (0, 1)]
    library.millijoules["first"] += 2_000
    assert [meter.pop_joules() for meter in meters] == [2.0, 0.0]


def test_energy_is_unknown_without_a_working_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert math.isnan(build_meter(monkeypatch, None, [None], 0).pop_joules())
    assert "[energy]" in caplog.text
    library = FakeNvml()
    library.works = False
    assert math.isnan(build_meter(monkeypatch, library, [None], 0).pop_joules())
    assert "Driver Not Loaded" in caplog.text
    assert math.isnan(RankEnergyMeter(torch.device("cpu")).pop_joules())
