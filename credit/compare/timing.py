"""Paired measurement of the time and the operations of an optimizer step of each run.

The load of a machine changes within minutes. Each round therefore times all runs by short training runs, one after the
other, and the order of the runs rotates between rounds. The cost of a run is the median over the rounds.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from credit.compare.budget import StepCost
from credit.compare.execution import ComparisonPart, Executor
from credit.compare.runs import ComparedRun
from credit.train.monitor.run_files import iterate_rows_with_key, read_summary
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# Number of steps of one time measurement. A measurement of each single step would wait for the GPU after every step.
_STEPS_PER_MEASUREMENT = 3


@dataclass(frozen=True)
class TimingPlan:
    """Numbers of steps, rounds and processes of the measurement of step costs.

    Attributes:
        steps: number of optimizer steps of a short training run.
        rounds: number of short training runs of each config.
        ranks: number of processes of each training run.
    """

    steps: int
    rounds: int
    ranks: int


def measure_step_costs(
    runs: Sequence[ComparedRun], config_paths: Mapping[str, Path], plan: TimingPlan, executor: Executor, folder: Path
) -> dict[str, StepCost]:
    """Return the cost of a step of each run; measure the runs that have no entry in ``timing.json``.

    Runs that are added later are timed together with the first run. For each added run, the ratio of its time to the
    time of the first run is computed in each round. The step time of the added run is the median ratio, multiplied by
    the earlier step time of the first run. So the added run can be compared with runs that were measured under a
    different load.

    Args:
        runs: all runs of the comparison.
        config_paths: name of a run -> its config file.
        plan: numbers of steps, rounds and processes of the measurement.
        executor: executor that starts the short training runs.
        folder: folder of the comparison.

    Returns:
        Name of a run -> cost of a step. A run has no entry if a short training run of it failed.
    """
    path = folder / "timing.json"
    document: dict[str, Any] = {"costs": {}, "sessions": []}
    if path.exists():
        document = json.loads(path.read_text(encoding="utf-8"))
    costs = {name: StepCost(**values) for name, values in document["costs"].items()}
    missing = [run for run in runs if run.name not in costs]
    if missing:
        reference = next((run for run in runs if run.name in costs), None)
        timed_runs = missing if reference is None else [reference, *missing]
        session = _time_in_rounds(timed_runs, config_paths, plan, executor, folder)
        reference_name = None if reference is None else reference.name
        for name, cost in compute_session_costs(session, reference_name, costs).items():
            costs.setdefault(name, cost)
        document["sessions"].append(session)
        document["costs"] = {name: vars(cost) for name, cost in costs.items()}
        atomic_write_text(path, json.dumps(document, indent=1) + "\n")
    return {run.name: costs[run.name] for run in runs if run.name in costs}


def rotate_order(names: Sequence[str], round_number: int) -> list[str]:
    """Return the order in which runs are timed in a round: each round starts with the next run.

    Args:
        names: names of the runs.
        round_number: number of the round, from 0.
    """
    start = round_number % max(len(names), 1)
    return [*names[start:], *names[:start]]


def _time_in_rounds(
    runs: Sequence[ComparedRun], config_paths: Mapping[str, Path], plan: TimingPlan, executor: Executor, folder: Path
) -> list[dict[str, Any]]:
    """Time all runs in rounds and return a record of each short training run.

    A record has the keys ``name``, ``round``, ``seconds`` and ``operations``; the last two are the cost of a step. If a
    short training run fails, its config is not timed again and has no records.

    Args:
        runs: the runs to time.
        config_paths: name of a run -> its config file.
        plan: numbers of steps, rounds and processes of the measurement.
        executor: executor that starts the short training runs.
        folder: folder of the comparison.
    """
    by_name = {run.name: run for run in runs}
    failed: set[str] = set()
    records = []
    for round_number in range(plan.rounds):
        remaining = [name for name in by_name if name not in failed]
        for name in rotate_order(remaining, round_number):
            run_folder = folder / "timing" / f"{name}_round_{round_number}"
            # An interrupted short run is repeated from its start, because the first steps of a process are slower.
            shutil.rmtree(run_folder, ignore_errors=True)
            part = ComparisonPart(
                f"time {name}, round {round_number + 1}",
                "train",
                config_paths[name],
                build_timing_overrides(by_name[name], plan.steps, run_folder),
                run_folder / "summary.json",
                ranks=plan.ranks,
            )
            if not executor.run(part, is_repeated=True):
                failed.add(name)
                continue
            cost = read_step_cost(run_folder, by_name[name].config.trainer.forecast_len_from)
            if cost is None:
                executor.mark_failed(part, f"{run_folder}: metrics.jsonl has no measured steps")
                failed.add(name)
                continue
            records.append({"name": name, "round": round_number, **vars(cost)})
            logger.info("%s: %.4g s per step", part.name, cost.seconds)
    # The checkpoints of the short training runs are not needed.
    shutil.rmtree(folder / "timing", ignore_errors=True)
    return [record for record in records if record["name"] not in failed]


def build_timing_overrides(run: ComparedRun, steps: int, folder: Path) -> tuple[str, ...]:
    """Return the overrides of a short training run, with one validation, one checkpoint, and no previews.

    Args:
        run: the run that is timed.
        steps: number of optimizer steps of the short training run.
        folder: run folder of the short training run.
    """
    return (
        f"save_loc={folder}",
        "trainer.num_epoch=null",
        f"trainer.max_steps={steps}",
        f"trainer.log_every={_STEPS_PER_MEASUREMENT}",
        f"trainer.validate_every={steps}",
        f"trainer.checkpoint_every={steps}",
        f"trainer.valid_samples={min(run.config.trainer.valid_samples, run.config.trainer.valid_batch_size)}",
        "trainer.patience=null",
        "trainer.preview=null",
        "trainer.loggers=[]",
        "trainer.walltime=null",
    )


def read_step_cost(folder: Path, stages: Mapping[float, int] | None) -> StepCost | None:
    """Return the cost of a step of a short training run, read from its metrics.jsonl and summary.json.

    If rollouts grow during a run (``trainer.forecast_len_from``), later steps take longer. The cost of a stage is the
    median of its measurements. The cost of the run is the mean over the stages, weighted by their share of the run.

    Args:
        folder: run folder of the short training run.
        stages: value of ``trainer.forecast_len_from``, which maps the start of a stage (a fraction of the run) to the
            number of rollout steps.

    Returns:
        The cost of a step; None if a stage has no measurement.
    """
    summary = read_summary(folder)
    rows = list(iterate_rows_with_key(folder, "samples_per_s"))
    if not rows or not summary.get("steps"):
        return None
    samples_per_step = summary["samples"] / summary["steps"]
    total_steps = rows[-1]["step"]
    # Several steps share a measurement, which is in the row of their last step.
    rows = [row for row in rows if row["step"] % _STEPS_PER_MEASUREMENT == 0] or rows
    seconds = 0.0
    operations: float | None = 0.0
    fractions = sorted(float(fraction) for fraction in stages or {0.0: 1})
    for start, end in zip(fractions, [*fractions[1:], 1.0], strict=True):
        stage_rows = [row for row in rows if start * total_steps < row["step"] <= end * total_steps]
        # The first measurement of a stage contains compilation and the first use of kernels.
        stage_rows = stage_rows[1:] or stage_rows
        if not stage_rows:
            return None
        step_seconds = [samples_per_step / row["samples_per_s"] for row in stage_rows]
        seconds += (end - start) * median(step_seconds)
        rates = [row["tflops"] for row in stage_rows if row.get("tflops")]
        if operations is None or len(rates) < len(stage_rows):
            operations = None
            continue
        # The count of operations is rate times time. It does not depend on the load of the machine.
        counts = [rate * 1e12 * time for rate, time in zip(rates, step_seconds, strict=True)]
        operations += (end - start) * summary["processes"] * median(counts)
    if operations is not None:
        # The count is an integer, but rate times time has rounding errors.
        operations = float(round(operations))
    return StepCost(seconds, operations)


def compute_session_costs(
    session: Sequence[Mapping[str, Any]], reference: str | None, earlier: Mapping[str, StepCost]
) -> dict[str, StepCost]:
    """Return the costs of a step that were measured in one session, which is one call of the command.

    With a reference, the seconds are scaled to the load of the earlier session, see `measure_step_costs`.

    Args:
        session: records of the short training runs, from `_time_in_rounds`.
        reference: name of a run of this session that was also measured in an earlier session; None in the first
            session.
        earlier: name of a run -> cost of a step in earlier sessions.

    Returns:
        Name of a run -> cost of a step.
    """
    by_name: dict[str, dict[int, Mapping[str, Any]]] = {}
    for record in session:
        by_name.setdefault(record["name"], {})[record["round"]] = record
    costs = {}
    for name, rounds in by_name.items():
        seconds = median(record["seconds"] for record in rounds.values())
        if reference is not None and reference in by_name:
            reference_rounds = by_name[reference]
            common = sorted(rounds.keys() & reference_rounds.keys())
            ratios = [rounds[number]["seconds"] / reference_rounds[number]["seconds"] for number in common]
            seconds = median(ratios) * earlier[reference].seconds
        counts = [record["operations"] for record in rounds.values()]
        operations = None if None in counts else median(counts)
        costs[name] = StepCost(seconds, operations)
    return costs
