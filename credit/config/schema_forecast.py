"""The ``inference`` and ``verification`` sections."""

from __future__ import annotations

import itertools
import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from credit.calendar import parse_duration
from credit.config.schema_base import PathText, Section
from credit.config.schema_data import Duration
from credit.config.schema_events import EventConfig
from credit.config.schema_model import HyperdiffusionEntry
from credit.config.schema_output import ProductConfig, require_names
from credit.config.schema_perturbation import InitialPerturbationEntry, TendencyPerturbationEntry
from credit.config.schema_postprocess import PostprocessEntry, PostprocessSection, keyed_entries, require_order
from credit.config.schema_regions import DEFAULT_REGIONS, REGIONS, RegionConfig
from credit.config.schema_source import GridConfig
from credit.errors import did_you_mean

BASELINES = ("persistence", "damped_persistence", "climatology")
BEST_BASELINE = "best_baseline"
OWN_NAMES = ("model", *BASELINES, BEST_BASELINE)  # of the scores of every run


class InitialTimesConfig(Section):
    """A range of initial times."""

    start: str | None = Field(None, description="First; default: the first of the test period.")
    end: str | None = Field(
        None, description="Last; default: the last whose whole forecast has truth in the test period."
    )
    every: Duration = Field("24h", description="Distance; the default is rounded up to a multiple of `data.timestep`.")


class NoiseConfig(Section):
    """Errors of the model: Gaussian noise is added inside the network at every step."""

    std: float = Field(
        0.5, gt=0, description="Standard deviation, in units of that of the block's output in each forecast."
    )
    where: list[str] | None = Field(
        None,
        min_length=1,
        description="Blocks whose outputs get noise, by name or by the beginning of names: [decoder], [stages.3]; "
        "default: all blocks.",
    )


class EnsembleConfig(Section):
    """Several forecasts from one initial time, the dimension `member` of the output."""

    members: int = Field(description="How many, at least 2.")
    perturbation: InitialPerturbationEntry | None = Field(
        None, description="Of the initial states; members 1 and 2, 3 and 4, ... are moved in opposite directions."
    )
    control: bool = Field(True, description="Member 0 has neither perturbation nor stochastic factors nor noise.")
    lagged: Duration | None = Field(None, description="Member m starts from the analysis m times this earlier.")
    dropout: bool = Field(
        False, description="Keep the network's dropout on. The numbers then depend on the batches, too."
    )
    stochastic: TendencyPerturbationEntry | None = Field(
        None, description="Perturb the changes that the network predicts; `{}` takes the defaults of `sppt`."
    )
    noise: NoiseConfig | None = Field(
        None, description="Add random numbers to the network's hidden fields; {} takes the defaults."
    )
    seed: int = Field(0, ge=0, description="Of all random numbers.")

    @field_validator("members")
    @classmethod
    def _several(cls, members: int) -> int:
        if members < 2:
            raise ValueError("an ensemble has at least 2 members; for single forecasts leave inference.ensemble out")
        return members

    @model_validator(mode="after")
    def _differs(self) -> EnsembleConfig:
        ways = self.perturbation, self.lagged, self.stochastic, self.noise
        if ways == (None,) * len(ways) and not self.dropout:
            raise ValueError("the members would be equal; give perturbation, lagged, stochastic, noise or dropout")
        return self


class ForecastParallelismConfig(Section):
    """How one forecast is spread over ranks; by default each rank has the whole network and makes its own forecasts."""

    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks; must divide attention heads and number of ranks.")
    shard: bool = Field(False, description="Shard the weights over all ranks (FSDP2), for models beyond one device.")

    @property
    def is_spread(self) -> bool:
        """Whether one forecast is spread over ranks."""
        return self.shard or self.tensor > 1


