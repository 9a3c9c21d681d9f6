"""Config sections of the built-in kinds of products; this module imports neither torch nor matplotlib."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, field_validator, model_validator

from credit.config.sections.base import Duration, PathText, StrictModel
from credit.config.sections.output import ProductList, ProductSection

# Keys for the limit of an event; a section sets exactly one of them.
LIMIT_KEYS = ("above", "at_least", "below", "at_most")
# Names of the eastward and the northward component.
WindPair = Annotated[list[str], Field(min_length=2, max_length=2)]


class FieldSection(ProductSection):
    """Base class of the config sections of products that are fields on the grid of the forecasts."""

    write: bool = Field(
        True, description="Write the field to a netCDF file. With `false`, only other products can use it."
    )


class WindSpeedSection(FieldSection):
    """Wind speed from its two components."""

    kind: Literal["wind_speed"] = Field("wind_speed", description="Wind speed.")
    of: WindPair = Field(description="Eastward and northward component, such as [u10, v10] or [u850, v850].")


class WindSpeedAtHeightSection(FieldSection):
    """Wind speed at a height between two heights at which the forecasts have the wind."""

    kind: Literal["wind_speed_at_height"] = Field("wind_speed_at_height", description="Wind speed at a height.")
    height: float = Field(gt=0, description="Height above ground in m, between the two heights of `of`.")
    of: dict[float, WindPair] = Field(
        {10.0: ["u10", "v10"], 100.0: ["u100", "v100"]},
        description="Two heights in m -> eastward and northward component at this height.",
    )
    profile: Literal["power", "log"] = Field(
        "power",
        description="Wind profile between the two heights: `power` law, or `log`arithmic profile of neutral air.",
    )

    @model_validator(mode="after")
    def _require_height_between(self) -> WindSpeedAtHeightSection:
        """Raise ValueError unless there are two heights above 0 m and `height` is between them."""
        heights = sorted(self.of)
        if len(heights) != 2 or heights[0] <= 0:
            raise ValueError(
                f"of: has {len(heights)} heights; a profile needs the wind at two heights above 0 m, such as "
                "{10: [u10, v10], 100: [u100, v100]}"
            )
        lower, upper = heights
        if not lower <= self.height <= upper:
            raise ValueError(
                f"height: {self.height:g} m is not between {lower:g} and {upper:g} m; a profile is not extrapolated"
            )
        return self


class ThicknessSection(FieldSection):
    """Thickness of the layer between two pressure levels, in m of geopotential height."""

    kind: Literal["thickness"] = Field("thickness", description="Thickness of a layer.")
    of: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        description="Geopotential or geopotential height at the lower and at the upper level, such as [z1000, z500]."
    )


class AccumulationSection(FieldSection):
    """Sum of a variable that is a sum over each step, such as precipitation, over several steps."""

    kind: Literal["accumulation"] = Field("accumulation", description="Sum over a window.")
    of: str = Field(description="Variable whose values are sums over a step, or since the initial time.")
    over: Duration | None = Field(
        None,
        description="Length of the window that ends at the lead time. At shorter lead times, values are missing. "
        "Default: the window starts at the initial time.",
    )
    window: Duration | None = Field(
        None,
        description="Length of the window of each sum in the forecasts, for files without time bounds. Default: from "
        "the time bounds.",
    )


class MemberStatisticSection(FieldSection):
    """Mean, spread, minimum or maximum of the members of an ensemble.

    The spread is the standard deviation about the mean, with the divisor M - 1 for M members.
    """

    kind: Literal["mean", "spread", "minimum", "maximum"] = Field(description="Statistic of the members.")
    of: str = Field(description="Variable of the forecasts, or an earlier product, with members.")


class ProbabilitySection(FieldSection):
    """Probability of an event: the fraction of members for which the event happens. Set exactly one of the limits.

    A limit is a number in the units of the field, or a string with a number and units, such as `15 m s-1`.
    """

    kind: Literal["probability"] = Field("probability", description="Probability of an event.")
    of: str = Field(description="Variable of the forecasts, or an earlier product, with members.")
    above: FiniteFloat | str | None = Field(None, description="The event is a value above this limit.")
    at_least: FiniteFloat | str | None = Field(None, description="The event is a value at or above this limit.")
    below: FiniteFloat | str | None = Field(None, description="The event is a value below this limit.")
    at_most: FiniteFloat | str | None = Field(None, description="The event is a value at or below this limit.")

    @model_validator(mode="after")
    def _require_one_limit(self) -> ProbabilitySection:
        """Raise ValueError unless exactly one limit is set."""
        limits = [key for key in LIMIT_KEYS if getattr(self, key) is not None]
        if len(limits) != 1:
            state = f"has {' and '.join(limits)}" if limits else "has no limit"
            raise ValueError(f"{state}; a probability has exactly one of {', '.join(LIMIT_KEYS)}")
        return self


class QuantilesSection(FieldSection):
    """Quantiles of the members of an ensemble, linearly interpolated between members."""

    kind: Literal["quantiles"] = Field("quantiles", description="Quantiles of the members.")
    of: str = Field(description="Variable of the forecasts, or an earlier product, with members.")
    quantiles: list[float] = Field(
        [0.1, 0.25, 0.5, 0.75, 0.9], min_length=1, description="Quantiles from 0 to 1, increasing."
    )

    @field_validator("quantiles")
    @classmethod
    def _require_increasing(cls, quantiles: list[float]) -> list[float]:
        """Raise ValueError unless the quantiles increase and are between 0 and 1."""
        if quantiles != sorted(set(quantiles)) or not 0 <= quantiles[0] <= quantiles[-1] <= 1:
            raise ValueError(f"{quantiles} must increase from 0 to 1; the ninetieth percentile is 0.9")
        return quantiles


class HeightCorrection(StrictModel):
    """Correction of station values for the difference between the height of the station and the model's surface."""

    lapse_rates: dict[str, FiniteFloat] = Field(
        min_length=1,
        description="Field in `of` -> decrease of its values per km of height, in its units, such as `{t2m: 6.5}`.",
    )
    orography: PathText = Field(
        description="netCDF file with the height of the model's surface on the grid of the forecasts: a field of the "
        "standard name surface_altitude, surface_geopotential or geopotential, without a time or level.",
    )


