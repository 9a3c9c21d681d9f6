"""Failures of a planned run: mean time between them, cost of a checkpoint and of a restart, and lost time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from credit.errors import ConfigError
from credit.hpc.planner.failures.checkpoint_interval import best_interval, run_time
from credit.hpc.planner.mesh import MeshPlan
from credit.hpc.planner.plan import Plan
from credit.hpc.planner.planned_run import PlannedRun

# Mean time between failures for each GPU in hours. The training of Llama 3 405B had 419 unexpected interruptions in 54
# days on 16,384 H100 GPUs, which is one in 50,677 hours of a GPU (arXiv 2407.21783, section 3.3.4).
MTBF_HOURS_PER_GPU = 50_000.0
# Bandwidth of the file system for all nodes together, and of the copy from a GPU to host memory. Assumed.
FILE_SYSTEM_GBS = 10.0
HOST_COPY_GBS = 10.0
# Time in which all ranks agree on a checkpoint, without the copy. Assumed.
COORDINATION_SECONDS = 0.3
# Time from the start of the processes until training could begin without a checkpoint: imports, communicators, data,
# weights, first batch. Assumed.
STARTUP_SECONDS = 60.0
# Time until the lost node counts as dead and the others have met again, see templates/elastic.sh.j2.
RENDEZVOUS_SECONDS = 35.0
# Copies of the weights in a checkpoint besides the optimizer's state: those that are trained and those that forecast.
_WEIGHT_COPIES = 2


@dataclass(frozen=True)
class FailureAssumptions:
    """Properties of a site that a plan of failures needs.

    Attributes:
        mtbf_hours_per_gpu: mean time between failures for each GPU in hours; it includes its share of the node and of
            the network.
        file_system_gbs: bandwidth of the file system for all nodes together in GB/s.
        startup_seconds: time from the start of the processes until training could begin without a checkpoint.
        stall_seconds: time in which training waits for a checkpoint; None to estimate it from its size.
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
            # `not >` also refuses nan.
            if value is not None and not value > 0:
                raise ConfigError(f"{option}: {value:g} must be more than 0")


@dataclass(frozen=True)
class FailurePlan:
    """Plan of the checkpoints and restarts of a run on one mesh. All times are estimates, in seconds.

    Attributes:
        assumptions: properties of the site.
        world: number of GPUs.
        mtbf: mean time between failures of the job.
        checkpoint_bytes: size of a checkpoint.
        stall: time in which training waits for a checkpoint.
        write: time until a checkpoint is written, while training goes on.
        read: time in which all ranks read a checkpoint.
        work: time of the run without checkpoints and failures.
        step: time of an optimizer step.
        configured_steps: present number of steps between checkpoints.
    """

    assumptions: FailureAssumptions
    world: int
    mtbf: float
    checkpoint_bytes: float
    stall: float
    write: float
    read: float
    work: float
    step: float
    configured_steps: int

    @property
    def restart(self) -> float:
        """Time from a failure until training goes on, if the job goes on with the nodes that are left."""
        return RENDEZVOUS_SECONDS + self.assumptions.startup_seconds + self.read

    @property
    def best_steps(self) -> int:
        """Number of steps between checkpoints with which the run is shortest."""
        # A checkpoint must be written before the next one is copied, and an interval is no longer than the run.
        interval = max(best_interval(self.stall, self.mtbf), self.write - self.stall)
        return max(1, round(min(interval, self.work) / self.step))

    def expected_time(self, steps: int) -> float:
        """Return the expected time of the run with a checkpoint every `steps` steps."""
        interval = min(steps * self.step, self.work)
        # A copy waits for the previous write.
        stall = max(self.stall, self.write - interval)
        return run_time(self.work, interval, stall, self.write, self.restart, self.mtbf)

    def lost_share(self, steps: int) -> float:
        """Return the expected share of the run that checkpoints, repeated training and restarts take."""
        return 1 - self.work / self.expected_time(steps)


