"""Table of a profile: a line for each phase of a step, with its share of the step time and of the peak rate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from credit.train.profile.account import RankAccount, RankSummary
from credit.utils.profiling.phases import Phase

# Version of the JSON file.
FORMAT = 1


@dataclass(frozen=True)
class ProfiledSteps:
    """Facts about the profiled steps that are the same for all ranks.

    Attributes:
        first: number of the first measured step, from 1.
        last: number of the last measured step.
        step_seconds: seconds of each measured step on the writing rank.
        clock: clock that measured the phases: ``host``, or ``device`` for the timeline of a GPU.
        device: name of the GPU, or CPU.
        threads: number of threads of torch on a rank.
        precision: precision in which the network computes.
        passes: floating-point operations per step and rank in the forward and in the backward pass, in TFLOP; None if
            unknown.
        communication_within: phase -> seconds per step of exposed communication inside this phase, on the writing rank.
        trace: name of the file with the timeline; None if the run ended before it was recorded.
        trace_steps: number of steps in the timeline.
    """

    first: int
    last: int
    step_seconds: Sequence[float]
    clock: str
    device: str
    threads: int
    precision: str
    passes: tuple[float, float] | None
    communication_within: Mapping[str, float]
    trace: str | None
    trace_steps: int


@dataclass(frozen=True)
class Line:
    """Line of the table.

    Attributes:
        name: name of the phase, or of the sum in this line.
        kind: ``phase`` for a part of the step, ``rest`` for the time outside of all phases, ``step`` for the complete
            step, ``hidden`` for work at the same time as the phases.
        seconds: seconds per step on the slowest rank.
        share: fraction of the step time.
        min_seconds: smallest seconds per step of all ranks.
        median_seconds: median of the seconds per step over all ranks.
        max_seconds: largest seconds per step of all ranks.
        processor_seconds: processor seconds per step of the main thread on the slowest rank; None if not measured. If
            they are less than `seconds`, the thread waits for another thread, for the disk or for a busy core.
        tflop: floating-point operations per step and rank, in TFLOP; None if unknown or not counted.
        bytes: bytes per step and rank; None if unknown or not counted.
        peak_share: fraction of the measured peak rate; None if unknown.
    """

    name: str
    kind: str
    seconds: float
    share: float
    min_seconds: float
    median_seconds: float
    max_seconds: float
    processor_seconds: float | None = None
    tflop: float | None = None
    bytes: float | None = None
    peak_share: float | None = None


def build_lines(summary: RankSummary, steps: ProfiledSteps) -> list[Line]:
    """Return the lines of the table: the phases, the time outside of all phases, the step, and the hidden work."""
    account = summary.accounts[summary.slowest_rank]
    lines = []

    def add(name: str, kind: str, read: Callable[[RankAccount], float], **amounts: float | None) -> None:
        of_ranks = [read(account) for account in summary.accounts]
        seconds = of_ranks[summary.slowest_rank]
        share = seconds / account.wall
        statistics_of_ranks = (min(of_ranks), statistics.median(of_ranks), max(of_ranks))
        lines.append(Line(name, kind, seconds, share, *statistics_of_ranks, **amounts))

    for name in Phase:
        amounts = _phase_amounts(name, account, steps)
        if steps.clock == "host":
            amounts["processor_seconds"] = account.processor_seconds.get(name, 0.0)
        add(name.value, "phase", lambda account, name=name: account.seconds.get(name, 0.0), **amounts)
    if steps.clock == "device":
        add("idle", "phase", lambda account: account.idle)
    add("outside of all phases", "rest", lambda account: account.wall - account.accounted_seconds)
    tflop = sum(steps.passes) if steps.passes else None
    peak_share = _flop_share(tflop, account.wall, account)
    add("step", "step", lambda account: account.wall, tflop=tflop, peak_share=peak_share)
    add("communication", "hidden", lambda account: account.hidden_communication)
    add("loader", "hidden", lambda account: account.hidden_loader)
    add("copy to device", "hidden", lambda account: account.hidden_copy)
    add("checkpoint", "hidden", lambda account: account.hidden_checkpoint)
    return lines


def _phase_amounts(name: Phase, account: RankAccount, steps: ProfiledSteps) -> dict[str, float | None]:
    """Return the known operations, bytes and peak share of a phase, as keyword arguments for `Line`."""
    seconds = account.seconds.get(name, 0.0)
    if name in (Phase.FORWARD, Phase.BACKWARD) and steps.passes is not None:
        tflop = steps.passes[name == Phase.BACKWARD]
        return {"tflop": tflop, "peak_share": _flop_share(tflop, seconds, account)}
    if name == Phase.OPTIMIZER:
        return {
            "bytes": account.updated_bytes,
            "peak_share": _rate_share(account.updated_bytes, seconds, account.rates.memory),
        }
    if name == Phase.COMMUNICATION:
        # A collective sends its bytes during its exposed and its hidden time.
        all_seconds = seconds + account.hidden_communication
        return {
            "bytes": account.sent_bytes,
            "peak_share": _rate_share(account.sent_bytes, all_seconds, account.rates.collective),
        }
    if name == Phase.LOADER:
        return {"bytes": account.loaded_bytes}
    return {}


def _flop_share(tflop: float | None, seconds: float, account: RankAccount) -> float | None:
    """Return the operations per second as a fraction of the peak rate of matrix products; None if unknown.

    Args:
        tflop: number of operations in TFLOP.
        seconds: duration of the operations.
        account: account of the rank, with the measured peak rates.
    """
    return _rate_share(None if tflop is None else tflop * 1e12, seconds, account.rates.flops)


def _rate_share(amount: float | None, seconds: float, rate: float | None) -> float | None:
    """Return amount / seconds / rate; None if a value is unknown or 0."""
    if not amount or not seconds or not rate:
        return None
    return amount / seconds / rate


def to_json(summary: RankSummary, steps: ProfiledSteps, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the contents of table.json."""
    account = summary.accounts[summary.slowest_rank]
    content = asdict(steps)
    step_seconds = content.pop("step_seconds")
    return {
        "format": FORMAT,
        **content,
        "ranks": len(summary.accounts),
        "slowest_rank": summary.slowest_rank,
        "work_seconds": [rank_account.work_seconds for rank_account in summary.accounts],
        "step_seconds": {
            "min": min(step_seconds),
            "median": statistics.median(step_seconds),
            "max": max(step_seconds),
        },
        "peak_rates": asdict(account.rates),
        "accounted_share": account.accounted_seconds / account.wall,
        "lines": [asdict(line) for line in lines],
    }


