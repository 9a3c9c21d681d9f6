"""The device under measurement: all calls that differ between a GPU and a CPU.

On a CPU, measurements only test the scripts. A CPU has no peak of memory, and the share of time in which it computes is
unknown.
"""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

# Names of the calls of the driver by which the host starts kernels, CUDA graphs and copies.
_LAUNCH_CALLS = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
# Names of the device's events that are no kernels.
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True)
class StepProfile:
    """Work of one step, measured with torch's profiler.

    Attributes:
        kernels: number of kernels on the device; on a CPU, of operators.
        launches: number of calls by which the host starts kernels, graphs and copies; None on a CPU.
        busy_s: seconds in which the device executes at least one kernel or copy.
        seconds_by_kernel: name of a kernel -> seconds of all its runs.
    """

    kernels: int
    launches: int | None
    busy_s: float
    seconds_by_kernel: dict[str, float] = field(default_factory=dict)

    def describe_longest(self, count: int = 5) -> str:
        """Return the kernels with the longest total times as a string, with their shares of the busy time."""
        texts = []
        for name, seconds in Counter(self.seconds_by_kernel).most_common(count):
            texts.append(f"{name[:48]} {seconds / self.busy_s:.0%}")
        return "; ".join(texts)


class Accelerator(ABC):
    """Device whose time and memory are measured.

    Attributes:
        device: the device of all tensors.
        is_gpu: True for a GPU.
    """

    is_gpu = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def describe(self) -> dict[str, str | float]:
        """Return the properties of the device and the versions of its software."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def is_usable(self) -> bool:
        """Return False after an error of CUDA that makes every further call of this process fail."""
        try:
            self.synchronize()
        except RuntimeError:
            return False
        return True

    @abstractmethod
    def release(self) -> None:
        """Free the memory of unused objects, and delete compiled code."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to measure the peak of memory."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the largest memory in bytes of torch's allocator since `reset_peak`; None on a CPU."""

    @abstractmethod
    def profile(self, step: Callable[[], object]) -> StepProfile:
        """Take a step and return its profile."""

    @abstractmethod
    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Record a step as a CUDA graph and return the function that replays it.

        Raises:
            NotImplementedError: on a CPU.
        """


class CpuAccelerator(Accelerator):
    """CPU in place of a GPU, to test the scripts."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def describe(self) -> dict[str, str | float]:
        """Return the kind of processor and the number of threads."""
        return {"device": f"CPU {platform.machine()}", "threads": torch.get_num_threads(), "torch": torch.__version__}

    def synchronize(self) -> None:
        """Do nothing, because a CPU computes at once."""

    def release(self) -> None:
        """Forget compiled code and collect garbage."""
        _forget_compiled_code()
        gc.collect()

    def reset_peak(self) -> None:
        """Do nothing."""

    def peak_bytes(self) -> int | None:
        """Return None: torch does not count the memory of a CPU."""
        return None

    def profile(self, step: Callable[[], object]) -> StepProfile:
        """Take a step and return its profile; operators are counted as kernels, and the CPU is always busy."""
        with _OperatorCounter() as counter:
            start = time.perf_counter()
            step()
            seconds = time.perf_counter() - start
        return StepProfile(counter.calls, None, seconds)

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Raise a NotImplementedError, because a CPU has no CUDA graphs."""
        raise NotImplementedError("a CPU has no CUDA graphs")


class _OperatorCounter(TorchDispatchMode):
    """Dispatch mode that counts calls of torch's operators, including views and allocations.

    Attributes:
        calls: number of calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class CudaAccelerator(Accelerator):
    """An NVIDIA GPU.

    Args:
        device: device of the tensors. A test passes the CPU, with stand-ins for the functions of `torch.cuda`.
    """

    is_gpu = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cuda", 0))

    def describe(self) -> dict[str, str | float]:
        """Return the name, memory and driver of the GPU, and the versions of CUDA, cuDNN and torch."""
        properties = torch.cuda.get_device_properties(0)
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        description: dict[str, str | float] = {
            "device": torch.cuda.get_device_name(0),
            "memory GiB": round(total_bytes / 2**30, 1),
            "free GiB": round(free_bytes / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "compute capability": f"{properties.major}.{properties.minor}",
            "host": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
        fields = ("driver_version", "clocks.max.sm", "power.limit")
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            description |= dict(zip(fields, (value.strip() for value in text.split(",")), strict=True))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            description["nvidia-smi"] = f"failed: {error}"
        return description

    def synchronize(self) -> None:
        """Wait until the GPU has finished all queued work."""
        torch.cuda.synchronize()

    def release(self) -> None:
        """Forget compiled code and CUDA graphs, collect garbage, and empty the cache of torch's allocator."""
        # Graphs hold the memory that they were recorded with, and are part of cycles.
        _forget_compiled_code()
        gc.collect()
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Begin to measure the peak of memory."""
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        """Return the largest number of bytes that torch's allocator has used since `reset_peak`."""
        return torch.cuda.max_memory_allocated()

    def profile(self, step: Callable[[], object]) -> StepProfile:
        """Take a step, and read its kernels and the host's calls from the profiler's events.

        Raises:
            RuntimeError: if the profiler recorded no kernel.
        """
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            self.synchronize()
        events = profiled.profiler.kineto_results.events()
        intervals = []
        seconds: Counter[str] = Counter()
        kernels = 0
        launches = 0
        for event in events:
            name = event.name()
            # The span of a named range, such as that of the optimizer, is no work of the device.
            if event.is_user_annotation():
                continue
            if event.device_type() == DeviceType.CUDA:
                intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
                seconds[name] += event.duration_ns() / 1e9
                kernels += not name.startswith(_COPIES)
            elif name.startswith(_LAUNCH_CALLS):
                launches += 1
        if not intervals:
            raise RuntimeError("torch's profiler saw no kernel; it needs CUPTI, and often a driver that permits it")
        return StepProfile(kernels, launches, _sum_covered_ns(intervals) / 1e9, dict(seconds))

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """Record a step as a CUDA graph and return its replay; three warm-up steps on a separate stream come first."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def _forget_compiled_code() -> None:
    """Delete all code that `torch.compile` has compiled in this process."""
    # Nothing is compiled unless torch's compiler has been imported, which takes seconds.
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _sum_covered_ns(intervals: list[tuple[int, int]]) -> int:
    """Return the length of the union of intervals (start, end) in nanoseconds."""
    covered = 0
    last_end = 0
    for start, end in sorted(intervals):
        covered += max(0, end - max(start, last_end))
        last_end = max(last_end, end)
    return covered
