"""Ensembles: initial states are perturbed, and the network's dropout stays on where that is asked for.

Perturbations are measured in standard deviations of each channel's change over a step, which is about what analyses are
uncertain by. They come in pairs: members 1 and 2, 3 and 4, ... have the same one with opposite signs, so that an even
number of them has the analysis as its mean. The numbers depend on seed, initial time and member alone: not on batches,
ranks or devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from credit.calendar import parse_duration
from credit.config.schema_inference import EnsembleConfig
from credit.data.samples.frames import FrameReader
from credit.errors import ConfigError
from credit.forecast.rollout import ForecastStart, Perturb, analyses, forcing_of, member_rng
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.parallel.host_copy import to_device
from credit.parallel.tensor_parallel import drop_rate
from credit.physics.spherical_harmonics import CorrelatedNoise


def build_perturbation(
    conf: EnsembleConfig, stepper: Stepper, frames: FrameReader, grid: LatLonGrid, step_minutes: int, history_len: int,
    reading: AbstractContextManager | None = None,
) -> Perturb | None:  # fmt: skip
    """Return what perturbs the initial states of ``inference.ensemble``, None where nothing does.

    Raises:
        ConfigError: if dropout is asked of a network that has none.
    """
    if conf.dropout:
        enable_dropout(stepper.model)
    chosen = conf.perturbation
    if chosen is None:
        return functools.partial(_seed_dropout, conf.seed) if conf.dropout else None
    noise = _Noise(stepper, grid, conf.seed, chosen.length if chosen.kind != "gaussian" else None)
    make: Callable[[Sequence[ForecastStart], Tensor], Tensor] = noise
    if chosen.kind == "bred":
        cycle = cycle_minutes(conf)
        make = _BredVectors(
            noise, stepper, frames, grid, chosen.amplitude, chosen.cycles, cycle, step_minutes, history_len, reading
        )

    def perturb(starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        if conf.dropout:
            _seed_dropout(conf.seed, starts, state_BCTHW)
        first = 1 if conf.control else 0
        sign = [0.0 if s.member < first else 1.0 if (s.member - first) % 2 == 0 else -1.0 for s in starts]
        scale = torch.tensor(sign, device=state_BCTHW.device)[:, None, None, None, None]
        # the odd one of a pair draws the even one's numbers
        drawn = [ForecastStart(s.initial, max(0, s.member - first) // 2, s.analysis) for s in starts]
        change = chosen.amplitude * make(drawn, state_BCTHW)
        return stepper.perturbed(state_BCTHW, scale * change[:, :, None])

    return perturb


def lag_minutes(conf: EnsembleConfig | None) -> int:
    """Return by how much earlier each member starts than the one before, in minutes."""
    return 0 if conf is None or conf.lagged is None else parse_duration(conf.lagged)


def cycle_minutes(conf: EnsembleConfig) -> int:
    """Return the length of a breeding cycle in minutes, 0 where nothing is bred."""
    chosen = conf.perturbation
    return 0 if chosen is None or chosen.kind != "bred" else parse_duration(chosen.cycle)


def describe_ensemble(conf: EnsembleConfig) -> str:
    """Return how members differ, in words; it tells the files of one ensemble from those of another."""
    parts = [f"{conf.members} members", f"seed {conf.seed}"]
    chosen = conf.perturbation
    if chosen is not None:
        length = "" if chosen.kind == "gaussian" else f", {chosen.length:g} km"
        bred = f", {chosen.cycles} cycles of {chosen.cycle}" if chosen.kind == "bred" else ""
        parts.append(f"{chosen.kind} perturbations of {chosen.amplitude:g} deviations of change{length}{bred}")
    if conf.lagged is not None:
        parts.append(f"lagged by {conf.lagged}")
    if conf.dropout:
        parts.append("dropout")
    if conf.stochastic is not None:
        factors = conf.stochastic
        parts.append(f"changes times 1 + {factors.amplitude:g} r, r of {factors.length:g} km and {factors.time}")
    if conf.noise is not None:
        where = "all blocks" if conf.noise.where is None else ", ".join(conf.noise.where)
        parts.append(f"noise of {conf.noise.std:g} deviations after {where}")
    if conf.control and not (chosen is None and conf.stochastic is None and conf.noise is None):
        parts.append("member 0 unperturbed")
    return "; ".join(parts)


def enable_dropout(model: nn.Module) -> None:
    """Let dropout draw in evaluation too; everything else stays as it is.

    Raises:
        ConfigError: if the network has no dropout.
    """
    found = False
    for module in model.modules():
        if drop_rate(module) > 0:
            module.training = found = True
    if not found:
        raise ConfigError(
            "inference.ensemble.dropout: the network was trained without dropout (model.attn_dropout, "
            "model.ff_dropout); set it to false"
        )


def _seed_dropout(seed: int, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
    """Make dropout's numbers depend on the batch's first start."""
    torch.manual_seed(member_rng(seed, starts[0], 1).integers(2**62))
    return state_BCTHW


class _Noise:
    """Random fields of variance 1: white from cell to cell, or correlated and the same at all levels of a variable."""

    def __init__(self, stepper: Stepper, grid: LatLonGrid, seed: int, length_km: float | None) -> None:
        self._channels = stepper.channels.group("prognostic")
        names = list(dict.fromkeys(c.variable for c in self._channels))
        self._pattern = [names.index(c.variable) for c in self._channels]
        self._patterns, self._grid, self._seed = len(names), grid, seed
        self._correlated = CorrelatedNoise(grid, length_km) if length_km is not None else None

    def __call__(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return (B, C, H, W) on the device of the state."""
        drawn = np.stack([self._draw(member_rng(self._seed, start, 0)) for start in starts])
        return to_device(drawn, state_BCTHW.device)

    def _draw(self, generator: np.random.Generator) -> np.ndarray:
        if self._correlated is None:
            return generator.standard_normal((len(self._channels), *self._grid.shape), dtype=np.float32)
        return self._correlated.draw(self._patterns, generator)[self._pattern]


