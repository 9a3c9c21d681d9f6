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
    """Computation of the solar radiation at the top of the atmosphere."""

    tsi: Literal["era5", "constant"] = Field(
        "constant",
        description="Total solar irradiance. `constant`: 1361 W m-2. `era5`: the yearly series that ERA5 uses (CMIP5).",
    )
    mean: Literal["step", "daily"] = Field(
        "step",
        description="`step`: the energy over the time step. `daily`: the mean over the day, for data without a "
        "diurnal cycle.",
    )
    window: Literal["past", "next"] = Field(
        "past",
        description="The step over which radiation is accumulated: the step that ends at t (`past`, as in ERA5) or at "
        "t+dt (`next`).",
    )


class SplitsConfig(StrictModel):
    """Training, validation and test periods: [first, last] in UTC, including both dates.

    If the last date has no clock time, the whole day is included.
    """

    train: list[str] = Field(min_length=2, max_length=2, description="Training period.")
    valid: list[str] = Field(
        min_length=2, max_length=2, description="Validation period, which selects the best weights."
    )
    test: list[str] = Field(min_length=2, max_length=2, description="Test period, for forecasts and scores.")


class BlocksConfig(StrictModel):
    """Numbers of blocks into which the fields of each time are divided in the training store."""

    lat: int = Field(1, ge=1, description="Number of blocks of latitude rows.")
    lon: int = Field(1, ge=1, description="Number of blocks of longitude columns.")

    def find_block_and_padded_shape(self, grid_shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the rows and columns of one block, and the total rows and columns of all blocks.

        All blocks have the same shape, so the last blocks may extend beyond the grid. A grid with too few rows or
        columns has fewer blocks than requested.

        Args:
            grid_shape: number of rows and columns of the grid.
        """
        block_shape = []
        padded_shape = []
        for size, number in zip(grid_shape, (self.lat, self.lon), strict=True):
            # `-(-a // b)` is a / b rounded up.
            length = -(-size // number)
            block_shape.append(length)
            padded_shape.append(-(-size // length) * length)
        return (block_shape[0], block_shape[1]), (padded_shape[0], padded_shape[1])


class PreprocessConfig(StrictModel):
    """Writing of the training store by `credit preprocess`. The values in the store do not depend on these keys."""

    workers: int = Field(1, ge=1, description="Number of processes on this machine, or of jobs on the cluster.")
    memory_gib: float = Field(
        1.0,
        gt=0,
        description="Memory in GiB for the fields that a process reads at once. If it is too small for a chunk of the "
        "source files, the chunk is decompressed several times. `credit check` reports the memory that "
        "avoids this.",
    )
    fetches: int = Field(
        8,
        ge=1,
        description="Number of chunks that each process fetches at the same time from each remote store.",
    )
    compression: Literal["lz4", "none"] = Field(
        "lz4",
        description="Compression of the store. `lz4` needs half to two thirds of the disk space of `none`. `none` is "
        "read twice as fast from the page cache.",
    )
    blocks: BlocksConfig = Field(
        BlocksConfig(),
        description="Blocks of rows and columns into which the fields of each time are divided. With "
        "`trainer.parallelism.domain` a rank reads only the blocks in its part of the grid. An existing store keeps "
        "its blocks.",
    )
    climatology: bool = Field(
        False,
        description="Also fit the climatology of `verification.climatology` and write it to the store, so that later "
        "commands need not read the training period again.",
    )
    cluster: Literal["none", "pbs", "slurm"] = Field(
        "none", description="Write the store in jobs of a PBS or Slurm cluster. Needs the extra `cluster`."
    )
    cluster_options: dict[str, Any] = Field(
        {},
        description="Arguments of dask_jobqueue's PBSCluster or SLURMCluster: cores, memory, walltime, account, queue.",
    )

    @property
    def memory_limit_bytes(self) -> int:
        """Memory for the fields that a process reads at once (`memory_gib`), in bytes."""
        return int(self.memory_gib * 2**30)

    @model_validator(mode="after")
    def _require_consistent(self) -> PreprocessConfig:
        """Raise ValueError if options of a cluster are set without a cluster."""
        if self.cluster_options and self.cluster == "none":
            raise ValueError("cluster_options have no effect without cluster: pbs or slurm")
        return self


class DataConfig(StrictModel):
    """Sources, variables, time step, periods and training store."""

    sources: list[SourceConfig] = Field(min_length=1, description="Files and other sources of the fields.")
    grid: GridConfig | None = Field(
        None,
        description="Grid to which all sources are interpolated. Default: the grid of the files, which must be the "
        "same for all files.",
    )
    regrid: Literal["bilinear", "conservative"] = Field(
        "bilinear",
        description="Interpolation method for `grid`. `bilinear`: from the four nearest cells. `conservative`: "
        "area-weighted mean; use it for a coarser grid, because it preserves the global mean.",
    )
    variables: VariablesConfig = Field(description="The variables of the model, by their role.")
    levels: Levels = Field(
        [],
        description="Levels of the variables in `vars_3D`, in `level_units`. The sources must contain these levels, "
        "unless `vertical` interpolates them.",
    )
    level_units: Literal["hPa", "Pa", "model_level"] = Field("hPa", description="Units of `levels`.")
    coefficients: PathText | None = Field(
        None,
        description="File with the coefficients of the run's model levels. Needed to interpolate to model levels, for "
        "the budgets in `model.postprocess`, and for `inference.pressure_levels` and `inference.derive`.",
    )
    variable_options: dict[str, VariableOptions] = Field({}, description="Name of a variable -> its options.")
    transforms: dict[str, TransformConfig] = Field(
        {}, description="Name of a skewed variable -> its transform, for example tp: {kind: log1p, unit: 0.001}."
    )
    input_order: list[Literal["prognostic", "dynamic_forcing", "static"]] = Field(
        ["prognostic", "dynamic_forcing", "static"],
        description="Order of the groups of variables in the input channels of the model.",
    )
    timestep: Duration = Field("6h", description="Time step of the model.")
    history_len: int = Field(1, ge=1, description="Number of input frames of the model.")
    forecast_len: int = Field(1, ge=1, description="Number of steps of a training rollout.")
    valid_forecast_len: int = Field(1, ge=1, description="Number of steps of a validation rollout.")
    sample_every: Duration | None = Field(
        None,
        description="Interval between the initial times of training and validation samples, counted from the start of "
        "the split. With hourly data and a time step of 6 h, `6h` avoids overlapping samples. Default: "
        "every time of the data.",
    )
    init_hours: list[Hour] | None = Field(
        None, description="Hours (UTC) at which training and validation samples may start. Default: any."
    )
    splits: SplitsConfig = Field(description="Training, validation and test periods.")
    split_gap: Duration = Field(
        "10d", description="Smallest gap between two splits. It avoids leakage of weather from one split to the next."
    )
    store: PathText | None = Field(
        None,
        description="Path of the training store that `credit preprocess` writes. Default: no store; training reads "
        "the sources.",
    )
    on_bad_time: Literal["fail", "skip"] = Field(
        "fail",
        description="Treatment of a time that cannot be read, or that has missing, infinite or impossible values. "
        "`fail`: stop with an error. `skip`: leave the time out of the store and list it; at most one time in twenty "
        "may be left out.",
    )
    solar: SolarConfig = Field(
        SolarConfig(), description="Options of the computed variable toa_incident_solar_radiation."
    )
    cache: Literal["none", "memory", "disk"] = Field(
        "none",
        description="`memory`: keep every field in memory after it was read. `disk`: copy each chunk of the store to "
        "`cache_folder` when a process of the node first needs it, and then read the copy.",
    )
    cache_folder: PathText | None = Field(
        None, description="For `cache: disk`: a folder on a local disk of the node. Default: TMPDIR."
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="Number of workers that read samples in advance. Workers are threads for a store (at least one) "
        "and processes for sources (0: none).",
    )

    @model_validator(mode="after")
    def _require_consistent(self) -> DataConfig:
        """Raise ValueError if keys contradict each other or have no effect."""
        self._require_known_variables()
        self._require_effective_options()
        if self.grid is None and self.regrid != "bilinear":
            raise ValueError("regrid has no effect without grid; set data.grid")
        if self.coefficients and self.level_units != "model_level":
            raise ValueError("coefficients has no effect without level_units: model_level")
        if self.on_bad_time == "skip" and self.store is None:
            raise ValueError("on_bad_time: skip needs a data.store, which lists the bad times; or correct the files")
        if self.cache == "disk" and self.store is None:
            raise ValueError("cache: disk copies the chunks of a training store; set data.store")
        if self.cache_folder is not None and self.cache != "disk":
            raise ValueError("cache_folder has no effect without cache: disk")
        if sorted(self.input_order) != ["dynamic_forcing", "prognostic", "static"]:
            raise ValueError("input_order must name prognostic, dynamic_forcing and static once each")
        # Data without a diurnal cycle do not depend on the time of day, which sin_day and cos_day describe.
        diurnal_forcing = {"sin_day", "cos_day"} & set(self.variables.dynamic_forcing.vars_2D)
        if self.solar.mean == "daily" and diurnal_forcing:
            raise ValueError("solar.mean is daily (no diurnal cycle), so sin_day and cos_day must not be forcings")
        # Building the channels raises an error if two of them have the same name.
        try:
            self.channel_map()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def _require_known_variables(self) -> None:
        """Raise ValueError if ``vars_3D`` have no levels, or options or transforms name unknown variables."""
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

    def _require_effective_options(self) -> None:
        """Raise ValueError if options of a variable contradict each other or have no effect."""
        # Groups of variables to which an option may apply.
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
        # Option -> variables to which it applies, and a description of these variables for the message.
        effective_for: dict[str, tuple[list[str], str]] = {
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
            for key, (members, description) in effective_for.items():
                is_set = getattr(options, key) != VariableOptions.model_fields[key].default
                if is_set and name not in members:
                    raise ValueError(f"variable_options.{name}.{key} has no effect: it applies to {description}")
            options.require_consistent(name)

    def _names_on_levels(self) -> list[str]:
        """Return the names of the variables on levels, in all groups."""
        groups = self.variables
        return [
            *groups.prognostic.vars_3D,
            *groups.diagnostic.vars_3D,
            *groups.dynamic_forcing.vars_3D,
            *groups.static.vars_3D,
        ]

    def options_of(self, name: str) -> VariableOptions:
        """Return the options of a variable; the default options if the config sets no options for the variable."""
        return self.variable_options.get(name, _DEFAULT_OPTIONS)

    def channel_map(self) -> ChannelMap:
        """Return the channels that this section describes.

        Raises:
            ConfigError: if two channels have the same name.
        """
        levels_by_variable = {}
        masked_variables = []
        for name, options in self.variable_options.items():
            if options.levels:
                levels_by_variable[name] = options.levels
            if options.missing == "fill_mean":
                masked_variables.append(name)
        return ChannelMap.build(
            self.variables.model_dump(),
            self.levels,
            levels_by_variable,
            masked_variables,
            self.input_order,
            self.level_units,
        )

    @property
    def has_vertical_interpolation(self) -> bool:
        """True if a source is interpolated vertically to the run's levels."""
        return any(source.vertical is not None for source in self.sources)

    @property
    def step_minutes(self) -> int:
        """Time step of the model in minutes."""
        return parse_duration(self.timestep)
