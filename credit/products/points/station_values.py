"""Product of the values at stations, written as CSV and GeoJSON."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from credit.products.base import ProductCase, ProductOutput, register_product
from credit.products.description import FieldInfo
from credit.products.points.series import StationProduct, StationSeries
from credit.products.section import StationsSection
from credit.utils.atomic import atomic_write_text

COLUMNS = (
    "station", "latitude", "longitude", "initial_time", "valid_time", "lead_hours", "variable", "member", "quantile",
    "value", "units",
)  # fmt: skip
# Number of decimals of coordinates in degrees; the last decimal is about 1 m.
_DECIMALS = 5


@register_product("stations", StationsSection)
class StationValues(StationProduct):
    """Values at stations, as CSV in long format and as GeoJSON with the time series of each station."""

    def open(self, case: ProductCase) -> ProductOutput:
        """Return a writer of the CSV and GeoJSON files of one forecast."""
        return _StationFiles(self, case)


class _StationFiles(StationSeries):
    """Writer of the CSV and the GeoJSON file of one forecast."""

    def finish(self) -> list[Path]:
        """Write the CSV and the GeoJSON file, and return their paths."""
        csv_path = atomic_write_text(self.case.folder / f"{self.product.name}.csv", self._build_csv())
        text = json.dumps(self._build_geojson(), allow_nan=False)
        return [csv_path, atomic_write_text(self.case.folder / f"{self.product.name}.geojson", text + "\n")]

    def _build_csv(self) -> str:
        """Return the CSV table as a string, with a row for each station, lead time, variable and member or quantile."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(COLUMNS)
        leads = self.case.forecasts.lead_minutes.tolist()
        for number, station in enumerate(self.product.stations):
            station_cells = (station.name, round(station.latitude, _DECIMALS), round(station.longitude, _DECIMALS))
            for lead_index, lead in enumerate(leads):
                times = (self.case.initial_text, self.case.valid_text(lead), f"{lead / 60:g}")
                for info in self.product.infos:
                    for index, value in enumerate(self.values[info.name][lead_index][:, number].tolist()):
                        member, quantile = _format_labels(info, index)
                        text = "" if math.isnan(value) else f"{value:.6g}"
                        writer.writerow((*station_cells, *times, info.name, member, quantile, text, info.units))
        return buffer.getvalue()

    def _build_geojson(self) -> dict[str, Any]:
        """Return a GeoJSON collection (RFC 7946) with one point per station; its properties contain the time series."""
        leads = self.case.forecasts.lead_minutes.tolist()
        series = self.stack_series()
        features = []
        for number, station in enumerate(self.product.stations):
            variables = {}
            for info in self.product.infos:
                series_LN = series[info.name][:, :, number]
                values = _to_json_values(series_LN if info.dim else series_LN[:, 0])
                variables[info.name] = {"units": info.units, "long_name": info.title, "values": values}
                if info.dim:
                    variables[info.name][info.dim] = list(info.coordinate)
            features.append(
                {
                    "type": "Feature",
                    "geometry": {
                        "type": "Point",
                        "coordinates": [round(station.longitude, _DECIMALS), round(station.latitude, _DECIMALS)],
                    },
                    "properties": {"name": station.name, "variables": variables},
                }
            )
        return {
            "type": "FeatureCollection",
            "initial_time": self.case.initial_text,
            "lead_hours": [lead / 60 for lead in leads],
            "valid_times": [self.case.valid_text(lead) for lead in leads],
            "features": features,
        }


def _format_labels(info: FieldInfo, index: int) -> tuple[str, str]:
    """Return the entries of the columns ``member`` and ``quantile`` for an index along the first dimension."""
    if info.dim is None:
        return "", ""
    text = f"{info.coordinate[index]:g}"
    return (text, "") if info.dim == "member" else ("", text)


def _to_json_values(values: np.ndarray) -> list[Any]:
    """Return an array as nested lists, with six significant digits and None for missing values."""
    if values.ndim > 1:
        return [_to_json_values(row) for row in values]
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]
