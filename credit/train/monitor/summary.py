"""Summary at the end of a run: the file summary.json, and a short table with the same values."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from credit.errors import CreditError
from credit.parallel.object_collectives import current_rank, reduce_over_ranks
from credit.train.checkpoint.checkpoint import step_folder
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.metrics_log import peak_memory_gb
from credit.train.monitor.run_files import iterate_rows_with_key
from credit.train.monitor.usage import UsageMeter
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# The metric skill is the RMSE divided by the RMSE of persistence, so the skill of persistence is 1.
PERSISTENCE_SKILL = 1.0


def write_run_summary(
    folder: Path, meter: UsageMeter, train_state: TrainState, monitor: str, total_steps: int, length: int
) -> str:
    """Collective: write summary.json on rank 0 and return its contents as a table; return "" on other ranks.

    Args:
        folder: the run's folder.
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the validation metric whose best value is `train_state.best`.
        total_steps: number of steps of the whole run.
        length: number of rollout steps of the last optimizer step.
    """

    def combine(low: tuple[float, float], high: tuple[float, float]) -> tuple[float, float]:
        return low[0] + high[0], max(low[1], high[1])

    joules, peak_gb = reduce_over_ranks(lambda: (meter.pop_joules(), peak_memory_gb(meter.device)), combine)
    if current_rank() > 0:
        return ""
    meter.add_energy(joules)
    return write_partial_summary(folder, meter, train_state, monitor, total_steps, length, peak_gb)


def write_partial_summary(
    folder: Path,
    meter: UsageMeter,
    train_state: TrainState,
    monitor: str,
    total_steps: int,
    length: int,
    peak_gb: float,
) -> str:
    """Write summary.json from the data of this process and return its contents as a table.

    `write_run_summary` calls this function on rank 0. Call this function directly if another rank has failed, because a
    collective is then impossible. The energy in the summary then ends at the last row of metrics.jsonl.

    Args:
        folder: the run's folder.
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the validation metric whose best value is `train_state.best`.
        total_steps: number of steps of the whole run.
        length: number of rollout steps of the last optimizer step.
        peak_gb: largest peak memory of the processes whose memory is known, in GB.
    """
    # This call updates the hours of the meter; its return value is not used.
    meter.to_dict()
    speeds = [row["samples_per_s"] for row in iterate_rows_with_key(folder, "samples_per_s")]
    summary = build_summary(meter, train_state, monitor, length, speeds, peak_gb)
    write_summary(folder, summary)
    return format_summary(summary, folder, total_steps)


def build_summary(
    meter: UsageMeter,
    train_state: TrainState,
    monitor: str,
    length: int,
    speeds: Sequence[float],
    peak_gb: float,
) -> dict[str, Any]:
    """Return the contents of summary.json; unknown values are omitted.

    Args:
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the validation metric whose best value is `train_state.best`.
        length: number of rollout steps of the last optimizer step.
        speeds: samples per second of each step, from metrics.jsonl.
        peak_gb: largest peak memory of the processes since the run was last started, in GB.
    """
    # A zero in the summary could be mistaken for a measurement, so values of 0 become None and are omitted at the end.
    spent = meter.spent
    wall_s = spent.wall_hours * 3600
    # The energy includes only the counted steps.
    counted_samples = (train_state.step - spent.since) * meter.samples_per_step
    device_name = "cpu"
    if meter.device.type == "cuda":
        device_name = torch.cuda.get_device_name(meter.device)
    mean_speed = spent.samples / spent.step_s if spent.step_s else None
    summary = {
        "steps": train_state.step,
        "samples": train_state.step * meter.samples_per_step,
        "counted_since_step": spent.since or None,
        "processes": meter.processes,
        "device": device_name,
        "wall_hours": spent.wall_hours,
        "gpu_hours": spent.gpu_hours or None,
        "process_hours": spent.process_hours or None,
        "samples_per_s_mean": mean_speed,
        "samples_per_s_median": median(speeds) if speeds else None,
        "time_shares": {
            "steps": spent.step_s / wall_s,
            "data_wait": spent.wait_s / wall_s,
            "validation": spent.validation_s / wall_s,
            "checkpoints": spent.save_s / wall_s,
            "other": 1 - (spent.step_s + spent.validation_s + spent.save_s) / wall_s,
        },
        "tflop_per_step": meter.count_step_tflop(length),
        "tflops": _divide(spent.tflop, spent.step_s),
        "mfu": _divide(spent.ideal_s, spent.step_s),
        "peak_memory_gb": peak_gb,
        "energy_kwh": spent.energy_kwh,
        "kwh_per_1000_samples": None,
        "best": None,
    }
    if spent.energy_kwh and counted_samples:
        summary["kwh_per_1000_samples"] = spent.energy_kwh / counted_samples * 1000
    # Step 0 means that there has been no validation yet.
    if train_state.best_step:
        summary["best"] = {"metric": monitor, "value": train_state.best, "step": train_state.best_step}
    return {name: value for name, value in summary.items() if value is not None}


def format_summary(summary: Mapping[str, Any], folder: Path, total_steps: int) -> str:
    """Return the summary as a table with one line each for time, speed, memory and other values.

    Args:
        summary: contents of summary.json.
        folder: the run's folder.
        total_steps: number of steps of the whole run.
    """
    # Unknown values are missing in the summary; the table then has no line for them.
    get = summary.get
    hours = []
    for kind in ("gpu", "process"):
        kind_hours = get(f"{kind}_hours")
        if kind_hours:
            hours.append(f"{kind_hours:.3g} {kind} hours")
    shares = {name: f"{value:.0%}" for name, value in get("time_shares").items()}
    # title of a line -> content of the line, in the order of the table
    lines = {
        "steps": f"{get('steps')} of {total_steps}, {get('samples')} samples",
        "time": f"{_format_hours(get('wall_hours'))}, {', '.join(hours)}",
        "of it": f"steps {shares['steps']} (waiting for data {shares['data_wait']}), "
        f"validation {shares['validation']}, checkpoints {shares['checkpoints']}, start and other {shares['other']}",
    }
    if get("samples_per_s_mean"):
        lines["speed"] = f"{get('samples_per_s_mean'):.3g} samples/s"
        if get("samples_per_s_median"):
            lines["speed"] += f", median {get('samples_per_s_median'):.3g}"
    if get("tflops"):
        lines["computed"] = _format_rate(summary)
    lines["memory"] = f"{get('peak_memory_gb'):.3g} GB at most"
    if get("energy_kwh"):
        lines["energy"] = f"{get('energy_kwh'):.4g} kWh"
        # There are no samples if a run fails before its first step.
        if get("kwh_per_1000_samples"):
            lines["energy"] += f", {get('kwh_per_1000_samples'):.3g} kWh per 1000 samples"
    best = get("best")
    if best:
        location = _describe_best_checkpoint(folder / "checkpoints", best["step"])
        lines["best"] = f"{best['metric']} {best['value']:.4f} at step {best['step']}, {location}"
        if best["metric"] == "skill" and best["value"] >= PERSISTENCE_SKILL:
            lines["warning"] = "the skill of persistence is 1, and no validation was better than persistence"
    if get("counted_since_step"):
        lines["counted"] = f"since step {get('counted_since_step')}; another run or version took the earlier steps"
    return "\n".join(f"  {title:<9} {text}" for title, text in lines.items())


def _format_rate(summary: Mapping[str, Any]) -> str:
    """Return the operations per second on each device, such as "120 TFLOP/s per GPU, MFU 38.4% of NVIDIA H100"."""
    tflops = summary["tflops"]
    if tflops > 1:
        rate = f"{tflops:.3g} TFLOP/s"
    else:
        rate = f"{tflops * 1e3:.3g} GFLOP/s"
    unit = "process" if summary["device"] == "cpu" else "GPU"
    text = f"{rate} per {unit}"
    if summary.get("mfu"):
        text += f", MFU {summary['mfu']:.1%} of {summary['device']}"
    return text


def _describe_best_checkpoint(checkpoints: Path, step: int) -> str:
    """Return the path of the checkpoint of the best validation, or a remark if this checkpoint could not be saved.

    Args:
        checkpoints: the run's ``checkpoints`` folder.
        step: step of the best validation.
    """
    link = checkpoints / "best"
    best_checkpoint = step_folder(checkpoints, step)
    if best_checkpoint.is_dir() and link.resolve() == best_checkpoint.resolve():
        return str(link)
    earlier_best = ""
    if link.is_dir():
        earlier_best = f"; {link} is {link.resolve().name}, of an earlier validation"
    return f"whose checkpoint could not be saved{earlier_best}"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json; if the file cannot be written, log a warning, because the run must not fail for this."""
    try:
        atomic_write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    except CreditError as error:
        logger.warning("%s", error)


def _format_hours(hours: float) -> str:
    """Return a duration as a string in seconds, minutes or hours."""
    if hours < 1 / 30:
        return f"{hours * 3600:.3g} s"
    if hours < 2:
        return f"{hours * 60:.3g} min"
    return f"{hours:.3g} h"


def _divide(amount: float | None, seconds: float) -> float | None:
    """Return the amount per second; None if the amount is unknown (None), or if the amount or the seconds are 0."""
    if not amount or not seconds:
        return None
    return amount / seconds
