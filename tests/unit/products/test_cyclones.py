"""Tracks of analytic cyclones: within half a grid cell of the truth, and no tracks without cyclones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from credit.calendar import Calendar
from credit.channels import ChannelMap
from credit.errors import CreditError
from credit.forecast.io.archive.base import ForecastArchive
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.io.schema import OutputFields
from credit.grid import LatLonGrid
from credit.physics.great_circle import compute_great_circle_distance
from credit.physics.vorticity import relative_vorticity
from credit.products.cyclones.detection import Centre, CycloneDetector, CycloneFields, find_parabola_vertex
from credit.products.cyclones.product import build_line_geometry
from credit.products.cyclones.tracking import TrackBuilder, TrackPoint
from credit.products.description import describe_archive
from credit.products.section import CycloneTracksSection
from tests.unit.products.forecasts import plan_entries, write_product_files
from tests.unit.products.vortices import Vortex, vortex_fields

SPACING = 2.0
GRID = LatLonGrid.equiangular(91, 180, poles=True)
CALENDAR = Calendar()
INITIAL = CALENDAR.parse("2001-08-01")
HOURS = [6.0 * number for number in range(1, 13)]
CHANNELS = ChannelMap.build(
    {"prognostic": {"vars_3D": ["u", "v", "z"], "vars_2D": ["msl", "u10", "v10"]}}, [850.0, 500.0, 300.0],
    {"u": [850.0], "v": [850.0], "z": [500.0, 300.0]},
)  # fmt: skip
NAMES = [channel.name for channel in CHANNELS.output]
ATTRIBUTES = {
    "msl": {"units": "Pa"}, "z": {"units": "m2 s-2"},
    **{name: {"units": "m s-1"} for name in ("u", "v", "u10", "v10")},
}  # fmt: skip
TRACKS = {"kind": "cyclone_tracks", "name": "tracks"}
# Westward to the date line and beyond it; in the Southern Hemisphere; eastward across longitude 0.
PACIFIC = Vortex(lat=15.0, lon=184.0, lat_speed=0.08, lon_speed=-0.2)
SOUTH = Vortex(lat=-14.0, lon=65.0, lat_speed=-0.1, lon_speed=-0.12)
GREENWICH = Vortex(lat=25.0, lon=353.0, lat_speed=0.15, lon_speed=0.25)


def write_forecast(folder: Path, members: list[list[Vortex]]) -> ForecastArchive:
    """Write a forecast with some vortices in each member; one member alone makes a single forecast."""
    fields = OutputFields(CHANNELS, GRID, CALENDAR, ATTRIBUTES, 360)
    leads = [int(60 * hour) for hour in HOURS]
    writer = ForecastWriter(folder, fields, leads, [INITIAL], members=len(members) if len(members) > 1 else None)
    for member, vortices in enumerate(members):
        for lead_index, hour in enumerate(HOURS):
            values = vortex_fields(GRID, vortices, hour, seed=100 * member + lead_index)
            stacked = np.stack([values[name] for name in NAMES]).astype(np.float32)
            writer.put(INITIAL, lead_index, stacked, member)
    writer.close()
    return open_forecasts(folder)


def read_tracks(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "2001-08-01T00" / "tracks.csv")


def require_on_track(track: pd.DataFrame, vortex: Vortex, hours: list[float]) -> None:
    """Require that a track has all hours and is within half a grid cell of the truth in each direction."""
    assert track.lead_hours.tolist() == hours
    for row in track.itertuples():
        lat, lon = vortex.position(row.lead_hours)
        assert abs(row.latitude - lat) <= SPACING / 2
        assert abs((row.longitude - lon + 180.0) % 360.0 - 180.0) <= SPACING / 2


def test_analytic_cyclones_are_tracked(tmp_path: Path) -> None:
    vortices = [PACIFIC, SOUTH, GREENWICH]
    archive = write_forecast(tmp_path / "forecasts", [vortices])
    write_product_files(archive, tmp_path, TRACKS)
    table = read_tracks(tmp_path)
    assert table.track.nunique() == 3 and table.member.isna().all()
    for vortex in vortices:
        lat, lon = vortex.position(HOURS[0])
        starts = table[table.lead_hours == HOURS[0]]
        nearest = compute_great_circle_distance(lat, lon, starts.latitude.values, starts.longitude.values).argmin()
        require_on_track(table[table.track == starts.track.values[nearest]], vortex, HOURS)
    # A depression of 30 hPa, and a wind of 0.7 * 40 exp(-1/2) beside the zonal wind.
    assert table.pressure_hpa.between(970, 990).all()
    assert table.max_wind_m_per_s.between(14, 36).all() and (table.vorticity_per_s > 3.5e-5).all()

    collection = json.loads((tmp_path / "2001-08-01T00" / "tracks.geojson").read_text())
    kinds = sorted(feature["geometry"]["type"] for feature in collection["features"])
    assert kinds == ["LineString", "LineString", "MultiLineString"] and len(collection["criteria"]) == 3


def test_each_member_has_its_own_tracks(tmp_path: Path) -> None:
    archive = write_forecast(tmp_path / "forecasts", [[PACIFIC], [], [PACIFIC, SOUTH]])
    entry = {"kind": "map", "name": "map", "of": "tracks"}
    assert write_product_files(archive, tmp_path, TRACKS, entry).num_made == 2
    table = read_tracks(tmp_path)
    assert table.groupby("member").track.nunique().to_dict() == {0: 1, 2: 2}
    require_on_track(table[table.member == 0], PACIFIC, HOURS)
    assert (tmp_path / "2001-08-01T00" / "map.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "vortices",
    [
        [],
        # Lows that are not tropical cyclones: cold core, anticyclonic wind, shallow, and poleward.
        [Vortex(lat=40.0, lon=100.0, lon_speed=0.4, warm=-60.0)],
        [Vortex(lat=20.0, lon=100.0, sign=-1.0)],
        [Vortex(lat=45.0, lon=100.0, depth=1.2)],
        [Vortex(lat=60.0, lon=100.0)],
        # The track is too short.
        [Vortex(lat=20.0, lon=100.0, first=12.0, last=36.0)],
    ],
    ids=["none", "cold core", "anticyclonic wind", "shallow", "polar", "short"],
)
def test_no_tracks_without_cyclones(tmp_path: Path, vortices: list[Vortex]) -> None:
    archive = write_forecast(tmp_path / "forecasts", [vortices])
    write_product_files(archive, tmp_path, TRACKS)
    assert read_tracks(tmp_path).empty
    assert json.loads((tmp_path / "2001-08-01T00" / "tracks.geojson").read_text())["features"] == []


def find_centres(fields: dict[str, np.ndarray], has_thickness: bool = True, **changes: Any) -> list[Centre]:
    """Return the centres in fields of `vortex_fields`."""
    section = CycloneTracksSection(name="tracks", **changes)
    vorticity = relative_vorticity(fields["u850"], fields["v850"], GRID)
    thickness = None
    if has_thickness:
        thickness = (fields["z300"] - fields["z500"]) / 9.80665
    return CycloneDetector(section, GRID).find(CycloneFields(fields["msl"] / 100, vorticity, thickness))


@pytest.mark.parametrize("lon", np.arange(0.0, 360.0, 22.5).tolist())
def test_centre_is_found_at_every_longitude(lon: float) -> None:
    """Centres near the first and the last column of the grid are found as well."""
    (centre,) = find_centres(vortex_fields(GRID, [Vortex(lat=18.0, lon=lon)], 0.0))
    assert compute_great_circle_distance(18.0, lon, centre.latitude, centre.longitude) < SPACING


def test_the_vertex_of_a_parabola() -> None:
    values = [(position - 0.3) ** 2 for position in (-1.0, 0.0, 1.0)]
    assert find_parabola_vertex(*values) == pytest.approx(0.3)
    assert find_parabola_vertex(1.0, 1.0, 1.0) == 0.0 and find_parabola_vertex(0.0, 0.0, 5.0) == -0.5


def test_deeper_of_two_near_centres_is_kept() -> None:
    near_vortices = [Vortex(lat=18.0, lon=100.0, radius=1.5), Vortex(lat=18.0, lon=105.5, depth=20.0, radius=1.5)]
    fields = vortex_fields(GRID, near_vortices, 0.0)
    (centre,) = find_centres(fields)
    assert abs(centre.longitude - 100.0) <= SPACING
    assert len(find_centres(fields, separation=3.0)) == 2


@pytest.mark.parametrize(
    ("vortex", "criterion"),
    [
        (Vortex(lat=40.0, lon=100.0, warm=-60.0), {"has_thickness": False}),
        (Vortex(lat=20.0, lon=100.0, sign=-1.0), {"min_vorticity": 1e-9, "core_radius": 8.0}),
        (Vortex(lat=45.0, lon=100.0, depth=1.2), {"pressure_rise": 0.5}),
        (Vortex(lat=60.0, lon=100.0), {"max_latitude": 70.0}),
    ],
    ids=["cold core", "anticyclonic wind", "shallow", "polar"],
)
def test_each_criterion_decides(vortex: Vortex, criterion: dict[str, Any]) -> None:
    """Each of the lows above is refused by one criterion, and accepted without it."""
    fields = vortex_fields(GRID, [vortex], 0.0)
    assert find_centres(fields) == []
    centres = find_centres(fields, **criterion)
    distances = [
        compute_great_circle_distance(vortex.lat, vortex.lon, item.latitude, item.longitude) for item in centres
    ]
    assert min(distances) < SPACING


def test_vorticity_of_solid_rotation() -> None:
    """Rotation about the axis of the Earth, and about an axis in the equatorial plane (flow over the poles)."""
    lat, lon = (np.deg2rad(axis) for axis in np.meshgrid(GRID.lat, GRID.lon, indexing="ij"))
    # Centred differences over 2 degrees are exact to about 2e-4.
    is_compared = np.abs(GRID.lat) < 70
    vorticity = relative_vorticity(10.0 * np.cos(lat), np.zeros(GRID.shape), GRID)
    expected = 20.0 * np.sin(lat) / 6.371e6
    np.testing.assert_allclose(vorticity[is_compared], expected[is_compared], atol=3e-9)
    eastward = -10.0 * np.sin(lat) * np.cos(lon)
    vorticity = relative_vorticity(eastward, 10.0 * np.sin(lon), GRID)
    expected = 20.0 * np.cos(lat) * np.cos(lon) / 6.371e6
    np.testing.assert_allclose(vorticity[is_compared], expected[is_compared], atol=3e-9)
    assert np.isnan(vorticity[[0, -1]]).all()


def centre(lat: float, lon: float) -> Centre:
    return Centre(lat, lon, 980.0)


def test_a_track_continues_over_a_gap_and_across_another() -> None:
    """Two cyclones that meet keep their directions; a missing centre does not end a track."""
    builder = TrackBuilder(max_speed=15.0, max_gap=720, min_duration=1440)
    for number in range(9):
        centres = [centre(20.0, 100.0 + number), centre(20.0 + 0.01, 108.0 - number)]
        if number in (2, 3):
            centres = centres[:1] if number == 2 else centres[1:]
        builder.add(360 * (number + 1), centres)
    tracks = builder.finish()
    assert len(tracks) == 2
    ends = sorted((track[0].centre.longitude, track[-1].centre.longitude) for track in tracks)
    assert ends == [(100.0, 108.0), (108.0, 100.0)]


def test_a_jump_begins_a_new_track() -> None:
    builder = TrackBuilder(max_speed=15.0, max_gap=0, min_duration=360)
    for number, lon in enumerate([100.0, 101.0, 120.0, 121.0]):
        builder.add(360 * (number + 1), [centre(10.0, lon)])
    assert [len(track) for track in builder.finish()] == [2, 2]


def test_lines_are_cut_at_the_date_line() -> None:
    track = [TrackPoint(0, centre(10.0, 178.0)), TrackPoint(360, centre(14.0, 182.0))]
    assert build_line_geometry(track) == {
        "type": "MultiLineString",
        "coordinates": [[[178.0, 10.0], [180.0, 12.0]], [[-180.0, 12.0], [-178.0, 14.0]]],
    }
    assert build_line_geometry(track[::-1])["coordinates"] == [
        [[-178.0, 14.0], [-180.0, 12.0]], [[180.0, 12.0], [178.0, 10.0]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pressure": "sp"}, 'products.0.pressure: "sp" is neither'),
        ({"pressure": "u10"}, 'pressure: u10 is in "m s-1"'),
        ({"warm_core": ["z500", "z200"]}, 'products.0.warm_core: "z200" is neither'),
        ({"vorticity_wind": ["u850"]}, "must name two variables, or none"),
        ({"min_duration": "10d"}, "no track could be found"),
    ],
)
def test_wrong_parameters_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    archive = write_forecast(tmp_path, [[]])
    with pytest.raises(CreditError, match=message):
        plan_entries(archive, {**TRACKS, **changes})


def test_missing_and_stratospheric_winds_are_ignored(tmp_path: Path) -> None:
    """Cells without wind do not hide the others; in forecasts without the wind at 10 m, u10 is the wind at 10 hPa."""
    fields = vortex_fields(GRID, [Vortex(lat=18.0, lon=100.0)], 0.0)
    speed = np.hypot(fields["u10"], fields["v10"])
    detector = CycloneDetector(CycloneTracksSection(name="tracks"), GRID)
    (expected,) = detector.find(CycloneFields(fields["msl"] / 100, wind=speed))
    speed[GRID.lat < 16.0] = np.nan
    (centre,) = detector.find(CycloneFields(fields["msl"] / 100, wind=speed))
    assert centre.wind == pytest.approx(expected.wind, rel=0.2)
    (centre,) = detector.find(CycloneFields(fields["msl"] / 100, wind=np.full_like(speed, np.nan)))
    assert centre.wind is None

    forecasts = describe_archive(write_forecast(tmp_path, [[]]))
    (tracks,) = plan_entries(forecasts, TRACKS)
    assert tracks.surface_wind == ("u10", "v10")
    levels = {name: replace(forecasts.fields[name], level=10.0) for name in ("u10", "v10")}
    (tracks,) = plan_entries(replace(forecasts, fields={**forecasts.fields, **levels}), TRACKS)
    assert tracks.surface_wind == ()


def test_a_map_of_tracks_has_no_lead_times(tmp_path: Path) -> None:
    archive = write_forecast(tmp_path, [[]])
    with pytest.raises(CreditError, match="has no effect on a map of tracks"):
        plan_entries(archive, TRACKS, {"kind": "map", "name": "map", "of": "tracks", "lead_times": ["6h"]})
