"""Ensembles: initial states are perturbed, and the network's dropout stays on where that is asked for.

Perturbations are measured in standard deviations of each channel's change over a step, which is about the uncertainty
of analyses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from credit.calendar import parse_duration
from credit.config.registry import PERTURBATIONS
from credit.data.samples.frames import FrameReader
from credit.errors import ConfigError
from credit.forecast.ensemble.base import InitialPerturbation, PerturbationContext, register_perturbation
from credit.forecast.ensemble.section import GaussianOrBredSection
from credit.forecast.rollout import ForecastStart, Perturb, analyses, forcing_of, member_rng
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.parallel.host_copy import to_device
from credit.parallel.tensor.dropout import drop_rate
from credit.physics.spherical_harmonics import CorrelatedNoise

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from credit.config.sections.inference import EnsembleConfig


def build_perturbation(
    conf: EnsembleConfig, stepper: Stepper, frames: FrameReader, grid: LatLonGrid, step_minutes: int, history_len: int,
    reading: AbstractContextManager | None = None,
) -> Perturb | None:  # fmt: skip
    """Return the function that perturbs the initial states of ``inference.ensemble``, None where nothing does.

    Raises:
        ConfigError: if the config asks for dropout and the network has none.
    """
    if conf.dropout:
        enable_dropout(stepper.model)
    section = conf.perturbation
    if section is None and not conf.dropout:
        return None
    perturbation = None
    if section is not None:
        context = PerturbationContext(grid, step_minutes, conf.seed, conf.control, stepper, frames, history_len)
        if reading is not None:
            context = replace(context, reading=reading)
        perturbation = PERTURBATIONS.find_class(section.kind)(context, section)
    first_perturbed = 1 if conf.control else 0

    def perturb(starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        if conf.dropout:
            _seed_dropout(conf.seed, starts)
        if perturbation is None:
            return state_BCTHW
        signs = []
        pair_starts = []
        for start in starts:
            number = start.member - first_perturbed
            if number < 0:
                signs.append(0.0)
            else:
                signs.append(1.0 if number % 2 == 0 else -1.0)
            # The odd member of a pair draws the even one's numbers.
            pair_starts.append(ForecastStart(start.initial, max(0, number) // 2, start.analysis))
        sign_B1111 = torch.tensor(signs, device=state_BCTHW.device)[:, None, None, None, None]
        change_BCHW = section.amplitude * perturbation.draw(pair_starts, state_BCTHW)
        return stepper.perturb_state(state_BCTHW, sign_B1111 * change_BCHW[:, :, None])

    return perturb


def lag_minutes(conf: EnsembleConfig | None) -> int:
    """Return by how much earlier each member starts than the one before, in minutes."""
    return 0 if conf is None or conf.lagged is None else parse_duration(conf.lagged)


def describe_ensemble(conf: EnsembleConfig) -> str:
    """Return text on how members differ; it tells the files of one ensemble from those of another."""
    parts = [f"{conf.members} members", f"seed {conf.seed}"]
    if conf.perturbation is not None:
        parts.append(conf.perturbation.describe())
    if conf.lagged is not None:
        parts.append(f"lagged by {conf.lagged}")
    if conf.dropout:
        parts.append("dropout")
    if conf.stochastic is not None:
        parts.append(conf.stochastic.describe())
    if conf.noise is not None:
        blocks = "all blocks" if conf.noise.where is None else ", ".join(conf.noise.where)
        parts.append(f"noise of {conf.noise.std:g} deviations after {blocks}")
    has_perturbation = conf.perturbation is not None or conf.stochastic is not None or conf.noise is not None
    if conf.control and has_perturbation:
        parts.append("member 0 unperturbed")
    return "; ".join(parts)


def enable_dropout(model: nn.Module) -> None:
    """Let dropout draw in evaluation too; everything else stays as it is.

    Raises:
        ConfigError: if the network has no dropout.
    """
    has_dropout = False
    for module in model.modules():
        if drop_rate(module) > 0:
            module.training = True
            has_dropout = True
    if not has_dropout:
        raise ConfigError(
            "inference.ensemble.dropout: the network was trained without dropout (model.attn_dropout, "
            "model.ff_dropout); set it to false"
        )


def _seed_dropout(seed: int, starts: Sequence[ForecastStart]) -> None:
    """Make dropout's numbers depend on the batch's first start."""
    torch.manual_seed(member_rng(seed, starts[0], 1).integers(2**62))


class RandomFields:
    """Random fields of variance 1: white from cell to cell, or correlated and the same at all levels of a variable.

    Args:
        context: with stepper.
        length_km: correlation length; None for white noise.
    """

    def __init__(self, context: PerturbationContext, length_km: float | None) -> None:
        self._channels = context.stepper.channels.group("prognostic")
        variables = list(dict.fromkeys(channel.variable for channel in self._channels))
        self._variable_index = [variables.index(channel.variable) for channel in self._channels]
        self._num_variables = len(variables)
        self._grid = context.grid
        self._seed = context.seed
        self._correlated = CorrelatedNoise(context.grid, length_km) if length_km is not None else None

    def draw(self, starts: Sequence[ForecastStart], device: torch.device) -> Tensor:
        """Return (B, C, H, W)."""
        fields = [self._draw(member_rng(self._seed, start, 0)) for start in starts]
        return to_device(np.stack(fields), device)

    def _draw(self, generator: np.random.Generator) -> np.ndarray:
        if self._correlated is None:
            return generator.standard_normal((len(self._channels), *self._grid.shape), dtype=np.float32)
        return self._correlated.draw(self._num_variables, generator)[self._variable_index]


@register_perturbation("gaussian", GaussianOrBredSection)
class GaussianPerturbation(InitialPerturbation):
    """White noise from cell to cell."""

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, None)

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """See the base class."""
        return self._fields.draw(starts, state_BCTHW.device)


@register_perturbation("correlated", GaussianOrBredSection)
class CorrelatedPerturbation(InitialPerturbation):
    """Noise correlated over a distance, the same at all levels of a variable."""

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, section.length)

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """See the base class."""
        return self._fields.draw(starts, state_BCTHW.device)


@register_perturbation("bred", GaussianOrBredSection)
class BredPerturbation(InitialPerturbation):
    """The differences that grow: noise is forecast through the days before, and scaled back after every cycle.

    Toth and Kalnay 1997, doi:10.1175/1520-0493(1997)125<3297:EFANAT>2.0.CO;2. The size of a vector is the root of the
    mean over area and channels of its square, in standard deviations of the change over a step.
    """

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, section.length)
        self._amplitude = section.amplitude
        self._num_cycles = section.cycles
        self._cycle_minutes = section.cycle_minutes
        self._area_HW = torch.from_numpy(context.grid.area_weights()).float()

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """See the base class; the size of each vector is 1."""
        context = self.context
        stepper = context.stepper
        device = state_BCTHW.device
        num_prognostic = state_BCTHW.shape[1]
        scale_C11 = stepper.normalizer.tendency_scale_C[:, None, None]
        bred_BCHW = self._fields.draw(starts, device)
        for number in range(self._num_cycles, 0, -1):
            times = [start.analysis - number * self._cycle_minutes for start in starts]
            with context.reading:
                history = analyses(context.frames, times, context.step_minutes, context.history_len)
            state = stepper.normalizer.encode(to_device(history, device), "prognostic")
            perturbed = stepper.perturb_state(state, self._amplitude * bred_BCHW[:, :, None])
            forcing = forcing_of(
                stepper, context.frames, [*times, *times], context.step_minutes, context.history_len, context.reading
            )
            # The unperturbed and the perturbed forecasts run side by side in one batch.
            for output in stepper.rollout(
                torch.cat([state, perturbed]), forcing, self._cycle_minutes // context.step_minutes
            ):
                last_output = output
            control, moved = last_output[:, :num_prognostic].chunk(2)
            bred_BCHW = self._scale_to_unit((moved - control) / scale_C11)
        return bred_BCHW

    def _scale_to_unit(self, change_BCHW: Tensor) -> Tensor:
        area = self._area_HW.to(change_BCHW.device)
        square = (change_BCHW**2 * area).sum(dim=(2, 3)).mean(dim=1) / area.sum()
        return change_BCHW / square.sqrt().clamp(min=1e-12)[:, None, None, None]
