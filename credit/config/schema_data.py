"""The ``data`` section: sources, variables, time, splits, store."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from credit.calendar import format_duration, parse_duration
from credit.channels import COMPUTED_DYNAMIC, COMPUTED_STATIC, DERIVED_FROM, ChannelMap
from credit.config.schema_base import PathText, Section
from credit.config.schema_source import GridConfig, SourceConfig
from credit.errors import ConfigError


def _canonical_duration(value: object) -> object:
    """Return the one spelling of a duration, so that configs that mean the same are equal."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    try:
        return format_duration(parse_duration(value))
    except ConfigError as error:
        raise ValueError(str(error).split(": ", 1)[1]) from error


Duration = Annotated[str, BeforeValidator(_canonical_duration)]
Hour = Annotated[int, Field(ge=0, le=23)]
Level = Annotated[float, Field(gt=0)]


def _require_each_once(levels: list[float]) -> list[float]:
    twice = sorted({level for level in levels if levels.count(level) > 1})
    if twice:
        raise ValueError(f"{', '.join(f'{level:g}' for level in twice)} is named twice; name each level once")
    return levels


Levels = Annotated[list[Level], AfterValidator(_require_each_once)]

Derived = Literal[
    "geopotential", "mean_sea_level_pressure", "relative_humidity", "relative_humidity_water", "wind_speed"
]


class GroupConfig(Section):
    """Variables of one group."""

    vars_3D: list[str] = Field([], description="Variables on levels.")
    vars_2D: list[str] = Field([], description="Variables without levels.")


class VariablesConfig(Section):
    """Which variables play which part."""

    prognostic: GroupConfig = Field(description="In and out; fed back in a forecast.")
    diagnostic: GroupConfig = Field(GroupConfig(), description="Out only.")
    dynamic_forcing: GroupConfig = Field(
        GroupConfig(),
        description=f"In only, varying in time. Computed, not read: {', '.join(COMPUTED_DYNAMIC)}.",
    )
    static: GroupConfig = Field(
        GroupConfig(), description=f"In only, constant. Computed, not read: {', '.join(COMPUTED_STATIC)}."
    )

    @model_validator(mode="after")
    def _some_prognostic(self) -> VariablesConfig:
        if not (self.prognostic.vars_3D or self.prognostic.vars_2D):
            raise ValueError("prognostic needs at least one variable")
        return self


class VariableOptions(Section):
    """Options of one variable."""

    levels: Levels | None = Field(None, description="This variable's own levels; default: `data.levels`.")
    missing: Literal["error", "fill_mean"] = Field(
        "error",
        description="`fill_mean`: cells that are always missing (sst over land) are filled with the mean, masked in "
        "loss and scores, and shown to the model as a static channel NAME_mask. `error`: a missing value stops.",
    )
    temporal: Literal["instant", "mean", "accumulate", "deaccumulate"] = Field(
        "instant",
        description="What a value in the files stands for; all but `instant` carry the label of their window's end. "
        "Means and sums of shorter intervals than the time step are put together; `deaccumulate` is for values that "
        "run from the start of a forecast.",
    )
    restarts: list[Hour] | None = Field(
        None,
        min_length=1,
        description="Hours (UTC) at which such a value starts from 0 again; none: from the files' time bounds.",
    )
    window: Literal["past", "next"] = Field(
        "past",
        description="For forcings that are means or accumulations: the step from t to t+dt uses the window that ends "
        "at t (`past`) or at t+dt (`next`).",
    )
    in_forecast: Literal["climatology", "persist", "observed"] = Field(
        "persist",
        description="What a dynamic forcing from data is in a forecast: held at its anomaly to the climatology "
        "(`persist`), the climatology itself, or `observed` (the analysed future: a prescribed-forcing run).",
    )
    minimum: float | None = Field(
        None,
        description="Predictions are not allowed below it (0 for humidity and precipitation), nor a dynamic forcing "
        "that a forecast makes of its climatology (0 for sea ice).",
    )
    maximum: float | None = Field(None, description="Likewise, not above it (1 for a fraction).")
    valid_range: tuple[float, float] | None = Field(
        None,
        description="Least and greatest value in the files, in the units of the run (`units` where it is set). What is "
        "outside is missing, as a fill value that a file does not declare (-999); what is within is accepted. Default: "
        "values that are fill values, or that no quantity in these units can have, stop.",
    )
    vector: Literal["auto", "yes", "no"] = Field(
        "auto", description="Whether it changes sign across a pole; `auto` decides by standard_name."
    )
    units: str | None = Field(
        None,
        min_length=1,
        description="Units to convert to (`K`, `Pa`, `mm`); default: those of the files. Where a file has others, the "
        "extra `units` is needed.",
    )
    regrid: Literal["bilinear", "conservative", "nearest"] | None = Field(
        None, description="Its own `data.regrid`; `nearest` for masks and categories."
    )
    derive: Derived | None = Field(
        None,
        description="Computed instead of read. `relative_humidity` is over water and ice as in ERA5, "
        "`relative_humidity_water` over water.",
    )
    inputs: dict[str, str] = Field(
        {},
        description="Variables to derive it from, where they have other names: temperature (t), specific_humidity (q), "
        "eastward_wind (u), northward_wind (v).",
    )

    @property
    def derived_from(self) -> dict[str, str]:
        """What it is derived from -> variable; empty where it is read. The first one's files stand for it."""
        return DERIVED_FROM[self.derive] | self.inputs if self.derive else {}


