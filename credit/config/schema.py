"""Schema of the whole config, and rules for combinations of keys in different sections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from credit.calendar import parse_duration
from credit.config.realtime_section import RealtimeConfig
from credit.config.sections.base import PathText, StrictModel
from credit.config.sections.data import DataConfig, PreprocessConfig
from credit.config.sections.execution import PbsConfig, SlurmConfig
from credit.config.sections.inference import InferenceConfig
from credit.config.sections.loss import LossEntry, default_loss
from credit.config.sections.model import ModelEntry
from credit.config.sections.postprocess import replace_entries, require_order
from credit.config.sections.trainer import TrainerConfig
from credit.config.sections.verification import VerificationConfig
from credit.config.step_defaults import fill_step_defaults


class Config(StrictModel):
    """Config of a run: its name, folder, seed and plugins, and one section for each topic."""

    experiment: str = Field("experiment", description="Name of the run.")
    save_loc: PathText = Field(description="Folder of the run. `~` and `$VAR` are expanded.")
    seed: int = Field(1000, ge=0, description="Seed of all random numbers.")
    plugins: list[str] = Field(
        [],
        description="Python modules that are imported before the config is checked. They register additional models, "
        "losses, sources and so on.",
    )
    data: DataConfig = Field(description="Sources and variables of the data, time step, periods and training store.")
    preprocess: PreprocessConfig = Field(PreprocessConfig(), description="How the training store is written.")
    model: ModelEntry = Field(description="The network; keys depend on `type`.")
    loss: LossEntry = Field(default_factory=default_loss, description="Training loss; keys depend on `kind`.")
    trainer: TrainerConfig = Field(description="How training runs.")
    inference: InferenceConfig = Field(InferenceConfig(), description="How forecasts are made.")
    verification: VerificationConfig = Field(VerificationConfig(), description="How forecasts are scored.")
    realtime: RealtimeConfig | None = Field(
        None, description="Forecasts from the newest operational analysis (`credit realtime`)."
    )
    pbs: PbsConfig = Field(PbsConfig(), description="Jobs under PBS.")
    slurm: SlurmConfig = Field(SlurmConfig(), description="Jobs under Slurm.")

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, raw: Any) -> Any:
        """Fill in the defaults that depend on the time step, before any key is validated."""
        if isinstance(raw, Mapping):
            return fill_step_defaults(raw)
        return raw

    @model_validator(mode="after")
    def _require_consistent(self) -> Config:
        """Raise an error if keys of different sections contradict each other."""
        self._require_multiples_of_step()
        self._require_effective_keys()
        self._require_consistent_ensemble()
        self._require_shareable_members()
        self._require_divisible_forecasts()
        self._require_consistent_rollout()
        return self

    def _require_multiples_of_step(self) -> None:
        """Raise an error if a duration is not a multiple of the time step."""
        # Collect pairs of a config key and its duration string.
        inference = self.inference
        durations = [("inference.lead_time", inference.lead_time)]
        if inference.output_every is not None:
            durations.append(("inference.output_every", inference.output_every))
        durations += [("inference.lead_times", lead) for lead in inference.lead_times or ()]
        ensemble = inference.ensemble
        if ensemble is not None:
            if ensemble.lagged is not None:
                durations.append(("inference.ensemble.lagged", ensemble.lagged))
            if ensemble.perturbation is not None:
                for key, duration in ensemble.perturbation.durations_to_check().items():
                    durations.append((f"inference.ensemble.perturbation.{key}", duration))
        if self.trainer.preview is not None:
            durations.append(("trainer.preview.lead_time", self.trainer.preview.lead_time))
        durations += [("verification.figure_leads", lead) for lead in self.verification.figure_leads]

        problems = []
        for key, duration in durations:
            if parse_duration(duration) % self.data.step_minutes:
                problems.append(f"{key}: {duration} is not a multiple of data.timestep {self.data.timestep}")
        if problems:
            raise ValueError("; ".join(problems))

    def _require_effective_keys(self) -> None:
        """Raise an error if a key has no effect or contradicts keys of other sections."""
        # Check the post-processes in training and in forecasts.
        model_entries = self.model.postprocess_entries
        forecast_entries = replace_entries(model_entries, self.inference.postprocess_entries)
        require_order(forecast_entries, "inference.postprocess")
        for key, entry in {**model_entries, **forecast_entries}.items():
            entry.require_variables(self.data, key)
        # Coefficients of model levels are needed only for sums over the column and for vertical interpolation.
        has_budgets = any(entry.needs_whole_columns for entry in forecast_entries.values())
        has_derived_output = self.inference.pressure_levels is not None or bool(self.inference.derive)
        if self.data.coefficients and not (self.data.has_vertical_interpolation or has_budgets or has_derived_output):
            raise ValueError(
                "data.coefficients has no effect without sources with vertical, budgets in model.postprocess, "
                "inference.pressure_levels or inference.derive"
            )
        # Check keys of forecasts, climatology and loss.
        output_every = self.inference.output_every
        if output_every and parse_duration(output_every) > parse_duration(self.inference.lead_time):
            raise ValueError(
                f"inference.output_every: {output_every} is longer than inference.lead_time {self.inference.lead_time}"
            )
        if self.preprocess.climatology and self.verification.climatology.method == "file":
            raise ValueError("preprocess.climatology has no effect with verification.climatology.method: file")
        if self.preprocess.climatology and self.data.store is None:
            raise ValueError("preprocess.climatology needs a data.store to write the climatology to")
        if self.loss.weight != 1.0:
            raise ValueError("loss.weight is the weight of a term of a sum; set it under loss.terms, or leave it out")
        if self.loss.level_weights == "pressure" and self.data.level_units == "model_level":
            raise ValueError("loss.level_weights: pressure needs data.level_units hPa or Pa, not model_level")

    def _require_consistent_ensemble(self) -> None:
        """Raise an error if keys of ensembles, in training or in forecasts, contradict each other."""
        # In ensembles of forecasts, a perturbation or noise must make the members different.
        ensemble = self.inference.ensemble
        if ensemble is not None and not self.model.noise:
            problem = ensemble.describe_lack_of_noise("a network without model.noise")
            if problem is not None:
                raise ValueError(problem)
        if ensemble is not None and ensemble.dropout and self.model.find_noise("dropout") is not None:
            raise ValueError(
                "inference.ensemble.dropout has no effect on a network with model.noise of kind dropout, whose dropout "
                "is always active in ensembles; remove inference.ensemble.dropout"
            )
        # In training, members, noise and loss must be used together.
        if self.trainer.members > 1 and not self.model.noise:
            raise ValueError(
                f"trainer.members: {self.trainer.members} members would all be equal; set model.noise, for "
                "example to global"
            )
        if self.trainer.members > 1 and not self.loss.needs_members:
            raise ValueError(
                f"trainer.members: {self.trainer.members} members need a loss that compares members; loss.kind "
                f"{self.loss.kind} would train all members to be equal; set it to crps"
            )
        if self.trainer.members == 1 and self.model.noise:
            raise ValueError(
                "model.noise has no effect with trainer.members: 1, because one forecast is trained without noise; set "
                "trainer.members to 2 or more, or remove model.noise"
            )
        if self.trainer.members == 1 and self.loss.needs_members:
            raise ValueError(
                f"loss.kind: {self.loss.kind} compares the members of an ensemble; set trainer.members to 2 or more, "
                "or loss.kind to mae, which crps is for one member"
            )

    def _require_shareable_members(self) -> None:
        """Raise an error if the ranks of an ensemble group cannot share the members of a sample or a forecast."""
        # In training, ranks share the members of a sample.
        ranks_per_sample = self.trainer.parallelism.ensemble
        if self.trainer.members % ranks_per_sample:
            raise ValueError(
                f"trainer.parallelism.ensemble: {ranks_per_sample} ranks cannot share trainer.members "
                f"{self.trainer.members} evenly; set it to a divisor of trainer.members"
            )
        if ranks_per_sample > 1 and self.trainer.parallelism.data == "none":
            raise ValueError(
                f"trainer.parallelism.ensemble: {ranks_per_sample} needs data parallelism; set "
                "trainer.parallelism.data to fsdp2 or ddp"
            )
        if ranks_per_sample > 1 and not self.trainer.objective.shares_members:
            raise ValueError(
                f"trainer.parallelism.ensemble: trainer.objective.kind {self.trainer.objective.kind} does not share "
                "members among ranks; set trainer.parallelism.ensemble to 1"
            )
        # In forecasts, ranks share the members of an initial time.
        ensemble = self.inference.ensemble
        ranks_per_forecast = self.inference.parallelism.ensemble
        if ranks_per_forecast == 1:
            return
        if ensemble is None:
            raise ValueError(
                f"inference.parallelism.ensemble: {ranks_per_forecast} ranks have no members to share; set "
                "inference.ensemble, or leave this key out"
            )
        # A rank computes whole batches of members. If there are more ranks than batches, some ranks are idle.
        num_batches = math.ceil(ensemble.members / self.inference.batch_size)
        if ranks_per_forecast > num_batches:
            raise ValueError(
                f"inference.parallelism.ensemble: {ensemble.members} members in batches of inference.batch_size "
                f"{self.inference.batch_size} are too few batches for {ranks_per_forecast} ranks; lower "
                "inference.batch_size, to at most the members divided by the ranks"
            )
        if self.inference.parallelism.shard and ensemble.lagged is not None:
            raise ValueError(
                "inference.parallelism: with ensemble above 1 and shard, all ranks take the same number of steps, but "
                "lagged members (inference.ensemble.lagged) take more than others; set shard to false or ensemble to 1"
            )

    def _require_divisible_forecasts(self) -> None:
        """Raise an error if perturbations need whole fields but ranks divide the fields of forecasts."""
        ensemble = self.inference.ensemble
        num_ranks = self.inference.parallelism.num_domain_ranks
        if num_ranks == 1 or ensemble is None:
            return
        key = None
        if ensemble.feature_noise is not None:
            key = "feature_noise"
        elif ensemble.dropout:
            key = "dropout"
        if key is not None:
            raise ValueError(
                f"inference.ensemble.{key}: its random numbers would depend on how inference.parallelism.domain "
                f"({num_ranks} ranks) divides the fields; remove it, or set domain to 1"
            )

    def _require_consistent_rollout(self) -> None:
        """Raise an error if keys of the training rollout do not match the number of rollout steps."""
        num_steps = self.data.forecast_len
        loss_steps = self.trainer.backprop_on_timestep
        if loss_steps is not None:
            is_in_rollout = bool(loss_steps) and min(loss_steps) >= 1 and max(loss_steps) <= num_steps
            if not is_in_rollout:
                raise ValueError(
                    f"trainer.backprop_on_timestep: {loss_steps} must name steps between 1 and data.forecast_len "
                    f"{num_steps}"
                )
        num_steps_from = self.trainer.forecast_len_from
        if num_steps_from is None:
            return
        # The rollout becomes longer during the run: the key maps a fraction of the run to a number of rollout steps.
        if self.trainer.monitor == "loss":
            raise ValueError(
                "trainer.monitor: the loss is not comparable while trainer.forecast_len_from changes the rollout; "
                "monitor skill"
            )
        if not num_steps_from:
            raise ValueError(
                "trainer.forecast_len_from: is empty; give the number of steps from the start of the run on, such as "
                "{0: 1}, or leave the key out"
            )
        fractions = list(num_steps_from)
        lengths = list(num_steps_from.values())
        if loss_steps is not None and min(loss_steps) > min(lengths):
            raise ValueError(
                f"trainer.backprop_on_timestep: {loss_steps} selects no step for the loss while "
                f"trainer.forecast_len_from is "
                f"{min(lengths)}"
            )
        are_increasing = fractions == sorted(fractions)
        are_in_run = fractions[0] == 0.0 and fractions[-1] < 1
        if not are_increasing or not are_in_run or min(lengths) < 1:
            raise ValueError(
                "trainer.forecast_len_from: the fractions of the run must start with 0, increase, and stay below 1"
            )
        if lengths[-1] != num_steps or max(lengths) > num_steps:
            raise ValueError(
                f"trainer.forecast_len_from: {num_steps_from} must end with data.forecast_len {num_steps}, the longest"
            )
