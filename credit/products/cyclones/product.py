"""Product of the tracks of tropical cyclones in each forecast, written as CSV and GeoJSON.

Shape suffixes: M members, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from credit.calendar import parse_duration
from credit.data.formats.cf import PRESSURE_IN_HPA
from credit.data.formats.units import find_conversion, normalise_units
from credit.errors import ConfigError
from credit.forecast.io.schema import MEMBER
from credit.physics.vorticity import relative_vorticity
from credit.products.base import Product, ProductCase, ProductContext, ProductOutput, register_product
from credit.products.cyclones.detection import CycloneDetector, CycloneFields
from credit.products.cyclones.tracking import TrackBuilder, TrackPoint
from credit.products.derived import find_layer_geopotential, find_wind_components, is_on_pressure_level
from credit.products.section import CycloneTracksSection
from credit.utils.atomic import atomic_write_text

COLUMNS = (
    "initial_time", "member", "track", "valid_time", "lead_hours", "latitude", "longitude", "pressure_hpa",
    "vorticity_per_s", "max_wind_m_per_s",
)  # fmt: skip
# Key of the section -> default variables, which are used if the forecasts contain all of them.
_DEFAULT_VARIABLES = {
    "vorticity_wind": ("u850", "v850"), "warm_core": ("z500", "z300"), "surface_wind": ("u10", "v10"),
}  # fmt: skip


@register_product("cyclone_tracks", CycloneTracksSection)
class CycloneTracks(Product):
    """Tracks of tropical cyclones, with a separate set of tracks for each member.

    Attributes:
        detector: detector of the centres at one lead time.
        criteria: descriptions of the criteria that are applied.
    """

    def __init__(self, section: CycloneTracksSection, context: ProductContext) -> None:
        super().__init__(section, context)
        pressure = context.find_field(section.pressure, "pressure")
        if pressure.units.lower() not in PRESSURE_IN_HPA:
            raise ConfigError(
                f'{context.key}.pressure: {pressure.name} is in "{pressure.units}"; name mean sea level pressure in Pa '
                "or hPa"
            )
        if pressure.dim not in (None, MEMBER):
            raise ConfigError(f"{context.key}.pressure: {pressure.name} has quantiles; name a field of each forecast")
        longest = int(context.forecasts.lead_minutes[-1] - context.forecasts.lead_minutes[0])
        if parse_duration(section.min_duration) > longest:
            raise ConfigError(
                f"{context.key}.min_duration: {section.min_duration} is longer than the {longest / 60:g} h from the "
                "first to the last lead time, so no track could be found; choose a shorter duration"
            )
        self.hpa_per_unit = PRESSURE_IN_HPA[pressure.units.lower()]
        self.members = len(pressure.coordinate) or None
        self.detector = CycloneDetector(section, context.forecasts.grid)
        self.criteria = ["enclosed minimum of pressure"]

        # Optional criteria. The forecasts must contain every variable that the config names.
        self.vorticity_wind = self._choose_variables("vorticity_wind", context)
        self.metres_per_second = 1.0
        if self.vorticity_wind:
            self.metres_per_second = self._find_wind_factor(context, self.vorticity_wind, "vorticity_wind")
            self.criteria.append(f"vorticity of {', '.join(self.vorticity_wind)}")
        self.warm_core = self._choose_variables("warm_core", context)
        self.thickness_factor = 1.0
        if self.warm_core:
            _, self.thickness_factor = find_layer_geopotential(context, self.warm_core, "warm_core")
            self.criteria.append(f"warm core between {' and '.join(self.warm_core)}")
        self.surface_wind = self._choose_variables("surface_wind", context)
        self.surface_metres_per_second = 1.0
        if self.surface_wind:
            self.surface_metres_per_second = self._find_wind_factor(context, self.surface_wind, "surface_wind")
        self.inputs = (section.pressure, *self.vorticity_wind, *self.warm_core, *self.surface_wind)
        for name in self.inputs:
            if context.find_field(name).dim != pressure.dim:
                raise ConfigError(
                    f"{context.key}: {name} and {pressure.name} do not have the same members; name fields of the same "
                    "members"
                )

    def _choose_variables(self, key: str, context: ProductContext) -> tuple[str, ...]:
        """Return the variables of an optional criterion; empty if the criterion is not applied."""
        names = getattr(self.section, key)
        if names is not None:
            return tuple(names)
        defaults = _DEFAULT_VARIABLES[key]
        if any(name not in context.forecasts.fields for name in defaults):
            return ()
        # In forecasts without the wind at 10 m, u10 is the wind at 10 hPa.
        if key == "surface_wind" and any(
            is_on_pressure_level(context, context.forecasts.fields[name]) for name in defaults
        ):
            return ()
        return defaults

    @staticmethod
    def _find_wind_factor(context: ProductContext, names: Sequence[str], key: str) -> float:
        """Check two wind components, and return the factor that converts their units to m s-1."""
        eastward, _ = find_wind_components(context, names, key)
        if normalise_units(eastward.units) == "m s-1":
            return 1.0
        return find_conversion(eastward.units, "m s-1", eastward.name, "forecasts", f"{context.key}.{key}").scale

    def settings(self) -> dict[str, Any]:
        """Return the settings of the section, the applied criteria, and the variables of the surface wind.

        The criteria and the variables also depend on the variables in the forecasts.
        """
        return {**super().settings(), "criteria": self.criteria, "wind": list(self.surface_wind)}

    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the tracks of one forecast."""
        return _TrackFiles(self, case)