# Sections are frozen, so all variables without options can share one object.
_USUAL = VariableOptions()


class TransformConfig(Section):
    """A pointwise function of a skewed variable, applied before it is normalised and undone in every output."""

    kind: Literal["log1p", "sqrt"] = Field(
        description="`log1p`: ln(1 + x / unit); `sqrt`: the square root of x / unit; both with the sign of x."
    )
    unit: float = Field(1.0, gt=0, description="Where the logarithm begins to bend, in units of the variable.")


class SolarConfig(Section):
    """Top-of-atmosphere solar radiation."""

    tsi: Literal["era5", "constant"] = Field(
        "constant", description="Total solar irradiance: 1361 W m-2, or the yearly series of ERA5 (CMIP5)."
    )
    mean: Literal["step", "daily"] = Field(
        "step", description="Accumulated over the step, or the day's mean for data without a diurnal cycle."
    )
    window: Literal["past", "next"] = Field(
        "past", description="The window that ends at t (ERA5's label) or the one that ends at t+dt."
    )


class SplitsConfig(Section):
    """Periods as [first, last]; a date without a time as last means the whole day."""

    train: list[str] = Field(min_length=2, max_length=2)
    valid: list[str] = Field(min_length=2, max_length=2)
    test: list[str] = Field(min_length=2, max_length=2)


class PreprocessConfig(Section):
    """How credit_preprocess does its work; the values that it writes do not depend on it."""

    workers: int = Field(1, ge=1, description="Processes on this machine, or jobs of the cluster.")
    memory_gib: float = Field(
        1.0,
        gt=0,
        description="Of fields that each process reads at once, when a store is begun. A chunk of the sources is "
        "unpacked whole, whatever is wanted of it: where it spans more times than this holds, again and again, and "
        "`credit check` says what it takes.",
    )
    compression: Literal["lz4", "none"] = Field(
        "lz4",
        description="Of the store's fields: LZ4 takes half to two thirds of the room, none is read twice as fast from "
        "memory.",
    )
    climatology: bool = Field(
        False,
        description="Fit the climatology of `verification.climatology` to every field and keep it in the store, so "
        "that no verification and no new run has to read the training period for it.",
    )
    cluster: Literal["none", "pbs", "slurm"] = Field(
        "none", description="Write the store in jobs of a PBS or Slurm cluster (extra `cluster`)."
    )
    cluster_options: dict[str, Any] = Field(
        {},
        description="Arguments of dask_jobqueue's PBSCluster or SLURMCluster: cores, memory, walltime, account, queue.",
    )

    @property
    def held_bytes(self) -> int:
        """What `memory_gib` is in bytes."""
        return int(self.memory_gib * 2**30)

    @model_validator(mode="after")
    def _consistent(self) -> PreprocessConfig:
        if self.cluster_options and self.cluster == "none":
            raise ValueError("cluster_options have no effect without cluster: pbs or slurm")
        return self