class _BredVectors:
    """The differences that grow: noise is forecast through the days before, and scaled back after every cycle.

    Toth and Kalnay 1997, doi:10.1175/1520-0493(1997)125<3297:EFANAT>2.0.CO;2. The size of a vector is the root of the
    mean over area and channels of its square, in standard deviations of the change over a step.
    """

    def __init__(
        self, noise: _Noise, stepper: Stepper, frames: FrameReader, grid: LatLonGrid, amplitude: float, cycles: int,
        cycle: int, step_minutes: int, history_len: int, reading: AbstractContextManager | None,
    ) -> None:  # fmt: skip
        self._noise, self._stepper, self._frames = noise, stepper, frames
        self._amplitude, self._cycles, self._cycle = amplitude, cycles, cycle
        self._step, self._history, self._reading = step_minutes, history_len, reading or nullcontext()
        self._area_HW = torch.from_numpy(grid.area_weights()).float()

    def __call__(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return (B, C, H, W) of the size 1."""
        stepper, device = self._stepper, state_BCTHW.device
        scale = stepper.normalizer.tendency_scale_C[:, None, None]
        bred = self._noise(starts, state_BCTHW)
        for number in range(self._cycles, 0, -1):
            times = [start.analysis - number * self._cycle for start in starts]
            with self._reading:
                history = analyses(self._frames, times, self._step, self._history)
            state = stepper.normalizer.encode(to_device(history, device), "prognostic")
            both = torch.cat([state, stepper.perturbed(state, self._amplitude * bred[:, :, None])])
            forcing = forcing_of(stepper, self._frames, [*times, *times], self._step, self._history, self._reading)
            for output in stepper.rollout(both, forcing, self._cycle // self._step):
                last = output
            plain, moved = last[:, : state.shape[1]].chunk(2)
            bred = self._unit((moved - plain) / scale)
        return bred

    def _unit(self, change_BCHW: Tensor) -> Tensor:
        area = self._area_HW.to(change_BCHW.device)
        square = (change_BCHW**2 * area).sum(dim=(2, 3)).mean(dim=1) / area.sum()
        return change_BCHW / square.sqrt().clamp(min=1e-12)[:, None, None, None]
