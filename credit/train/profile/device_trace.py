"""Time of a GPU in each phase of a step, computed from a recorded timeline.

A GPU runs a kernel some time after the host has launched it. So each kernel is assigned to the phase in which the host
launched it. Copies within the GPU and from the GPU to the host are assigned in the same way. Copies from the host to
the GPU transfer batches. At each moment, the GPU is in exactly one state: it computes; or it only communicates
(exposed communication); or it only copies from the host; or it has no work.

Events are the events of a Chrome trace that torch's profiler exports; ``ts`` and ``dur`` are in microseconds.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from credit.train.profile.collectives import BYTES_PER_VALUE, compute_sent_bytes
from credit.train.profile.spans import (
    CLOSED_PHASES,
    Interval,
    intersect_intervals,
    merge_intervals,
    subtract_intervals,
    total_length,
)
from credit.utils.profiling.phases import Phase

# Categories of events in a trace.
_KERNELS = ("kernel", "gpu_memset")
_COPY = "gpu_memcpy"
# Prefix of the names of copies from the host, such as "Memcpy HtoD (Pinned -> Device)".
_HOST_TO_DEVICE = "Memcpy HtoD"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ANNOTATION = "user_annotation"
# Prefixes of the names of collective kernels in NCCL and in AMD's RCCL.
_COLLECTIVE_KERNELS = ("nccl", "rccl")
# If the GPU has no work while the host is in one of these phases, the GPU waits for this phase.
_WAITED_FOR = (Phase.LOADER, Phase.COPY, Phase.LOGGING, Phase.CHECKPOINT, Phase.VALIDATION)


@dataclass(frozen=True)
class DeviceAccount:
    """Time of a GPU in each phase, summed over some steps.

    Attributes:
        wall: elapsed seconds of the steps.
        seconds: phase -> seconds; communication is the exposed part. The phases and `idle` are disjoint.
        hidden_communication: seconds of communication during which the GPU also computed.
        hidden_copies: seconds of copies from the host during which the GPU also computed or communicated.
        idle: seconds in which the GPU had no work, because the host had launched no further kernel.
        sent_bytes: bytes that this rank sent in collectives; None if the trace does not contain the sizes.
    """

    wall: float
    seconds: dict[Phase, float]
    hidden_communication: float
    hidden_copies: float
    idle: float
    sent_bytes: float | None


def compute_gpu_phase_times(events: Iterable[Mapping[str, Any]], windows: Sequence[Interval]) -> DeviceAccount:
    """Return the time of a GPU in each phase of the steps.

    Args:
        events: events of the trace.
        windows: (start, end) of the steps in microseconds on the clock of the trace; disjoint and in increasing order.
    """
    windows = merge_intervals(windows)
    complete_events = [event for event in events if event.get("ph") == "X"]
    host_phases = _HostPhases(complete_events)
    work = _classify_gpu_work(complete_events, host_phases)

    # `busy` contains the time of all states so far. Each further state gets only its time outside of `busy`.
    seconds: dict[Phase, float] = defaultdict(float)
    busy: list[Interval] = []
    for name, intervals in work.compute.items():
        remainder = subtract_intervals(intersect_intervals(merge_intervals(intervals), windows), busy)
        if name is not None:
            seconds[name] += total_length(remainder) / 1e6
        busy = merge_intervals(busy + remainder)
    all_communication = intersect_intervals(merge_intervals(work.communication), windows)
    exposed_communication = subtract_intervals(all_communication, busy)
    seconds[Phase.COMMUNICATION] += total_length(exposed_communication) / 1e6
    busy = merge_intervals(busy + exposed_communication)
    all_copies = intersect_intervals(merge_intervals(work.copies), windows)
    exposed_copies = subtract_intervals(all_copies, busy)
    seconds[Phase.COPY] += total_length(exposed_copies) / 1e6
    busy = merge_intervals(busy + exposed_copies)

    # The remaining time is assigned to the phase of the host that the GPU waits for, or otherwise to `idle`.
    idle = 0.0
    for start, end, name in host_phases.split_at_changes(subtract_intervals(windows, busy)):
        if name in _WAITED_FOR:
            seconds[name] += (end - start) / 1e6
        elif name is not None:
            idle += (end - start) / 1e6
    return DeviceAccount(
        wall=total_length(windows) / 1e6,
        seconds=dict(seconds),
        hidden_communication=(total_length(all_communication) - total_length(exposed_communication)) / 1e6,
        hidden_copies=(total_length(all_copies) - total_length(exposed_copies)) / 1e6,
        idle=idle,
        sent_bytes=_count_sent_bytes(work.collective_kernels),
    )


class _HostPhases:
    """Innermost phase of the host at each time.

    Args:
        events: events of the trace.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        names = set(Phase)
        annotations = [event for event in events if event.get("cat") == _ANNOTATION and event["name"] in names]
        # Times at which the phase changes, and the phase after each change. When an inner phase ends, the outer phase
        # continues.
        self._times: list[float] = []
        self._names: list[Phase | None] = []
        stack: list[tuple[float, Phase]] = []
        for event in sorted(annotations, key=lambda event: (event["ts"], -event["dur"])):
            self._close_until(stack, event["ts"])
            name = Phase(event["name"])
            if stack and stack[-1][1] in CLOSED_PHASES:
                name = stack[-1][1]
            stack.append((event["ts"] + event["dur"], name))
            self._add_change(event["ts"], name)
        self._close_until(stack, float("inf"))

    def find_phase(self, time: float) -> Phase | None:
        """Return the innermost phase at a time; None outside of all phases."""
        index = bisect.bisect_right(self._times, time) - 1
        if index < 0:
            return None
        return self._names[index]

    def split_at_changes(self, intervals: Iterable[Interval]) -> Iterable[tuple[float, float, Phase | None]]:
        """Yield (start, end, phase) for the pieces of the intervals; the phase is constant within each piece."""
        for start, end in intervals:
            while start < end:
                index = bisect.bisect_right(self._times, start)
                piece_end = end
                if index < len(self._times):
                    piece_end = min(end, self._times[index])
                yield start, piece_end, self.find_phase(start)
                start = piece_end

    def _close_until(self, stack: list[tuple[float, Phase]], time: float) -> None:
        """Remove the phases that end at or before a time from the stack of open phases."""
        while stack and stack[-1][0] <= time:
            end, _ = stack.pop()
            outer_name = stack[-1][1] if stack else None
            self._add_change(end, outer_name)

    def _add_change(self, time: float, name: Phase | None) -> None:
        """Add a change of the phase; if several changes have the same time, the last change is used."""
        if self._times and self._times[-1] == time:
            self._names[-1] = name
        else:
            self._times.append(time)
            self._names.append(name)