class InferenceConfig(Section):
    """How forecasts are made."""

    checkpoint: PathText = Field("best", description="best, latest, or the path of a checkpoint.")
    initial_times: InitialTimesConfig | list[str] | Literal["latest"] = Field(
        InitialTimesConfig(),
        description="A range {start, end, every}, a list of times, or `latest`: the last that the data can start from.",
    )
    lead_time: Duration = Field(
        "72h", description="Length of a forecast; the default is rounded up to a multiple of `data.timestep`."
    )
    batch_size: int = Field(8, ge=1, description="Initial times, or members of ensembles, at once on a rank.")
    amp: bool = Field(False, description="Compute in bfloat16.")
    parallelism: ForecastParallelismConfig = Field(
        ForecastParallelismConfig(), description="Where several ranks share one forecast."
    )
    ensemble: EnsembleConfig | None = Field(None, description="Several forecasts from each initial time.")
    hyperdiffusion: HyperdiffusionEntry | None = Field(
        None,
        description="Damping of the shortest waves in place of the model's own. A network learns to undo what it is "
        "trained with, so runs of weeks want about half of model.hyperdiffusion.time. Default: as in training.",
    )
    postprocess: list[PostprocessEntry] | None = Field(
        None,
        min_length=1,
        description="Entries that replace those of the same kind in `model.postprocess`, in forecasts alone. Default: "
        "as in training.",
    )
    folder: PathText = Field(
        "forecasts", description="Where they go, below save_loc; credit_verify scores this folder."
    )
    format: Literal["netcdf", "zarr"] = Field("netcdf", description="One netCDF file an initial time, or one store.")
    layout: Literal["cf", "weatherbench2"] = Field("cf", description="Names of zarr's dimensions.")
    pressure_levels: list[float] | None = Field(
        None,
        min_length=1,
        description="hPa; variables on model levels are brought to these, with data.coefficients and surface pressure.",
    )
    derive: dict[str, ProductConfig] = Field({}, description="Name -> a variable made of the outputs.")
    surface_pressure: str | None = Field(
        None, description="The output that is surface pressure; default: by standard_name surface_air_pressure."
    )
    surface_geopotential: str | None = Field(
        None,
        description="The static field that is geopotential or height of the ground; default: by standard_name "
        "surface_geopotential, geopotential or surface_altitude.",
    )
    variables: list[str] | None = Field(
        None, description="Variables to write; default: every output, and everything derived."
    )
    levels: list[float] | None = Field(None, description="Levels to write of variables that have them; default: all.")
    output_every: Duration | None = Field(None, description="Lead times to write; default: every step.")
    lead_times: list[Duration] | None = Field(
        None, min_length=1, description="Lead times to write, in place of output_every: [24h, 72h, 120h]."
    )
    split: Literal["day", "month", "lead", "member"] | None = Field(
        None,
        description="netCDF: a file for each day or month of the valid time, each lead time, or each member of an "
        "ensemble, of a forecast.",
    )
    compression: int = Field(0, ge=0, le=9, description="Lossless: 0 (none) to 9, zlib in netCDF, zstd in zarr.")
    keep_bits: int | None = Field(
        None,
        ge=1,
        le=23,
        description="Bits of the mantissa to round to, which makes compression worth while: 12 is a relative error of "
        "1.2e-4; default: all.",
    )

    @field_validator("derive")
    @classmethod
    def _derived_have_names(cls, derive: dict[str, ProductConfig]) -> dict[str, ProductConfig]:
        require_names(derive)
        return derive

    @field_validator("pressure_levels")
    @classmethod
    def _are_pressures(cls, levels: list[float] | None) -> list[float] | None:
        if levels is not None and (min(levels) <= 0 or len(set(levels)) < len(levels)):
            raise ValueError("pressures in hPa are above 0 and are named once each")
        return levels

    @field_validator("levels")
    @classmethod
    def _some_level(cls, levels: list[float] | None) -> list[float] | None:
        if levels == []:
            raise ValueError(
                "it has no level; leave the key out for all of them, or name in inference.variables what has none, to "
                "write that alone"
            )
        return levels

    @property
    def postprocess_entries(self) -> dict[str, PostprocessSection]:
        """The entries that replace the model's, by their config keys, with `hyperdiffusion` as the first."""
        return keyed_entries("inference", self.hyperdiffusion, self.postprocess)

    @model_validator(mode="after")
    def _postprocess_in_order(self) -> InferenceConfig:
        require_order(self.postprocess_entries)
        return self

    @model_validator(mode="after")
    def _split_files(self) -> InferenceConfig:
        if self.split is not None and self.format != "netcdf":
            raise ValueError("split: is for netCDF; a zarr store is one for all forecasts")
        if self.split == "member" and self.ensemble is None:
            raise ValueError("split: member is for ensembles; set ensemble, or another split")
        if self.layout != "cf" and self.format != "zarr":
            raise ValueError(f"layout: {self.layout} names zarr's dimensions; write format: zarr, too")
        return self

    @model_validator(mode="after")
    def _lead_times_fit(self) -> InferenceConfig:
        if self.lead_times is None:
            return self
        if self.output_every is not None:
            raise ValueError("lead_times and output_every both say what is written; give one of them")
        minutes = [parse_duration(lead) for lead in self.lead_times]
        if any(after <= before for before, after in itertools.pairwise(minutes)):
            raise ValueError(f"lead_times: {', '.join(self.lead_times)} must increase")
        if minutes[-1] > parse_duration(self.lead_time):
            raise ValueError(f"lead_times: {self.lead_times[-1]} is longer than lead_time {self.lead_time}")
        return self


