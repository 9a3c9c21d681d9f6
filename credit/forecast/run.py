"""Forecasts from many initial times, a batch at a time, in physical units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from credit.data.frames import Frames
from credit.errors import CreditError
from credit.forecast.step import Stepper


@torch.inference_mode()
def forecast(
    stepper: Stepper, frames: Frames, initial: Sequence[int], steps: int, step_minutes: int, history_len: int
) -> Iterator[torch.Tensor]:
    """Yield the output (B, C_out, H, W) of each step in physical units, float32, on the device.

    Args:
        stepper: runs the network, in eval mode.
        frames: initial states, and the forcing that a forecast may know.
        initial: B initial times in minutes.
        steps: forecast steps.
        step_minutes: time step.
        history_len: input frames.
    """
    normalizer = stepper.normalizer
    device = normalizer.tendency_scale_C.device
    past = range(1 - history_len, 1)
    history = [np.stack([frames.prognostic(t + k * step_minutes) for k in past], axis=1) for t in initial]
    state = normalizer.encode(torch.from_numpy(np.stack(history)).to(device), "prognostic")

    def forcing(number: int) -> torch.Tensor:
        fields = [
            np.stack([frames.forcing(t + (number + k) * step_minutes, initial=t) for k in past], axis=1)
            for t in initial
        ]
        return normalizer.encode(torch.from_numpy(np.stack(fields)).to(device), "dynamic_forcing")

    for output in stepper.rollout(state, forcing, steps):
        yield stepper.decode(output)


def require_finite(fields: Sequence[np.ndarray], row: int, origin: str) -> None:
    """Stop before a forecast that has blown up is written.

    Args:
        fields: (B, C_out, H, W) of each step that is kept.
        row: which forecast of the batch.
        origin: how to call it in the message.

    Raises:
        CreditError: naming the first bad step; a NaN is never written as if it were a forecast.
    """
    for number, field in enumerate(fields, start=1):
        if not np.isfinite(field[row]).all():
            raise CreditError(
                f"{origin}: not finite from output {number} of {len(fields)} on; not written. Forecast a shorter "
                "inference.lead_time, or train on longer rollouts (data.forecast_len)"
            )
