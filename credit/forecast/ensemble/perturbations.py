"""Perturbations of the initial states of an ensemble, and dropout during forecasts.

The unit of a perturbation is the standard deviation of each channel's change over a step. The errors of analyses are of
about this size.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from credit.calendar import parse_duration
from credit.config.registry import PERTURBATIONS
from credit.errors import ConfigError
from credit.forecast.ensemble.base import InitialPerturbation, PerturbationContext, register_perturbation
from credit.forecast.ensemble.section import GaussianOrBredSection
from credit.forecast.rollout import (
    ForecastInputs,
    ForecastStart,
    PerturbStates,
    build_forcing_function,
    build_member_rng,
    read_initial_states,
)
from credit.forecast.stepper import Stepper
from credit.grid import LatLonGrid
from credit.parallel.domain.domain import allows_divided_fields
from credit.parallel.host_copy import to_device
from credit.parallel.tensor.dropout import drop_rate
from credit.physics.spherical_harmonics import CorrelatedNoise

if TYPE_CHECKING:
    from credit.config.sections.inference import EnsembleConfig


# Streams of `build_member_rng`. `sppt` uses stream 2, and `feature_noise` uses stream 3.
_RNG_STREAM = 0
_DROPOUT_RNG_STREAM = 1


def build_perturbation(
    conf: EnsembleConfig, stepper: Stepper, inputs: ForecastInputs, grid: LatLonGrid
) -> PerturbStates | None:
    """Build the function that perturbs initial states; None if the config has neither a perturbation nor dropout.

    With ``inference.ensemble.dropout``, this function switches the dropout of the network on, and the returned function
    seeds the dropout. Without ``inference.ensemble.perturbation``, the returned function does not change the states.

    Args:
        conf: config section ``inference.ensemble``.
        stepper: stepper that runs the network.
        inputs: source of analyses and forcing.
        grid: grid of the fields.

    Raises:
        ConfigError: if the network has no dropout, or if the perturbation does not support domain parallelism.
    """
    if conf.dropout:
        enable_dropout(stepper.model)
    section = conf.perturbation
    if section is None and not conf.dropout:
        return None
    # None if the members differ only by dropout.
    perturbation = None
    if section is not None:
        context = PerturbationContext(grid, inputs.step_minutes, conf.seed, conf.control, stepper, inputs)
        perturbation_class = PERTURBATIONS.find_class(section.kind)
        if stepper.domain is not None and not allows_divided_fields(perturbation_class):
            raise ConfigError(
                f"inference.ensemble.perturbation: {section.kind} does not declare that it works on divided fields "
                "(supports_domain); choose a different kind, or set inference.parallelism.domain to 1"
            )
        perturbation = perturbation_class(context, section)
    first_perturbed = 1 if conf.control else 0

    def perturb_states(starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        if conf.dropout:
            _seed_dropout(conf.seed, starts)
        if perturbation is None:
            return state_BCTHW
        signs = []
        pair_starts = []
        for start in starts:
            # The number of a perturbed member starts from 0; the control has the number -1 and the sign 0.
            number = start.member - first_perturbed
            if number < 0:
                signs.append(0.0)
            elif number % 2 == 0:
                signs.append(1.0)
            else:
                signs.append(-1.0)
            # Both members of a pair use the same random numbers.
            pair_number = max(0, number) // 2
            pair_starts.append(ForecastStart(start.initial_minutes, pair_number, start.analysis_minutes))
        sign_B1111 = torch.tensor(signs, device=state_BCTHW.device)[:, None, None, None, None]
        change_BCHW = section.amplitude * perturbation.draw(pair_starts, state_BCTHW)
        # All input frames get the same perturbation.
        return stepper.perturb_state(state_BCTHW, sign_B1111 * change_BCHW[:, :, None])

    return perturb_states


def compute_member_lag(conf: EnsembleConfig | None) -> int:
    """Return the interval in minutes between the analyses of successive members; 0 if all start from one analysis."""
    if conf is None or conf.lagged is None:
        return 0
    return parse_duration(conf.lagged)


def compute_analysis_offsets(conf: EnsembleConfig | None) -> list[int]:
    """Return the offsets of all analyses that an ensemble reads, in minutes before the initial time, ascending.

    Offsets above 0 occur because lagged members start from earlier analyses, and because bred vectors grow from earlier
    analyses. A single forecast reads only the analysis at the initial time, which has the offset 0.

    Args:
        conf: config section ``inference.ensemble``; None for a single forecast.
    """
    if conf is None:
        return [0]
    lag = compute_member_lag(conf)
    perturbation_lags = [0]
    if conf.perturbation is not None:
        perturbation_lags = conf.perturbation.analysis_lags_minutes()
    # Each lagged member needs the analyses of the perturbation before its start; several members may share an analysis.
    offsets = set()
    for member in range(conf.members):
        for perturbation_lag in perturbation_lags:
            offsets.add(member * lag + perturbation_lag)
    return sorted(offsets)


def describe_ensemble(conf: EnsembleConfig) -> str:
    """Return a description of the ensemble for the attributes of forecast files, such as "5 members; seed 0; dropout".

    Ensembles with different settings have different descriptions.
    """
    parts = [f"{conf.members} members", f"seed {conf.seed}"]
    if conf.perturbation is not None:
        parts.append(conf.perturbation.describe())
    if conf.lagged is not None:
        parts.append(f"lagged by {conf.lagged}")
    if conf.dropout:
        parts.append("dropout")
    if conf.stochastic is not None:
        parts.append(conf.stochastic.describe())
    if conf.feature_noise is not None:
        blocks = "all blocks"
        if conf.feature_noise.blocks is not None:
            blocks = ", ".join(conf.feature_noise.blocks)
        parts.append(f"noise of {conf.feature_noise.std:g} deviations after {blocks}")
    perturbations = (conf.perturbation, conf.stochastic, conf.feature_noise)
    if conf.control and any(perturbation is not None for perturbation in perturbations):
        parts.append("member 0 unperturbed")
    return "; ".join(parts)


def enable_dropout(model: nn.Module) -> None:
    """Switch the dropout modules of a network to training mode, so that dropout is also active in forecasts.

    The mode of all other modules does not change.

    Raises:
        ConfigError: if the network has no dropout.
    """
    has_dropout = False
    for module in model.modules():
        if drop_rate(module) > 0:
            # Set the attribute, because the method `train` would also change submodules.
            module.training = True
            has_dropout = True
    if not has_dropout:
        raise ConfigError(
            "inference.ensemble.dropout: the network was trained without dropout (model.attn_dropout, "
            "model.ff_dropout); set it to false"
        )


def _seed_dropout(seed: int, starts: Sequence[ForecastStart]) -> None:
    """Seed torch's global generator, which dropout uses, from the ensemble's seed and the first start of a batch."""
    generator = build_member_rng(seed, starts[0], _DROPOUT_RNG_STREAM)
    torch.manual_seed(generator.integers(2**62))


class RandomFields:
    """Generator of random fields of mean 0 and variance 1 for all prognostic channels.

    White noise is independent in each cell and channel. Correlated noise has a horizontal correlation length, is the
    same at all levels of a variable, and is independent between variables.

    Args:
        context: grid, seed and channels of the run.
        length_km: correlation length in km; None for white noise.
    """

    def __init__(self, context: PerturbationContext, length_km: float | None) -> None:
        self._channels = context.stepper.channels.group("prognostic")
        variables = list(dict.fromkeys(channel.variable for channel in self._channels))
        # Index of the variable of each channel.
        self._variable_index = [variables.index(channel.variable) for channel in self._channels]
        self._num_variables = len(variables)
        self._grid = context.grid
        self._domain = context.stepper.domain
        self._seed = context.seed
        self._correlated_noise = None
        if length_km is not None:
            self._correlated_noise = CorrelatedNoise(context.grid, length_km)

    def draw(self, starts: Sequence[ForecastStart], device: torch.device) -> Tensor:
        """Return the random fields of each start on this rank's part of the grid, (B, C, H, W) float32, dimensionless.

        The fields are generated for the whole grid, so they do not depend on the number of ranks.

        Args:
            starts: starts of the forecasts of the batch.
            device: device of the result.
        """
        fields = []
        for start in starts:
            generator = build_member_rng(self._seed, start, _RNG_STREAM)
            fields_CHW = self._sample_member(generator)
            if self._domain is not None:
                fields_CHW = fields_CHW[(..., *self._domain.part.slices)]
            fields.append(fields_CHW)
        return to_device(np.stack(fields), device)

    def _sample_member(self, generator: np.random.Generator) -> np.ndarray:
        """Return the random fields of one member, (C, H, W) float32."""
        if self._correlated_noise is None:
            return generator.standard_normal((len(self._channels), *self._grid.shape), dtype=np.float32)
        # All channels of a variable share one field; V is the number of variables.
        fields_VHW = self._correlated_noise.draw(self._num_variables, generator)
        return fields_VHW[self._variable_index]


@register_perturbation("gaussian", GaussianOrBredSection)
class GaussianPerturbation(InitialPerturbation):
    """Perturbation by white noise, independent in each cell and channel."""

    supports_domain = True

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, None)

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return white noise (B, C, H, W) for each start; see `InitialPerturbation.draw`."""
        return self._fields.draw(starts, state_BCTHW.device)


