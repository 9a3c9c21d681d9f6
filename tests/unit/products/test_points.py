"""Interpolation to stations, compared with a search of all cells; CSV and GeoJSON files of stations; meteograms."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from PIL import Image

from credit.data.formats.regrid import Regridder
from credit.errors import CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.grid import LatLonGrid
from credit.products.base import FieldReader, ProductCase
from credit.products.description import describe_archive
from credit.products.points.interpolation import PointInterpolator
from credit.products.points.meteogram import plot_meteogram
from credit.products.points.stations import Station, load_stations
from tests.unit.products.forecasts import (
    GRID,
    INITIAL,
    LEADS,
    MEMBERS,
    NAMES,
    plan_entries,
    random_ensemble,
    write_forecasts,
    write_product_files,
)

STATIONS = """name,latitude,longitude,height
Berlin,52.5,13.4,34
Suva,-18.1,178.4,6
"Hilo, Hawaii",19.7,-155.1,11
Date line,0,180,0
South Pole,-90,0,2835
North,89.9,359.9,0
"""
# (latitude, longitude) of points, some on the date line, at longitude 0, and on or near the poles.
POINTS = [(52.5, 13.4), (-18.1, 178.4), (19.7, -155.1), (0.0, 180.0), (0.0, -180.0), (-90.0, 77.0), (90.0, 0.0),
          (89.9, 359.9), (-88.0, -0.1), (81.0, 342.0), (45.0, 0.0), (45.0, 360.0)]  # fmt: skip
GRIDS = {
    "cells": GRID,
    "poles": LatLonGrid.equiangular(9, 16, poles=True),
    "gaussian": LatLonGrid.from_coords(np.array([83.0, 52.0, 20.0, -15.0, -45.0, -80.0]), np.arange(3, 360, 24.0))[0],
}


def interpolate_by_search(grid: LatLonGrid, field_HW: np.ndarray, lat: float, lon: float) -> float:
    """Return the bilinear interpolation to a point, whose four surrounding cells are searched one by one."""
    rows = [(90.0, np.full(len(grid.lon), field_HW[0].mean()))]
    rows += [(row_lat, field_HW[row]) for row, row_lat in enumerate(grid.lat.tolist())]
    rows.append((-90.0, np.full(len(grid.lon), field_HW[-1].mean())))
    if grid.has_pole_points:
        rows = rows[1:-1]

    def interpolate_in_row(values: np.ndarray) -> float:
        for column, west in enumerate(grid.lon.tolist()):
            spacing = 360.0 / len(grid.lon)
            east_of = (lon - west) % 360.0
            if east_of < spacing:
                share = east_of / spacing
                return (1 - share) * values[column] + share * values[(column + 1) % len(values)]
        raise AssertionError

    for (north, northern), (south, southern) in zip(rows, rows[1:], strict=False):
        if south <= lat <= north:
            share = (north - lat) / (north - south)
            return (1 - share) * interpolate_in_row(northern) + share * interpolate_in_row(southern)
    raise AssertionError


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_bilinear_equals_search_of_cells(grid: LatLonGrid) -> None:
    fields_NHW = np.random.default_rng(2).normal(size=(3, *grid.shape))
    if grid.has_pole_points:
        fields_NHW[:, [0, -1]] = fields_NHW[:, [0, -1], :1]
    lat_S, lon_S = np.array(POINTS).T
    values_NS = PointInterpolator(grid, lat_S, lon_S, "bilinear").apply(fields_NHW)
    for index, (lat, lon) in enumerate(POINTS):
        expected = [interpolate_by_search(grid, field, lat, lon) for field in fields_NHW]
        np.testing.assert_allclose(values_NS[:, index], expected, atol=1e-9)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_nearest_equals_search_of_cells(grid: LatLonGrid) -> None:
    """The nearest cell is the one whose unit vector has the largest cosine with that of the point."""
    field_HW = np.random.default_rng(3).normal(size=grid.shape)
    rng = np.random.default_rng(4)
    points = [*POINTS[:5], *zip(rng.uniform(-90, 90, 200), rng.uniform(-180, 360, 200), strict=True)]
    lat_S, lon_S = np.array(points).T
    values_NS = PointInterpolator(grid, lat_S, lon_S, "nearest").apply(field_HW[None])

    def to_vectors(lat: np.ndarray, lon: np.ndarray) -> np.ndarray:
        lat, lon = np.deg2rad(lat), np.deg2rad(lon)
        return np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=-1)

    cells = to_vectors(*np.meshgrid(grid.lat, grid.lon, indexing="ij")).reshape(-1, 3)
    cosines = to_vectors(lat_S, lon_S) @ cells.T
    for index in range(len(points)):
        # A point may be equally near to several cells.
        nearest = np.flatnonzero(cosines[index] > cosines[index].max() - 1e-12)
        assert values_NS[0, index] in field_HW.ravel()[nearest]


def test_bilinear_agrees_with_the_regridder() -> None:
    """Both follow the same rules, also for missing cells and for wind components near the poles."""
    target = LatLonGrid.equiangular(37, 48, poles=True)
    lat_S, lon_S = (axis.ravel() for axis in np.meshgrid(target.lat, target.lon, indexing="ij"))
    field_HW = np.random.default_rng(5).normal(size=GRID.shape).astype(np.float32)
    interpolator = PointInterpolator(GRID, lat_S, lon_S, "bilinear")
    for is_vector in (False, True):
        expected = Regridder(GRID, target, "bilinear", vector=is_vector).apply(field_HW)
        values = interpolator.apply(field_HW[None], is_vector)[0]
        np.testing.assert_allclose(values.reshape(target.shape), expected, atol=2e-6)
    field_HW[4:6, 7:9] = np.nan
    expected = Regridder(GRID, target, "bilinear").apply(field_HW)
    np.testing.assert_allclose(interpolator.apply(field_HW[None])[0].reshape(target.shape), expected, atol=2e-6)
    assert np.isnan(expected).any()


def test_linear_fields_are_exact_across_the_date_line() -> None:
    """The field is linear between the columns at 162 and 198 degrees."""
    field_HW = np.zeros(GRID.shape)
    field_HW[:, 9], field_HW[:, 10], field_HW[:, 11] = 162.0, 180.0, 198.0
    lon_S = np.array([170.0, 179.9, -179.9, 190.0, -170.0])
    values = PointInterpolator(GRID, np.zeros(5), lon_S, "bilinear").apply(field_HW[None])[0]
    np.testing.assert_allclose(values, lon_S % 360.0)


@pytest.fixture(scope="module")
def ensemble() -> np.ndarray:
    return random_ensemble(seed=6)


@pytest.fixture(scope="module")
def archive(ensemble: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> ForecastArchive:
    return write_forecasts(tmp_path_factory.mktemp("forecasts"), ensemble)


@pytest.fixture
def stations(tmp_path: Path) -> Path:
    path = tmp_path / "stations.csv"
    path.write_text(STATIONS, encoding="utf-8")
    return path


def test_station_files(archive: ForecastArchive, ensemble: np.ndarray, stations: Path, tmp_path: Path) -> None:
    entries = [
        {"kind": "quantiles", "name": "q", "of": "msl", "quantiles": [0.5], "write": False},
        {"kind": "mean", "name": "mean", "of": "t2m", "write": False},
        {"kind": "stations", "name": "cities", "of": ["t2m", "mean", "q"], "stations": str(stations)},
    ]
    assert write_product_files(archive, tmp_path / "products", *entries).num_made == 1
    folder = tmp_path / "products" / "2001-04-01T00"
    table = pd.read_csv(folder / "cities.csv")
    assert len(table) == 6 * len(LEADS) * (MEMBERS + 1 + 1)
    # One value by hand.
    row = table[(table.station == "Suva") & (table.lead_hours == 12) & (table.variable == "t2m") & (table.member == 3)]
    expected = interpolate_by_search(GRID, ensemble[1, 3, NAMES.index("t2m")].astype(float), -18.1, 178.4)
    assert row.value.item() == pytest.approx(expected, rel=1e-5)
    assert row.valid_time.item() == "2001-04-01T12:00" and row.units.item() == "K"
    mean = table[(table.station == "Suva") & (table.lead_hours == 12) & (table.variable == "mean")]
    expected = np.mean(table[(table.station == "Suva") & (table.lead_hours == 12) & (table.variable == "t2m")].value)
    assert mean.value.item() == pytest.approx(expected, rel=1e-5) and np.isnan(mean.member.item())

    collection = json.loads((folder / "cities.geojson").read_text())
    features = {feature["properties"]["name"]: feature for feature in collection["features"]}
    assert features["Hilo, Hawaii"]["geometry"] == {"type": "Point", "coordinates": [-155.1, 19.7]}
    assert collection["valid_times"][1] == "2001-04-01T12:00"
    values = features["Suva"]["properties"]["variables"]["t2m"]
    assert values["member"] == list(range(MEMBERS)) and values["values"][1][3] == pytest.approx(row.value.item())


def test_statistics_of_wind_near_a_pole(
    archive: ForecastArchive, ensemble: np.ndarray, stations: Path, tmp_path: Path
) -> None:
    """Interpolation rotates wind components near a pole, but not their spread and extremes."""
    entries = [
        {"kind": kind, "name": kind, "of": "u10", "write": False} for kind in ("mean", "spread", "maximum", "minimum")
    ]
    names = [entry["name"] for entry in entries]
    write_product_files(
        archive, tmp_path, *entries, {"kind": "stations", "name": "s", "of": ["u10", *names], "stations": str(stations)}
    )
    table = pd.read_csv(tmp_path / "2001-04-01T00" / "s.csv")
    at_pole = table[table.station == "South Pole"].groupby(["lead_hours", "variable"]).value.mean().unstack()
    row_LMW = ensemble[:, :, NAMES.index("u10"), -1].astype(np.float64)
    expected = {
        "spread": row_LMW.std(axis=1, ddof=1), "maximum": row_LMW.max(axis=1), "minimum": row_LMW.min(axis=1),
    }  # fmt: skip
    for name, values_LW in expected.items():
        np.testing.assert_allclose(at_pole[name], values_LW.mean(axis=1), rtol=1e-5)
    # The mean is a component, so at the pole it equals the mean of the members' values.
    np.testing.assert_allclose(at_pole["mean"], at_pole["u10"], rtol=1e-4, atol=1e-4)


def test_missing_values_of_stations_are_empty(archive: ForecastArchive, stations: Path, tmp_path: Path) -> None:
    entries = [
        {"kind": "accumulation", "name": "tp24", "of": "tp", "over": "24h", "write": False},
        {"kind": "mean", "name": "tp_mean", "of": "tp24", "write": False},
        {"kind": "stations", "name": "rain", "of": ["tp_mean"], "stations": str(stations)},
    ]
    write_product_files(archive, tmp_path, *entries)
    table = pd.read_csv(tmp_path / "2001-04-01T00" / "rain.csv")
    assert (np.isnan(table.value) == (table.lead_hours < 24)).all()
    collection = json.loads((tmp_path / "2001-04-01T00" / "rain.geojson").read_text())
    values = collection["features"][0]["properties"]["variables"]["tp_mean"]["values"]
    assert values[:3] == [None] * 3 and None not in values[3:]


@pytest.mark.parametrize("style", ["box", "plume"])
def test_meteograms(archive: ForecastArchive, tmp_path: Path, style: str) -> None:
    """File names have no characters that file systems refuse, and differ if only such characters differ."""
    stations = tmp_path / "stations.csv"
    stations.write_text('name,latitude,longitude\n"Hilo, Hawaii",19.7,-155.1\nHilo/Hawaii,19.7,-155.1\n')
    entries = [
        {"kind": "probability", "name": "p", "of": "t2m", "above": 285, "write": False},
        {"kind": "accumulation", "name": "tp24", "of": "tp", "over": "24h", "write": False},
        {"kind": "meteogram", "name": "meteo", "of": ["t2m", "p", "tp24"], "stations": str(stations), "style": style},
    ]
    write_product_files(archive, tmp_path, *entries)
    folder = tmp_path / "2001-04-01T00"
    assert sorted(path.name for path in folder.glob("*.png")) == ["meteo_Hilo_Hawaii.png", "meteo_Hilo_Hawaii_2.png"]
    with Image.open(folder / "meteo_Hilo_Hawaii.png") as image:
        assert image.width > 1000 and len(set(image.convert("L").resize((100, 100)).tobytes())) > 10


def test_boxes_of_meteograms_are_drawn_completely(archive: ForecastArchive, tmp_path: Path) -> None:
    forecasts = describe_archive(archive)
    case = ProductCase(INITIAL, tmp_path, forecasts, FieldReader(archive, INITIAL, {}), {})
    series = {"t2m": np.random.default_rng(0).normal(size=(len(LEADS), MEMBERS))}
    figure = plot_meteogram(Station("A", 0.0, 0.0), [forecasts.fields["t2m"]], series, case, "box")
    low, high = figure.axes[0].get_xlim()
    for patch in figure.axes[0].patches:
        box = patch.get_path().vertices[:, 0]
        assert low < box.min() and box.max() < high


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,lat,longitude\nA,1,2\n", "has no column latitude"),
        ("name,latitude,longitude\n", "has no stations"),
        ("name,latitude,longitude\nA,1,2\nA,3,4\n", '"A" is listed twice'),
        ("name,latitude,longitude\nA,north,2\n", 'line 2: latitude "north" of A is not a number'),
        ("name,latitude,longitude\nA,91,2\n", "latitude 91 of A is outside -90..90"),
        ("name,latitude,longitude\nA,91,2\nB,1,2\nC,1,400\n", r"latitude 91 of A(.|\n)*longitude 400 of C"),
        ("name,latitude,longitude\nA,nan,2\n", "outside -90..90"),
        ("name,latitude,longitude\nA,1\n", 'longitude "" of A is not a number'),
        (" , latitude,longitude\n", "has no column name"),
    ],
)
def test_wrong_station_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "stations.csv"
    path.write_text(text)
    with pytest.raises(CreditError, match=message):
        load_stations(path, "products.0.stations")


def test_a_missing_station_file_is_refused(archive: ForecastArchive, tmp_path: Path) -> None:
    entry = {"kind": "stations", "name": "a", "of": ["t2m"], "stations": str(tmp_path / "none.csv")}
    with pytest.raises(CreditError, match=r"products.0.stations: .*none.csv cannot be read"):
        plan_entries(archive, entry)


def test_spreadsheets_and_other_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "stations.csv"
    path.write_text("\ufeffheight, Name ,Latitude,LONGITUDE\n5,A,10,350\n", encoding="utf-8")
    (station,) = load_stations(path, "key")
    assert (station.name, station.latitude, station.longitude) == ("A", 10.0, -10.0)


ELEVATIONS = "name,latitude,longitude,elevation\nValley,47,11,600\nSummit,47,11,3400\n"


def write_orography(
    path: Path,
    standard_name: str = "surface_altitude",
    units: str = "m",
    scale: float = 1.0,
    first_value: float = 0.0,
) -> Path:
    """Write the height of a slope that rises towards the south, from 0 m, on the grid of the forecasts."""
    height = scale * np.broadcast_to(np.arange(GRID.shape[0])[:, None] * 100.0, GRID.shape)
    height = np.where(height == 0.0, first_value, height)
    field = xr.DataArray(
        height[None],
        dims=("time", "latitude", "longitude"),
        coords={"time": [0], "latitude": GRID.lat, "longitude": GRID.lon},
        attrs={"standard_name": standard_name, "units": units},
    )
    # A field of the same standard name with levels is not the surface.
    levels = field.expand_dims(level=[500.0, 850.0])
    xr.Dataset({"air": levels, "surface": field}).to_netcdf(path)
    return path


@pytest.mark.parametrize(
    ("standard_name", "units", "scale"),
    [
        ("surface_altitude", "m", 1.0),
        ("geopotential", "m2 s-2", 9.80665),
        ("surface_geopotential", "m**2 s**-2", 9.80665),
    ],
)
def test_temperatures_are_corrected_for_the_height_of_the_station(
    archive: ForecastArchive, tmp_path: Path, standard_name: str, units: str, scale: float
) -> None:
    path = tmp_path / "stations.csv"
    path.write_text(ELEVATIONS)
    orography = write_orography(tmp_path / "orography.nc", standard_name, units, scale)
    entry = {"kind": "stations", "of": ["t2m", "msl", "q"], "stations": str(path)}
    correction = {"lapse_rates": {"t2m": 6.5, "q": 5.0}, "orography": str(orography)}
    entries = [
        {"kind": "quantiles", "name": "q", "of": "t2m", "quantiles": [0.5], "write": False},
        {**entry, "name": "plain"},
        {**entry, "name": "corrected", "height_correction": correction},
        {**entry, "kind": "meteogram", "name": "meteo", "height_correction": correction},
    ]
    write_product_files(archive, tmp_path / "products", *entries)
    folder = tmp_path / "products" / "2001-04-01T00"
    plain, corrected = (pd.read_csv(folder / f"{name}.csv") for name in ("plain", "corrected"))
    height_HW = np.broadcast_to(np.arange(GRID.shape[0])[:, None] * 100.0, GRID.shape)
    model_height = interpolate_by_search(GRID, height_HW, 47.0, 11.0)
    for station, elevation in (("Valley", 600.0), ("Summit", 3400.0)):
        for variable, lapse_rate in (("t2m", 6.5), ("q", 5.0), ("msl", 0.0)):
            rows = (plain.station == station) & (plain.variable == variable)
            difference = (corrected[rows].value - plain[rows].value).to_numpy()
            # Values have six significant digits.
            expected = lapse_rate / 1000 * (model_height - elevation)
            np.testing.assert_allclose(difference, expected, atol=2e-3 if variable != "msl" else 0)
            assert len(difference) > 0
    # The titles of the panels of a meteogram tell which fields are corrected.
    meteogram = plan_entries(archive, *entries)[-1]
    is_corrected = [info.title.endswith(", corrected to the height of the station") for info in meteogram.infos]
    assert is_corrected == [True, False, True]


@pytest.mark.parametrize(
    ("text", "lapse_rates", "changes", "message"),
    [
        (ELEVATIONS, {"u10": 6.5}, {}, r"height_correction.lapse_rates: u10 is not in the key `of`"),
        (ELEVATIONS, {"s": 6.5}, {}, "s is a probability or a spread"),
        ("name,latitude,longitude\nA,1,2\n", {"t2m": 6.5}, {}, "has no column elevation"),
        ("name,latitude,longitude,elevation\nA,1,2,\n", {"t2m": 6.5}, {}, 'elevation "" of A is not a number'),
        (
            "name,latitude,longitude,elevation\nA,1,2,9999\n",
            {"t2m": 6.5},
            {},
            "elevation 9999 of A is outside",
        ),
        (
            ELEVATIONS,
            {"t2m": 6.5},
            {"standard_name": "altitude"},
            "no field with the standard name surface_altitude",
        ),
        (ELEVATIONS, {"t2m": 6.5}, {"units": "K"}, "orography"),
        (
            "name,latitude,longitude,elevation\nPole,90,0,0\n",
            {"t2m": 6.5},
            {"first_value": np.nan},
            r"orography.nc has no height at the station Pole \(90, 0\); give a file",
        ),
    ],
)
def test_wrong_height_corrections_are_refused(
    archive: ForecastArchive, tmp_path: Path, text: str, lapse_rates: dict, changes: dict, message: str
) -> None:
    path = tmp_path / "stations.csv"
    path.write_text(text)
    orography = write_orography(tmp_path / "orography.nc", **changes)
    entries = [
        {"kind": "spread", "name": "s", "of": "t2m", "write": False},
        {
            "kind": "stations", "name": "a", "of": ["t2m", "s"], "stations": str(path),
            "height_correction": {"lapse_rates": lapse_rates, "orography": str(orography)},
        },
    ]  # fmt: skip
    with pytest.raises(CreditError, match=message):
        plan_entries(archive, *entries)
