"""Forecasts from many starts, a batch at a time, in physical units."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from credit.data.samples.frames import FrameReader
from credit.forecast.stepper import Stepper
from credit.parallel.host_copy import to_device


@dataclass(frozen=True, order=True)
class ForecastStart:
    """Where one forecast, or one member of an ensemble, begins.

    Attributes:
        initial: the time in minutes that lead times count from.
        member: number of the member, 0 for a single forecast.
        analysis: the time in minutes whose fields it starts from; before `initial` for a lagged member.
    """

    initial: int
    member: int
    analysis: int


def make_starts(initial: Sequence[int], members: int = 1, lag_minutes: int = 0) -> list[ForecastStart]:
    """Return the starts of all members, those of one initial time side by side; member m starts m lags before."""
    return [ForecastStart(t, m, t - m * lag_minutes) for t in initial for m in range(members)]


def batch_starts(
    initial: Sequence[int], batch_size: int, members: int = 1, lag_minutes: int = 0
) -> list[list[ForecastStart]]:
    """Return the starts of a group of initial times, `batch_size` at a time."""
    starts = make_starts(initial, members, lag_minutes)
    return [starts[first : first + batch_size] for first in range(0, len(starts), batch_size)]


def member_rng(seed: int, start: ForecastStart, stream: int) -> np.random.Generator:
    """Return the source of a member's random numbers; each purpose has a stream of its own."""
    # times before 1970 are negative, which a seed must not be
    return np.random.default_rng([seed, start.initial % 2**63, start.member, stream])


# changes the normalised states (B, C, T, H, W) of a batch's starts
Perturb = Callable[[Sequence[ForecastStart], Tensor], Tensor]
# the factors (B, 1, H, W) of the changes that the network predicts, step by step
Stochastic = Callable[[Sequence[ForecastStart], torch.device], Iterator[Tensor]]
# what to enter for each step, so that the network draws its noise
Noise = Callable[[Sequence[ForecastStart]], Callable[[], AbstractContextManager[None]]]


def analyses(frames: FrameReader, times: Sequence[int], step_minutes: int, history_len: int) -> np.ndarray:
    """Return the prognostic fields (B, C, T, H, W) of the input frames up to each of `times`, in physical units."""
    past = range(1 - history_len, 1)
    return np.stack([np.stack([frames.prognostic(t + k * step_minutes) for k in past], axis=1) for t in times])


def checksums(
    frames: FrameReader, lags_minutes: Sequence[int], step_minutes: int, history_len: int
) -> Callable[[int], str]:
    """Return initial time -> 16 hexadecimal digits over the prognostic fields of its input frames and of the lags'.

    Another analysis of the same time has others.
    """

    @functools.cache  # lagged members of neighbouring initial times share analyses
    def of(analysis: int) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for k in range(1 - history_len, 1):
            digest.update(np.ascontiguousarray(frames.prognostic(analysis + k * step_minutes)))
        return digest.digest()

    return lambda initial: hashlib.blake2b(
        b"".join(of(initial - lag) for lag in lags_minutes), digest_size=8
    ).hexdigest()


def forcing_of(
    stepper: Stepper, frames: FrameReader, times: Sequence[int], step_minutes: int, history_len: int,
    reading: AbstractContextManager, last: Sequence[int] | None = None,
) -> Callable[[int], Tensor]:  # fmt: skip
    """Return step number -> normalised forcing (B, C, T, H, W) that forecasts from `times` may know.

    From the number in `last` on a forecast's forcing stays as it is.
    """
    device, past = stepper.normalizer.tendency_scale_C.device, range(1 - history_len, 1)

    def forcing(number: int) -> Tensor:
        numbers = [number] * len(times) if last is None else [min(number, own) for own in last]
        with reading:
            fields = [
                np.stack([frames.forcing(t + (own + k) * step_minutes, initial=t) for k in past], axis=1)
                for t, own in zip(times, numbers, strict=True)
            ]
        return stepper.normalizer.encode(to_device(np.stack(fields), device), "dynamic_forcing")

    return forcing


@torch.no_grad()
def forecast(
    stepper: Stepper,
    frames: FrameReader,
    starts: Sequence[ForecastStart],
    steps: int,
    step_minutes: int,
    history_len: int,
    perturb: Perturb | None = None,
    reading: AbstractContextManager | None = None,
    stochastic: Stochastic | None = None,
    noise: Noise | None = None,
) -> Iterator[Tensor]:
    """Yield the output (B, C_out, H, W) of each step in physical units, float32, on the device.

    Starts with a shorter lag than others of the batch go on beyond the last lead time, where nobody wants them and the
    data may have no observed forcing: there it stays as it is.

    Args:
        stepper: runs the network, in eval mode.
        frames: initial states, and the forcing that a forecast may know.
        starts: of the batch.
        steps: how many, counted from the analyses.
        step_minutes: time step.
        history_len: input frames.
        perturb: changes the initial states.
        reading: held while fields are read.
        stochastic: draws factors of each step's change.
        noise: draws what is added inside the network.
    """
    reading = reading or nullcontext()
    times = [start.analysis for start in starts]
    with reading:
        state = to_device(
            analyses(frames, times, step_minutes, history_len), stepper.normalizer.tendency_scale_C.device
        )
    state = stepper.normalizer.encode(state, "prognostic")
    if perturb is not None:
        state = perturb(starts, state)
    lags = [(start.initial - start.analysis) // step_minutes for start in starts]
    last = [steps - 1 - max(lags) + lag for lag in lags]
    forcing = forcing_of(stepper, frames, times, step_minutes, history_len, reading, last)
    factors = None if stochastic is None else stochastic(starts, state.device)
    drawing = nullcontext if noise is None else noise(starts)
    outputs = stepper.rollout(state, forcing, steps, factors=factors)
    del state  # or it would be held to the last step
    for _ in range(steps):
        with drawing():
            output = next(outputs)
        yield stepper.decode(output)


@torch.inference_mode()
def inference_mode(outputs: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the steps of `forecast`, made in torch's inference mode, which is faster.

    Not during training: what a network keeps from such a forecast cannot be used by a training step.
    """
    yield from outputs