@register_perturbation("correlated", GaussianOrBredSection)
class CorrelatedPerturbation(InitialPerturbation):
    """Perturbation by noise with a horizontal correlation length, the same at all levels of a variable."""

    supports_domain = True

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, section.length)

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return correlated noise (B, C, H, W) for each start; see `InitialPerturbation.draw`."""
        return self._fields.draw(starts, state_BCTHW.device)


@register_perturbation("bred", GaussianOrBredSection)
class BredPerturbation(InitialPerturbation):
    """Bred vectors: perturbations that have grown in forecasts up to the initial time.

    Each breeding cycle makes two forecasts: one from an analysis and one from the same analysis plus a perturbation.
    The difference between the two forecasts, scaled to norm 1, is the perturbation of the next cycle. The first cycle
    uses random noise. The last cycle ends at the initial time, and its difference is the bred vector. Over the cycles,
    the fastest-growing directions dominate (Toth and Kalnay 1997,
    doi:10.1175/1520-0493(1997)125<3297:EFANAT>2.0.CO;2).

    The norm is the root mean square over area and channels, in standard deviations of each channel's change over a
    step.
    """

    supports_domain = True

    def __init__(self, context: PerturbationContext, section: GaussianOrBredSection) -> None:
        super().__init__(context, section)
        self._fields = RandomFields(context, section.length)
        self._amplitude = section.amplitude
        self._num_cycles = section.cycles
        self._cycle_minutes = section.cycle_minutes
        # Area weights of this rank's part of the grid, and their sum over the whole grid.
        self._area_HW = torch.from_numpy(context.grid.area_weights()).float()
        self._total_area = self._area_HW.sum()
        self._domain = context.stepper.domain
        if self._domain is not None:
            self._area_HW = self._area_HW[self._domain.part.slices]

    def draw(self, starts: Sequence[ForecastStart], state_BCTHW: Tensor) -> Tensor:
        """Return a bred vector (B, C, H, W) of norm 1 for each start; see `InitialPerturbation.draw`."""
        inputs = self.context.inputs
        stepper = self.context.stepper
        device = state_BCTHW.device
        num_prognostic = state_BCTHW.shape[1]
        scale_C11 = stepper.normalizer.tendency_scale_C[:, None, None]
        steps_per_cycle = self._cycle_minutes // inputs.step_minutes
        bred_BCHW = self._fields.draw(starts, device)
        # The loop runs from the earliest cycle to the last cycle, which ends at the analyses of the starts.
        for cycles_before in range(self._num_cycles, 0, -1):
            minutes_before = cycles_before * self._cycle_minutes
            cycle_starts = [start.analysis_minutes - minutes_before for start in starts]
            fields = read_initial_states(inputs, cycle_starts)
            state = stepper.normalizer.encode(to_device(fields, device), "prognostic")
            perturbed = stepper.perturb_state(state, self._amplitude * bred_BCHW[:, :, None])
            # The unperturbed and the perturbed forecasts run in one batch.
            both_states = torch.cat([state, perturbed])
            forcing = build_forcing_function(stepper.normalizer, inputs, [*cycle_starts, *cycle_starts])
            # Only the output of the last step is used.
            for output in stepper.rollout(both_states, forcing, steps_per_cycle):
                last_output = output
            control_BCHW, perturbed_BCHW = last_output[:, :num_prognostic].chunk(2)
            bred_BCHW = self._scale_to_unit_norm((perturbed_BCHW - control_BCHW) / scale_C11)
        return bred_BCHW

    def _scale_to_unit_norm(self, change_BCHW: Tensor) -> Tensor:
        """Divide the changes (B, C, H, W) of each forecast by their root mean square over area and channels."""
        area_HW = self._area_HW.to(change_BCHW.device)
        square_B = (change_BCHW**2 * area_HW).sum(dim=(2, 3)).mean(dim=1) / self._total_area
        if self._domain is not None:
            square_B = self._domain.sum(square_B)
        # The lower limit avoids 0 / 0 if the perturbation has decayed to 0.
        norm_B = square_B.sqrt().clamp(min=1e-12)
        return change_BCHW / norm_B[:, None, None, None]
