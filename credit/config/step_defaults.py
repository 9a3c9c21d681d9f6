"""Default durations of forecasts, which must be multiples of the time step, whatever that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from credit.calendar import format_duration, parse_duration
from credit.config.registry import PERTURBATIONS
from credit.config.schema_data import DataConfig
from credit.config.schema_forecast import InferenceConfig, InitialTimesConfig, VerificationConfig
from credit.config.schema_trainer import PreviewConfig
from credit.errors import ConfigError


def fill_step_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the durations that it leaves out, where their usual default is no multiple of the step.

    Args:
        raw: the whole config, not yet validated; what is not of the right type is left to the validation.
    """
    filled = dict(raw)
    data = raw.get("data")
    timestep = data.get("timestep", DataConfig.model_fields["timestep"].default) if isinstance(data, Mapping) else None
    try:
        step = parse_duration(timestep)
    except ConfigError:
        return filled
    _fill(filled, "inference", {"lead_time": _round_up(InferenceConfig.model_fields["lead_time"].default, step)})
    leads = VerificationConfig.model_fields["figure_leads"].default
    _fill(filled, "verification", {"figure_leads": list(dict.fromkeys(_round_up(lead, step) for lead in leads))})
    inference, trainer = filled.get("inference"), filled.get("trainer")
    if isinstance(inference, dict):
        every = _round_up(InitialTimesConfig.model_fields["every"].default, step)
        _fill(inference, "initial_times", {"every": every})
        ensemble = inference.get("ensemble")
        perturbation = ensemble.get("perturbation") if isinstance(ensemble, Mapping) else None
        if isinstance(perturbation, Mapping) and perturbation.get("kind") == "bred":
            inference["ensemble"] = dict(ensemble)
            cycle = _round_up(PERTURBATIONS.find_section("bred").model_fields["cycle"].default, step)
            _fill(inference["ensemble"], "perturbation", {"cycle": cycle})
    if isinstance(trainer, Mapping) and isinstance(trainer.get("preview"), Mapping):
        filled["trainer"] = dict(trainer)
        lead_time = _round_up(PreviewConfig.model_fields["lead_time"].default, step)
        _fill(filled["trainer"], "preview", {"lead_time": lead_time})
    return filled


def _fill(parent: dict[str, Any], name: str, defaults: Mapping[str, Any]) -> None:
    """Give a section below `parent` the defaults of keys that it lacks; a section that is left out is made."""
    section = parent.get(name, {})
    if isinstance(section, Mapping):
        parent[name] = {**defaults, **section}


def _round_up(duration: str, step: int) -> str:
    """Return a duration, or the next multiple of `step` minutes where it is none."""
    minutes = parse_duration(duration)
    return duration if minutes % step == 0 else format_duration(-(-minutes // step) * step)