class ClimatologyConfig(Section):
    """The climatology of the baselines and of anomaly correlation, from the training period."""

    method: Literal["harmonic", "window", "file"] = Field("harmonic", description="How it is made.")
    harmonics: int = Field(1, ge=0, description="Annual harmonics (method harmonic).")
    window_days: int = Field(61, ge=1, description="Width of the moving window (method window).")
    by_hour: bool = Field(False, description="One climatology for each hour of the day; for data with a diurnal cycle.")
    path: PathText | None = Field(
        None,
        description="A netCDF file or zarr store with the climatology (method file): dimensions dayofyear, hour, "
        "level, latitude and longitude, as WeatherBench 2's.",
    )
    rename: dict[str, str] = Field(
        {}, description="Our name -> name in that file; default: ours, or that of `data.sources`."
    )
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="How to reach a remote zarr store, as in `data.sources`."
    )

    @model_validator(mode="after")
    def _has_file(self) -> ClimatologyConfig:
        if (self.method == "file") != (self.path is not None):
            raise ValueError("method: file and path go together")
        if self.method != "file" and (self.rename or self.storage_options):
            raise ValueError("rename and storage_options are of a file (method: file)")
        return self


class OtherForecastsConfig(Section):
    """Other forecasts to score; a plain path stands for a section with it alone."""

    path: PathText = Field(
        description="A folder of credit_rollout, or a zarr store, such as WeatherBench 2's, on a disk or at s3://, "
        "gs://, https://."
    )
    rename: dict[str, str] = Field({}, description="Our name -> name there.")
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="How to reach a remote zarr store, as in `data.sources`."
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


class VerificationConfig(Section):
    """How forecasts are scored."""

    climatology: ClimatologyConfig = Field(ClimatologyConfig(), description="The climatology.")
    allow_seen: bool = Field(
        False,
        description="Score forecasts in periods that their weights were trained or selected on, too, as to see how "
        "much they have learnt by heart, or where the years of another data set have the same names.",
    )
    figure_channels: list[str] | None = Field(
        None, description="Channels of the maps, spectra and curves; default: z500, t850, t2m, ... where present."
    )
    figure_leads: list[Duration] = Field(
        ["24h", "72h"],
        description="Lead times of the maps and spectra; those that the forecasts lack are left out. The defaults are "
        "rounded up to multiples of `data.timestep`.",
    )
    hovmoeller_band: tuple[float, float] = Field(
        (35.0, 60.0), description="South and north of the band of the Hovmoeller diagrams, degrees."
    )
    animate: list[str] = Field(
        [], description="Channels of which truth and forecast of one case are written as an animated GIF."
    )
    other_forecasts: dict[str, OtherForecastsConfig] = Field(
        {}, description="Name -> folder or store of another forecast to score."
    )
    grid: GridConfig | None = Field(
        None,
        description="Grid of the scores, to which truth, forecasts and climatology are brought conservatively; "
        "WeatherBench 2's is {rows: 121, columns: 240, poles: true}. Default: that of the data.",
    )
    regions: list[str] = Field(
        DEFAULT_REGIONS, description=f"Regions of the scores, global and others, among {', '.join(REGIONS)}."
    )
    boxes: dict[str, RegionConfig] = Field({}, description="Name -> a region of your own, scored beside `regions`.")
    events: dict[str, EventConfig] = Field(
        {}, description="Name -> an event whose probability is scored (Brier score, reliability)."
    )
    seeps: list[str] | None = Field(
        None,
        description="Channels of accumulated precipitation, which SEEPS is of; default: sums over the step (`temporal: "
        "accumulate` or `deaccumulate`) called tp or total_precipitation, or precipitation by standard_name.",
    )

    @model_validator(mode="after")
    def _is_a_band(self) -> VerificationConfig:
        south, north = self.hovmoeller_band
        if not -90 <= south < north <= 90:
            raise ValueError(f"hovmoeller_band: [{south:g}, {north:g}] is not [south, north] within -90..90")
        return self

    @model_validator(mode="after")
    def _others_have_own_names(self) -> VerificationConfig:
        for name in self.other_forecasts:
            if is_reserved_name(name):
                raise ValueError(
                    f'other_forecasts: "{name}" is what a run calls scores of its own ({", ".join(OWN_NAMES)}); take '
                    "another name"
                )
        return self

    @model_validator(mode="after")
    def _regions_exist(self) -> VerificationConfig:
        for name in self.regions:
            if name not in REGIONS:
                raise ValueError(f'regions: "{name}" is not known; your own go into boxes{did_you_mean(name, REGIONS)}')
        if "global" not in self.regions or len(set(self.regions)) < len(self.regions):
            raise ValueError(f"regions: {self.regions} must have global, which tables and figures show, and each once")
        for name in self.boxes:
            if name in REGIONS:
                raise ValueError(f'boxes: "{name}" is the name of one of the regions; take another name')
        return self

    @model_validator(mode="after")
    def _events_have_names(self) -> VerificationConfig:
        for name in self.events:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ValueError(
                    f'events: "{name}" becomes part of the names of scores; use letters, digits, underscore, dot and '
                    "hyphen"
                )
        return self


def is_reserved_name(name: str) -> bool:
    """Return whether a forecast of this name would be taken for one of `OWN_NAMES`, also in the words of figures."""
    return name.strip().lower().replace(" ", "_") in OWN_NAMES