class DataConfig(Section):
    """Where the data are and what they mean."""

    sources: list[SourceConfig] = Field(min_length=1, description="Where the fields come from.")
    grid: GridConfig | None = Field(
        None, description="The grid that all sources are brought to; none: that of the files, which must share one."
    )
    regrid: Literal["bilinear", "conservative"] = Field(
        "bilinear",
        description="How: between the four nearest cells, or by covered area, which keeps global means and is the "
        "choice for coarser grids.",
    )
    variables: VariablesConfig = Field(description="Which variables play which part.")
    levels: Levels = Field([], description="Levels of the 3-D variables, matched exactly, in `level_units`.")
    level_units: Literal["hPa", "Pa", "model_level"] = Field("hPa", description="Units of `levels`.")
    coefficients: PathText | None = Field(
        None,
        description="A file with the coefficients of the run's model levels, to bring sources with `vertical` to them, "
        "for the budgets of `model.postprocess`, and for `inference.pressure_levels` and `inference.derive`.",
    )
    variable_options: dict[str, VariableOptions] = Field({}, description="Options of single variables, by name.")
    transforms: dict[str, TransformConfig] = Field(
        {}, description="Transforms of single variables, by name, for skewed ones: tp: {kind: log1p, unit: 0.001}."
    )
    input_order: list[Literal["prognostic", "dynamic_forcing", "static"]] = Field(
        ["prognostic", "dynamic_forcing", "static"], description="Order of the groups in the model's input."
    )
    timestep: Duration = Field("6h", description="The model's time step.")
    history_len: int = Field(1, ge=1, description="Time frames in the input.")
    forecast_len: int = Field(1, ge=1, description="Steps of a training rollout.")
    valid_forecast_len: int = Field(1, ge=1, description="Steps of a validation rollout.")
    sample_every: Duration | None = Field(
        None,
        description="Spacing of the initial times of training and validation samples, counted from the split's first "
        "time (6h with hourly data and a time step of 6 h: no overlapping windows); none: every time of the data.",
    )
    init_hours: list[Hour] | None = Field(
        None, description="Hours (UTC) at which training and validation samples may begin; none: any."
    )
    splits: SplitsConfig = Field(description="Training, validation and test periods.")
    split_gap: Duration = Field("10d", description="Least distance between two splits.")
    store: PathText | None = Field(
        None, description="The training store that credit_preprocess writes; none: train from the sources."
    )
    on_bad_time: Literal["fail", "skip"] = Field(
        "fail",
        description="A time whose fields have missing, infinite or impossible values or cannot be read: stop, or leave "
        "it out of the store and list it (at most one in twenty).",
    )
    solar: SolarConfig = Field(SolarConfig(), description="Options of toa_incident_solar_radiation.")
    cache: Literal["none", "memory", "disk"] = Field(
        "none",
        description="`memory`: keep every field that training has read. `disk`: copy what was read of the store to "
        "`cache_folder`, and read it there from then on.",
    )
    cache_folder: PathText | None = Field(
        None, description="A folder on the node's own disk for `cache: disk`; none: its temporary one (TMPDIR)."
    )
    num_workers: int = Field(
        0,
        ge=0,
        description="What reads ahead: threads from a store (at least one), processes from sources (0: none).",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DataConfig:
        groups = self.variables
        names_3d = groups.prognostic.vars_3D + groups.diagnostic.vars_3D + groups.dynamic_forcing.vars_3D
        names_3d += groups.static.vars_3D
        for name in names_3d:
            if not self.levels and not self.field(name).levels:
                raise ValueError(f"{name} is in vars_3D but there are no levels; set data.levels")
        every = set(names_3d)
        for group in (groups.prognostic, groups.diagnostic, groups.dynamic_forcing, groups.static):
            every |= set(group.vars_2D)
        for name in self.variable_options:
            if name not in every:
                raise ValueError(
                    f'variable_options names "{name}", which is not in data.variables ({", ".join(sorted(every))})'
                )
        self._refuse_options_without_effect()
        if self.on_bad_time == "skip" and self.store is None:
            raise ValueError(
                "on_bad_time: skip needs a data.store, in which the bad times are noted; or correct the files"
            )
        if self.cache == "disk" and self.store is None:
            raise ValueError("cache: disk copies the chunks of a training store; set data.store")
        if self.cache_folder is not None and self.cache != "disk":
            raise ValueError("cache_folder has no effect without cache: disk")
        computed = {*COMPUTED_DYNAMIC, *COMPUTED_STATIC}
        for name in self.transforms:
            if name not in every - computed:
                known = ", ".join(sorted(every - computed))
                raise ValueError(f'transforms names "{name}", which is not read from data ({known})')
        if sorted(self.input_order) != ["dynamic_forcing", "prognostic", "static"]:
            raise ValueError("input_order must name prognostic, dynamic_forcing and static once each")
        if self.solar.mean == "daily" and {"sin_day", "cos_day"} & set(groups.dynamic_forcing.vars_2D):
            raise ValueError("solar.mean is daily (no diurnal cycle), so sin_day and cos_day must not be forcings")
        try:
            self.channel_map()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def _refuse_options_without_effect(self) -> None:
        groups = self.variables
        outputs = [*groups.prognostic.vars_3D, *groups.prognostic.vars_2D]
        outputs += [*groups.diagnostic.vars_3D, *groups.diagnostic.vars_2D]
        on_levels = [name for group in groups.model_dump().values() for name in group["vars_3D"]]
        forcing = [*groups.dynamic_forcing.vars_3D, *groups.dynamic_forcing.vars_2D]
        read = [name for name in forcing if name not in COMPUTED_DYNAMIC]
        static = [*groups.static.vars_3D, *groups.static.vars_2D]
        from_files = [*outputs, *read, *(name for name in static if name not in COMPUTED_STATIC)]
        as_they_are = [name for name in from_files if self.field(name).derive is None]
        if self.grid is None and self.regrid != "bilinear":
            raise ValueError("regrid has no effect without grid; set data.grid")
        if self.coefficients and self.level_units != "model_level":
            raise ValueError("coefficients has no effect: it is for level_units: model_level")
        for name, field in self.variable_options.items():
            option_key = f"variable_options.{name}"
            self._check_derived(name, field, on_levels, [*outputs, *read])
            for key, members, which in (
                ("levels", on_levels, "variables on levels"),
                ("minimum", [*outputs, *read], "prognostic and diagnostic variables and forcing read from data"),
                ("maximum", [*outputs, *read], "prognostic and diagnostic variables and forcing read from data"),
                ("in_forecast", read, "dynamic forcing that is read from data"),
                ("window", read, "dynamic forcing that is read from data"),
                ("units", from_files, "variables that are read from data"),
                ("valid_range", as_they_are, "variables that are read from data and not derived"),
                ("regrid", from_files if self.grid else (), "variables that are read from data, with data.grid"),
            ):
                if getattr(field, key) != VariableOptions.model_fields[key].default and name not in members:
                    raise ValueError(f"{option_key}.{key} has no effect: it is for {which}")
            if field.minimum is not None and field.maximum is not None and field.minimum >= field.maximum:
                raise ValueError(f"{option_key}: minimum {field.minimum:g} must be below maximum {field.maximum:g}")
            if field.valid_range is not None and field.valid_range[0] >= field.valid_range[1]:
                least, greatest = field.valid_range
                raise ValueError(f"{option_key}.valid_range: {least:g} must be below {greatest:g}")
            if field.restarts is not None and field.temporal != "deaccumulate":
                raise ValueError(f"{option_key}.restarts has no effect without temporal: deaccumulate")
            if field.window == "next" and field.temporal == "instant":
                raise ValueError(f"{option_key}.window has no effect with temporal: instant; set mean or accumulate")

    @staticmethod
    def _check_derived(name: str, field: VariableOptions, on_levels: list[str], varying: list[str]) -> None:
        if field.derive is None:
            if field.inputs:
                raise ValueError(f"variable_options.{name}.inputs has no effect without derive")
            return
        here = f"variable_options.{name}.derive: {field.derive}"
        for role in field.inputs:
            if role not in DERIVED_FROM[field.derive]:
                raise ValueError(f'{here} has no input "{role}"; it is made of {", ".join(DERIVED_FROM[field.derive])}')
        if name not in varying:
            raise ValueError(f"{here} is for prognostic, diagnostic and forcing variables that are not computed")
        if field.derive not in ("mean_sea_level_pressure", "wind_speed") and name not in on_levels:
            raise ValueError(f"{here} is a field on levels; list {name} in vars_3D")
        if field.derive == "mean_sea_level_pressure" and name in on_levels:
            raise ValueError(f"{here} has no levels; list {name} in vars_2D")
        if field.temporal != "instant":
            raise ValueError(f"{here} is of instantaneous fields; leave out temporal: {field.temporal}")

    def field(self, name: str) -> VariableOptions:
        """Return the options of variable `name`."""
        return self.variable_options.get(name, _USUAL)

    def channel_map(self) -> ChannelMap:
        """Return the channels that this section describes."""
        variables = self.variables.model_dump()
        levels_of = {name: field.levels for name, field in self.variable_options.items() if field.levels}
        masked = [name for name, field in self.variable_options.items() if field.missing == "fill_mean"]
        return ChannelMap.build(variables, self.levels, levels_of, masked, self.input_order, self.level_units)

    @property
    def has_vertical(self) -> bool:
        """Whether a source is brought to the run's levels by interpolation."""
        return any(source.vertical is not None for source in self.sources)

    @property
    def step_minutes(self) -> int:
        """The time step in minutes."""
        return parse_duration(self.timestep)
