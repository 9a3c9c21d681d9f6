"""Summary of a run at its end: the file summary.json, and a short table with the same values."""

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

# The metric skill is the RMSE divided by that of persistence, so persistence itself has this value.
PERSISTENCE_SKILL = 1.0


def write_run_summary(
    folder: Path, meter: UsageMeter, train_state: TrainState, monitor: str, total_steps: int, length: int
) -> str:
    """Collective: write summary.json on the main process and return its contents as a table, empty on other ranks.

    Args:
        folder: the run's folder.
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
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

    `write_run_summary` calls it on the main process. Call it directly if another rank has failed, so that a collective
    is impossible; the energy is then the one up to the last row of metrics.jsonl.

    Args:
        folder: the run's folder.
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
        total_steps: number of steps of the whole run.
        length: number of rollout steps of the last optimizer step.
        peak_gb: largest peak memory of the processes whose memory is known, in GB.
    """
    # Called for its effect: it brings the hours up to now.
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
    """Return the contents of summary.json, without the values that are not known.

    Args:
        meter: the meter of the run's resources.
        train_state: state of the run.
        monitor: name of the metric of which `train_state.best` is a value.
        length: number of rollout steps of the last optimizer step.
        speeds: samples per second of each step, from metrics.jsonl.
        peak_gb: largest peak memory of the processes since the run was last started, in GB.
    """
    # A zero in the summary would be taken for a measurement, so values of 0 become None and are left out at the end.
    spent = meter.spent
    wall_s = spent.wall_hours * 3600
    # The energy is that of the counted steps only.
    counted_samples = (train_state.step - spent.since) * meter.samples_a_step
    device_name = "cpu"
    if meter.device.type == "cuda":
        device_name = torch.cuda.get_device_name(meter.device)
    mean_speed = spent.samples / spent.step_s if spent.step_s else None
    summary = {
        "steps": train_state.step,
        "samples": train_state.step * meter.samples_a_step,
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
    # Step 0 means that there was no validation yet.
    if train_state.best_step:
        summary["best"] = {"metric": monitor, "value": train_state.best, "step": train_state.best_step}
    return {name: value for name, value in summary.items() if value is not None}


def format_summary(summary: Mapping[str, Any], folder: Path, total_steps: int) -> str:
    """Return the summary as a table, whose lines are time, speed, memory and so on.

    Args:
        summary: contents of summary.json.
        folder: the run's folder.
        total_steps: number of steps of the whole run.
    """
    # Values that are not known are missing in the summary, and their lines in the table.
    get = summary.get
    hours = []
    for kind in ("gpu", "process"):
        kind_hours = get(f"{kind}_hours")
        if kind_hours:
            hours.append(f"{kind_hours:.3g} {kind} hours")
    shares = {name: f"{value:.0%}" for name, value in get("time_shares").items()}
    # title of a line -> its text, in the order of the table
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
            lines["energy"] += f", {get('kwh_per_1000_samples'):.3g} kWh a 1000 samples"
    best = get("best")
    if best:
        location = _describe_best(folder / "checkpoints", best["step"])
        lines["best"] = f"{best['metric']} {best['value']:.4f} at step {best['step']}, {location}"
        if best["metric"] == "skill" and best["value"] >= PERSISTENCE_SKILL:
            lines["warning"] = "a skill of 1 is persistence's: no validation was better than that"
    if get("counted_since_step"):
        lines["counted"] = f"since step {get('counted_since_step')}; another run or version took those before"
    return "\n".join(f"  {title:<9} {text}" for title, text in lines.items())


def _format_rate(summary: Mapping[str, Any]) -> str:
    """Return the operations per second on each device, such as "120 TFLOP/s a GPU, MFU 38.4% of NVIDIA H100"."""
    tflops = summary["tflops"]
    if tflops > 1:
        rate = f"{tflops:.3g} TFLOP/s"
    else:
        rate = f"{tflops * 1e3:.3g} GFLOP/s"
    unit = "process" if summary["device"] == "cpu" else "GPU"
    text = f"{rate} a {unit}"
    if summary.get("mfu"):
        text += f", MFU {summary['mfu']:.1%} of {summary['device']}"
    return text


def _describe_best(checkpoints: Path, step: int) -> str:
    """Return the path of the best validation's checkpoint, or a remark if the checkpoint could not be saved.

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
    """Write summary.json; a failure is only logged as a warning, because it must not change the outcome of the run."""
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


def _divide(amount: float | None, seconds: float) -> float | None:
    """Return the amount per second, None if the amount is unknown (None) or amount or seconds are 0."""
    if not amount or not seconds:
        return None
    return amount / seconds