class PointsSection(ProductSection):
    """Base class of the config sections of products at stations."""

    of: list[str] = Field(min_length=1, description="Variables of the forecasts, or earlier products that are fields.")
    stations: PathText = Field(
        description="CSV file of the stations with the columns `name`, `latitude` and `longitude` in degrees."
    )
    method: Literal["bilinear", "nearest"] = Field(
        "bilinear", description="Interpolation between the four surrounding cells, or the nearest cell."
    )
    height_correction: HeightCorrection | None = Field(
        None,
        description="Correct values for the height of the stations, which the column `elevation` (m) of the CSV file "
        "contains. Default: values are not corrected.",
    )


class StationsSection(PointsSection):
    """Values at stations, as CSV and GeoJSON."""

    kind: Literal["stations"] = Field("stations", description="Values at stations.")


class MeteogramSection(PointsSection):
    """Figure of the time series at each station, with a panel for each variable."""

    kind: Literal["meteogram"] = Field("meteogram", description="Time series at stations.")
    style: Literal["box", "plume"] = Field(
        "box",
        description="Ensembles as a `box` for each lead time (range, quartiles, median), or as a `plume` of all "
        "members with their median.",
    )


class MapSection(ProductSection):
    """Maps of a field, one PNG file per lead time, or one map of the tracks of tropical cyclones."""

    kind: Literal["map"] = Field("map", description="Map.")
    of: str = Field(description="Variable of the forecasts, or an earlier product: a field or `cyclone_tracks`.")
    lead_times: list[Duration] | None = Field(
        None, min_length=1, description="Lead times of the maps of a field. Default: all lead times of the forecasts."
    )
    member: int | None = Field(
        None, ge=0, description="Number of the ensemble member to plot. Default: the mean of the members."
    )
    range: tuple[float, float] | None = Field(
        None,
        description="[low, high] ends of the colour scale, in the units of the field. Default: 0 to 1 for "
        "probabilities, otherwise from the values of each map.",
    )
    colormap: str = Field("viridis", description="Name of a colour map of matplotlib.")

    @field_validator("range")
    @classmethod
    def _require_increasing(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        """Raise ValueError unless the upper end of the range is above the lower end."""
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"[{value[0]:g}, {value[1]:g}] must increase")
        return value


