"""The ``inference`` and ``verification`` sections."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from credit.config.base import Section
from credit.config.schema_data import Duration
from credit.config.schema_model import HyperdiffusionConfig
from credit.config.schema_regions import DEFAULT_REGIONS, REGIONS, BoxConfig
from credit.errors import did_you_mean


class InitialTimesConfig(Section):
    """A range of initial times."""

    start: str | None = Field(None, description="First; default: the first of the test period.")
    end: str | None = Field(
        None, description="Last; default: the last whose whole forecast has truth in the test period."
    )
    every: Duration = Field("24h", description="Distance.")


class InferenceConfig(Section):
    """How forecasts are made."""

    checkpoint: str = Field("best", description="best, latest, or the path of a checkpoint.")
    initial_times: InitialTimesConfig | list[str] = Field(
        InitialTimesConfig(), description="A range {start, end, every} or a list of times."
    )
    lead_time: Duration = Field("72h", description="Length of a forecast.")
    batch_size: int = Field(8, ge=1, description="Initial times at once.")
    amp: bool = Field(False, description="Compute in bfloat16.")
    hyperdiffusion: HyperdiffusionConfig | None = Field(
        None,
        description="Damping of the shortest waves in place of the model's own. A network learns to undo what it is "
        "trained with, so runs of weeks want about half of model.hyperdiffusion.time. Default: as in training.",
    )
    folder: str = Field("forecasts", description="Where they go, below save_loc; credit_verify scores this folder.")
    format: Literal["netcdf", "zarr"] = Field("netcdf", description="One netCDF file an initial time, or one store.")
    layout: Literal["cf", "weatherbench2"] = Field("cf", description="Names of zarr's dimensions.")
    variables: list[str] | None = Field(None, description="Variables to write; default: every output.")
    output_every: Duration | None = Field(None, description="Lead times to write; default: every step.")


class ClimatologyConfig(Section):
    """The climatology of the baselines and of anomaly correlation, from the training period."""

    method: Literal["harmonic", "window", "file"] = Field("harmonic", description="How it is made.")
    harmonics: int = Field(1, ge=0, description="Annual harmonics (method harmonic).")
    window_days: int = Field(61, ge=1, description="Width of the moving window (method window).")
    by_hour: bool = Field(False, description="One climatology for each hour of the day; for data with a diurnal cycle.")
    path: str | None = Field(None, description="A file with the climatology (method file).")

    @model_validator(mode="after")
    def _has_file(self) -> ClimatologyConfig:
        if (self.method == "file") != (self.path is not None):
            raise ValueError("method: file and path go together")
        return self


class VerificationConfig(Section):
    """How forecasts are scored."""

    climatology: ClimatologyConfig = Field(ClimatologyConfig(), description="The climatology.")
    figure_channels: list[str] | None = Field(
        None, description="Channels of the maps, spectra and curves; default: z500, t850, t2m, ... where present."
    )
    figure_leads: list[Duration] = Field(["24h", "72h"], description="Lead times of the maps and spectra.")
    other_forecasts: dict[str, str] = Field({}, description="Name -> folder or store of another forecast to score.")
    regions: list[str] = Field(DEFAULT_REGIONS, description=f"Regions of the scores, among {', '.join(REGIONS)}.")
    boxes: dict[str, BoxConfig] = Field({}, description="Name -> a region of your own, scored beside `regions`.")

    @model_validator(mode="after")
    def _regions_exist(self) -> VerificationConfig:
        for name in self.regions:
            if name not in REGIONS:
                raise ValueError(f'regions: "{name}" is not known; your own go into boxes{did_you_mean(name, REGIONS)}')
        if "global" not in self.regions or len(set(self.regions)) < len(self.regions):
            raise ValueError("regions: must have global, which the report shows, and each once")
        for name in self.boxes:
            if name in REGIONS:
                raise ValueError(f'boxes: "{name}" is the name of one of the regions; take another name')
        return self
