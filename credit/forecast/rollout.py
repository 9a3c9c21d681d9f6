"""Forecasts from many starts, a batch at a time, in physical units.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

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
    """Start of one forecast, or of one member of an ensemble.

    Attributes:
        initial: the time in minutes that lead times count from.
        member: number of the member, 0 for a single forecast.
        analysis: the time in minutes whose fields it starts from; before `initial` for a lagged member.
    """

    initial: int
    member: int
    analysis: int


def make_starts(initial: Sequence[int], members: int = 1, lag_minutes: int = 0) -> list[ForecastStart]:
    """Return the starts of all members, those of one initial time side by side; member m starts m lags earlier."""
    starts = []
    for minutes in initial:
        starts += [ForecastStart(minutes, member, minutes - member * lag_minutes) for member in range(members)]
    return starts


def batch_starts(
    initial: Sequence[int], batch_size: int, members: int = 1, lag_minutes: int = 0
) -> list[list[ForecastStart]]:
    """Return the starts of a group of initial times, `batch_size` at a time."""
    starts = make_starts(initial, members, lag_minutes)
    return [starts[first : first + batch_size] for first in range(0, len(starts), batch_size)]


def member_rng(seed: int, start: ForecastStart, stream: int) -> np.random.Generator:
    """Return the random number generator of a member; each purpose has its own stream."""
    # Times before 1970 are negative, and a seed must not be.
    return np.random.default_rng([seed, start.initial % 2**63, start.member, stream])


# Starts of a batch and their normalised states (B, C, T, H, W) -> perturbed states.
Perturb = Callable[[Sequence[ForecastStart], Tensor], Tensor]
# Starts of a batch -> for each step the factors (B, 1, H, W) of the changes that the network predicts.
Stochastic = Callable[[Sequence[ForecastStart], torch.device], Iterator[Tensor]]
# Starts of a batch -> a function that returns a context for each step, inside which the network adds its noise.
Noise = Callable[[Sequence[ForecastStart]], Callable[[], AbstractContextManager[None]]]


def analyses(frames: FrameReader, times: Sequence[int], step_minutes: int, history_len: int) -> np.ndarray:
    """Return the prognostic fields (B, C, T, H, W) of the input frames up to each of `times`, in physical units."""
    states = []
    for minutes in times:
        frame_times = [minutes + offset * step_minutes for offset in range(1 - history_len, 1)]
        states.append(np.stack([frames.prognostic(frame_time) for frame_time in frame_times], axis=1))
    return np.stack(states)


def checksums(
    frames: FrameReader, lags_minutes: Sequence[int], step_minutes: int, history_len: int
) -> Callable[[int], str]:
    """Return the function initial time -> checksum of the prognostic fields that its members start from.

    The checksum has 16 hexadecimal digits. Another analysis of the same time has another checksum.
    """

    @functools.cache  # lagged members of neighbouring initial times share analyses
    def checksum_of_analysis(analysis: int) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for k in range(1 - history_len, 1):
            digest.update(np.ascontiguousarray(frames.prognostic(analysis + k * step_minutes)))
        return digest.digest()

    return lambda initial: hashlib.blake2b(
        b"".join(checksum_of_analysis(initial - lag) for lag in lags_minutes), digest_size=8
    ).hexdigest()


def forcing_of(
    stepper: Stepper, frames: FrameReader, times: Sequence[int], step_minutes: int, history_len: int,
    reading: AbstractContextManager, last: Sequence[int] | None = None,
) -> Callable[[int], Tensor]:  # fmt: skip
    """Return the function step number -> normalised forcing (B, C, T, H, W) that forecasts from `times` may know.

    From the step number in `last` on, the forcing of a forecast is constant.
    """
    device = stepper.normalizer.tendency_scale_C.device

    def forcing(number: int) -> Tensor:
        fields = []
        with reading:
            for index, initial in enumerate(times):
                step = number if last is None else min(number, last[index])
                frame_times = [initial + (step + offset) * step_minutes for offset in range(1 - history_len, 1)]
                fields.append(np.stack([frames.forcing(minutes, initial=initial) for minutes in frame_times], axis=1))
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

    Starts with a shorter lag than others of the batch continue beyond the last lead time, which is not written. The
    data may have no observed forcing there, so the forcing is constant.

    Args:
        stepper: runs the network, in eval mode.
        frames: initial states, and the forcing that a forecast may know.
        starts: of the batch.
        steps: number of steps, counted from the analyses.
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
    noise_context = nullcontext if noise is None else noise(starts)
    outputs = stepper.rollout(state, forcing, steps, factors=factors)
    del state  # or it would stay in memory to the last step
    for _ in range(steps):
        with noise_context():
            output = next(outputs)
        yield stepper.decode(output)


@torch.inference_mode()
def inference_mode(outputs: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the steps of `forecast`, computed in torch's inference mode, which is faster.

    Not for use during training: tensors that a network keeps from such a forecast cannot be used by a training step.
    """
    yield from outputs
