"""The whole config, one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from credit.calendar import parse_duration
from credit.config.schema_base import PathText, StrictModel
from credit.config.schema_data import DataConfig, PreprocessConfig
from credit.config.schema_inference import InferenceConfig
from credit.config.schema_jobs import PbsConfig, SlurmConfig
from credit.config.schema_loss import LossEntry, default_loss
from credit.config.schema_model import ModelEntry
from credit.config.schema_postprocess import replace_entries, require_order
from credit.config.schema_trainer import TrainerConfig
from credit.config.schema_verification import VerificationConfig
from credit.config.step_defaults import fill_step_defaults


class Config(StrictModel):
    """A run."""

    experiment: str = Field("experiment", description="A name for the run.")
    save_loc: PathText = Field(description="The run's folder. `~` and `$VAR` are expanded.")
    seed: int = Field(1000, ge=0, description="Every random draw derives from it.")
    plugins: list[str] = Field([], description="Modules to import first: models, losses, sources of your own.")
    data: DataConfig = Field(description="Where the data are and what they mean.")
    preprocess: PreprocessConfig = Field(PreprocessConfig(), description="How the training store is written.")
    model: ModelEntry = Field(description="The network; keys depend on `type`.")
    loss: LossEntry = Field(default_factory=default_loss, description="Training loss; keys depend on `kind`.")
    trainer: TrainerConfig = Field(description="How training runs.")
    inference: InferenceConfig = Field(InferenceConfig(), description="How forecasts are made.")
    verification: VerificationConfig = Field(VerificationConfig(), description="How forecasts are scored.")
    pbs: PbsConfig = Field(PbsConfig(), description="Jobs under PBS.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="Jobs under Slurm.")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        return fill_step_defaults(raw) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        step, early = self.data.step_minutes, self.trainer.preview
        ensemble = self.inference.ensemble
        perturbation = ensemble.perturbation if ensemble is not None else None
        perturbation_steps = perturbation.step_multiples() if perturbation is not None else {}
        wrong = []
        for key, text in (
            ("inference.lead_time", self.inference.lead_time),
            ("inference.output_every", self.inference.output_every),
            *(("inference.lead_times", lead) for lead in self.inference.lead_times or ()),
            ("inference.ensemble.lagged", ensemble.lagged if ensemble is not None else None),
            *((f"inference.ensemble.perturbation.{key}", text) for key, text in perturbation_steps.items()),
            ("trainer.preview.lead_time", early.lead_time if early is not None else None),
            *(("verification.figure_leads", lead) for lead in self.verification.figure_leads),
        ):
            if text is not None and parse_duration(text) % step:
                wrong.append(f"{key}: {text} is not a multiple of data.timestep {self.data.timestep}")
        if wrong:
            raise ValueError("; ".join(wrong))
        forecast_entries = replace_entries(self.model.postprocess_entries, self.inference.postprocess_entries)
        require_order(forecast_entries)
        for key, entry in {**self.model.postprocess_entries, **forecast_entries}.items():
            entry.require_variables(self.data, key)
        budgets = any(entry.needs_whole_columns for entry in forecast_entries.values())
        products = self.inference.pressure_levels is not None or bool(self.inference.derive)
        if self.data.coefficients and not (self.data.has_vertical or budgets or products):
            raise ValueError(
                "data.coefficients has no effect without sources with vertical, budgets in model.postprocess, "
                "inference.pressure_levels or inference.derive"
            )
        output_every = self.inference.output_every
        if output_every and parse_duration(output_every) > parse_duration(self.inference.lead_time):
            raise ValueError(
                f"inference.output_every: {output_every} is longer than inference.lead_time {self.inference.lead_time}"
            )
        if self.preprocess.climatology and self.verification.climatology.method == "file":
            raise ValueError("preprocess.climatology has no effect with verification.climatology.method: file")
        if self.preprocess.climatology and self.data.store is None:
            raise ValueError("preprocess.climatology needs a data.store, in which it is kept")
        if self.loss.level_weights == "pressure" and self.data.level_units == "model_level":
            raise ValueError("loss.level_weights: pressure needs data.level_units hPa or Pa, not model_level")
        if self.trainer.forecast_len_from is not None and self.trainer.monitor == "loss":
            raise ValueError("trainer.monitor: loss changes its meaning with trainer.forecast_len_from; monitor skill")
        wanted = self.trainer.backprop_on_timestep
        if wanted is not None and (not wanted or min(wanted) < 1 or max(wanted) > self.data.forecast_len):
            raise ValueError(
                f"trainer.backprop_on_timestep: {wanted} must name steps between 1 and data.forecast_len "
                f"{self.data.forecast_len}"
            )
        ramp = self.trainer.forecast_len_from
        if ramp is not None:
            shares, lengths = list(ramp), list(ramp.values())
            if wanted is not None and min(wanted) > min(lengths):
                raise ValueError(
                    f"trainer.backprop_on_timestep: {wanted} leaves no loss while trainer.forecast_len_from is "
                    f"{min(lengths)}"
                )
            if shares != sorted(shares) or shares[:1] != [0.0] or shares[-1] >= 1 or min(lengths) < 1:
                raise ValueError("trainer.forecast_len_from: shares must begin with 0, rise, and stay below 1")
            if lengths[-1] != self.data.forecast_len or max(lengths) > self.data.forecast_len:
                raise ValueError(
                    f"trainer.forecast_len_from: {ramp} must end with data.forecast_len {self.data.forecast_len}"
                )
        return self