class CycloneTracksSection(ProductSection):
    """Tracks of tropical cyclones in each forecast, as CSV and GeoJSON."""

    kind: Literal["cyclone_tracks"] = Field("cyclone_tracks", description="Tracks of tropical cyclones.")
    pressure: str = Field("msl", description="Mean sea level pressure, in Pa or hPa.")
    vorticity_wind: list[str] | None = Field(
        None,
        max_length=2,
        description="Eastward and northward wind for the vorticity criterion. Default: [u850, v850] if the forecasts "
        "have both, otherwise the criterion is not applied; [] never applies it.",
    )
    warm_core: list[str] | None = Field(
        None,
        max_length=2,
        description="Geopotential at the lower and the upper level of the layer that must be thicker in the warm core. "
        "Default: [z500, z300] if the forecasts have both, otherwise the criterion is not applied; [] never applies "
        "it.",
    )
    surface_wind: list[str] | None = Field(
        None,
        max_length=2,
        description="Eastward and northward wind whose largest speed near the centre is written. Default: [u10, v10] "
        "if the forecasts have both; [] writes none.",
    )
    max_latitude: float = Field(50.0, gt=0, le=80, description="Largest latitude of a centre, north and south.")
    pressure_rise: float = Field(
        2.0, gt=0, description="Rise of pressure in hPa from the centre in all directions, within `pressure_radius`."
    )
    pressure_radius: float = Field(
        5.5, gt=0, le=20, description="Great-circle distance in degrees within which pressure must rise."
    )
    min_vorticity: float = Field(
        3.5e-5, gt=0, description="Least cyclonic vorticity in s-1, anywhere within `core_radius` of the centre."
    )
    core_radius: float = Field(
        2.0,
        gt=0,
        le=10,
        description="Great-circle distance in degrees from the centre within which the largest vorticity and thickness "
        "are searched. At least one and a half grid cells are used.",
    )
    thickness_fall: float = Field(
        6.0, gt=0, description="Fall of thickness in m from the warm core in all directions, within `warm_core_radius`."
    )
    warm_core_radius: float = Field(
        6.5, gt=0, le=20, description="Great-circle distance in degrees within which thickness must fall."
    )
    separation: float = Field(
        6.0,
        gt=0,
        description="Of centres that are closer together than this distance, in degrees, only the deepest is kept.",
    )
    max_speed: float = Field(
        30.0,
        gt=0,
        description="Largest distance between a centre and the position that its track predicts, divided by the "
        "interval, in m s-1.",
    )
    max_gap: Duration = Field(
        "12h", description="Longest time between two centres of a track; one interval of lead times is always allowed."
    )
    min_duration: Duration = Field("48h", description="Shortest time from the first to the last centre of a track.")

    @field_validator("vorticity_wind", "warm_core", "surface_wind")
    @classmethod
    def _require_pair(cls, names: list[str] | None) -> list[str] | None:
        """Raise ValueError if a single variable is named."""
        if names is not None and len(names) == 1:
            raise ValueError(f"{names} must name two variables, or none")
        return names


class ProductsFileConfig(StrictModel):
    """Config file of `credit products` for forecasts without a run: the forecasts and the products."""

    forecasts: PathText = Field(description="Folder of forecasts, or a zarr store on disk or at a URL.")
    products: ProductList = Field(min_length=1, description="The products.")
    output: PathText | None = Field(
        None, description="Folder of the products. Default: the folder `products` in the folder of the forecasts."
    )
    rename: dict[str, str] = Field({}, description="Name of a variable in the products -> its name in the files.")
    level_units: Literal["hPa", "Pa", "model_level"] | None = Field(
        None, description="Units to which the levels are converted. Default: the units in the files."
    )
    storage_options: dict[str, bool | int | float | str] = Field(
        {}, description="Options of a remote zarr store, as in `data.sources`."
    )
    land: PathText | None = Field(
        None,
        description="netCDF file with a field of the standard name land_area_fraction or land_binary_mask on the grid "
        "of the forecasts, from which maps draw the coastline. Default: maps have no coastline.",
    )
    plugins: list[str] = Field([], description="Python modules that register additional kinds of products.")
