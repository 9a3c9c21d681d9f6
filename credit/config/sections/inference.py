"""The ``inference`` section: initial times, ensembles, base classes of perturbations, and forecast files."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from pydantic import Field, SerializeAsAny, field_validator, model_validator

from credit.calendar import parse_duration
from credit.config.registry import PERTURBATIONS, RegisteredSection
from credit.config.sections.base import (
    DomainSection,
    Duration,
    PathText,
    StrictModel,
)
from credit.config.sections.model import HyperdiffusionEntry
from credit.config.sections.output import DerivedVariableConfig, GribConfig, ProductList, require_valid_names
from credit.config.sections.postprocess import PostprocessEntry, PostprocessSection, list_entries_by_key, require_order


class InitialTimesConfig(StrictModel):
    """A range of initial times."""

    start: str | None = Field(None, description="First initial time. Default: the start of the test period.")
    end: str | None = Field(
        None,
        description="Last initial time. Default: the last time whose forecast can be verified completely in the test "
        "period.",
    )
    every: Duration = Field(
        "24h",
        description="Interval between initial times. The default is rounded up to a multiple of `data.timestep`.",
    )


class FeatureNoiseConfig(StrictModel):
    """Gaussian noise that is added to the outputs of blocks of the network at every step."""

    std: float = Field(
        0.5,
        gt=0,
        description="Standard deviation of the noise, as a multiple of the standard deviation of the block's output.",
    )
    blocks: list[str] | None = Field(
        None,
        min_length=1,
        description="Blocks whose output gets noise, by name or by the first part of the name: [decoder], [stages.3]. "
        "Default: all blocks.",
    )


class ModelNoiseConfig(StrictModel):
    """Use of the network's noise (`model.noise`) in forecasts."""

    amplitude: float = Field(
        1.0,
        gt=0,
        description="Factor on the noise. Values above 1 increase a spread that is too small, for example after "
        "training on few data. Noise that is not Gaussian, such as `dropout`, is not changed.",
    )
    pairs: bool = Field(
        True,
        description="Give the members of each pair (the first two, the next two, ...) opposite noise, which makes the "
        "ensemble mean more accurate. This does not change the noise of `dropout`.",
    )


class InitialPerturbationSection(StrictModel):
    """Base class of the config sections of initial perturbations, with the keys that all kinds have."""

    kind: str
    amplitude: float = Field(
        0.3,
        gt=0,
        description="Standard deviation of the perturbation, as a multiple of the standard deviation of each "
        "channel's change over one step.",
    )

    def analysis_lags_minutes(self) -> list[int]:
        """Return the lags of the analyses that a forecast reads, in minutes before the initial time.

        The lag 0 means the analysis at the initial time.
        """
        return [0]

    def durations_to_check(self) -> dict[str, str]:
        """Return key of this section -> duration string, for each duration that must be a multiple of
        ``data.timestep``.
        """
        return {}

    def describe(self) -> str:
        """Return a string for the attributes of forecast files; different perturbations must have different strings."""
        return f"{self.kind} perturbations of {self.amplitude:g} deviations of change"


class TendencyPerturbationSection(StrictModel):
    """Base class of the config sections of tendency perturbations, with the key that all kinds have."""

    kind: str

    def describe(self) -> str:
        """Return a string for the attributes of forecast files; different perturbations must have different strings."""
        return f"{self.kind} perturbations of the tendencies"


InitialPerturbationEntry = Annotated[
    SerializeAsAny[InitialPerturbationSection],
    RegisteredSection(PERTURBATIONS, default="correlated", base=InitialPerturbationSection),
]
TendencyPerturbationEntry = Annotated[
    SerializeAsAny[TendencyPerturbationSection],
    RegisteredSection(PERTURBATIONS, default="sppt", base=TendencyPerturbationSection),
]


class EnsembleConfig(StrictModel):
    """Several forecasts from each initial time. The output has the dimension `member`."""

    members: int = Field(description="Number of members, at least 2.")
    perturbation: InitialPerturbationEntry | None = Field(
        None,
        description="Perturbations of the initial states. Members 1 and 2, 3 and 4, ... get the same perturbation "
        "with opposite signs.",
    )
    control: bool = Field(
        True,
        description="Member 0 is the control, without perturbation, stochastic tendencies and noise. Default: true, "
        "but false for a network with `model.noise`.",
    )
    lagged: Duration | None = Field(
        None, description="Lagged ensemble: member m starts from an analysis that is earlier by m times this interval."
    )
    dropout: bool = Field(
        False, description="Keep the dropout of the network active. The results then also depend on the batch size."
    )
    stochastic: TendencyPerturbationEntry | None = Field(
        None, description="Perturbations of the tendencies (the changes over a step). `{}` uses the defaults of `sppt`."
    )
    feature_noise: FeatureNoiseConfig | None = Field(
        None, description="Noise on the outputs of blocks of the network. `{}` uses the defaults."
    )
    model_noise: ModelNoiseConfig = Field(ModelNoiseConfig(), description="Noise of a network with `model.noise`.")
    seed: int = Field(0, ge=0, description="Seed of all random numbers of the ensemble.")

    @field_validator("members")
    @classmethod
    def _require_several_members(cls, members: int) -> int:
        """Raise ValueError if an ensemble has fewer than two members."""
        if members < 2:
            raise ValueError("an ensemble has at least 2 members; for single forecasts leave inference.ensemble out")
        return members

    @property
    def has_added_spread(self) -> bool:
        """True if perturbations, lagged initial times, feature noise or dropout make the members differ."""
        for source_of_spread in (self.perturbation, self.lagged, self.stochastic, self.feature_noise):
            if source_of_spread is not None:
                return True
        return self.dropout

    def describe_lack_of_noise(self, network: str) -> str | None:
        """Return an error message if a network without ``model.noise`` cannot make this ensemble, otherwise None.

        Args:
            network: description of the network for the message, such as "a network without model.noise".

        Returns:
            The message; None if the network can make the ensemble.
        """
        if not self.has_added_spread:
            return (
                f"inference.ensemble: the members would be equal with {network}; give perturbation, lagged, "
                "stochastic, feature_noise or dropout, or train a network with model.noise"
            )
        if self.model_noise != ModelNoiseConfig():
            return f"inference.ensemble.model_noise has no effect with {network}; remove it"
        return None


