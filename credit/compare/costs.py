"""Costs of the runs of a comparison: steps, time, memory, operations, energy and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from credit.errors import DataError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.train.monitor.run_files import iterate_rows_with_key, read_summary


@dataclass(frozen=True)
class RunCosts:
    """Costs of one training run, for one config and one seed. An unknown cost is None.

    Attributes:
        steps: number of optimizer steps.
        samples: number of training samples that were used.
        processes: number of processes.
        device: ``cpu`` or the name of the GPU.
        wall_hours: duration of the training run in hours, including start and validations.
        step_hours: total duration of the optimizer steps in hours.
        step_seconds: median duration of an optimizer step in seconds.
        tflop: floating-point operations of all steps and processes, in TFLOP.
        peak_memory_gb: largest memory that a process used, in GB (10^9 bytes).
        energy_kwh: energy that the GPUs used, in kWh.
        parameters: number of parameters of the network.
        forecast_seconds: duration of ``credit rollout`` in seconds, including its start.
    """

    steps: int | None = None
    samples: int | None = None
    processes: int | None = None
    device: str | None = None
    wall_hours: float | None = None
    step_hours: float | None = None
    step_seconds: float | None = None
    tflop: float | None = None
    peak_memory_gb: float | None = None
    energy_kwh: float | None = None
    parameters: int | None = None
    forecast_seconds: float | None = None


def read_costs(run_folder: Path, forecast_folder: Path, forecast_seconds: float | None) -> RunCosts:
    """Return the costs of a training run, read from its summary.json, its metrics.jsonl and its forecasts.

    Args:
        run_folder: run folder of the training run.
        forecast_folder: folder of the forecasts of the run; their attributes contain the number of parameters.
        forecast_seconds: duration of ``credit rollout`` in seconds; None if the duration is unknown.
    """
    summary = read_summary(run_folder)
    if not summary:
        return RunCosts(parameters=_read_parameters(forecast_folder), forecast_seconds=forecast_seconds)
    samples_per_step = summary["samples"] / max(summary["steps"], 1)
    step_seconds = []
    tflop = 0.0
    is_counted = True
    for row in iterate_rows_with_key(run_folder, "samples_per_s"):
        seconds = samples_per_step / row["samples_per_s"]
        step_seconds.append(seconds)
        if row.get("tflops"):
            tflop += row["tflops"] * seconds * summary["processes"]
        else:
            is_counted = False
    wall_hours = summary["wall_hours"]
    return RunCosts(
        steps=summary["steps"],
        samples=summary["samples"],
        processes=summary["processes"],
        device=summary["device"],
        wall_hours=wall_hours,
        step_hours=wall_hours * summary["time_shares"]["steps"],
        step_seconds=median(step_seconds) if step_seconds else None,
        tflop=tflop if is_counted and tflop else None,
        peak_memory_gb=summary.get("peak_memory_gb"),
        energy_kwh=summary.get("energy_kwh"),
        parameters=_read_parameters(forecast_folder),
        forecast_seconds=forecast_seconds,
    )


def _read_parameters(folder: Path) -> int | None:
    """Return the number of network parameters that the attributes of the forecasts state, None if it is missing."""
    try:
        parameters = open_forecasts(folder).attributes.get("parameters")
    except DataError:
        return None
    return None if parameters is None else int(str(parameters))
