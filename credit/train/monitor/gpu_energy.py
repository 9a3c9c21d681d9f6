"""Energy consumption of GPUs, measured by NVIDIA's management library NVML (extra `energy`)."""

from __future__ import annotations

import logging
import math
import time
from types import ModuleType
from typing import Any

import torch

from credit.parallel.object_collectives import current_rank, run_on_all_ranks
from credit.utils.installation import install_command

logger = logging.getLogger(__name__)


class GpuEnergyMeter:
    """Meter of the energy of one GPU, in joules.

    The meter reads the energy counter of the driver. GPUs older than Volta have no counter, so the meter integrates
    their power between calls.

    Args:
        nvml: the module `pynvml`, initialised.
        handle: NVML's handle of the GPU.
    """

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        # The first reading shows whether the GPU has a counter.
        try:
            self._read_joules = self._read_counter
            self._last_joules = self._read_joules()
        except nvml.NVMLError:
            self._read_joules = self._integrate_power
            self._integrated_joules = 0.0
            self._last_watts = self._read_watts()
            self._last_time = time.monotonic()
            self._last_joules = self._read_joules()

    def pop_joules(self) -> float:
        """Return the energy in joules since the last call, or since the construction of the meter; NaN on an error."""
        try:
            joules = self._read_joules()
        except self._nvml.NVMLError as error:
            logger.debug("the energy of the GPU is unknown: %s", error)
            return math.nan
        increase = joules - self._last_joules
        self._last_joules = joules
        # The counter starts at 0 when the driver is reloaded; its value is then the energy since the reload.
        return increase if increase >= 0 else joules

    def _read_counter(self) -> float:
        """Return the energy of the GPU in joules since the driver was loaded."""
        # NVML returns millijoules.
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def _integrate_power(self) -> float:
        """Return the energy in joules since the construction of the meter, integrated by the trapezoidal rule."""
        now = time.monotonic()
        watts = self._read_watts()
        self._integrated_joules += (now - self._last_time) * (self._last_watts + watts) / 2
        self._last_time = now
        self._last_watts = watts
        return self._integrated_joules

    def _read_watts(self) -> float:
        """Return the current power of the GPU in watts."""
        # NVML returns milliwatts.
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3


class RankEnergyMeter:
    """Meter of the energy of this rank's GPU.

    If several ranks share a GPU, only the first of these ranks counts the energy of the GPU. The construction is
    collective if the device is a GPU.

    Args:
        device: the device of this process.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu: GpuEnergyMeter | None = None
        self._is_known = False
        if device.type != "cuda":
            return
        local_uuid = None
        opened_gpu = _open_gpu_of_device(device)
        if opened_gpu is not None:
            local_uuid, gpu = opened_gpu
        # Ranks that share a GPU have the same UUID.
        uuids = run_on_all_ranks(lambda: local_uuid)
        if local_uuid is not None:
            self._is_known = True
            if uuids.index(local_uuid) == current_rank():
                self._gpu = gpu

    def pop_joules(self) -> float:
        """Return the energy in joules since the last call; NaN if it is unknown, 0 if another rank counts this GPU."""
        if self._gpu is not None:
            return self._gpu.pop_joules()
        if self._is_known:
            return 0.0
        return math.nan


def open_gpu(nvml: ModuleType, uuid: str) -> tuple[str, GpuEnergyMeter]:
    """Return the UUID and the energy meter of the GPU of a CUDA device.

    If the device is a MIG instance, which is a part of a GPU, the meter measures the complete GPU.

    Args:
        nvml: the module `pynvml`.
        uuid: UUID of the device from torch, without a prefix. Unlike an index, it does not depend on
            CUDA_VISIBLE_DEVICES.

    Raises:
        nvml.NVMLError: if the library does not work, does not find the GPU, or cannot measure its energy.
    """
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return nvml.nvmlDeviceGetUUID(handle), GpuEnergyMeter(nvml, handle)


def _open_gpu_of_device(device: torch.device) -> tuple[str, GpuEnergyMeter] | None:
    """Return the UUID and the energy meter of the GPU of `device`; None if the energy cannot be measured."""
    try:
        import pynvml
    except ImportError:
        logger.debug("energy is not logged: it needs pynvml; install it with: %s", install_command("energy"))
        return None
    try:
        return open_gpu(pynvml, str(torch.cuda.get_device_properties(device).uuid))
    except pynvml.NVMLError as error:
        logger.debug("energy is not logged: %s", error)
        return None