def plan_failures(plan: Plan, run: PlannedRun, assumptions: FailureAssumptions) -> FailurePlan:
    """Return the plan of failures of the recommended mesh."""
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
        stall=stall,
        write=transfer_seconds,
        read=transfer_seconds,
        work=mesh.hours * 3600,
        step=mesh.hours * 3600 / mesh.steps,
        configured_steps=run.trainer.checkpoint_every or steps_per_epoch,
    )


def estimate_checkpoint_bytes(plan: Plan, mesh: MeshPlan) -> float:
    """Return the bytes of a checkpoint: weights that are trained, weights that forecast, and the optimizer's state."""
    # The optimizer has the same state for each weight on every rank, up to the rest of an uneven division.
    optimizer_copies = mesh.memory.optimizer / mesh.memory.parameters
    return 4 * plan.parameters * (_WEIGHT_COPIES + optimizer_copies)


def format_failures(failures: FailurePlan) -> str:
    """Return the plan of failures as text with tables in Markdown."""
    assumptions = failures.assumptions
    best, configured = failures.best_steps, failures.configured_steps
    stall_source = "measured (--stall)"
    if assumptions.stall_seconds is None:
        stall_source = f"{COORDINATION_SECONDS:g} s + copy at {HOST_COPY_GBS:g} GB/s a GPU"
    rows = [
        "failures, for the recommended mesh (estimates):",
        f"  a failure every {format_seconds(failures.mtbf)} on {failures.world} GPUs: one in "
        f"{assumptions.mtbf_hours_per_gpu:g} hours of a GPU (--mtbf-per-gpu)",
        f"  a checkpoint has {failures.checkpoint_bytes / 1e9:.2f} GB: training waits {failures.stall:.2f} s "
        f"({stall_source}); it is written in {failures.write:.1f} s at {assumptions.file_system_gbs:g} GB/s "
        "(--file-system)",
        f"  a restart takes {failures.restart:.0f} s = {RENDEZVOUS_SECONDS:g} until the other nodes go on (min_nodes; "
        f"else the wait in the queue) + {assumptions.startup_seconds:g} for the start and the first batch (--startup) "
        f"+ {failures.read:.1f} to read the checkpoint",
        "",
        "| trainer.checkpoint_every | interval | lost share of the run | run | |",
        "|---|---|---|---|---|",
        _format_row(failures, best, "best"),
    ]
    if configured != best:
        rows.append(_format_row(failures, configured, "the config's"))
    return "\n".join(rows)


def failures_to_dict(failures: FailurePlan) -> dict[str, Any]:
    """Return the plan of failures for JSON, in seconds and bytes."""
    intervals = {}
    for name, steps in (("best", failures.best_steps), ("configured", failures.configured_steps)):
        run_seconds = failures.expected_time(steps)
        intervals[name] = {
            "checkpoint_every": steps,
            "interval_seconds": steps * failures.step,
            "lost_share": failures.lost_share(steps),
            # JSON has no infinity, which stands for a run that never ends.
            "run_seconds": run_seconds if math.isfinite(run_seconds) else None,
        }
    return {
        "mtbf_seconds": failures.mtbf,
        "checkpoint_bytes": failures.checkpoint_bytes,
        "stall_seconds": failures.stall,
        "write_seconds": failures.write,
        "restart_seconds": failures.restart,
        "rendezvous_seconds": RENDEZVOUS_SECONDS,
        "startup_seconds": failures.assumptions.startup_seconds,
        "read_seconds": failures.read,
        **intervals,
    }


def format_seconds(seconds: float) -> str:
    """Return a time as text in seconds, minutes, hours or days; "never" for infinity."""
    if math.isinf(seconds):
        return "never"
    for unit, length, limit in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 48)):
        if seconds < limit * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.4g} days"


def _format_row(failures: FailurePlan, steps: int, note: str) -> str:
    """Return the table row of one number of steps between checkpoints."""
    return (
        f"| {steps} | {format_seconds(steps * failures.step)} | {failures.lost_share(steps):.2%} "
        f"| {format_seconds(failures.expected_time(steps))} | {note} |"
    )
