"""Defaults that depend on other keys: durations that are multiples of the time step, and the control member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credit.calendar import format_duration, parse_duration
from credit.config.registry import PERTURBATIONS
from credit.config.sections.base import StrictModel
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig, InitialTimesConfig
from credit.config.sections.trainer import PreviewConfig
from credit.config.sections.verification import VerificationConfig
from credit.errors import ConfigError


def fill_step_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with defaults for missing durations, each rounded up to a multiple of the time step.

    For the ensemble of a network with noise, ``control: false`` is also added if the key is missing.

    Args:
        raw: the whole config, not yet validated; it is not changed. Values of a wrong type are kept, so that the
            validation reports them.

    Returns:
        A copy of the config; sections that need no default are the same objects as in `raw`.
    """
    filled = dict(raw)
    data = raw.get("data")
    if not isinstance(data, Mapping):
        return filled
    timestep = data.get("timestep", DataConfig.model_fields["timestep"].default)
    try:
        step = parse_duration(timestep)
    except ConfigError:
        return filled

    # Round the lead times of figures. Several short lead times may be rounded to the same multiple, which is listed
    # once.
    figure_leads = []
    for lead in VerificationConfig.model_fields["figure_leads"].default:
        rounded = _round_up(lead, step)
        if rounded not in figure_leads:
            figure_leads.append(rounded)
    filled["verification"] = _add_defaults(raw.get("verification", {}), {"figure_leads": figure_leads})

    # Round durations of forecasts: lead time, interval of the initial times, and cycle of bred perturbations.
    inference = _add_defaults(
        raw.get("inference", {}), {"lead_time": _round_default(InferenceConfig, "lead_time", step)}
    )
    filled["inference"] = inference
    if isinstance(inference, dict):
        initial_times = inference.get("initial_times", {})
        inference["initial_times"] = _add_defaults(
            initial_times, {"every": _round_default(InitialTimesConfig, "every", step)}
        )
        ensemble = inference.get("ensemble")
        if isinstance(ensemble, Mapping):
            inference["ensemble"] = _fill_ensemble_defaults(ensemble, raw.get("model"), step)

    # Round durations of previews during training.
    trainer = raw.get("trainer")
    if isinstance(trainer, Mapping) and isinstance(trainer.get("preview"), Mapping):
        lead_time = _round_default(PreviewConfig, "lead_time", step)
        preview = _add_defaults(trainer["preview"], {"lead_time": lead_time})
        filled["trainer"] = {**trainer, "preview": preview}
    return filled


def _fill_ensemble_defaults(ensemble: Mapping[str, Any], model: Any, step: int) -> Mapping[str, Any]:
    """Return the section ``inference.ensemble`` with the defaults of the control member and of bred perturbations.

    Args:
        ensemble: the section, not yet validated; it is not changed.
        model: the section ``model``, not yet validated; it may have a wrong type.
        step: time step in minutes.
    """
    if isinstance(model, Mapping) and model.get("noise"):
        # A network that was trained with noise has no unperturbed ensemble member.
        ensemble = _add_defaults(ensemble, {"control": False})
    perturbation = ensemble.get("perturbation")
    if isinstance(perturbation, Mapping) and perturbation.get("kind") == "bred":
        cycle = _round_default(PERTURBATIONS.find_section("bred"), "cycle", step)
        ensemble = {**ensemble, "perturbation": _add_defaults(perturbation, {"cycle": cycle})}
    return ensemble


def _add_defaults(section: Any, defaults: Mapping[str, Any]) -> Any:
    """Return a copy of a section with `defaults` for missing keys; return a value that is not a mapping unchanged."""
    if not isinstance(section, Mapping):
        return section
    return {**defaults, **section}


def _round_default(section: type[StrictModel], key: str, step: int) -> str:
    """Return the default duration string of a key of a section, rounded up to a multiple of `step` minutes."""
    return _round_up(section.model_fields[key].default, step)


def _round_up(duration: str, step: int) -> str:
    """Return a duration string rounded up to a multiple of `step` minutes."""
    minutes = parse_duration(duration)
    if minutes % step == 0:
        return duration
    # Floor division of the negative number rounds the quotient up.
    num_steps = -(-minutes // step)
    return format_duration(num_steps * step)
