"""Regions of scores: those of WeatherBench 2 by name, and boxes of a user's own."""

from __future__ import annotations

from pydantic import Field, model_validator

from credit.config.schema_base import Section


class RegionConfig(Section):
    """A part of the sphere between two parallels and two meridians; a cell belongs by its centre, edges included."""

    lat: tuple[float, float] = Field((-90.0, 90.0), description="South and north, degrees.")
    lon: tuple[float, float] = Field(
        (0.0, 360.0), description="West and east, degrees; from west eastward, so [347.5, 42.5] lies across 0."
    )

    @model_validator(mode="after")
    def _is_a_box(self) -> RegionConfig:
        south, north = self.lat
        if not -90 <= south <= north <= 90:
            raise ValueError(f"lat: [{south:g}, {north:g}] is not [south, north] within -90..90")
        west, east = self.lon
        if not (min(west, east) >= -180 and max(west, east) <= 360 and abs(east - west) <= 360):
            raise ValueError(f"lon: [{west:g}, {east:g}] is not [west, east] within -180..360")
        return self


def _box(lat: tuple[float, float], lon: tuple[float, float] = (0.0, 360.0)) -> tuple[RegionConfig]:
    return (RegionConfig(lat=lat, lon=lon),)


_NORTH, _SOUTH = (20.0, 90.0), (-90.0, -20.0)

# WeatherBench 2's, with underscores for its hyphens
REGIONS: dict[str, tuple[RegionConfig, ...]] = {
    "global": _box((-90.0, 90.0)),
    "tropics": _box((-20.0, 20.0)),
    "extratropics": _box(_NORTH) + _box(_SOUTH),
    "extratropics_north": _box(_NORTH),
    "extratropics_south": _box(_SOUTH),
    "europe": _box((35.0, 75.0), (347.5, 42.5)),
    "north_america": _box((25.0, 60.0), (240.0, 285.0)),
    "north_atlantic": _box((25.0, 65.0), (290.0, 350.0)),
    "north_pacific": _box((25.0, 60.0), (145.0, 230.0)),
    "east_asia": _box((25.0, 60.0), (102.5, 150.0)),
    "ausnz": _box((-45.0, -12.5), (120.0, 175.0)),
    "arctic": _box((60.0, 90.0)),
    "antarctic": _box((-90.0, -60.0)),
}
DEFAULT_REGIONS = ["global", "tropics", "extratropics", "extratropics_north", "extratropics_south"]
