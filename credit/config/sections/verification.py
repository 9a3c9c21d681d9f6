"""The ``verification`` section: climatology, regions, events and other forecasts."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from credit.config.sections.base import Duration, PathText, StrictModel
from credit.config.sections.source import GridConfig
from credit.errors import did_you_mean

BASELINES = ("persistence", "damped_persistence", "climatology")
# Name of the comparison with the best baseline.
BEST_BASELINE = "best_baseline"
# Names in the scores of every run. Other forecasts must not have these names.
RESERVED_NAMES = ("model", *BASELINES, BEST_BASELINE)


class RegionConfig(StrictModel):
    """A latitude-longitude box. A cell belongs to the box if the centre of the cell is inside or on the edge."""

    lat: tuple[float, float] = Field((-90.0, 90.0), description="[south, north] in degrees.")
    lon: tuple[float, float] = Field(
        (0.0, 360.0),
        description="[west, east] in degrees; the box extends eastward from west, so [347.5, 42.5] contains longitude "
        "0.",
    )

    @model_validator(mode="after")
    def _require_valid_box(self) -> RegionConfig:
        """Raise ValueError if an edge is outside the globe or south is above north."""
        south, north = self.lat
        if not -90 <= south <= north <= 90:
            raise ValueError(f"lat: [{south:g}, {north:g}] is not [south, north] within -90..90")
        # West may be greater than east if the box includes longitude 0.
        west, east = self.lon
        is_in_range = min(west, east) >= -180 and max(west, east) <= 360
        spans_at_most_globe = abs(east - west) <= 360
        if not (is_in_range and spans_at_most_globe):
            raise ValueError(f"lon: [{west:g}, {east:g}] is not [west, east] within -180..360")
        return self


def _make_region(lat: tuple[float, float], lon: tuple[float, float] = (0.0, 360.0)) -> tuple[RegionConfig]:
    """Return a region that consists of one box, as a tuple of boxes.

    Args:
        lat: (south, north) in degrees.
        lon: (west, east) in degrees.
    """
    return (RegionConfig(lat=lat, lon=lon),)


# Latitudes of the extratropics, [south, north] in degrees.
_NORTH = (20.0, 90.0)
_SOUTH = (-90.0, -20.0)

# The regions of WeatherBench 2, with underscores instead of hyphens.
REGIONS: dict[str, tuple[RegionConfig, ...]] = {
    "global": _make_region((-90.0, 90.0)),
    "tropics": _make_region((-20.0, 20.0)),
    "extratropics": _make_region(_NORTH) + _make_region(_SOUTH),
    "extratropics_north": _make_region(_NORTH),
    "extratropics_south": _make_region(_SOUTH),
    "europe": _make_region((35.0, 75.0), (347.5, 42.5)),
    "north_america": _make_region((25.0, 60.0), (240.0, 285.0)),
    "north_atlantic": _make_region((25.0, 65.0), (290.0, 350.0)),
    "north_pacific": _make_region((25.0, 60.0), (145.0, 230.0)),
    "east_asia": _make_region((25.0, 60.0), (102.5, 150.0)),
    "ausnz": _make_region((-45.0, -12.5), (120.0, 175.0)),
    "arctic": _make_region((60.0, 90.0)),
    "antarctic": _make_region((-90.0, -60.0)),
}
DEFAULT_REGIONS = ["global", "tropics", "extratropics", "extratropics_north", "extratropics_south"]


# Keys that set the limit of an event.
_LIMIT_KEYS = ("above", "below", "above_quantile", "below_quantile")


class EventConfig(StrictModel):
    """An event: the value of a channel exceeds or falls below a limit. Set exactly one of the four limits."""

    channel: str = Field(description="The channel (`tp`, `t2m`, `z500`). It must be among the scored channels.")
    above: float | None = Field(None, description="The event is a value above this number, in the units of the data.")
    below: float | None = Field(None, description="The event is a value below this number, in the units of the data.")
    above_quantile: float | None = Field(
        None,
        description="The event is a value above this quantile (0 to 1) of the training period, for each cell and time "
        "of the year.",
    )
    below_quantile: float | None = Field(
        None,
        description="The event is a value below this quantile (0 to 1) of the training period, for each cell and time "
        "of the year.",
    )

    @model_validator(mode="after")
    def _require_one_limit(self) -> EventConfig:
        """Raise ValueError if an event has no limit, several limits, or a quantile outside 0 to 1."""
        limits = [key for key in _LIMIT_KEYS if getattr(self, key) is not None]
        if len(limits) != 1:
            state = "has no limit"
            if limits:
                state = f"has {' and '.join(limits)}"
            raise ValueError(f"{state}; an event has exactly one of {', '.join(_LIMIT_KEYS)}")
        for key in ("above_quantile", "below_quantile"):
            value = getattr(self, key)
            if value is not None and not 0 < value < 1:
                raise ValueError(f"{key}: {value:g} is not between 0 and 1; the ninetieth percentile is 0.9")
        return self


class ClimatologyConfig(StrictModel):
    """The climatology for anomaly correlation and for the baselines, from the training period or from a file."""

    method: Literal["harmonic", "window", "file"] = Field(
        "harmonic",
        description="`harmonic`: fit annual harmonics. `window`: average over a moving window of days. `file`: read "
        "the climatology from `path`.",
    )
    harmonics: int = Field(1, ge=0, description="For `harmonic`: number of annual harmonics; 0 is the mean only.")
    window_days: int = Field(61, ge=1, description="For `window`: width of the window in days.")
    by_hour: bool = Field(
        False, description="Fit a separate climatology for each hour of the day, for data with a diurnal cycle."
    )
    path: PathText | None = Field(
        None,
        description="For `file`: a netCDF file or zarr store with the dimensions dayofyear, hour, level, latitude and "
        "longitude, as in WeatherBench 2.",
    )
    rename: dict[str, str] = Field(
        {}, description="For `file`: variable of the run -> its name in the file. Default: the names in `data.sources`."
    )
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="For `file`: options for a remote zarr store, as in `data.sources`."
    )

    @model_validator(mode="after")
    def _require_fitting_path(self) -> ClimatologyConfig:
        """Raise ValueError if the method ``file`` has no `path`, or another method has `path` or options of a file."""
        if (self.method == "file") != (self.path is not None):
            raise ValueError("method: file and path must be set together")
        if self.method != "file" and (self.rename or self.storage_options):
            raise ValueError("rename and storage_options are only for method: file")
        return self


class OtherForecastsConfig(StrictModel):
    """Other forecasts to score. You may write the path instead of the section."""

    path: PathText = Field(
        description="A folder that `credit rollout` has written, or a zarr store in the format of WeatherBench 2, on "
        "a disk or at s3://, gs://, https://."
    )
    rename: dict[str, str] = Field({}, description="Variable of the run -> its name in these forecasts.")
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="Options for a remote zarr store, as in `data.sources`."
    )

    @model_validator(mode="before")
    @classmethod
    def _wrap_path(cls, value: object) -> object:
        """Return a section with the path if the value is a path; return any other value unchanged."""
        if isinstance(value, str):
            return {"path": value}
        return value


class VerificationConfig(StrictModel):
    """Scores of forecasts by `credit verify`."""

    folder: PathText = Field(
        ".",
        description="Folder of the scores, figures and report, relative to `save_loc`. Existing results in this folder "
        "are replaced, so give each verification of a run its own folder to keep all results.",
    )
    climatology: ClimatologyConfig = Field(
        ClimatologyConfig(), description="Climatology for the anomaly correlation and for the baselines."
    )
    allow_seen: bool = Field(
        False,
        description="Also score forecasts in periods on which the weights were trained or selected. Use this key to "
        "measure overfitting, or for simulated data with years that coincide with the training period.",
    )
    draw_figures: bool = Field(
        True,
        description="Plot figures, which takes most of the time of a small verification. The report does not "
        "need the figures.",
    )
    figure_channels: list[str] | None = Field(
        None,
        description="Channels of the maps, spectra and curves. Default: z500, t850, t2m, msl, ... if the data contain "
        "them.",
    )
    figure_leads: list[Duration] = Field(
        ["24h", "72h"],
        description="Lead times of the maps and spectra; lead times without forecasts are omitted. The defaults are "
        "rounded up to multiples of `data.timestep`.",
    )
    hovmoeller_band: tuple[float, float] = Field(
        (35.0, 60.0), description="Latitude band of the Hovmoeller diagrams: [south, north] in degrees."
    )
    animate: list[str] = Field(
        [], description="Channels to plot as an animated GIF, which shows truth and forecast of one case."
    )
    other_forecasts: dict[str, OtherForecastsConfig] = Field(
        {}, description="Name -> folder or store of other forecasts to score."
    )
    all_pairs: bool = Field(
        False,
        description="Compare each pair of forecasts: for each of `other_forecasts`, also write "
        "`pairs/NAME/scores.nc`, in which it is treated as the model and is compared with the later entries.",
    )
    grid: GridConfig | None = Field(
        None,
        description="Grid of the scores. Truth, forecasts and climatology are interpolated to it conservatively. The "
        "grid of WeatherBench 2 is {rows: 121, columns: 240, poles: true}. Default: the grid of the data.",
    )
    regions: list[str] = Field(
        DEFAULT_REGIONS, description=f"Regions of the scores: global and any of {', '.join(REGIONS)}."
    )
    boxes: dict[str, RegionConfig] = Field({}, description="Name -> user-defined region, in addition to `regions`.")
    events: dict[str, EventConfig] = Field({}, description="Name -> an event to score (Brier score, reliability).")
    seeps: list[str] | None = Field(
        None,
        description="Channels of accumulated precipitation to score with SEEPS. Default: sums over the step "
        "(`temporal: accumulate` or `deaccumulate`) with the name tp or total_precipitation, or with a "
        "standard_name of precipitation.",
    )

    @model_validator(mode="after")
    def _require_valid_band(self) -> VerificationConfig:
        """Raise ValueError if the latitude band is outside the globe or south is not below north."""
        south, north = self.hovmoeller_band
        if not -90 <= south < north <= 90:
            raise ValueError(f"hovmoeller_band: [{south:g}, {north:g}] is not [south, north] within -90..90")
        return self

    @model_validator(mode="after")
    def _require_figures_for_animations(self) -> VerificationConfig:
        """Raise ValueError if animations are set without figures."""
        if self.animate and not self.draw_figures:
            raise ValueError(f"animate: {self.animate} needs draw_figures: true")
        return self

    @model_validator(mode="after")
    def _require_unreserved_names(self) -> VerificationConfig:
        """Raise ValueError if other forecasts have a reserved name, such as ``persistence``."""
        for name in self.other_forecasts:
            if is_reserved_name(name):
                reserved = ", ".join(RESERVED_NAMES)
                raise ValueError(f'other_forecasts: "{name}" is reserved ({reserved}); choose a different name')
            # With all_pairs, the name is also the name of a folder.
            if self.all_pairs and not re.fullmatch(r"[\w-][\w. -]*", name):
                raise ValueError(
                    f'other_forecasts: "{name}" names a folder with all_pairs: true; use letters, digits, '
                    "underscore, dot, hyphen and space"
                )
        return self

    @model_validator(mode="after")
    def _require_known_regions(self) -> VerificationConfig:
        """Raise ValueError if a region is unknown or repeated, global is missing, or a box has the name of a region."""
        for name in self.regions:
            if name not in REGIONS:
                raise ValueError(
                    f'regions: "{name}" is not a known region; define additional regions in '
                    f"boxes{did_you_mean(name, REGIONS)}"
                )
        if "global" not in self.regions:
            raise ValueError(f"regions: {self.regions} must contain global, which tables and figures show")
        if len(set(self.regions)) < len(self.regions):
            raise ValueError(f"regions: {self.regions} contains a region twice")
        for name in self.boxes:
            if name in REGIONS:
                raise ValueError(f'boxes: "{name}" is the name of a built-in region; choose a different name')
        return self

    @model_validator(mode="after")
    def _require_valid_event_names(self) -> VerificationConfig:
        """Raise ValueError if the name of an event has characters that names of scores must not contain."""
        for name in self.events:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise ValueError(
                    f'events: "{name}" becomes part of the names of scores; use letters, digits, underscore, dot and '
                    "hyphen"
                )
        return self


def is_reserved_name(name: str) -> bool:
    """Return True if `name` is one of `RESERVED_NAMES`, also in the spelling of figures ("Damped persistence")."""
    return name.strip().lower().replace(" ", "_") in RESERVED_NAMES
