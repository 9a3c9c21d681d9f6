"""Resource usage of a run over all its parts: time, energy, floating-point operations and speed."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from credit.config import Config
from credit.parallel.mesh import DeviceGrid
from credit.train.build.assets import ModelAssets
from credit.train.monitor.flops import FlopCounter
from credit.train.monitor.gpu_energy import EnergyMeter


@dataclass
class Usage:
    """Resources that a run has used since its start; saved with every checkpoint.

    Attributes:
        since: optimizer step at which counting started; above 0 if another run, or a version without counting, took
            the earlier steps.
        wall_hours: time from the start of each part of the run to its end.
        gpu_hours: wall hours times the number of processes, if each has a GPU.
        process_hours: wall hours times the number of processes, if they have no GPUs.
        energy_kwh: energy of all GPUs; None if a part of it is unknown.
        step_s: seconds of the steps, without validations and saves.
        wait_s: seconds of the steps in which the main process waited for data.
        validation_s: seconds of validations and previews.
        save_s: seconds in which steps waited for checkpoints.
        samples: samples of the steps in `step_s`, including steps that were repeated.
        tflop: operations of these steps on a process, in 1e12.
        ideal_s: seconds that these operations take at the peak rate of the device; None if that is unknown.
    """

    since: int = 0
    wall_hours: float = 0.0
    gpu_hours: float = 0.0
    process_hours: float = 0.0
    energy_kwh: float | None = 0.0
    step_s: float = 0.0
    wait_s: float = 0.0
    validation_s: float = 0.0
    save_s: float = 0.0
    samples: int = 0
    tflop: float | None = 0.0
    ideal_s: float | None = 0.0


class UsageMeter:
    """Meter of the resource usage of a run.

    Args:
        device: of this process.
        processes: number of processes of the run.
        cost: counter of the network's operations for a micro-batch.
        share: number of micro-batches in an optimizer step, divided by the number of processes that share each.
        samples_a_step: number of samples per optimizer step, over all processes.
        peaks: rate -> TFLOP/s of the device, see `FlopCounter.operations`; empty if they are not known.
        energy: meter of the energy of this process's GPU.
        began: `time.perf_counter` at the start of this part of the run.
    """

    def __init__(
        self,
        device: torch.device,
        processes: int,
        cost: FlopCounter,
        share: float,
        samples_a_step: int,
        peaks: Mapping[str, float],
        energy: EnergyMeter,
        began: float,
    ) -> None:
        self.device = device
        self.processes = processes
        self.peaks = peaks
        self.samples_a_step = samples_a_step
        self.spent = Usage()
        self._cost = cost
        self._share = share
        self._energy = energy
        self._last_time = began
        self._hours_field = "gpu_hours" if device.type == "cuda" else "process_hours"

    def resume(self, step: int, stored: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the usage in a checkpoint and in later rows of the log, whose steps are lost but were used.

        Args:
            step: of the checkpoint.
            stored: return value of `state`, empty if an older version saved the checkpoint.
            rows: the last of metrics.jsonl, and summary.json.
        """
        field_names = {field.name for field in fields(Usage)}
        stored_fields = {name: value for name, value in stored.items() if name in field_names}
        self.spent = Usage(**stored_fields) if stored_fields else Usage(since=step)
        rows = [*rows]
        for name in ("wall_hours", "gpu_hours", "process_hours", "energy_kwh"):
            stored_value = getattr(self.spent, name)
            if stored_value is not None:
                logged_values = [row[name] for row in rows if name in row]
                setattr(self.spent, name, max([stored_value, *logged_values]))

    def state(self) -> dict[str, Any]:
        """Return the usage so far, ready for JSON."""
        self._pass_time()
        return asdict(self.spent)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to the field `name` of `Usage`."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.spent, name, getattr(self.spent, name) + time.perf_counter() - start_time)

    def joules(self) -> float:
        """Return the energy of this process's GPU since the last call; pass the sum over the ranks to `add_energy`."""
        return self._energy.take()

    def add_energy(self, joules: float) -> None:
        """Add the energy of all ranks; it is not finite if a rank does not know its own."""
        total = self.spent.energy_kwh
        self.spent.energy_kwh = total + joules / 3.6e6 if total is not None and math.isfinite(joules) else None

    def add_steps(self, lengths: Sequence[int], seconds: float, wait: float) -> dict[str, float]:
        """Add consecutive steps and return the fields of their rows in metrics.jsonl.

        Args:
            lengths: number of times that each step applies the network to a micro-batch.
            seconds: duration of all steps.
            wait: seconds of them spent waiting for data.
        """
        self._pass_time()
        spent = self.spent
        samples = len(lengths) * self.samples_a_step
        tflop, ideal_s = self._count_work(lengths)
        spent.samples += samples
        spent.step_s += seconds
        spent.wait_s += wait
        spent.tflop = _sum(spent.tflop, tflop)
        spent.ideal_s = _sum(spent.ideal_s, ideal_s)
        row = {
            "samples_per_s": samples / seconds,
            "data_wait_frac": wait / seconds,
            "tflops": None if tflop is None else tflop / seconds,
            "mfu": None if ideal_s is None else ideal_s / seconds,
            "wall_hours": spent.wall_hours,
            self._hours_field: getattr(spent, self._hours_field),
            "energy_kwh": spent.energy_kwh,
        }
        return {name: value for name, value in row.items() if value is not None}

    def step_tflop(self, length: int) -> float | None:
        """Return the operations of a step over all processes, in 1e12; None if they cannot be counted."""
        tflop, _ = self._count_work([length])
        return None if tflop is None else tflop * self.processes

    def _count_work(self, lengths: Sequence[int]) -> tuple[float | None, float | None]:
        """Return the operations of steps on one process, in 1e12, and the seconds that they take at its peak rate."""
        total_counts: Counter[str] = Counter()
        for length, num_steps in Counter(lengths).items():
            counts = self._cost.operations(length)
            if counts is None:
                return None, None
            total_counts.update({rate: count * num_steps for rate, count in counts.items()})
        tflop_by_rate = {rate: count * self._share / 1e12 for rate, count in total_counts.items()}
        ideal_s = None
        if self.peaks:
            ideal_s = sum(tflop / self.peaks[rate] for rate, tflop in tflop_by_rate.items())
        return sum(tflop_by_rate.values()), ideal_s

    def _pass_time(self) -> None:
        """Add the time since the last call to the hours."""
        now = time.perf_counter()
        hours = (now - self._last_time) / 3600
        self._last_time = now
        self.spent.wall_hours += hours
        process_hours = getattr(self.spent, self._hours_field) + hours * self.processes
        setattr(self.spent, self._hours_field, process_hours)


def build_meter(
    config: Config,
    assets: ModelAssets,
    device: torch.device,
    mesh: DeviceGrid,
    samples_a_step: int,
    peaks: Mapping[str, float],
    began: float,
) -> UsageMeter:
    """Return the meter of a run; collective if the device is a GPU.

    Args:
        config: of the run.
        assets: of the run.
        device: of this process.
        mesh: of the run's ranks.
        samples_a_step: number of samples per optimizer step, over all processes.
        peaks: rate -> TFLOP/s of the device, see `FlopCounter.operations`; empty if they are not known.
        began: `time.perf_counter` at the start of this part of the run.
    """
    degrees = mesh.degrees
    share = config.trainer.grad_accum_every / degrees.tensor
    sharded = mesh.device_mesh is not None and config.trainer.parallelism.data != "none"
    cost = FlopCounter(config, assets, sharded)
    energy = EnergyMeter(device)
    return UsageMeter(device, degrees.world, cost, share, samples_a_step, peaks, energy, began)


def _sum(total: float | None, addend: float | None) -> float | None:
    """Return the sum, None if either summand is unknown."""
    if total is None or addend is None:
        return None
    return total + addend
