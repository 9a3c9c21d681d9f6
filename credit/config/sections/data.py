"""The ``data`` section (sources, variables, time, splits, store) and the ``preprocess`` section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from credit.calendar import parse_duration
from credit.channels import COMPUTED_DYNAMIC, COMPUTED_STATIC, ChannelMap
from credit.config.sections.base import Duration, Hour, PathText, StrictModel
from credit.config.sections.source import GridConfig, SourceConfig
from credit.config.sections.variables import Levels, TransformConfig, VariableOptions, VariablesConfig
from credit.errors import ConfigError

_DEFAULT_OPTIONS = VariableOptions()


class SolarConfig(StrictModel):
    """Top-of-atmosphere solar radiation, which is computed."""

    tsi: Literal["era5", "constant"] = Field(
        "constant",
        description="Total solar irradiance. `constant`: 1361 W m-2. `era5`: the yearly series that ERA5 uses (CMIP5).",
    )
    mean: Literal["step", "daily"] = Field(
        "step",
        description="`step`: accumulated over the time step. `daily`: the mean of the day, for data without a diurnal "
        "cycle.",
    )
    window: Literal["past", "next"] = Field(
        "past", description="Accumulate over the step that ends at t (`past`, as ERA5 labels it) or at t+dt (`next`)."
    )


class SplitsConfig(StrictModel):
    """Training, validation and test periods as [first, last], in UTC; both are included.

    A date without a time as last means the whole day.
    """

    train: list[str] = Field(min_length=2, max_length=2, description="Period that the model is trained on.")
    valid: list[str] = Field(min_length=2, max_length=2, description="Period that selects the best weights.")
    test: list[str] = Field(min_length=2, max_length=2, description="Period of forecasts and scores.")


class PreprocessConfig(StrictModel):
    """Writing of the training store by `credit preprocess`. The values in the store do not depend on these keys."""

    workers: int = Field(1, ge=1, description="Number of processes on this machine, or of jobs on the cluster.")
    memory_gib: float = Field(
        1.0,
        gt=0,
        description="Memory in GiB for the fields that a process reads at once. A chunk of the sources that contains "
        "more times than fit into it is decompressed several times; `credit check` reports the memory that avoids "
        "this.",
    )
    compression: Literal["lz4", "none"] = Field(
        "lz4",
        description="Compression of the store. `lz4` takes half to two thirds of the disk space; `none` is read twice "
        "as fast from memory.",
    )
    climatology: bool = Field(
        False,
        description="Also fit the climatology of `verification.climatology` and keep it in the store, so that later "
        "commands need not read the training period for it.",
    )
    cluster: Literal["none", "pbs", "slurm"] = Field(
        "none", description="Write the store in jobs of a PBS or Slurm cluster. Needs the extra `cluster`."
    )
    cluster_options: dict[str, Any] = Field(
        {},
        description="Arguments of dask_jobqueue's PBSCluster or SLURMCluster: cores, memory, walltime, account, queue.",
    )

    @property
    def held_bytes(self) -> int:
        """`memory_gib` in bytes."""
        return int(self.memory_gib * 2**30)

    @model_validator(mode="after")
    def _require_consistent(self) -> PreprocessConfig:
        if self.cluster_options and self.cluster == "none":
            raise ValueError("cluster_options have no effect without cluster: pbs or slurm")
        return self


class DataConfig(StrictModel):
    """Sources and variables of the data, time step, periods and training store."""

    sources: list[SourceConfig] = Field(min_length=1, description="Files and other sources of the fields.")
    grid: GridConfig | None = Field(
        None,
        description="Grid that all sources are interpolated to. Default: the grid of the files, which must then be "
        "the same for all.",
    )
    regrid: Literal["bilinear", "conservative"] = Field(
        "bilinear",
        description="Method of interpolation to `grid`. `bilinear`: between the four nearest cells. `conservative`: by "
        "overlapping area; it preserves global means and is the right one for coarser grids.",
    )
    variables: VariablesConfig = Field(description="The variables of the model, by their role.")
    levels: Levels = Field(
        [], description="Levels of the 3-D variables, in `level_units`. The sources must contain exactly these."
    )
    level_units: Literal["hPa", "Pa", "model_level"] = Field("hPa", description="Units of `levels`.")
    coefficients: PathText | None = Field(
        None,
        description="File with the coefficients of the run's model levels. It is needed for sources with `vertical`, "
        "for the budgets of `model.postprocess`, and for `inference.pressure_levels` and `inference.derive`.",
    )
    variable_options: dict[str, VariableOptions] = Field({}, description="Name of a variable -> its options.")
    transforms: dict[str, TransformConfig] = Field(
        {}, description="Name of a skewed variable -> its transform: tp: {kind: log1p, unit: 0.001}."
    )
    input_order: list[Literal["prognostic", "dynamic_forcing", "static"]] = Field(
        ["prognostic", "dynamic_forcing", "static"], description="Order of the groups in the model's input channels."
    )
    timestep: Duration = Field("6h", description="Time step of the model.")
    history_len: int = Field(1, ge=1, description="Number of time frames in the model's input.")
    forecast_len: int = Field(1, ge=1, description="Number of steps of a training rollout.")
    valid_forecast_len: int = Field(1, ge=1, description="Number of steps of a validation rollout.")
    sample_every: Duration | None = Field(
        None,
        description="Interval between the initial times of training and validation samples, counted from the first "
        "time of the split. With hourly data and a time step of 6 h, 6h avoids overlapping windows. Default: every "
        "time of the data.",
    )
    init_hours: list[Hour] | None = Field(
        None, description="Hours (UTC) at which training and validation samples may start. Default: any."
    )
    splits: SplitsConfig = Field(description="Training, validation and test periods.")
    split_gap: Duration = Field(
        "10d", description="Smallest gap between two splits, so that one does not contain the weather of the other."
    )
    store: PathText | None = Field(
        None, description="The training store that `credit preprocess` writes. Default: none; train from the sources."
    )
    on_bad_time: Literal["fail", "skip"] = Field(
        "fail",
        description="Treatment of a time that cannot be read or has missing, infinite or impossible values. `fail`: "
        "stop. `skip`: leave the time out of the store and list it; at most one time in twenty.",
    )
    solar: SolarConfig = Field(SolarConfig(), description="Options of toa_incident_solar_radiation.")
    cache: Literal["none", "memory", "disk"] = Field(
        "none",
        description="`memory`: keep every field that training has read in memory. `disk`: copy what training reads of "
        "the store to `cache_folder` and read it there afterwards.",
    )
    cache_folder: PathText | None = Field(
        None, description="For `cache: disk`: a folder on a local disk of the node. Default: TMPDIR."
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="Workers that read samples ahead: threads for a store (at least one is used), processes for "
        "sources (0: none).",
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> DataConfig:
        self._check_variables()
        self._check_options()
        if self.grid is None and self.regrid != "bilinear":
            raise ValueError("regrid has no effect without grid; set data.grid")
        if self.coefficients and self.level_units != "model_level":
            raise ValueError("coefficients has no effect: it is for level_units: model_level")
        if self.on_bad_time == "skip" and self.store is None:
            raise ValueError("on_bad_time: skip needs a data.store, which lists the bad times; or correct the files")
        if self.cache == "disk" and self.store is None:
            raise ValueError("cache: disk copies the chunks of a training store; set data.store")
        if self.cache_folder is not None and self.cache != "disk":
            raise ValueError("cache_folder has no effect without cache: disk")
        if sorted(self.input_order) != ["dynamic_forcing", "prognostic", "static"]:
            raise ValueError("input_order must name prognostic, dynamic_forcing and static once each")
        if self.solar.mean == "daily" and {"sin_day", "cos_day"} & set(self.variables.dynamic_forcing.vars_2D):
            raise ValueError("solar.mean is daily (no diurnal cycle), so sin_day and cos_day must not be forcings")
        try:
            self.channel_map()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def _check_variables(self) -> None:
        """Refuse variables without levels, and options and transforms of variables that do not exist."""
        names_3d = self._names_on_levels()
        for name in names_3d:
            if not self.levels and not self.options_of(name).levels:
                raise ValueError(f"{name} is in vars_3D but there are no levels; set data.levels")
        groups = self.variables
        names = set(names_3d)
        for group in (groups.prognostic, groups.diagnostic, groups.dynamic_forcing, groups.static):
            names.update(group.vars_2D)
        for name in self.variable_options:
            if name not in names:
                raise ValueError(
                    f'variable_options names "{name}", which is not in data.variables ({", ".join(sorted(names))})'
                )
        names_in_data = sorted(names - {*COMPUTED_DYNAMIC, *COMPUTED_STATIC})
        for name in self.transforms:
            if name not in names_in_data:
                raise ValueError(f'transforms names "{name}", which is not read from data ({", ".join(names_in_data)})')

    def _check_options(self) -> None:
        """Refuse options of variables that contradict each other or have no effect."""
        groups = self.variables
        names_3d = self._names_on_levels()
        outputs = [*groups.prognostic.vars_3D, *groups.prognostic.vars_2D]
        outputs += [*groups.diagnostic.vars_3D, *groups.diagnostic.vars_2D]
        forcing = [*groups.dynamic_forcing.vars_3D, *groups.dynamic_forcing.vars_2D]
        forcing_from_data = [name for name in forcing if name not in COMPUTED_DYNAMIC]
        static = [*groups.static.vars_3D, *groups.static.vars_2D]
        static_from_data = [name for name in static if name not in COMPUTED_STATIC]
        varying = [*outputs, *forcing_from_data]
        from_data = [*varying, *static_from_data]
        not_derived = [name for name in from_data if self.options_of(name).derive is None]
        # Option -> the variables that it has an effect for, and their description.
        effective: dict[str, tuple[list[str], str]] = {
            "levels": (names_3d, "variables on levels"),
            "minimum": (varying, "prognostic and diagnostic variables and forcing read from data"),
            "maximum": (varying, "prognostic and diagnostic variables and forcing read from data"),
            "in_forecast": (forcing_from_data, "dynamic forcing that is read from data"),
            "window": (forcing_from_data, "dynamic forcing that is read from data"),
            "units": (from_data, "variables that are read from data"),
            "valid_range": (not_derived, "variables that are read from data and not derived"),
            "regrid": (from_data if self.grid else [], "variables that are read from data, with data.grid"),
        }
        for name, options in self.variable_options.items():
            options.require_derivable(name, name in names_3d, name in varying)
            for key, (members, description) in effective.items():
                is_default = getattr(options, key) == VariableOptions.model_fields[key].default
                if not is_default and name not in members:
                    raise ValueError(f"variable_options.{name}.{key} has no effect: it is for {description}")
            options.require_consistent(name)

    def _names_on_levels(self) -> list[str]:
        groups = self.variables
        return [
            *groups.prognostic.vars_3D,
            *groups.diagnostic.vars_3D,
            *groups.dynamic_forcing.vars_3D,
            *groups.static.vars_3D,
        ]

    def options_of(self, name: str) -> VariableOptions:
        """Return the options of variable `name`."""
        return self.variable_options.get(name, _DEFAULT_OPTIONS)

    def channel_map(self) -> ChannelMap:
        """Return the channels that this section describes."""
        levels_of = {name: options.levels for name, options in self.variable_options.items() if options.levels}
        masked = [name for name, options in self.variable_options.items() if options.missing == "fill_mean"]
        return ChannelMap.build(
            self.variables.model_dump(), self.levels, levels_of, masked, self.input_order, self.level_units
        )

    @property
    def has_vertical(self) -> bool:
        """True if a source is interpolated to the run's levels."""
        return any(source.vertical is not None for source in self.sources)

    @property
    def step_minutes(self) -> int:
        """The time step in minutes."""
        return parse_duration(self.timestep)
