"""Energy that a GPU takes, by NVIDIA's management library (extra `energy`)."""

from __future__ import annotations

import logging
import math
import time
from types import ModuleType
from typing import Any

import torch

from credit.parallel.object_collectives import rank_of, together
from credit.utils.installation import install_command

logger = logging.getLogger(__name__)


class GpuEnergy:
    """Energy of one GPU, in joules, by the driver's counter; of GPUs before Volta, which have none, power times time.

    Args:
        nvml: the module `pynvml`, initialised.
        handle: of the GPU.
    """

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        try:
            self._read = self._since_driver
            self._seen = self._read()
        except nvml.NVMLError:
            self._read, self._joules, self._power = self._from_power, 0.0, self._watts()
            self._at = time.monotonic()
            self._seen = self._read()

    def take(self) -> float:
        """Return the joules since the last call, NaN where the library fails."""
        try:
            now = self._read()
        except self._nvml.NVMLError as error:
            logger.debug("the energy of the GPU is not known: %s", error)
            return math.nan
        before, self._seen = self._seen, now
        # a counter that has begun again, with the driver: what it shows came after
        return now - before if now >= before else now

    def _since_driver(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def _from_power(self) -> float:
        now, power = time.monotonic(), self._watts()
        self._joules += (now - self._at) * (self._power + power) / 2
        self._at, self._power = now, power
        return self._joules

    def _watts(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3


class EnergyMeter:
    """Energy of this rank's GPU; a GPU that ranks share is the first one's. Building it is collective on GPUs.

    Args:
        device: of this process.
    """

    def __init__(self, device: torch.device) -> None:
        opened = _open_device(device) if device.type == "cuda" else None
        gpus = together(lambda: opened and opened[0]) if device.type == "cuda" else []
        self._is_known = opened is not None
        self._gpu = opened[1] if opened is not None and gpus.index(opened[0]) == rank_of() else None

    def take(self) -> float:
        """Return the joules since the last call, NaN where they are not known, 0 where another rank counts them."""
        if self._gpu is not None:
            return self._gpu.take()
        return 0.0 if self._is_known else math.nan


def open_gpu(nvml: ModuleType, uuid: str) -> tuple[str, GpuEnergy]:
    """Return the UUID and the energy of the whole GPU that a device of CUDA is, or is a part of (MIG).

    Args:
        nvml: the module `pynvml`.
        uuid: as torch gives it, without a prefix; it does not depend on CUDA_VISIBLE_DEVICES as the index does.

    Raises:
        nvml.NVMLError: if the library or the GPU tell nothing.
    """
    nvml.nvmlInit()
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        handle = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return nvml.nvmlDeviceGetUUID(handle), GpuEnergy(nvml, handle)


def _open_device(device: torch.device) -> tuple[str, GpuEnergy] | None:
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
