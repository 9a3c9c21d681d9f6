"""Equality to the CPU: outputs, losses, gradients and forecasts of all networks, ensembles, lower precision.

The CPU computes with its kernels in float32, and the device with the kernels that the dispatch chooses for it. If the
device is the CPU, it computes with the formulations of a GPU instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from benchmarks.device.cases import AT_ONCE, ENSEMBLE, NETWORKS, NOISES, ONE_BY_ONE, Run, quickstart
from benchmarks.device.context import Context
from benchmarks.device.parts import Row
from benchmarks.device.work import ForecastWork, TrainingWork, compare_gradients, relative_difference
from credit.models.kernels.dispatch import force_gpu_path

_CPU = torch.device("cpu")
# Largest relative differences in float32 without TF32: of the loss, and of outputs and gradients as norms.
_FLOAT32_LOSS = 2e-5
_FLOAT32_FIELDS = 1e-3
# The same for TF32 and bfloat16, compared with float32 on the same device.
_LOW_LOSS = 1e-2
_LOW_FIELDS = 1e-1
# Optimizer steps after which losses are compared, and steps of a forecast.
_NUM_STEPS = 3
_FORECAST_STEPS = 4


def run(context: Context) -> Iterator[Row]:
    """Yield the row of each case: its differences from the CPU, and True if they are within the tolerance."""
    yield from context.measure_cases(_list_cases(context))


def _list_cases(context: Context) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Yield the name and the measurement of each case."""
    # Batches of two samples are enough, and the CPU has to compute them as well.
    small_batch = "trainer.train_batch_size=2"
    exact_runs = {}
    for name in NETWORKS:
        exact_runs[name] = quickstart(name, context.fast).in_precision("float32").with_overrides("", small_batch)
    names = context.select(NETWORKS)
    for name in names:
        yield f"training, {name}", partial(_compare_training, context, exact_runs[name])
    for name in names:
        yield f"forecast, {name}", partial(_compare_forecast, context, exact_runs[name])
    for noise in context.select(NOISES):
        for order in context.select((ONE_BY_ONE, AT_ONCE)):
            ensemble_run = exact_runs["wxformer"].with_overrides(noise, *ENSEMBLE, *NOISES[noise], order)
            yield f"ensemble, {noise} noise, {order}", partial(_compare_training, context, ensemble_run)
    recomputed = ("data.forecast_len=2", "trainer.activation_checkpoint=true", "trainer.grad_accum_every=2")
    rollout_run = exact_runs["wxformer"].with_overrides("rollout", *recomputed)
    yield "training, rollout of 2, recomputed", partial(_compare_training, context, rollout_run)
    for precision in context.select(("bfloat16", "tf32")):
        for name in names:
            low_run = quickstart(name, context.fast).in_precision(precision).with_overrides("", small_batch)
            yield f"{precision} and float32, {name}", partial(_compare_precision, context, low_run, exact_runs[name])


def _use_device_formulations(context: Context) -> AbstractContextManager[None]:
    """Return the context in which the device computes; on a CPU, it selects the formulations of a GPU."""
    return nullcontext() if context.accelerator.is_gpu else force_gpu_path()


def _compare_training(context: Context, run: Run) -> Row:
    """Return the row of the differences between device and CPU: a micro-step, and the losses of optimizer steps."""
    with _use_device_formulations(context):
        actual = _measure_training(run, context.accelerator.device)
    expected = _measure_training(run, _CPU)
    return _describe_training(actual, expected, _FLOAT32_LOSS, _FLOAT32_FIELDS)


def _compare_precision(context: Context, low_run: Run, exact_run: Run) -> Row:
    """Return the differences between lower precision and float32 on the device."""
    with _use_device_formulations(context):
        actual = _measure_training(low_run, context.accelerator.device)
        expected = _measure_training(exact_run, context.accelerator.device)
    return _describe_training(actual, expected, _LOW_LOSS, _LOW_FIELDS)


# Output of the network, loss and gradients of a micro-step, losses of optimizer steps.
_TrainingResult = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], torch.Tensor]


def _measure_training(run: Run, device: torch.device) -> _TrainingResult:
    """Return the output of the untrained network, the loss and gradients of a micro-step, and losses of steps."""
    work = TrainingWork(run, device)
    if work.config.trainer.members > 1:
        work.fill_zero_weights()
    encoded = work.objective.encode(work.batch)
    work.model.eval()
    with torch.no_grad():
        output_BMCHW = next(iter(work.objective.predict(encoded, 1))).cpu()
    work.model.train()
    loss, gradients = work.gradients()
    losses = torch.stack([work.step() for _ in range(_NUM_STEPS)]).cpu().double()
    return output_BMCHW, loss, gradients, losses


def _describe_training(
    actual: _TrainingResult, expected: _TrainingResult, loss_tolerance: float, field_tolerance: float
) -> Row:
    """Return the row of a comparison; after optimizer steps, losses may differ by ten times the tolerance."""
    gradient, worst, worst_name = compare_gradients(actual[2], expected[2])
    row: Row = {
        "output": relative_difference(actual[0], expected[0]),
        "loss": relative_difference(actual[1], expected[1]),
        "gradient": gradient,
        "worst weight": worst,
        "its name": worst_name,
        f"losses of {_NUM_STEPS} steps": relative_difference(actual[3], expected[3]),
    }
    is_finite = bool(torch.isfinite(actual[3]).all())
    row["ok"] = (
        is_finite
        and row["loss"] <= loss_tolerance
        and row["output"] <= field_tolerance
        and gradient <= field_tolerance
        and row[f"losses of {_NUM_STEPS} steps"] <= 10 * loss_tolerance
    )
    return row


def _compare_forecast(context: Context, run: Run) -> Row:
    """Return the row of the difference between a forecast on the device and on the CPU."""
    batch = run.with_overrides("", "inference.batch_size=2")
    with _use_device_formulations(context):
        actual = ForecastWork.build(batch, context.accelerator.device).rollout(_FORECAST_STEPS)
    expected = ForecastWork.build(batch, _CPU).rollout(_FORECAST_STEPS)
    difference = relative_difference(actual, expected)
    return {"output": difference, "ok": difference <= _FLOAT32_FIELDS}
