"""Summary of a run at its end: summary.json, and the same as a short table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from credit.errors import CreditError
from credit.parallel.object_collectives import current_rank, run_on_all_ranks
from credit.train.checkpoint.checkpoint import step_folder
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.metrics_log import peak_memory_gb
from credit.train.monitor.run_files import rows_with
from credit.train.monitor.usage import UsageMeter
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# The metric skill is the RMSE divided by that of persistence, so persistence itself has this value.
PERSISTENCE_SKILL = 1.0


def write_run_summary(
    folder: Path, meter: UsageMeter, train_state: TrainState, monitor: str, total_steps: int, length: int
) -> str:
    """Collective: write summary.json on the main process and return its contents as a table, empty on other ranks.

    Args:
        folder: the run's folder.
        meter: of the run.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
        total_steps: number of steps of the whole run.
        length: number of times that the last step applied the network to a micro-batch.
    """
    usage_of_ranks = run_on_all_ranks(lambda: (meter.joules(), peak_memory_gb(meter.device)))
    if current_rank() > 0:
        return ""
    meter.add_energy(sum(joules for joules, _ in usage_of_ranks))
    peak_gb = max(peak for _, peak in usage_of_ranks)
    return record(folder, meter, train_state, monitor, total_steps, length, peak_gb)


def record(
    folder: Path,
    meter: UsageMeter,
    train_state: TrainState,
    monitor: str,
    total_steps: int,
    length: int,
    peak_gb: float,
) -> str:
    """Write summary.json from the data of this process and return its contents as a table.

    Call it if another rank has failed, so that the collective `write_run_summary` is impossible. The energy is then
    that up to the last row of metrics.jsonl.

    Args:
        folder: the run's folder.
        meter: of the run.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
        total_steps: number of steps of the whole run.
        length: number of times that the last step applied the network to a micro-batch.
        peak_gb: largest peak memory of the processes, in GB, as far as known.
    """
    meter.state()
    speeds = [row["samples_per_s"] for row in rows_with(folder, "samples_per_s")]
    summary = summarise(meter, train_state, monitor, length, speeds, peak_gb)
    write_summary(folder, summary)
    return describe(summary, folder, total_steps)


def summarise(
    meter: UsageMeter,
    train_state: TrainState,
    monitor: str,
    length: int,
    speeds: Sequence[float],
    peak_gb: float,
) -> dict[str, Any]:
    """Return the contents of summary.json, without the values that are not known.

    Args:
        meter: of the run.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
        length: number of times that the last step applied the network to a micro-batch.
        speeds: samples/s of each step, from metrics.jsonl.
        peak_gb: largest peak memory of the processes since the run was last started, in GB.
    """
    spent = meter.spent
    wall_s = spent.wall_hours * 3600
    samples = (train_state.step - spent.since) * meter.samples_a_step
    gpu = torch.cuda.get_device_name(meter.device) if meter.device.type == "cuda" else None
    summary = {
        "steps": train_state.step,
        "samples": train_state.step * meter.samples_a_step,
        "counted_since_step": spent.since or None,
        "processes": meter.processes,
        "device": gpu or "cpu",
        "wall_hours": spent.wall_hours,
        "gpu_hours": spent.gpu_hours or None,
        "process_hours": spent.process_hours or None,
        "samples_per_s_mean": spent.samples / spent.step_s if spent.step_s else None,
        "samples_per_s_median": median(speeds) if speeds else None,
        "time_shares": {
            "steps": spent.step_s / wall_s,
            "data_wait": spent.wait_s / wall_s,
            "validation": spent.validation_s / wall_s,
            "checkpoints": spent.save_s / wall_s,
            "other": 1 - (spent.step_s + spent.validation_s + spent.save_s) / wall_s,
        },
        "tflop_per_step": meter.step_tflop(length),
        "tflops": spent.tflop / spent.step_s if spent.tflop and spent.step_s else None,
        "mfu": spent.ideal_s / spent.step_s if spent.ideal_s and spent.step_s else None,
        "peak_memory_gb": peak_gb,
        "energy_kwh": spent.energy_kwh,
        "kwh_per_1000_samples": spent.energy_kwh / samples * 1000 if spent.energy_kwh and samples else None,
        "best": None,
    }
    # Step 0 means that there was no validation yet.
    if train_state.best_step:
        summary["best"] = {"metric": monitor, "value": train_state.best, "step": train_state.best_step}
    return {name: value for name, value in summary.items() if value is not None}


def describe(summary: Mapping[str, Any], folder: Path, total_steps: int) -> str:
    """Return the summary as a table with one line for each subject.

    Args:
        summary: contents of summary.json.
        folder: the run's folder.
        total_steps: number of steps of the whole run.
    """
    get = summary.get
    hours = [f"{get(f'{kind}_hours'):.3g} {kind} hours" for kind in ("gpu", "process") if get(f"{kind}_hours")]
    share = {name: f"{value:.0%}" for name, value in get("time_shares").items()}
    lines = {
        "steps": f"{get('steps')} of {total_steps}, {get('samples')} samples",
        "time": f"{_format_hours(get('wall_hours'))}, {', '.join(hours)}",
        "of it": f"steps {share['steps']} (waiting for data {share['data_wait']}), validation {share['validation']}, "
        f"checkpoints {share['checkpoints']}, start and other {share['other']}",
    }
    if get("samples_per_s_mean"):
        lines["speed"] = f"{get('samples_per_s_mean'):.3g} samples/s"
        if get("samples_per_s_median"):
            lines["speed"] += f", median {get('samples_per_s_median'):.3g}"
    if get("tflops"):
        rate = f"{get('tflops'):.3g} TFLOP/s" if get("tflops") > 1 else f"{get('tflops') * 1e3:.3g} GFLOP/s"
        unit = "process" if get("device") == "cpu" else "GPU"
        lines["computed"] = f"{rate} a {unit}"
        if get("mfu"):
            lines["computed"] += f", MFU {get('mfu'):.1%} of {get('device')}"
    lines["memory"] = f"{get('peak_memory_gb'):.3g} GB at most"
    if get("energy_kwh"):
        lines["energy"] = f"{get('energy_kwh'):.4g} kWh"
        # There are no samples if a run fails before its first step.
        if get("kwh_per_1000_samples"):
            lines["energy"] += f", {get('kwh_per_1000_samples'):.3g} kWh a 1000 samples"
    best = get("best")
    if best:
        location = _describe_best(folder / "checkpoints", best["step"])
        lines["best"] = f"{best['metric']} {best['value']:.4f} at step {best['step']}, {location}"
        if best["metric"] == "skill" and best["value"] >= PERSISTENCE_SKILL:
            lines["warning"] = "a skill of 1 is persistence's: no validation was better than that"
    if get("counted_since_step"):
        lines["counted"] = f"since step {get('counted_since_step')}; another run or version took those before"
    return "\n".join(f"  {name:<9} {text}" for name, text in lines.items())


def _describe_best(checkpoints: Path, step: int) -> str:
    """Return the path of the best validation's checkpoint, or a remark if it could not be saved, as on a full disk."""
    link = checkpoints / "best"
    best_checkpoint = step_folder(checkpoints, step)
    if best_checkpoint.is_dir() and link.resolve() == best_checkpoint.resolve():
        return str(link)
    earlier_best = f"; {link} is {link.resolve().name}, of an earlier validation" if link.is_dir() else ""
    return f"whose checkpoint could not be saved{earlier_best}"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json; if that fails, log a warning, because it must not change the outcome of the run."""
    try:
        atomic_write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    except CreditError as error:
        logger.warning("%s", error)


def _format_hours(hours: float) -> str:
    """Return a duration as text, in seconds, minutes or hours."""
    if hours < 1 / 30:
        return f"{hours * 3600:.3g} s"
    if hours < 2:
        return f"{hours * 60:.3g} min"
    return f"{hours:.3g} h"
