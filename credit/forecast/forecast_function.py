"""Construction of the function that makes the forecasts of a batch, with the perturbations of an ensemble."""

from __future__ import annotations

import functools
from pathlib import Path

from credit.config.sections.inference import EnsembleConfig
from credit.config.sections.model import ModelSection
from credit.errors import ConfigError
from credit.forecast.ensemble.feature_noise import build_feature_noise
from credit.forecast.ensemble.model_noise import build_model_noise
from credit.forecast.ensemble.perturbations import build_perturbation
from credit.forecast.ensemble.sppt import build_tendency_perturbation
from credit.forecast.rollout import ForecastInputs, forecast_batch
from credit.forecast.shared_forecasts import ForecastFunction
from credit.forecast.stepper import Stepper
from credit.models.base import ModelSpec


def build_forecast_function(
    ensemble: EnsembleConfig | None,
    stepper: Stepper,
    inputs: ForecastInputs,
    spec: ModelSpec,
    model_conf: ModelSection,
    origin: Path,
) -> ForecastFunction:
    """Build the function that makes the forecasts of a batch on this rank.

    Args:
        ensemble: section ``inference.ensemble`` of the config; None for single forecasts.
        stepper: stepper that runs the network, which is in eval mode.
        inputs: source of the initial states and of the forcing.
        spec: channels, grid and frames of the data.
        model_conf: section ``model`` of the training run.
        origin: path of the weights, for messages.

    Returns:
        Function of a list of B forecast starts and a number of steps, which yields the output (B, C, H, W) of each step
        in physical units, on this rank's part of the grid.

    Raises:
        ConfigError: if the network does not support a setting of ``inference.ensemble``, for example because it has no
            dropout.
    """
    perturb_states = None
    if ensemble is not None:
        # The checkpoint may contain a network that was trained without noise, although the current config has noise.
        if not model_conf.noise:
            problem = ensemble.describe_lack_of_noise(f"{origin}, which was trained without model.noise")
            if problem is not None:
                raise ConfigError(problem)
        perturb_states = build_perturbation(ensemble, stepper, inputs, spec.grid)
    return functools.partial(
        forecast_batch,
        stepper,
        inputs,
        perturb_states=perturb_states,
        draw_factors=build_tendency_perturbation(ensemble, spec.grid, inputs.step_minutes, stepper.domain),
        build_noise_context=build_feature_noise(ensemble, stepper.model),
        draw_conditions=build_model_noise(ensemble, spec, model_conf),
    )
