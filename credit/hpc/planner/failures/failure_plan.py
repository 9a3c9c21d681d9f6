"""Failures of a planned run: mean time between failures, times of a checkpoint and a restart, and lost time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from credit.errors import ConfigError
from credit.hpc.planner.failures.checkpoint_interval import compute_best_interval, compute_run_time
from credit.hpc.planner.mesh import MeshPlan
from credit.hpc.planner.plan import Plan
from credit.hpc.planner.planned_run import PlannedRun

# Mean time between failures for each GPU in hours. The training of Llama 3 405B had 419 unexpected interruptions in 54
# days on 16,384 H100 GPUs, which is one failure per 50,677 GPU hours (arXiv 2407.21783, section 3.3.4).
MTBF_HOURS_PER_GPU = 50_000.0
# Assumed bandwidth of the file system for all nodes together, and of the copy from a GPU to host memory.
FILE_SYSTEM_GBS = 10.0
HOST_COPY_GBS = 10.0
# Assumed time in which all ranks agree on a checkpoint, without the copy.
COORDINATION_SECONDS = 0.3
# Assumed time from the start of the processes until training can begin, without reading a checkpoint: imports,
# communicators, data, weights, first batch.
STARTUP_SECONDS = 60.0
# Time until the lost node is treated as dead and the rendezvous of the other nodes is complete, see
# templates/elastic.sh.j2.
RENDEZVOUS_SECONDS = 35.0
# Number of copies of the weights in a checkpoint, without the optimizer state: trained weights and weights for
# forecasts.
_WEIGHT_COPIES = 2


@dataclass(frozen=True)
class FailureAssumptions:
    """Properties of a site that determine a plan of failures.

    Attributes:
        mtbf_hours_per_gpu: mean time between failures for each GPU in hours. Failures of the node and the network are
            included proportionally.
        file_system_gbs: bandwidth of the file system for all nodes together in GB/s.
        startup_seconds: time from the start of the processes until training can begin, without reading a checkpoint.
        stall_seconds: time for which training waits for a checkpoint; None to estimate this time from the size of the
            checkpoint.
    """

    mtbf_hours_per_gpu: float = MTBF_HOURS_PER_GPU
    file_system_gbs: float = FILE_SYSTEM_GBS
    startup_seconds: float = STARTUP_SECONDS
    stall_seconds: float | None = None

    def __post_init__(self) -> None:
        values = {
            "--mtbf-per-gpu": self.mtbf_hours_per_gpu,
            "--file-system": self.file_system_gbs,
            "--startup": self.startup_seconds,
            "--stall": self.stall_seconds,
        }
        for option, value in values.items():
            # The comparison with `not >` is also true for nan.
            if value is not None and not value > 0:
                raise ConfigError(f"{option}: {value:g} must be more than 0")


@dataclass(frozen=True)
class FailurePlan:
    """Plan of the checkpoints and restarts of a run on one mesh. All times are estimates, in seconds.

    Attributes:
        assumptions: properties of the site.
        world: number of GPUs.
        mtbf: mean time between failures of the job.
        checkpoint_bytes: size of a checkpoint in bytes.
        stall_seconds: time for which training waits for a checkpoint.
        write_seconds: time to write a checkpoint while training continues.
        read_seconds: time to read a checkpoint on all ranks.
        work_seconds: time of the run without checkpoints and failures.
        step_seconds: time of an optimizer step.
        configured_steps: number of steps between checkpoints in the config.
    """

    assumptions: FailureAssumptions
    world: int
    mtbf: float
    checkpoint_bytes: float
    stall_seconds: float
    write_seconds: float
    read_seconds: float
    work_seconds: float
    step_seconds: float
    configured_steps: int

    @property
    def restart(self) -> float:
        """Time from a failure until training continues, if the job continues on the remaining nodes."""
        return RENDEZVOUS_SECONDS + self.assumptions.startup_seconds + self.read_seconds

    @property
    def best_steps(self) -> int:
        """Number of steps between checkpoints for which the run is shortest."""
        # A checkpoint must be written before the next checkpoint is copied, and an interval is at most the whole run.
        interval = max(compute_best_interval(self.stall_seconds, self.mtbf), self.write_seconds - self.stall_seconds)
        return max(1, round(min(interval, self.work_seconds) / self.step_seconds))

    def expected_time(self, steps: int) -> float:
        """Return the expected time of the run with a checkpoint every `steps` steps."""
        interval = min(steps * self.step_seconds, self.work_seconds)
        # A copy waits for the end of the previous write.
        stall = max(self.stall_seconds, self.write_seconds - interval)
        return compute_run_time(self.work_seconds, interval, stall, self.write_seconds, self.restart, self.mtbf)

    def lost_share(self, steps: int) -> float:
        """Return the expected fraction of the run that is used for checkpoints, repeated training and restarts.

        Args:
            steps: number of steps between checkpoints.
        """
        return 1 - self.work_seconds / self.expected_time(steps)


def plan_failures(plan: Plan, run: PlannedRun, assumptions: FailureAssumptions) -> FailurePlan:
    """Estimate how often a run on the recommended mesh fails, and how long its checkpoints and restarts take."""
    mesh = plan.best
    world = mesh.degrees.world
    checkpoint_bytes = estimate_checkpoint_bytes(plan, mesh)
    transfer_seconds = checkpoint_bytes / (assumptions.file_system_gbs * 1e9)
    stall = assumptions.stall_seconds
    if stall is None:
        # Each rank copies its part of the weights.
        part_bytes = mesh.memory.parameters * _WEIGHT_COPIES + mesh.memory.optimizer
        stall = COORDINATION_SECONDS + part_bytes / (HOST_COPY_GBS * 1e9)
    steps_per_epoch = run.samples // mesh.samples
    return FailurePlan(
        assumptions=assumptions,
        world=world,
        mtbf=assumptions.mtbf_hours_per_gpu * 3600 / world,
        checkpoint_bytes=checkpoint_bytes,
        stall_seconds=stall,
        write_seconds=transfer_seconds,
        read_seconds=transfer_seconds,
        work_seconds=mesh.hours * 3600,
        step_seconds=mesh.hours * 3600 / mesh.steps,
        configured_steps=run.trainer.checkpoint_every or steps_per_epoch,
    )


def estimate_checkpoint_bytes(plan: Plan, mesh: MeshPlan) -> float:
    """Estimate the bytes of a checkpoint: trained weights, weights for forecasts, and optimizer state."""
    # On every rank, the ratio of optimizer state to weights is the same, except for the remainder of uneven divisions.
    optimizer_copies = mesh.memory.optimizer / mesh.memory.parameters
    return 4 * plan.parameters * (_WEIGHT_COPIES + optimizer_copies)


def format_failures(failures: FailurePlan) -> str:
    """Return the report of a plan of failures, as text with tables in Markdown."""
    assumptions = failures.assumptions
    best, configured = failures.best_steps, failures.configured_steps
    stall_source = "measured (--stall)"
    if assumptions.stall_seconds is None:
        stall_source = f"{COORDINATION_SECONDS:g} s + copy at {HOST_COPY_GBS:g} GB/s per GPU"
    rows = [
        "failures, for the recommended mesh (estimates):",
        f"  one failure every {format_seconds(failures.mtbf)} on {failures.world} GPUs: one per "
        f"{assumptions.mtbf_hours_per_gpu:g} GPU hours (--mtbf-per-gpu)",
        f"  a checkpoint is {failures.checkpoint_bytes / 1e9:.2f} GB: training waits {failures.stall_seconds:.2f} s "
        f"({stall_source}); the checkpoint is written in {failures.write_seconds:.1f} s at "
        f"{assumptions.file_system_gbs:g} GB/s (--file-system)",
        f"  a restart takes {failures.restart:.0f} s = {RENDEZVOUS_SECONDS:g} until the other nodes continue "
        f"(min_nodes; otherwise the wait in the queue) + {assumptions.startup_seconds:g} for the start and the first "
        f"batch (--startup) + {failures.read_seconds:.1f} to read the checkpoint",
        "",
        "| trainer.checkpoint_every | interval | lost fraction of the run | run | |",
        "|---|---|---|---|---|",
        _format_row(failures, best, "best"),
    ]
    if configured != best:
        rows.append(_format_row(failures, configured, "config"))
    return "\n".join(rows)


def failures_to_dict(failures: FailurePlan) -> dict[str, Any]:
    """Return the plan of failures for JSON, in seconds and bytes."""
    intervals = {}
    for name, steps in (("best", failures.best_steps), ("configured", failures.configured_steps)):
        run_seconds = failures.expected_time(steps)
        intervals[name] = {
            "checkpoint_every": steps,
            "interval_seconds": steps * failures.step_seconds,
            "lost_share": failures.lost_share(steps),
            # JSON has no infinity; a run that never ends has the value null.
            "run_seconds": run_seconds if math.isfinite(run_seconds) else None,
        }
    return {
        "mtbf_seconds": failures.mtbf,
        "checkpoint_bytes": failures.checkpoint_bytes,
        "stall_seconds": failures.stall_seconds,
        "write_seconds": failures.write_seconds,
        "restart_seconds": failures.restart,
        "rendezvous_seconds": RENDEZVOUS_SECONDS,
        "startup_seconds": failures.assumptions.startup_seconds,
        "read_seconds": failures.read_seconds,
        **intervals,
    }


def format_seconds(seconds: float) -> str:
    """Return a time as a string in seconds, minutes, hours or days; "never" for infinity."""
    if math.isinf(seconds):
        return "never"
    for unit, length, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.4g} days"


def _format_row(failures: FailurePlan, steps: int, note: str) -> str:
    """Return the row of the Markdown table for a number of steps between checkpoints."""
    return (
        f"| {steps} | {format_seconds(steps * failures.step_seconds)} | {failures.lost_share(steps):.2%} "
        f"| {format_seconds(failures.expected_time(steps))} | {note} |"
    )