class _TrackFiles(ProductOutput):
    """Builder of the tracks of all members of one forecast, and writer of their files."""

    def __init__(self, product: CycloneTracks, case: ProductCase) -> None:
        self._product = product
        self._case = case
        section = product.section
        self._builders = []
        for _ in range(product.members or 1):
            builder = TrackBuilder(
                section.max_speed, parse_duration(section.max_gap), parse_duration(section.min_duration)
            )
            self._builders.append(builder)

    def add(self, lead_index: int) -> None:
        """Find the centres of each member at a lead time, and add them to the tracks."""
        product = self._product
        lead = int(self._case.forecasts.lead_minutes[lead_index])
        for member, builder in enumerate(self._builders):

            def read(name: str, member: int = member) -> np.ndarray:
                return self._case.fields.read(name, lead_index)[member].astype(np.float64)

            vorticity = thickness = wind = None
            if product.vorticity_wind:
                eastward, northward = (product.metres_per_second * read(name) for name in product.vorticity_wind)
                vorticity = relative_vorticity(eastward, northward, self._case.forecasts.grid)
            if product.warm_core:
                lower, upper = (product.thickness_factor * read(name) for name in product.warm_core)
                thickness = upper - lower
            if product.surface_wind:
                wind = np.hypot(*(product.surface_metres_per_second * read(name) for name in product.surface_wind))
            pressure = product.hpa_per_unit * read(product.section.pressure)
            builder.add(lead, product.detector.find(CycloneFields(pressure, vorticity, thickness, wind)))

    def finish(self) -> list[Path]:
        """Write the tracks of all members, and return the paths of the CSV and the GeoJSON file."""
        tracks_by_member = [builder.finish() for builder in self._builders]
        stem = self._case.folder / self._product.name
        csv_path = atomic_write_text(stem.with_name(f"{stem.name}.csv"), self._build_csv(tracks_by_member))
        text = json.dumps(self._build_geojson(tracks_by_member), allow_nan=False)
        return [csv_path, atomic_write_text(stem.with_name(f"{stem.name}.geojson"), text + "\n")]

    def _find_member_label(self, member: int) -> int | None:
        return None if self._product.members is None else member

    def _build_csv(self, tracks_by_member: list[list[list[TrackPoint]]]) -> str:
        """Return the CSV table as a string, with a row for each point of each track."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(COLUMNS)
        for member, tracks in enumerate(tracks_by_member):
            label = self._find_member_label(member)
            for number, track in enumerate(tracks, start=1):
                for point in track:
                    centre = point.centre
                    row = [self._case.initial_text, "" if label is None else label, number]
                    row += [self._case.valid_text(point.lead_minutes), f"{point.lead_minutes / 60:g}"]
                    row += [f"{centre.latitude:.4f}", f"{_wrap_longitude(centre.longitude):.4f}"]
                    row.append(f"{centre.pressure:.2f}")
                    row.append("" if centre.vorticity is None else f"{centre.vorticity:.3e}")
                    row.append("" if centre.wind is None else f"{centre.wind:.2f}")
                    writer.writerow(row)
        return buffer.getvalue()

    def _build_geojson(self, tracks_by_member: list[list[list[TrackPoint]]]) -> dict[str, Any]:
        """Return a GeoJSON collection (RFC 7946) with one line per track; its properties contain the point values."""
        features = []
        for member, tracks in enumerate(tracks_by_member):
            for number, track in enumerate(tracks, start=1):
                properties = {
                    "member": self._find_member_label(member),
                    "track": number,
                    "valid_times": [self._case.valid_text(point.lead_minutes) for point in track],
                    "lead_hours": [point.lead_minutes / 60 for point in track],
                    "pressure_hpa": [round(point.centre.pressure, 2) for point in track],
                    "max_wind_m_per_s": [_round(point.centre.wind) for point in track],
                }
                features.append({"type": "Feature", "geometry": build_line_geometry(track), "properties": properties})
        return {
            "type": "FeatureCollection",
            "initial_time": self._case.initial_text,
            "criteria": self._product.criteria,
            "features": features,
        }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _wrap_longitude(longitude: float) -> float:
    """Return a longitude in degrees, moved to the range from -180 to below 180."""
    return (longitude + 180.0) % 360.0 - 180.0


def build_line_geometry(track: Sequence[TrackPoint]) -> dict[str, Any]:
    """Return the GeoJSON geometry of a track, cut where the track crosses the date line (RFC 7946, section 3.1.9).

    Args:
        track: points of the track in the order of lead times.
    """
    parts: list[list[list[float]]] = [[]]
    for point in track:
        longitude = _wrap_longitude(point.centre.longitude)
        latitude = point.centre.latitude
        if parts[-1]:
            last_longitude, last_latitude = parts[-1][-1]
            if abs(longitude - last_longitude) > 180.0:
                edge = 180.0 if last_longitude > 0 else -180.0
                step = (longitude - last_longitude + 180.0) % 360.0 - 180.0
                share = (edge - last_longitude) / step if step else 0.0
                crossing = round(last_latitude + share * (latitude - last_latitude), 4)
                parts[-1].append([edge, crossing])
                parts.append([[-edge, crossing]])
        parts[-1].append([round(longitude, 4), round(latitude, 4)])
    if len(parts) > 1:
        return {"type": "MultiLineString", "coordinates": parts}
    if len(parts[0]) == 1:
        return {"type": "Point", "coordinates": parts[0][0]}
    return {"type": "LineString", "coordinates": parts[0]}