class ForecastParallelismConfig(DomainSection):
    """Distribution of one forecast over ranks.

    By default, each rank has the whole network and makes different forecasts.
    """

    tensor: int = Field(
        1,
        ge=1,
        description="Number of tensor-parallel ranks. It must divide the number of ranks. A layer is not split if "
        "this number does not divide its heads or hidden units.",
    )
    ensemble: int = Field(
        1,
        ge=1,
        description="Number of ranks that share the members of one initial time. It must divide the number of ranks / "
        "(tensor x domain). Each of these ranks computes whole batches of `inference.batch_size` members.",
    )
    shard: bool = Field(
        False,
        description="Shard the weights over all ranks (FSDP2), for models that do not fit into the memory of one "
        "device.",
    )

    @property
    def ranks_per_start(self) -> int:
        """Number of ranks that work together on the forecasts from one initial time."""
        return self.ensemble * self.num_domain_ranks * self.tensor

    @property
    def splits_weights(self) -> bool:
        """True if a rank stores only a part of the weights (sharding or tensor parallelism)."""
        return self.shard or self.tensor > 1

    @property
    def shares_forecasts(self) -> bool:
        """True if several ranks compute one forecast together, because they divide its weights or its fields."""
        return self.splits_weights or self.num_domain_ranks > 1

    @property
    def needs_process_group(self) -> bool:
        """True if several ranks work together on the forecasts from one initial time."""
        return self.shares_forecasts or self.ensemble > 1


