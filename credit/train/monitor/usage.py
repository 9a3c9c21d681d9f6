"""What a run has used, over all its parts, and how fast it is: time, energy, floating point operations."""

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
from credit.train.assets import ModelAssets
from credit.train.monitor.flops import FlopCounter
from credit.train.monitor.gpu_energy import EnergyMeter


@dataclass
class Usage:
    """What a run has used since it began; saved with every checkpoint.

    Attributes:
        since: optimizer step from which on it is counted; above 0 where another run, or a version that did not count,
            took those before.
        wall_hours: from the start of each part of the run to its end.
        gpu_hours: the same times the number of processes, where each has a GPU.
        process_hours: the same where they have none.
        energy_kwh: of all GPUs; None where not all of it is known.
        step_s: seconds of the steps, without validations and saves.
        wait_s: of these, waiting for data on the main process.
        validation_s: seconds of validations and early views.
        save_s: seconds in which steps waited for checkpoints.
        samples: of the steps in `step_s`, those among them that were taken again.
        tflop: of these steps, a process.
        ideal_s: how long these operations take at the device's peak; None where that is not known.
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
    """Measures a run.

    Args:
        device: of this process.
        processes: of the run.
        cost: of the network for a micro-batch.
        share: micro-batches of an optimizer step over the processes that share each.
        samples_a_step: over all processes.
        peaks: rate -> TFLOP/s of the device, see `FlopCounter.operations`; empty where they are not known.
        energy: of this process's GPU.
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
        self.device, self.processes, self.peaks = device, processes, peaks
        self.samples_a_step = samples_a_step
        self.spent = Usage()
        self._cost, self._share, self._energy = cost, share, energy
        self._seen = began
        self._hours = "gpu_hours" if device.type == "cuda" else "process_hours"

    def resume(self, step: int, stored: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Go on from what a checkpoint says was used before, and from later rows: what was lost was used as well.

        Args:
            step: of the checkpoint.
            stored: what `state` has given, empty from an older version.
            rows: the last of metrics.jsonl, and summary.json.
        """
        known = {one.name for one in fields(Usage)}
        self.spent = Usage(**{name: value for name, value in stored.items() if name in known} or {"since": step})
        rows = [*rows]
        for name in ("wall_hours", "gpu_hours", "process_hours", "energy_kwh"):
            before = getattr(self.spent, name)
            if before is not None:
                setattr(self.spent, name, max([before, *(row[name] for row in rows if name in row)]))

    def state(self) -> dict[str, Any]:
        """Return what was used so far, JSON-ready."""
        self._pass_time()
        return asdict(self.spent)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the seconds of what is done inside as `name` of `Usage`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self.spent, name, getattr(self.spent, name) + time.perf_counter() - began)

    def joules(self) -> float:
        """Return the energy of this process's GPU since the last call; the sum over the ranks is for `add_energy`."""
        return self._energy.take()

    def add_energy(self, joules: float) -> None:
        """Count the energy of all ranks; not finite where any of them does not know its own."""
        total = self.spent.energy_kwh
        self.spent.energy_kwh = total + joules / 3.6e6 if total is not None and math.isfinite(joules) else None

    def add_steps(self, lengths: Sequence[int], seconds: float, wait: float) -> dict[str, float]:
        """Count a stretch of steps and return what the rows of metrics.jsonl say of it.

        Args:
            lengths: how often each step applies the network to a micro-batch.
            seconds: of all of them.
            wait: of these, for data.
        """
        self._pass_time()
        spent, samples = self.spent, len(lengths) * self.samples_a_step
        tflop, ideal = self._work(lengths)
        spent.samples += samples
        spent.step_s += seconds
        spent.wait_s += wait
        spent.tflop, spent.ideal_s = _sum(spent.tflop, tflop), _sum(spent.ideal_s, ideal)
        figures = {
            "samples_per_s": samples / seconds,
            "data_wait_frac": wait / seconds,
            "tflops": None if tflop is None else tflop / seconds,
            "mfu": None if ideal is None else ideal / seconds,
            "wall_hours": spent.wall_hours,
            self._hours: getattr(spent, self._hours),
            "energy_kwh": spent.energy_kwh,
        }
        return {name: value for name, value in figures.items() if value is not None}

    def step_tflop(self, length: int) -> float | None:
        """Return the operations of a step over all processes, in 1e12; None where they are not counted."""
        tflop, _ = self._work([length])
        return None if tflop is None else tflop * self.processes

    def _work(self, lengths: Sequence[int]) -> tuple[float | None, float | None]:
        """Return a process's share of the operations of steps, in 1e12, and the seconds they take at its peak."""
        rates: Counter[str] = Counter()
        for length, times in Counter(lengths).items():
            counts = self._cost.operations(length)
            if counts is None:
                return None, None
            rates.update({rate: count * times for rate, count in counts.items()})
        work = {rate: count * self._share / 1e12 for rate, count in rates.items()}
        ideal = sum(tflop / self.peaks[rate] for rate, tflop in work.items()) if self.peaks else None
        return sum(work.values()), ideal

    def _pass_time(self) -> None:
        now = time.perf_counter()
        hours, self._seen = (now - self._seen) / 3600, now
        self.spent.wall_hours += hours
        setattr(self.spent, self._hours, getattr(self.spent, self._hours) + hours * self.processes)


def build_meter(
    config: Config,
    assets: ModelAssets,
    device: torch.device,
    mesh: DeviceGrid,
    samples_a_step: int,
    peaks: Mapping[str, float],
    began: float,
) -> UsageMeter:
    """Return the meter of a run that began at `began` (`time.perf_counter`); collective on GPUs."""
    degrees = mesh.degrees
    share = config.trainer.grad_accum_every / degrees.tensor
    sharded = mesh.device_mesh is not None and config.trainer.parallelism.data != "none"
    cost, energy = FlopCounter(config, assets, sharded), EnergyMeter(device)
    return UsageMeter(device, degrees.world, cost, share, samples_a_step, peaks, energy, began)


def _sum(total: float | None, more: float | None) -> float | None:
    return None if total is None or more is None else total + more
