"""What a run says at its end: summary.json and the same as a short table."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from credit.errors import CreditError
from credit.parallel.object_collectives import rank_of, together
from credit.train.checkpoint.checkpoint import step_folder
from credit.train.checkpoint.train_state import TrainState
from credit.train.monitor.metrics_log import peak_memory_gb
from credit.train.monitor.run_files import rows_with
from credit.train.monitor.usage import UsageMeter
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# The skill is an RMSE over that of persistence, so this is what persistence itself has.
PERSISTENCE_SKILL = 1.0


def write_run_summary(
    folder: Path, meter: UsageMeter, at: TrainState, monitor: str, total_steps: int, length: int
) -> str:
    """Collective: write summary.json on the main process and return what it says as a table, empty on the others.

    Args:
        folder: of the run.
        meter: of the run.
        at: where it stands.
        monitor: what `at.best` is a value of.
        total_steps: of the run.
        length: how often the last step applied the network.
    """
    told = together(lambda: (meter.joules(), peak_memory_gb(meter.device)))
    if rank_of() > 0:
        return ""
    meter.add_energy(sum(joules for joules, _ in told))
    return record(folder, meter, at, monitor, total_steps, length, max(peak for _, peak in told))


def record(
    folder: Path, meter: UsageMeter, at: TrainState, monitor: str, total_steps: int, length: int, peak_gb: float
) -> str:
    """Write summary.json, as the main process knows the run, and return what it says; `peak_gb` as of `summarise`.

    Where a rank has failed this is all that can be had: energy is that up to the last row of metrics.jsonl.
    """
    meter.state()
    speeds = [row["samples_per_s"] for row in rows_with(folder, "samples_per_s")]
    summary = summarise(meter, at, monitor, length, speeds, peak_gb)
    write_summary(folder, summary)
    return describe(summary, folder, total_steps)


def summarise(
    meter: UsageMeter, at: TrainState, monitor: str, length: int, speeds: Sequence[float], peak_gb: float
) -> dict[str, Any]:
    """Return what summary.json holds; what is not known is left out.

    Args:
        meter: of the run.
        at: where it stands.
        monitor: what `at.best` is a value of.
        length: how often the last step applied the network.
        speeds: samples/s of each step, from metrics.jsonl.
        peak_gb: most memory of any process in this part of the run.
    """
    spent = meter.spent
    wall_s = spent.wall_hours * 3600
    samples = (at.step - spent.since) * meter.samples_a_step
    gpu = torch.cuda.get_device_name(meter.device) if meter.device.type == "cuda" else None
    found = {
        "steps": at.step,
        "samples": at.step * meter.samples_a_step,
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
        "best": {"metric": monitor, "value": at.best, "step": at.best_step} if at.best_step else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def describe(summary: Mapping[str, Any], folder: Path, total_steps: int) -> str:
    """Return the summary as a table of one line a subject."""
    one = summary.get
    hours = [f"{one(f'{kind}_hours'):.3g} {kind} hours" for kind in ("gpu", "process") if one(f"{kind}_hours")]
    share = {name: f"{value:.0%}" for name, value in one("time_shares").items()}
    lines = {
        "steps": f"{one('steps')} of {total_steps}, {one('samples')} samples",
        "time": f"{_duration(one('wall_hours'))}, {', '.join(hours)}",
        "of it": f"steps {share['steps']} (waiting for data {share['data_wait']}), validation {share['validation']}, "
        f"checkpoints {share['checkpoints']}, start and other {share['other']}",
    }
    if one("samples_per_s_mean"):
        lines["speed"] = f"{one('samples_per_s_mean'):.3g} samples/s"
        if one("samples_per_s_median"):
            lines["speed"] += f", median {one('samples_per_s_median'):.3g}"
    if one("tflops"):
        rate = f"{one('tflops'):.3g} TFLOP/s" if one("tflops") > 1 else f"{one('tflops') * 1e3:.3g} GFLOP/s"
        lines["computed"] = f"{rate} a {'process' if one('device') == 'cpu' else 'GPU'}"
        if one("mfu"):
            lines["computed"] += f", MFU {one('mfu'):.1%} of {one('device')}"
    lines["memory"] = f"{one('peak_memory_gb'):.3g} GB at most"
    if one("energy_kwh"):
        lines["energy"] = f"{one('energy_kwh'):.4g} kWh"
        # there are no samples where a run fails before its first step
        if one("kwh_per_1000_samples"):
            lines["energy"] += f", {one('kwh_per_1000_samples'):.3g} kWh a 1000 samples"
    if best := one("best"):
        place = _describe_best(folder / "checkpoints", best["step"])
        lines["best"] = f"{best['metric']} {best['value']:.4f} at step {best['step']}, {place}"
        if best["metric"] == "skill" and best["value"] >= PERSISTENCE_SKILL:
            lines["warning"] = "a skill of 1 is persistence's: no validation was better than that"
    if one("counted_since_step"):
        lines["counted"] = f"since step {one('counted_since_step')}; another run or version took those before"
    return "\n".join(f"  {name:<9} {text}" for name, text in lines.items())


def _describe_best(checkpoints: Path, step: int) -> str:
    """Return where the checkpoint of the best validation is; a full disk may have kept it from being saved."""
    link = checkpoints / "best"
    if step_folder(checkpoints, step).is_dir() and link.resolve() == step_folder(checkpoints, step).resolve():
        return str(link)
    earlier_best = f"; {link} is {link.resolve().name}, of an earlier validation" if link.is_dir() else ""
    return f"whose checkpoint could not be saved{earlier_best}"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json; a disk that takes none gets a warning, as the run itself is whole."""
    try:
        atomic_write_text(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    except CreditError as error:
        logger.warning("%s", error)


def _duration(hours: float) -> str:
    """Return hours as a reader wants them."""
    if hours < 1 / 30:
        return f"{hours * 3600:.3g} s"
    return f"{hours * 60:.3g} min" if hours < 2 else f"{hours:.3g} h"