@dataclass(frozen=True)
class _DeviceWork:
    """Intervals in which a GPU works, in microseconds; intervals of different streams may overlap.

    Attributes:
        compute: phase in which the host launched the work -> intervals of kernels, of copies within the GPU and of
            copies to the host.
        communication: intervals of collectives.
        copies: intervals of copies from the host.
        collective_kernels: events of the collectives.
    """

    compute: dict[Phase | None, list[Interval]]
    communication: list[Interval]
    copies: list[Interval]
    collective_kernels: list[Mapping[str, Any]]


def _classify_gpu_work(events: Sequence[Mapping[str, Any]], host_phases: _HostPhases) -> _DeviceWork:
    """Return the work of a GPU, separated into computation, communication and copies from the host.

    Args:
        events: events of the trace.
        host_phases: phases of the host.
    """
    launch_times = _find_launch_times(events)
    work = _DeviceWork(defaultdict(list), [], [], [])
    for event in events:
        interval = (event["ts"], event["ts"] + event["dur"])
        category = event.get("cat")
        if category == _COPY and event["name"].startswith(_HOST_TO_DEVICE):
            work.copies.append(interval)
        elif category in _KERNELS and event["name"].lower().startswith(_COLLECTIVE_KERNELS):
            work.communication.append(interval)
            work.collective_kernels.append(event)
        elif category in (*_KERNELS, _COPY):
            launch_time = launch_times.get(event["args"].get("correlation"), event["ts"])
            work.compute[host_phases.find_phase(launch_time)].append(interval)
    return work


def _find_launch_times(events: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return a dict: correlation number of a kernel -> time at which the host launched the kernel."""
    launch_times = {}
    for event in events:
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {}):
            launch_times[event["args"]["correlation"]] = event["ts"]
    return launch_times


def _count_sent_bytes(collective_kernels: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the bytes that this rank sent in collectives; None if the event of a collective contains no size."""
    num_bytes = 0.0
    for event in collective_kernels:
        args = event["args"]
        if "In msg nelems" not in args:
            return None
        value_bytes = BYTES_PER_VALUE.get(args.get("dtype"), 4)
        input_bytes = args["In msg nelems"] * value_bytes
        output_bytes = args["Out msg nelems"] * value_bytes
        num_bytes += compute_sent_bytes(args["Collective name"], input_bytes, output_bytes, args["Group size"])
    return num_bytes
