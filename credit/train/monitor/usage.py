"""Resource usage of a run over all its parts: time, energy, floating-point operations and speed.

A part of a run begins with a start of the program and ends when the program ends. A resumed run has several parts.
"""

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
from credit.train.monitor.gpu_energy import RankEnergyMeter


@dataclass
class Usage:
    """Resources that a run has used since its start; saved with every checkpoint.

    Attributes:
        since: number of optimizer steps that were taken before the usage was counted; above 0 if a different run, or a
            version of credit that does not count the usage, took these steps.
        wall_hours: wall-clock hours of all parts of the run.
        gpu_hours: wall-clock hours times the number of processes, if each process has a GPU; else 0.
        process_hours: wall-clock hours times the number of processes, if the processes have no GPUs; else 0.
        energy_kwh: energy of all GPUs; None if the energy of a GPU or of a part of the run is unknown.
        step_s: seconds of the optimizer steps, without validations and saves.
        wait_s: seconds of `step_s` in which the main process waited for data.
        validation_s: seconds of validations and previews.
        save_s: seconds in which training waited for checkpoints.
        samples: number of samples of the steps in `step_s`, including steps that were repeated.
        tflop: floating-point operations of the steps in `step_s` on one process, in TFLOP; None if they cannot be
            counted.
        ideal_s: seconds that the operations in `tflop` would take at the peak rate of the device; None if the peak rate
            is unknown.
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
        device: the device of this process.
        processes: number of processes of the run.
        flop_counter: counter of the network's floating-point operations for a micro-batch; None on ranks other than
            rank 0, because only rank 0 logs and saves the usage.
        micro_batches: number of micro-batches that a process computes per optimizer step, times the number of ensemble
            members. If n processes share a micro-batch, the number is divided by n.
        samples_per_step: number of samples per optimizer step, over all processes.
        peak_rates: precision -> peak rate of the device in TFLOP/s; empty if unknown. The precisions are the keys of
            `FlopCounter.count_operations_by_precision`.
        energy_meter: meter of the energy of this process's GPU.
        start_time: `time.perf_counter` at the start of this part of the run.

    Attributes:
        device: the device of this process.
        processes: number of processes of the run.
        peak_rates: precision -> peak rate of the device in TFLOP/s; empty if unknown.
        samples_per_step: number of samples per optimizer step, over all processes.
        spent: the usage of the run so far.
    """

    def __init__(
        self,
        device: torch.device,
        processes: int,
        flop_counter: FlopCounter | None,
        micro_batches: float,
        samples_per_step: int,
        peak_rates: Mapping[str, float],
        energy_meter: RankEnergyMeter,
        start_time: float,
    ) -> None:
        self.device = device
        self.processes = processes
        self.peak_rates = peak_rates
        self.samples_per_step = samples_per_step
        self.spent = Usage()
        self._flop_counter = flop_counter
        self._micro_batches = micro_batches
        self._energy_meter = energy_meter
        self._last_time = start_time
        self._hours_field = "gpu_hours" if device.type == "cuda" else "process_hours"

    def resume(self, step: int, stored: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue from the usage in a checkpoint.

        The time and energy of lost steps after the checkpoint are included in the usage.

        Args:
            step: number of optimizer steps of the checkpoint.
            stored: return value of `to_dict` in the checkpoint; empty if the checkpoint contains no usage.
            rows: the last rows of metrics.jsonl, and the contents of summary.json.
        """
        field_names = {field.name for field in fields(Usage)}
        stored_fields = {name: value for name, value in stored.items() if name in field_names}
        self.spent = Usage(**stored_fields) if stored_fields else Usage(since=step)
        # Hours and energy only grow, so the largest value is the latest, and includes steps that will be repeated.
        rows = list(rows)
        for name in ("wall_hours", "gpu_hours", "process_hours", "energy_kwh"):
            stored_value = getattr(self.spent, name)
            # If the energy was unknown in one part of the run, it stays unknown for the whole run.
            if stored_value is not None:
                logged_values = [row[name] for row in rows if name in row]
                setattr(self.spent, name, max([stored_value, *logged_values]))

    def to_dict(self) -> dict[str, Any]:
        """Return the usage up to now as values that JSON can express."""
        self._add_elapsed_time()
        return asdict(self.spent)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the seconds of the ``with`` block and add them to the field `name` of `Usage`."""
        start_time = time.perf_counter()
        try:
            yield
        finally:
            total_seconds = getattr(self.spent, name) + time.perf_counter() - start_time
            setattr(self.spent, name, total_seconds)

    def pop_joules(self) -> float:
        """Return the joules that this process's GPU has used since the last call; NaN if the energy is unknown.

        The caller sums the joules of all ranks and passes the sum to `add_energy`.
        """
        return self._energy_meter.pop_joules()

    def add_energy(self, joules: float) -> None:
        """Add the energy of all ranks to the usage.

        Args:
            joules: sum over all ranks. If the sum is NaN, the total energy becomes unknown.
        """
        total_kwh = self.spent.energy_kwh
        if total_kwh is not None and math.isfinite(joules):
            # 1 kWh is 3.6e6 J.
            self.spent.energy_kwh = total_kwh + joules / 3.6e6
        else:
            # A sum over only some ranks or steps could be mistaken for the energy of the run.
            self.spent.energy_kwh = None

    def add_steps(self, lengths: Sequence[int], seconds: float, wait: float) -> dict[str, float]:
        """Add consecutive steps and return the fields of their rows in metrics.jsonl.

        Args:
            lengths: number of rollout steps of each optimizer step.
            seconds: total duration of these optimizer steps.
            wait: part of `seconds` in which this process waited for data.

        Returns:
            Name of a field -> value; unknown values are omitted. Hours and energy are the totals of the run so far.
        """
        self._add_elapsed_time()
        spent = self.spent
        # A total of the run becomes unknown if one of its parts is unknown.
        samples = len(lengths) * self.samples_per_step
        tflop, ideal_s = self._count_operations(lengths)
        spent.samples += samples
        spent.step_s += seconds
        spent.wait_s += wait
        spent.tflop = _sum(spent.tflop, tflop)
        spent.ideal_s = _sum(spent.ideal_s, ideal_s)
        row = {
            "samples_per_s": samples / seconds,
            "data_wait_frac": wait / seconds,
            "tflops": _divide(tflop, seconds),
            "mfu": _divide(ideal_s, seconds),
            "wall_hours": spent.wall_hours,
            self._hours_field: getattr(spent, self._hours_field),
            "energy_kwh": spent.energy_kwh,
        }
        return {name: value for name, value in row.items() if value is not None}

    def count_step_tflop(self, length: int) -> float | None:
        """Return the floating-point operations of one optimizer step over all processes, in TFLOP.

        Args:
            length: number of rollout steps of the optimizer step.

        Returns:
            The operations; None if they cannot be counted.
        """
        tflop, _ = self._count_operations([length])
        if tflop is None:
            return None
        return tflop * self.processes

    def count_operations_by_pass(self, length: int) -> tuple[float, float] | None:
        """Return the floating-point operations of one optimizer step on this process, in TFLOP.

        Args:
            length: number of rollout steps of the optimizer step.

        Returns:
            (operations of the forward pass, operations of the backward pass); None if they cannot be counted, and on
            all ranks other than rank 0.
        """
        passes = self._flop_counter.count_operations_by_pass(length) if self._flop_counter is not None else None
        if passes is None:
            return None
        forward, backward = passes
        return forward * self._micro_batches / 1e12, backward * self._micro_batches / 1e12

    def _count_operations(self, lengths: Sequence[int]) -> tuple[float | None, float | None]:
        """Return the operations of optimizer steps on one process, and their ideal duration at the peak rates.

        Args:
            lengths: number of rollout steps of each optimizer step.

        Returns:
            (operations in TFLOP, ideal duration in seconds). Both are None if the operations are not counted; the
            duration is also None if the peak rates are unknown.
        """
        if self._flop_counter is None:
            return None, None
        # precision -> operations of all steps for one micro-batch. Steps of the same length have the same operations.
        total_counts: Counter[str] = Counter()
        for length, num_steps in Counter(lengths).items():
            counts = self._flop_counter.count_operations_by_precision(length)
            if counts is None:
                return None, None
            for rate, count in counts.items():
                total_counts[rate] += count * num_steps
        tflop_by_rate = {rate: count * self._micro_batches / 1e12 for rate, count in total_counts.items()}
        ideal_s = None
        if self.peak_rates:
            # Peak rates are in TFLOP/s.
            ideal_s = sum(tflop / self.peak_rates[rate] for rate, tflop in tflop_by_rate.items())
        return sum(tflop_by_rate.values()), ideal_s

    def _add_elapsed_time(self) -> None:
        """Add the time since the last call to the hours in `spent`."""
        now = time.perf_counter()
        hours = (now - self._last_time) / 3600
        self._last_time = now
        self.spent.wall_hours += hours
        # `_hours_field` is "gpu_hours" or "process_hours"; both count every process.
        process_hours = getattr(self.spent, self._hours_field) + hours * self.processes
        setattr(self.spent, self._hours_field, process_hours)


def build_usage_meter(
    config: Config,
    assets: ModelAssets,
    device: torch.device,
    mesh: DeviceGrid,
    samples_per_step: int,
    peak_rates: Mapping[str, float],
    start_time: float,
) -> UsageMeter:
    """Collective if the device is a GPU: return the usage meter of a run.

    Args:
        config: the config of the run.
        assets: the assets of the model.
        device: the device of this process.
        mesh: position of this rank in the device mesh.
        samples_per_step: number of samples per optimizer step, over all processes.
        peak_rates: precision -> peak rate of the device in TFLOP/s; empty if unknown. The precisions are the keys of
            `FlopCounter.count_operations_by_precision`.
        start_time: `time.perf_counter` at the start of this part of the run.
    """
    degrees = mesh.degrees
    # Each ensemble member is a separate batch. Recomputing members does not count as work.
    micro_batches = config.trainer.grad_accum_every * config.trainer.members
    # The ranks of a tensor-parallel or domain group share the operations of each batch. The ranks of an ensemble group
    # share the members.
    micro_batches /= degrees.ranks_per_sample
    sharded = mesh.device_mesh is not None and config.trainer.parallelism.data != "none"
    # Counting takes a second or more on a CPU, and only rank 0 writes the rows, the checkpoints and the summary.
    flop_counter = FlopCounter(config, assets, sharded) if mesh.rank == 0 else None
    energy_meter = RankEnergyMeter(device)
    return UsageMeter(
        device, degrees.world, flop_counter, micro_batches, samples_per_step, peak_rates, energy_meter, start_time
    )


def _divide(amount: float | None, seconds: float) -> float | None:
    """Return the amount per second, None if the amount is unknown."""
    if amount is None:
        return None
    return amount / seconds


def _sum(total: float | None, addend: float | None) -> float | None:
    """Return the sum of a total and an addend; None if one of them is unknown."""
    if total is None or addend is None:
        return None
    return total + addend
