"""Profile of some steps of a run: a table of the phases and a timeline, in the folder ``profile`` of the run.

The profile has two parts, because torch's profiler slows down steps with many small operations. The first part only
measures the times of the phases, for the table. In the second part, torch's profiler records a few steps for the
timeline. The table uses two values of the second part: the hidden communication, and all times of a GPU. The host
cannot measure the times of a GPU, because the GPU runs each kernel some time after its launch.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from credit.errors import CreditError
from credit.train.adamw import AdamW
from credit.train.build.components import TrainingComponents
from credit.train.monitor.flops import choose_compute_precision
from credit.train.profile import table
from credit.train.profile.account import RankAccount, RankSummary, gather_accounts
from credit.train.profile.calibration import measure_rates
from credit.train.profile.collectives import count_sent_bytes, find_newest_collective, record_communication_waits
from credit.train.profile.device_trace import compute_gpu_phase_times
from credit.train.profile.request import TRACED_STEPS, ProfileRequest
from credit.train.profile.spans import (
    Interval,
    SpanRecorder,
    StepAccount,
    compute_phase_times,
    intersect_intervals,
    merge_intervals,
    subtract_intervals,
    total_length,
)
from credit.train.profile.timeline import STEP, Timeline, add_thread_phases, find_collectives, find_steps, write_trace
from credit.utils.atomic import atomic_write_text
from credit.utils.profiling.phases import Phase, recorded_by
from credit.utils.progress import ProgressBar, is_quiet

logger = logging.getLogger(__name__)

FOLDER = "profile"


@contextmanager
def profile_steps(request: ProfileRequest, parts: TrainingComponents, steps_taken: int) -> Iterator[None]:
    """Collective: context manager that profiles the requested steps of the trainer.

    Args:
        request: steps to be profiled.
        parts: the components of the trainer.
        steps_taken: number of optimizer steps before this start of the run.

    Raises:
        ConfigError: if the run does not include all requested steps.
    """
    profiler = StepProfiler(request, parts, steps_taken)
    with profiler.resources:
        yield
        # This line is not reached after an error, because other ranks may no longer exist.
        profiler.finish()


class StepProfiler:
    """Recorder that profiles some steps and then writes table and timeline; its construction is collective.

    Args:
        request: steps to be profiled.
        parts: the components of the trainer.
        steps_taken: number of optimizer steps before this start of the run.

    Attributes:
        resources: stack of the contexts that are open until the profile is complete; the caller must close it.

    Raises:
        ConfigError: if the run does not include all requested steps.
    """

    def __init__(self, request: ProfileRequest, parts: TrainingComponents, steps_taken: int) -> None:
        self._parts = parts
        self._request = request
        self._first_step = request.choose_first_step(steps_taken, parts.total_steps, parts.process_info.world)
        sharded = parts.mesh.device_mesh is not None and parts.config.trainer.parallelism.data != "none"
        self._rate = choose_compute_precision(parts.config, sharded)
        if parts.device.type == "cpu" and self._rate == "tf32":
            # A CPU has no TF32.
            self._rate = "float32"
        # The operations are counted and the rates measured before the first step, so that no step includes this time.
        # Counting takes about a second; without a profile it happens when the first rows are logged.
        self._passes = self._count_operations_by_pass()
        dtype = torch.bfloat16 if self._rate == "bfloat16" else torch.float32
        self._rates = measure_rates(parts.device, dtype)
        if parts.device.type == "cuda":
            # The peak memory in metrics.jsonl must not include the memory of this measurement.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(parts.device)
        self._recorder = SpanRecorder()
        self._timed_windows: list[Interval] = []
        self._traced_windows: list[Interval] = []
        self._step_start = 0.0
        self._is_in_step = False
        self._timeline: Timeline | None = None
        self._step_range: Any = None
        self._newest_collective = -1
        self._sent_bytes: float | None = None
        self._is_complete = False
        self.resources = ExitStack()
        # From now on, the phases of the training step are recorded in this object.
        self.resources.enter_context(recorded_by(self))

    def span(self, name: Phase) -> Any:
        """Return a context manager that records the ``with`` block as a phase."""
        return self._recorder.span(name)

    def begin_step(self, step: int) -> None:
        """Record the start of optimizer step `step` (from 0); begin or end the timing or the trace if it is due.

        This method is collective at the end of the profile.
        """
        now = time.perf_counter()
        number = step + 1
        index = number - self._first_step
        num_timed = self._request.num_steps
        if self._is_complete or (index < 0 and not self._is_in_step):
            return
        if self._is_in_step and index != len(self._timed_windows) + len(self._traced_windows) + 1:
            # After a rollback, the previous step is incomplete and the run repeats earlier steps.
            logger.warning("--profile: the run returned to an earlier step, so the profile ends here")
            self.finish()
            return
        # The previous step has ended.
        if self._timeline is not None:
            self._step_range.__exit__(None, None, None)
            self._traced_windows.append((self._step_start, now))
        elif self._is_in_step:
            self._timed_windows.append((self._step_start, now))
        self._is_in_step = True
        # The next window begins at the end of the last window, so that consecutive windows can be merged.
        self._step_start = now
        if index == 0:
            self._begin_timing()
            self._step_start = time.perf_counter()
        elif index == num_timed:
            self._end_timing()
            self._recorder.is_tracing = True
            self._timeline = Timeline(self._parts.device)
            self._step_start = time.perf_counter()
        elif index == num_timed + TRACED_STEPS:
            self.finish()
            return
        if self._timeline is not None:
            self._step_range = torch.profiler.record_function(f"{STEP}{number}")
            self._step_range.__enter__()

    def finish(self) -> None:
        """Collective: write table and timeline of the completed steps; do nothing in later calls.

        If no step is complete, log a warning instead.
        """
        if self._is_complete:
            return
        self._is_complete = True
        self._recorder.is_tracing = False
        trace = None
        if self._timeline is not None:
            self._timeline.stop()
            trace = self._timeline.export() if self._traced_windows else None
            self._timeline = None
        elif self._timed_windows:
            self._end_timing()
        self.resources.close()
        if self._timed_windows:
            self._write(trace)
        else:
            logger.warning("--profile: no measured step was completed, so there is no table")

    def _begin_timing(self) -> None:
        """Start to record phases and waits for collectives."""
        self._recorder.spans.clear()
        if self._parts.process_info.world > 1 and self._parts.device.type == "cpu":
            self.resources.enter_context(record_communication_waits())
            self._newest_collective = find_newest_collective()

    def _end_timing(self) -> None:
        """Read the number of bytes that were sent during the timed steps from torch's record of collectives."""
        if self._parts.process_info.world > 1 and self._parts.device.type == "cpu":
            num_bytes = count_sent_bytes(self._newest_collective)
            self._sent_bytes = None if num_bytes is None else num_bytes / len(self._timed_windows)

    def _write(self, trace: dict[str, Any] | None) -> None:
        """Collective: gather the accounts of all ranks, and write table and timeline.

        Rank 0 writes the table, and the rank `ProfileRequest.trace_rank` writes the timeline. If a file cannot be
        written, a warning is logged, because the run must not fail for this reason.

        Args:
            trace: Chrome trace of this rank; None if the run ended before the trace was recorded.
        """
        spans = [span for span in self._recorder.spans if span.thread == self._recorder.main_thread]
        host_account = compute_phase_times(spans, self._timed_windows)
        summary = gather_accounts(self._build_account(host_account, trace))
        try:
            self._write_files(summary, host_account, trace)
        except (CreditError, OSError) as error:
            logger.warning("--profile: not written: %s", error)

    def _write_files(self, summary: RankSummary, host_account: StepAccount, trace: dict[str, Any] | None) -> None:
        """Write the table on rank 0, and the timeline on the rank `ProfileRequest.trace_rank`.

        Args:
            summary: accounts of all ranks.
            host_account: account of the host in all timed steps.
            trace: Chrome trace of this rank; None if the run ended before the trace was recorded.

        Raises:
            CreditError, OSError: if a file cannot be written.
        """
        parts = self._parts
        folder = Path(parts.config.save_loc) / FOLDER
        trace_name = None
        if trace is not None:
            trace_name = f"trace_rank{self._request.trace_rank:05d}.json.gz"
            if parts.process_info.rank == self._request.trace_rank:
                folder.mkdir(exist_ok=True)
                offset = find_steps(trace["traceEvents"])[0][0] - self._traced_windows[0][0] * 1e6
                write_trace(
                    folder / trace_name,
                    add_thread_phases(trace, self._traced_spans(), self._recorder.main_thread, offset),
                )
        if not parts.process_info.is_main:
            return
        num_steps = len(self._timed_windows)
        within = {}
        for name, seconds in host_account.communication.items():
            within["outside of all phases" if name is None else name.value] = seconds / num_steps
        steps = table.ProfiledSteps(
            first=self._first_step,
            last=self._first_step + num_steps - 1,
            step_seconds=[end - start for start, end in self._timed_windows],
            clock="device" if self._uses_device_clock(trace) else "host",
            device=_describe_device(parts.device),
            threads=torch.get_num_threads(),
            precision=self._rate,
            passes=self._passes,
            communication_within=within,
            trace=trace_name,
            trace_steps=len(self._traced_windows),
        )
        content = table.to_json(summary, steps, table.build_lines(summary, steps))
        text = table.render(content)
        folder.mkdir(exist_ok=True)
        atomic_write_text(folder / "table.json", json.dumps(content, indent=1) + "\n")
        atomic_write_text(folder / "table.txt", text)
        if not is_quiet():
            ProgressBar.write(f"\n{text}\nThe table is in {folder}; the run continues.", file=sys.stderr)

    def _uses_device_clock(self, trace: dict[str, Any] | None) -> bool:
        """Return True if the times of the phases come from the timeline of a GPU, and not from the host clock."""
        return self._parts.device.type == "cuda" and trace is not None

    def _build_account(self, host_account: StepAccount, trace: dict[str, Any] | None) -> RankAccount:
        """Return the account of this rank, with means per step.

        Args:
            host_account: account of the host in all timed steps.
            trace: Chrome trace of this rank; None if it was not recorded.
        """
        parts = self._parts
        num_steps = len(self._timed_windows)
        common = {
            "rates": self._rates,
            "hidden_loader": self._hidden_seconds(Phase.LOADER) / num_steps,
            "hidden_checkpoint": self._hidden_seconds(Phase.CHECKPOINT) / num_steps,
            "loaded_bytes": float(parts.sample_schedule.bytes_per_step),
            "updated_bytes": _count_updated_bytes(parts),
        }
        if self._uses_device_clock(trace):
            steps = find_steps(trace["traceEvents"])
            account = compute_gpu_phase_times(trace["traceEvents"], steps)
            num_traced = len(steps)
            return RankAccount(
                wall=account.wall / num_traced,
                seconds={name: seconds / num_traced for name, seconds in account.seconds.items()},
                processor_seconds={},
                idle=account.idle / num_traced,
                hidden_communication=account.hidden_communication / num_traced,
                hidden_copy=account.hidden_copies / num_traced,
                sent_bytes=None if account.sent_bytes is None else account.sent_bytes / num_traced,
                **common,
            )
        return RankAccount(
            wall=total_length(self._timed_windows) / num_steps,
            seconds={name: seconds / num_steps for name, seconds in host_account.seconds.items()},
            processor_seconds={name: seconds / num_steps for name, seconds in host_account.processor_seconds.items()},
            hidden_communication=self._hidden_communication(trace),
            sent_bytes=self._sent_bytes,
            **common,
        )

    def _hidden_seconds(self, name: Phase) -> float:
        """Return the seconds in which other threads are in a phase and the main thread is not in this phase.

        The sum includes all timed steps and all other threads.
        """
        windows = merge_intervals(self._timed_windows)
        waits: list[Interval] = []
        threads: dict[int, list[Interval]] = {}
        for span in self._recorder.spans:
            if span.name != name:
                continue
            if span.thread == self._recorder.main_thread:
                waits.append((span.start, span.end))
            else:
                threads.setdefault(span.thread, []).append((span.start, span.end))
        waits = merge_intervals(waits)
        seconds = 0.0
        for intervals in threads.values():
            work = intersect_intervals(merge_intervals(intervals), windows)
            seconds += total_length(subtract_intervals(work, waits))
        return seconds

    def _hidden_communication(self, trace: dict[str, Any] | None) -> float:
        """Return the seconds per traced step in which gloo communicates and the main thread does not wait.

        Args:
            trace: Chrome trace of this rank; None if it was not recorded.
        """
        if trace is None:
            return 0.0
        steps = find_steps(trace["traceEvents"])
        offset = steps[0][0] - self._traced_windows[0][0] * 1e6
        collectives = intersect_intervals(
            merge_intervals(find_collectives(trace["traceEvents"])), merge_intervals(steps)
        )
        waits = []
        for span in self._traced_spans():
            if span.name == Phase.COMMUNICATION and span.thread == self._recorder.main_thread:
                waits.append((span.start * 1e6 + offset, span.end * 1e6 + offset))
        hidden = subtract_intervals(collectives, merge_intervals(waits))
        return total_length(hidden) / 1e6 / len(steps)

    def _traced_spans(self) -> list[Any]:
        """Return the recorded phases that end after the start of the first traced step."""
        start = self._traced_windows[0][0]
        return [span for span in self._recorder.spans if span.end > start]

    def _count_operations_by_pass(self) -> tuple[float, float] | None:
        """Return the mean operations per timed step in the forward and the backward pass, in TFLOP; None if unknown."""
        num_steps = self._request.num_steps
        forward = backward = 0.0
        for step in range(self._first_step - 1, self._first_step - 1 + num_steps):
            length = self._parts.training_step.list_loss_steps(step)[-1]
            passes = self._parts.meter.count_operations_by_pass(length)
            if passes is None:
                return None
            forward += passes[0] / num_steps
            backward += passes[1] / num_steps
        return forward, backward


def _count_updated_bytes(parts: TrainingComponents) -> float | None:
    """Return the bytes that an optimizer step of AdamW reads and writes in memory; None for other optimizers.

    The gradient norm reads the gradient. AdamW reads weight, gradient and two moments, and writes weight and moments.
    The moving average reads the weight and the average, and writes the average.
    """
    # Muon is a subclass of AdamW and reads and writes different amounts.
    if type(parts.optimizer) is not AdamW:
        return None
    passes = 8 if parts.average is None else 11
    num_bytes = 0
    for group in parts.optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            num_bytes += passes * local.numel() * local.element_size()
    return float(num_bytes)


def _describe_device(device: torch.device) -> str:
    """Return the name of a GPU, or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "CPU"
