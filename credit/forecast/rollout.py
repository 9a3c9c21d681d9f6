"""Forecasts of a batch of starts, in physical units: initial states, forcing and the loop over steps.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from credit.data.normalize import Normalizer
from credit.data.samples.frames import FrameReader
from credit.forecast.stepper import Condition, Stepper
from credit.parallel.host_copy import to_device


@dataclass(frozen=True, order=True)
class ForecastStart:
    """Start of one forecast, or of one member of an ensemble.

    Attributes:
        initial_minutes: initial time in minutes of the run's calendar; lead times are relative to this time.
        member: number of the member; 0 for a single forecast.
        analysis_minutes: time of the initial fields in minutes; it is before `initial_minutes` for a lagged member.
    """

    initial_minutes: int
    member: int
    analysis_minutes: int

    def lead_minutes(self, step: int, step_minutes: int) -> int:
        """Return the lead time in minutes after `step` steps of `step_minutes`.

        For a lagged member, the lead time may be 0 or negative, because its first steps end at or before the initial
        time.
        """
        return self.analysis_minutes + step * step_minutes - self.initial_minutes


def build_starts(
    initial_times: Sequence[int], members: int = 1, lag_minutes: int = 0, first_member: int = 0
) -> list[ForecastStart]:
    """Return the starts of all members of all initial times, in a list in which members of the same time are adjacent.

    Args:
        initial_times: initial times in minutes.
        members: number of members; 1 for single forecasts.
        lag_minutes: interval between the analyses of successive members. Member m starts from the analysis m intervals
            before the initial time. With 0, all members start at the initial time.
        first_member: number of the first member.
    """
    starts = []
    for initial_minutes in initial_times:
        for member in range(first_member, first_member + members):
            starts.append(ForecastStart(initial_minutes, member, initial_minutes - member * lag_minutes))
    return starts


def build_start_batches(
    initial_times: Sequence[int], batch_size: int, members: int = 1, lag_minutes: int = 0, first_member: int = 0
) -> list[list[ForecastStart]]:
    """Return the starts of all forecasts in batches of `batch_size`; the last batch may be smaller.

    See `build_starts` for the order of the starts and for the other arguments.
    """
    starts = build_starts(initial_times, members, lag_minutes, first_member)
    return [starts[first : first + batch_size] for first in range(0, len(starts), batch_size)]


def build_member_rng(seed: int, start: ForecastStart, stream: int) -> np.random.Generator:
    """Return the random number generator of one ensemble member.

    Args:
        seed: ``inference.ensemble.seed``.
        start: start of the member's forecast. Only its initial time and member number have an effect.
        stream: number of the stream of random numbers. Each kind of perturbation has its own number, so the random
            numbers of different kinds are independent.
    """
    # Times before 1970 are negative, but a seed must not be negative.
    return np.random.default_rng([seed, start.initial_minutes % 2**63, start.member, stream])


# Types of the four functions by which the members of an ensemble differ.
# Takes the starts of a batch and their normalised states (B, C, T, H, W); returns perturbed states of the same shape.
PerturbStates = Callable[[Sequence[ForecastStart], Tensor], Tensor]
# Takes the starts of a batch and the device; yields for each step the factors (B, 1, H, W) on the predicted changes.
DrawFactors = Callable[[Sequence[ForecastStart], torch.device], Iterator[Tensor]]
# Takes the starts of a batch; returns a function that returns a context for each step. Inside the context, the network
# adds noise to its features.
BuildNoiseContext = Callable[[Sequence[ForecastStart]], Callable[[], AbstractContextManager[None]]]
# Takes the starts of a batch and the device; yields for each step the noise inputs of a network trained with noise.
DrawConditions = Callable[[Sequence[ForecastStart], torch.device], Iterator[Condition | None]]


@dataclass(frozen=True)
class ForecastInputs:
    """Source of the initial states and forcing of forecasts.

    Attributes:
        frames: reader of the prognostic and forcing fields of one valid time.
        step_minutes: time step of the model in minutes.
        history_len: number of input frames of the model.
        file_lock: context that is entered while fields are read. If a `BackgroundWriter` writes files at the same time,
            this must be the `file_lock` of that writer.
    """

    frames: FrameReader
    step_minutes: int
    history_len: int
    file_lock: AbstractContextManager = field(default_factory=nullcontext)


def read_initial_states(inputs: ForecastInputs, analysis_times: Sequence[int]) -> np.ndarray:
    """Read the prognostic fields of the input frames that end at each analysis time.

    Args:
        inputs: source of the fields.
        analysis_times: time in minutes of the last input frame of each of the B forecasts.

    Returns:
        (B, C, T, H, W) float32 in physical units, with the T input frames of the model, the earliest first.

    Raises:
        DataError: if a frame is missing in the data.
    """
    states = []
    with inputs.file_lock:
        for minutes in analysis_times:
            frames = [inputs.frames.prognostic(frame_time) for frame_time in _list_frame_times(inputs, minutes)]
            states.append(np.stack(frames, axis=1))
    return np.stack(states)


def _list_frame_times(inputs: ForecastInputs, last_frame: int) -> list[int]:
    """Return the times of the input frames in minutes, ascending; the last is `last_frame`."""
    # Offsets in steps from the last frame: -2, -1 and 0 for three frames.
    offsets = range(1 - inputs.history_len, 1)
    return [last_frame + offset * inputs.step_minutes for offset in offsets]


def build_initial_state_checksum(inputs: ForecastInputs, lags_minutes: Sequence[int]) -> Callable[[int], str]:
    """Build a function that computes the checksum of the initial prognostic fields of a forecast.

    The function takes the initial time in minutes and returns 16 hexadecimal digits. If the analysis in the data is
    replaced, the checksum changes, so a forecast from the old analysis is made again.

    Args:
        inputs: source of the fields; its `file_lock` is not used.
        lags_minutes: offsets of the analyses of all members, in minutes before the initial time.
    """

    @functools.cache  # lagged members of neighbouring initial times share analyses
    def hash_analysis(analysis_minutes: int) -> bytes:
        digest = hashlib.blake2b(digest_size=8)
        for frame_time in _list_frame_times(inputs, analysis_minutes):
            digest.update(np.ascontiguousarray(inputs.frames.prognostic(frame_time)))
        return digest.digest()

    def hash_initial_states(initial_minutes: int) -> str:
        digests = [hash_analysis(initial_minutes - lag) for lag in lags_minutes]
        return hashlib.blake2b(b"".join(digests), digest_size=8).hexdigest()

    return hash_initial_states


def build_forcing_function(
    normalizer: Normalizer,
    inputs: ForecastInputs,
    analysis_times: Sequence[int],
    last_forcing_steps: Sequence[int] | None = None,
) -> Callable[[int], Tensor]:
    """Build a function that reads the dynamic forcing of a forecast step.

    The function takes a step number, from 0. It returns the normalised forcing of the step's input frames,
    (B, C, T, H, W) on the device of the normalizer. For each variable,
    ``data.variable_options.NAME.in_forecast`` determines whether values after the analysis are read from the data or
    extrapolated.

    Args:
        normalizer: conversion to normalised space.
        inputs: source of the fields.
        analysis_times: time in minutes of the analysis of each forecast of the batch.
        last_forcing_steps: for each forecast, the number of the last step whose forcing is read; all later steps get
            the forcing of this step. None to read the forcing of every step.
    """
    device = normalizer.tendency_scale_C.device

    def read_forcing(step_number: int) -> Tensor:
        fields = []
        with inputs.file_lock:
            for index, analysis_minutes in enumerate(analysis_times):
                forcing_step = step_number
                if last_forcing_steps is not None:
                    forcing_step = min(step_number, last_forcing_steps[index])
                last_frame = analysis_minutes + forcing_step * inputs.step_minutes
                frames = []
                for frame_time in _list_frame_times(inputs, last_frame):
                    frames.append(inputs.frames.forcing(frame_time, initial=analysis_minutes))
                fields.append(np.stack(frames, axis=1))
        return normalizer.encode(to_device(np.stack(fields), device), "dynamic_forcing")

    return read_forcing


@torch.no_grad()
def forecast_batch(
    stepper: Stepper,
    inputs: ForecastInputs,
    starts: Sequence[ForecastStart],
    num_steps: int,
    perturb_states: PerturbStates | None = None,
    draw_factors: DrawFactors | None = None,
    build_noise_context: BuildNoiseContext | None = None,
    draw_conditions: DrawConditions | None = None,
) -> Iterator[Tensor]:
    """Collective: yield the output of each step of a batch of forecasts.

    If the network is sharded, all ranks that share its weights must make the same number of steps.

    All members of a batch make the same number of steps. So a lagged member with a short lag continues beyond the last
    lead time. These additional steps are not written; they use the last forcing, because the data may have no further
    forcing.

    Args:
        stepper: stepper that runs the network, which is in eval mode.
        inputs: source of the initial states and of the forcing.
        starts: starts of the forecasts of the batch.
        num_steps: number of steps from the analysis of each forecast.
        perturb_states: function that perturbs the initial states; None for unperturbed states.
        draw_factors: function that generates the factors on the predicted change of each step; None for no factors.
        build_noise_context: function that builds the contexts in which noise is added to features; None for no noise.
        draw_conditions: function that generates the noise input of a network trained with noise; None for no noise.

    Yields:
        (B, C_out, H, W) float32 in physical units, on the device of the network; C_out output channels.

    Raises:
        DataError: if a field is missing in the data.
    """
    state = _encode_initial_states(stepper, inputs, starts)
    if perturb_states is not None:
        state = perturb_states(starts, state)
    forcing = build_forcing_function(
        stepper.normalizer,
        inputs,
        [start.analysis_minutes for start in starts],
        _find_last_forcing_steps(starts, num_steps, inputs.step_minutes),
    )
    factors = None
    if draw_factors is not None:
        factors = draw_factors(starts, state.device)
    noise_context: Callable[[], AbstractContextManager[None]] = nullcontext
    if build_noise_context is not None:
        noise_context = build_noise_context(starts)
    conditions = None
    if draw_conditions is not None:
        conditions = draw_conditions(starts, state.device)
    outputs = stepper.rollout(state, forcing, num_steps, factors=factors, conditions=conditions)
    del state  # free the memory now, not after the last step
    for _ in range(num_steps):
        # The context covers only the network's step, not the work of the caller between two steps.
        with noise_context():
            output = next(outputs)
        yield stepper.decode(output)


def _encode_initial_states(stepper: Stepper, inputs: ForecastInputs, starts: Sequence[ForecastStart]) -> Tensor:
    """Return the normalised initial states (B, C, T, H, W) of forecasts, on the device of the network."""
    fields_BCTHW = read_initial_states(inputs, [start.analysis_minutes for start in starts])
    normalizer = stepper.normalizer
    return normalizer.encode(to_device(fields_BCTHW, normalizer.tendency_scale_C.device), "prognostic")


def _find_last_forcing_steps(starts: Sequence[ForecastStart], num_steps: int, step_minutes: int) -> list[int]:
    """Return, for each forecast of a batch, the number (from 0) of the step that ends at the last lead time.

    For the forecast with the longest lag, this is the last step. Other forecasts reach the last lead time earlier, by
    the difference between their lag and the longest lag.
    """
    lag_steps = [(start.initial_minutes - start.analysis_minutes) // step_minutes for start in starts]
    longest_lag = max(lag_steps)
    return [num_steps - 1 - longest_lag + lag for lag in lag_steps]


@torch.inference_mode()
def iterate_in_inference_mode(outputs: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the outputs of an iterator that is advanced in torch's inference mode, which is faster than `no_grad`.

    Do not use this function for forecasts during training. A network may cache tensors during a forecast, such as
    tables, and a training step cannot use tensors that were created in inference mode.

    Args:
        outputs: iterator over the outputs of forecast steps, such as the result of `forecast_batch`.
    """
    yield from outputs