def render(content: Mapping[str, Any]) -> str:
    """Return the contents of table.txt.

    Args:
        content: the contents of table.json, from `to_json`.
    """
    ranks = content["ranks"]
    step_seconds, rates = content["step_seconds"], content["peak_rates"]
    peaks = [
        f"{rates['flops'] / 1e9:.0f} GFLOP/s ({content['precision']})",
        f"memory {rates['memory'] / 1e9:.1f} GB/s",
    ]
    if rates["collective"] is not None:
        peaks.append(f"all-reduce {rates['collective'] / 1e9:.2f} GB/s sent")
    threads = content["threads"]
    lines = [
        f"Profile of steps {content['first']} to {content['last']}: {content['device']}, {ranks} "
        f"rank{'s' * (ranks > 1)}, {threads} thread{'s' * (threads > 1)} each, clock of the {content['clock']}",
        f"Steps on rank 0: {_format_ms(step_seconds['min'])} to {_format_ms(step_seconds['max'])} ms, median "
        f"{_format_ms(step_seconds['median'])} ms",
        f"Measured peak: {', '.join(peaks)}",
    ]
    header = f"{'phase':<24}{'ms/step':>9}{'share':>8}{'CPU ms':>9}{'GFLOP':>10}{'MB':>10}{'of peak':>9}"
    if ranks > 1:
        header += f"{'min':>10}{'median':>10}{'max':>10}"
    lines += ["", header]
    for line in content["lines"]:
        is_empty = line["max_seconds"] == 0.0
        if is_empty and line["kind"] == "hidden":
            continue
        lines.append(_render_line(line, ranks))
        if line["kind"] == "step":
            lines.append("At the same time as these phases (hidden):")
    if lines[-1].startswith("At the same time"):
        lines.pop()
    lines += ["", f"The phases explain {content['accounted_share']:.1%} of the step."]
    if content["communication_within"]:
        parts = [f"{name} {_format_ms(value)}" for name, value in content["communication_within"].items()]
        lines.append(f"Exposed communication on rank 0 waits in (ms): {', '.join(parts)}.")
    if ranks > 1:
        work = content["work_seconds"]
        slowest = content["slowest_rank"]
        others = [seconds for rank, seconds in enumerate(work) if rank != slowest]
        lines.append(
            f"The slowest rank is rank {slowest}: without waiting for other ranks, its step takes "
            f"{_format_ms(work[slowest])} ms, and a step of the other ranks {_format_ms(min(others))} to "
            f"{_format_ms(max(others))} ms. The columns before min show the values of rank {slowest}."
        )
    if content["trace"] is not None:
        lines.append(f"Timeline of the {content['trace_steps']} steps after these: {content['trace']}")
    return "\n".join(lines) + "\n"


def _render_line(line: Mapping[str, Any], ranks: int) -> str:
    """Return a line of the table as a string with aligned columns."""
    processor_seconds = line["processor_seconds"]
    tflop, num_bytes, peak_share = line["tflop"], line["bytes"], line["peak_share"]
    columns = [
        f"{line['name']:<24}{_format_ms(line['seconds']):>9}{line['share']:>8.1%}",
        f"{_format_ms(processor_seconds):>9}" if processor_seconds else f"{'':>9}",
        f"{_format_number(tflop * 1e3):>10}" if tflop else f"{'':>10}",
        f"{_format_number(num_bytes / 1e6):>10}" if num_bytes else f"{'':>10}",
        f"{peak_share:>9.1%}" if peak_share else f"{'':>9}",
    ]
    if ranks > 1:
        for name in ("min_seconds", "median_seconds", "max_seconds"):
            columns.append(f"{_format_ms(line[name]):>10}")
    return "".join(columns).rstrip()


def _format_ms(seconds: float) -> str:
    """Return a time in seconds as a string in milliseconds."""
    return _format_number(seconds * 1e3)


def _format_number(number: float) -> str:
    """Return a number as a string, with two decimals below 100 and without decimals from 100."""
    if abs(number) >= 100:
        return f"{number:.0f}"
    return f"{number:.2f}"