class InferenceConfig(StrictModel):
    """Forecasts by `credit rollout` and `credit verify --online`."""

    checkpoint: PathText = Field(
        "best", description="Weights of the forecasts: `best`, `latest`, or the path of a checkpoint."
    )
    initial_times: InitialTimesConfig | list[str] | Literal["latest"] = Field(
        InitialTimesConfig(),
        description="A range {start, end, every}, a list of times, or `latest`: the last time from which the data "
        "allow a forecast.",
    )
    lead_time: Duration = Field(
        "72h", description="Length of a forecast. The default is rounded up to a multiple of `data.timestep`."
    )
    batch_size: int = Field(
        8, ge=1, description="Number of forecasts (initial times x members) in a batch on each rank."
    )
    amp: bool = Field(False, description="Compute in bfloat16.")
    parallelism: ForecastParallelismConfig = Field(
        ForecastParallelismConfig(), description="Division of one forecast, or of its members, among several ranks."
    )
    ensemble: EnsembleConfig | None = Field(None, description="Several forecasts from each initial time.")
    hyperdiffusion: HyperdiffusionEntry | None = Field(
        None,
        description="Damping of the shortest waves in forecasts, instead of `model.hyperdiffusion`. A network partly "
        "learns to undo the damping of training, so use half of the `time` for forecasts of weeks. "
        "Default: as in training.",
    )
    postprocess: list[PostprocessEntry] | None = Field(
        None,
        min_length=1,
        description="Entries that replace the entries of the same kind in `model.postprocess`, in forecasts only. "
        "Default: as in training.",
    )
    folder: PathText = Field(
        "forecasts",
        description="Folder of the forecasts, relative to save_loc. `credit verify` scores the forecasts in this "
        "folder.",
    )
    format: Literal["netcdf", "grib2", "zarr"] = Field(
        "netcdf",
        description="`netcdf`, `grib2`: one file for each initial time. `zarr`: one store for all forecasts.",
    )
    grib: GribConfig = Field(GribConfig(), description="Settings of GRIB2 files.")
    layout: Literal["cf", "weatherbench2"] = Field(
        "cf", description="Names of the dimensions in a zarr store: names of CF or of WeatherBench 2."
    )
    pressure_levels: list[float] | None = Field(
        None,
        min_length=1,
        description="Pressure levels in hPa to which variables on model levels are interpolated. Needs "
        "data.coefficients and surface pressure. Default: write model levels.",
    )
    derive: dict[str, DerivedVariableConfig] = Field(
        {}, description="Name -> a variable that is computed from the output of the model."
    )
    products: ProductList = Field(
        [], description="Products that `credit rollout` makes from the forecasts, such as probabilities and maps."
    )
    surface_pressure: str | None = Field(
        None,
        description="Output variable with surface pressure. Default: the variable with standard_name "
        "surface_air_pressure.",
    )
    surface_geopotential: str | None = Field(
        None,
        description="Static variable with the geopotential or height of the surface. Default: the variable with "
        "standard_name surface_geopotential, geopotential or surface_altitude.",
    )
    variables: list[str] | None = Field(
        None, description="Variables to write. Default: all outputs and all derived variables."
    )
    levels: list[float] | None = Field(None, description="Levels to write. Default: all.")
    output_every: Duration | None = Field(
        None, description="Interval between the lead times to write. Default: every step."
    )
    lead_times: list[Duration] | None = Field(
        None,
        min_length=1,
        description="Lead times to write, for example [24h, 72h, 120h]. Set either this key or output_every.",
    )
    split: Literal["day", "month", "lead", "member"] | None = Field(
        None,
        description="For netCDF and GRIB2: split a forecast into one file for each day or month of the valid time, "
        "each lead time, or each member. Default: one file.",
    )
    compression: int = Field(
        0, ge=0, le=9, description="Level of lossless compression, 0 (none) to 9: zlib in netCDF, zstd in zarr."
    )
    keep_bits: int | None = Field(
        None,
        ge=1,
        le=23,
        description="Round values to this number of mantissa bits, so that they compress better. 12 bits have a "
        "relative error of 1.2e-4. Default: no rounding.",
    )

    @field_validator("derive")
    @classmethod
    def _require_valid_names(cls, derive: dict[str, DerivedVariableConfig]) -> dict[str, DerivedVariableConfig]:
        """Raise ValueError if forecast files cannot contain the name of a derived variable."""
        require_valid_names(derive)
        return derive

    @field_validator("pressure_levels")
    @classmethod
    def _require_pressures(cls, levels: list[float] | None) -> list[float] | None:
        """Raise ValueError if pressure levels are not positive or are repeated."""
        if levels is None:
            return levels
        has_repeated_levels = len(set(levels)) < len(levels)
        if min(levels) <= 0 or has_repeated_levels:
            raise ValueError("pressures in hPa must be above 0 and must not be repeated")
        return levels

    @field_validator("levels")
    @classmethod
    def _require_some_level(cls, levels: list[float] | None) -> list[float] | None:
        """Raise ValueError if the list of levels is empty."""
        if levels == []:
            raise ValueError(
                "the list is empty; leave the key out to write all levels, or select variables without levels in "
                "inference.variables"
            )
        return levels

    @property
    def postprocess_entries(self) -> dict[str, PostprocessSection]:
        """Config key -> post-process, in order; each replaces the post-processes of the same kind in the model.

        The value of the key ``hyperdiffusion`` is the first entry.
        """
        return list_entries_by_key("inference", self.hyperdiffusion, self.postprocess)

    @model_validator(mode="after")
    def _require_postprocess_order(self) -> InferenceConfig:
        """Raise ValueError if a later post-process would undo an earlier post-process."""
        require_order(self.postprocess_entries, "inference.postprocess")
        return self

    @model_validator(mode="after")
    def _require_fitting_format(self) -> InferenceConfig:
        """Raise ValueError if the format of the files does not support a key."""
        if self.split is not None and self.format == "zarr":
            raise ValueError("split: only for netCDF and GRIB2; a zarr store contains all forecasts")
        if self.split == "member" and self.ensemble is None:
            raise ValueError("split: member is only for ensembles; set ensemble, or a different split")
        if self.layout != "cf" and self.format != "zarr":
            raise ValueError(f"layout: {self.layout} names the dimensions of a zarr store; also set format: zarr")
        if self.grib != GribConfig() and self.format != "grib2":
            raise ValueError(f"grib: only for GRIB2, but format is {self.format}; set format: grib2, or remove grib")
        if self.format == "grib2" and (self.compression or self.keep_bits is not None):
            raise ValueError(
                "compression, keep_bits: only for netCDF and zarr; for GRIB2 set grib.packing and grib.bits"
            )
        return self

    @model_validator(mode="after")
    def _require_fitting_lead_times(self) -> InferenceConfig:
        """Raise ValueError if ``lead_times`` conflicts with ``output_every`` or ``lead_time``, or does not increase."""
        if self.lead_times is None:
            return self
        if self.output_every is not None:
            raise ValueError("lead_times and output_every both select the written lead times; set only one of them")
        minutes = [parse_duration(lead) for lead in self.lead_times]
        if any(after <= before for before, after in itertools.pairwise(minutes)):
            raise ValueError(f"lead_times: {', '.join(self.lead_times)} must increase")
        if minutes[-1] > parse_duration(self.lead_time):
            raise ValueError(f"lead_times: {self.lead_times[-1]} is longer than lead_time {self.lead_time}")
        return self
