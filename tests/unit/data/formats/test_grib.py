"""Tests of reading GRIB files that ecCodes wrote, against the encoded arrays."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import eccodes
import numpy as np
import pytest

from credit.config.sections.data import DataConfig
from credit.data.formats.grib.dataset import open_grib
from credit.data.reader import open_reader
from credit.data.sources.source_reader import open_sources
from credit.data.store.preprocess import write_training_store
from credit.errors import DataError
from tests.unit.data.files_on_the_fly import make_config, write_file
from tests.unit.data.formats.grib_on_the_fly import LAT, LON, H, W, draw_field, encode_message, write_grib

# Upper bound of the rounding step of 24 bits over a range of 40 K.
PACKING = 40 / 2**23
PASCALS = 300  # turns a random field, about 280, into plausible values of sea level pressure


def build_config(path: Path, select: dict | None = None, rename: dict | None = None, **options: object) -> DataConfig:
    """Return a data section with one source."""
    return make_config("", sources=[{"path": str(path), "select": select or {}, "rename": rename or {}}], **options)


@pytest.mark.parametrize("edition", [1, 2])
def test_levels_times_and_names_are_read(tmp_path: Path, edition: int) -> None:
    fields = {(time, level): draw_field(time + level) for time in (0, 600, 1200) for level in (850, 500)}
    messages = [encode_message(v, edition=edition, dataTime=t, level=lev) for (t, lev), v in fields.items()]
    path = write_grib(tmp_path / "noending", *messages)  # recognised by its first bytes
    reader = open_sources(build_config(path, rename={"temperature": "130"}, p3=["temperature"], levels=[500, 850]))
    assert [reader.calendar.format(time) for time in reader.times] == [
        f"2000-01-01T{hour}:00" for hour in ("00", "06", 12)
    ]
    assert reader.calendar.name == "standard"
    np.testing.assert_allclose(reader.grid.lat, LAT)
    np.testing.assert_allclose(reader.grid.lon, LON)
    for index, time in enumerate((0, 600, 1200)):
        np.testing.assert_allclose(reader.read(index), [fields[time, 500], fields[time, 850]], atol=PACKING, rtol=1e-7)
    np.testing.assert_array_equal([*reader.read_each(range(3))], [reader.read(index) for index in range(3)])
    attributes = reader.attributes["temperature"]
    assert (attributes["units"], attributes["standard_name"]) == ("K", "air_temperature")
    assert 0 < reader.packing_steps["temperature"] <= PACKING
    assert [item.name for item in tmp_path.iterdir()] == ["noending"]  # no index file is written
    unpickled_reader = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(unpickled_reader.read(1), reader.read(1))


@pytest.mark.parametrize(("edition", "mode"), [(1, mode) for mode in range(8)] + [(2, mode) for mode in range(16)])
def test_every_scanning_mode_is_read(tmp_path: Path, edition: int, mode: int) -> None:
    """Bits of the scanning mode: westward, northward, columns first, alternating line direction (GRIB 2)."""
    westward, northward, columns_first, alternating = (mode >> bit & 1 for bit in range(4))
    values = draw_field(1)
    stored = values[:: -1 if northward else 1, :: -1 if westward else 1]
    stored = (stored.T if columns_first else stored).copy()
    if alternating:
        stored[1::2] = stored[1::2, ::-1]
    keys = {"iScansNegatively": westward, "jScansPositively": northward, "jPointsAreConsecutive": columns_first}
    if alternating:
        keys["alternativeRowScanning"] = 1
    if westward:
        keys |= {"longitudeOfFirstGridPointInDegrees": 337.5, "longitudeOfLastGridPointInDegrees": 0}
    if northward:
        keys |= {"latitudeOfFirstGridPointInDegrees": -90, "latitudeOfLastGridPointInDegrees": 90}
    path = write_grib(tmp_path / "a.grib", encode_message(stored.reshape(H, W), edition=edition, **keys))
    np.testing.assert_allclose(open_sources(build_config(path, p2=["t"])).read(0)[0], values, atol=PACKING, rtol=1e-7)


def test_pressures_in_hpa_and_pa_are_one_axis(tmp_path: Path) -> None:
    fields = [draw_field(number) for number in range(3)]
    kinds = (("isobaricInhPa", 1), ("isobaricInPa", 50), ("isobaricInPa", 1))
    path = write_grib(
        tmp_path / "a.grib2",
        *(encode_message(v, typeOfLevel=k, level=lev) for v, (k, lev) in zip(fields, kinds, strict=True)),
    )
    reader = open_sources(build_config(path, p3=["t"], levels=[0.01, 0.5, 1]))
    np.testing.assert_allclose(reader.read(0), fields[::-1], atol=PACKING, rtol=1e-7)


def test_member_is_selected(tmp_path: Path) -> None:
    keys = {"productDefinitionTemplateNumber": 1, "numberOfForecastsInEnsemble": 3}
    messages = [encode_message(draw_field(n), **keys, number=n) for n in range(3)]
    path = write_grib(tmp_path / "a.grb2", *messages)
    with pytest.raises(DataError, match=r"t is in the file several times, .* number 0, 1, 2; .*select: \{number: 0\}"):
        open_sources(build_config(path, p2=["t"]))
    reader = open_sources(build_config(path, {"number": 2}, p2=["t"]))
    np.testing.assert_allclose(reader.read(0)[0], draw_field(2), atol=PACKING, rtol=1e-7)
    with pytest.raises(DataError, match="number 7 is not in the file; the file has 0, 1, 2"):
        open_sources(build_config(path, {"number": 7}, p2=["t"]))
    with pytest.raises(DataError, match='names nummer; did you mean "number"'):
        open_sources(build_config(path, {"nummer": 7}, p2=["t"]))


def test_variable_on_several_types_of_level_needs_a_selection(tmp_path: Path) -> None:
    near_ground = {"typeOfLevel": "heightAboveGround", "level": 100}
    messages = [encode_message(draw_field(0)), encode_message(draw_field(1), **near_ground)]
    messages += [
        encode_message(draw_field(2), **near_ground | {"level": 200}),
        encode_message(draw_field(3), shortName="z"),
    ]
    path = write_grib(tmp_path / "a.grib", *messages)
    with pytest.raises(DataError, match="with typeOfLevel heightAboveGround, isobaricInhPa; choose with .*select"):
        open_sources(build_config(path, p2=["t"]))
    # A run that does not read the variable is not affected.
    np.testing.assert_allclose(open_sources(build_config(path, p2=["z"])).read(0)[0], draw_field(3), atol=PACKING)
    with pytest.raises(
        DataError, match=r"levels of the type heightAboveGround \(100, 200\).*\{heightAboveGround: 100\}"
    ):
        open_sources(build_config(path, {"typeOfLevel": "heightAboveGround"}, p2=["t"]))
    selection = {"typeOfLevel": "heightAboveGround", "heightAboveGround": 200}
    np.testing.assert_allclose(
        open_sources(build_config(path, selection, p2=["t"])).read(0)[0], draw_field(2), atol=PACKING
    )
    sources = [
        {"path": str(path), "variables": ["t"], "select": {"typeOfLevel": "isobaricInhPa"}},
        {"path": str(path), "variables": ["t200"], "rename": {"t200": "t"}, "select": selection},
    ]
    reader = open_sources(make_config("", sources=sources, p3=["t"], p2=["t200"], levels=[500]))
    np.testing.assert_allclose(reader.read(0), [draw_field(0), draw_field(2)], atol=PACKING)
    with pytest.raises(
        DataError, match=r'"z" is in the files of data\.sources\.0, but data\.sources\.0\.select excludes it'
    ):
        open_sources(build_config(path, selection, p2=["z"]))


@pytest.mark.parametrize("on_levels", [True, False], ids=["levels", "ground"])
def test_recommended_selection_works(tmp_path: Path, on_levels: bool) -> None:
    """The file has t on levels of three types, and variables that a selection of one type excludes."""
    messages = [
        encode_message(draw_field(1)),
        encode_message(draw_field(2), typeOfLevel="isobaricInPa", level=50),
        encode_message(draw_field(3), typeOfLevel="surface", level=0),
        encode_message(draw_field(4), typeOfLevel="heightAboveGround", level=100),
        encode_message(draw_field(5), shortName="2t", typeOfLevel="heightAboveGround", level=2),
        encode_message(PASCALS * draw_field(6), shortName="msl", typeOfLevel="meanSea", level=0),
    ]
    path = write_grib(tmp_path / "a.grib", *messages)
    variables = {"p3": ["t"], "p2": ["msl"], "levels": [0.5, 500]} if on_levels else {"p2": ["t", "msl"]}
    with pytest.raises(DataError) as error_info:
        open_sources(build_config(path, **variables))
    text = str(error_info.value)
    assert "another entry with the same path" in text
    recommended = re.search(r"select: \{typeOfLevel: (\w+)\}", text)[1]
    excluded_names = re.search(r"the choice leaves out ([\w, ]+):", text)[1].split(", ")
    assert excluded_names == (["2t", "msl"] if on_levels else ["msl"])
    sources = [
        {"path": str(path), "variables": ["t"], "select": {"typeOfLevel": recommended}},
        {"path": str(path), "variables": ["msl"]},
    ]
    reader = open_sources(make_config("", sources=sources, **variables))
    # Pressure levels in hPa and in Pa are one type.
    numbers = (2, 1, 6) if on_levels else (4, 6)
    expected = [draw_field(number) * (PASCALS if number == 6 else 1) for number in numbers]
    np.testing.assert_allclose(reader.read(0), expected, atol=PASCALS * PACKING, rtol=1e-7)


def test_error_recommends_vars_2d_for_other_types_of_level(tmp_path: Path) -> None:
    heights = [encode_message(draw_field(n), typeOfLevel="heightAboveGround", level=n * 100) for n in (1, 2)]
    surface = encode_message(draw_field(3), typeOfLevel="surface", level=0)
    for content in (heights, [*heights, surface]):
        path = write_grib(tmp_path / "a.grib", *content)
        with pytest.raises(DataError, match="list it in vars_2D"):
            open_sources(build_config(path, p3=["t"], levels=[500]))


def test_times_of_forecasts_are_valid_times(tmp_path: Path) -> None:
    first_forecast = [encode_message(draw_field(n), dataTime=0, step=6 * n) for n in range(3)]
    path = write_grib(tmp_path / "a.grib", *first_forecast)
    reader = open_sources(build_config(path, p2=["t"]))
    assert [reader.calendar.format(time)[11:] for time in reader.times] == ["00:00", "06:00", "12:00"]
    np.testing.assert_allclose(reader.read(1)[0], draw_field(1), atol=PACKING)
    # Two forecasts for one time.
    path = write_grib(tmp_path / "b.grib", *first_forecast, encode_message(draw_field(8), dataTime=600, step=0))
    with pytest.raises(DataError, match=r"with step 0, 6, 12; choose with data.sources.N.select: \{step: 0\}"):
        open_sources(build_config(path, p2=["t"]))
    reader = open_sources(build_config(path, {"step": 0}, p2=["t"]))
    assert [reader.calendar.format(time)[11:] for time in reader.times] == ["00:00", "06:00"]
    np.testing.assert_allclose(reader.read(1)[0], draw_field(8), atol=PACKING)
    file_in_minutes = write_grib(tmp_path / "c.grib", encode_message(draw_field(0), stepUnits="m", step=30))
    assert open_sources(build_config(file_in_minutes, p2=["t"])).times[0] % 60 == 30


def test_duplicate_message_is_refused(tmp_path: Path) -> None:
    path = write_grib(tmp_path / "a.grib", encode_message(draw_field(0)), encode_message(draw_field(0)))
    with pytest.raises(DataError, match=r"a.grib: 2000-01-01T00:00 occurs twice \(t\); remove one"):
        open_sources(build_config(path, p2=["t"]))


def test_accumulation_windows_are_read(tmp_path: Path) -> None:
    keys = {"productDefinitionTemplateNumber": 8, "stepType": "accum"}
    messages = [encode_message(draw_field(n), **keys, stepRange=f"{6 * n}-{6 * n + 6}") for n in range(2)]
    options = {"p2": ["t"], "variable_options": {"t": {"temporal": "accumulate"}}}
    reader = open_sources(build_config(write_grib(tmp_path / "a.grib", *messages), **options))
    assert [reader.calendar.format(time)[11:] for time in reader.times] == ["06:00", "12:00"]
    since_start_file = write_grib(
        tmp_path / "b.grib", messages[0], encode_message(draw_field(1), **keys, stepRange="0-12")
    )
    with pytest.raises(DataError, match="intervals of 6h and 12h; .*set temporal: deaccumulate"):
        open_sources(build_config(since_start_file, **options))
    deaccumulated_reader = open_sources(
        build_config(since_start_file, p2=["t"], variable_options={"t": {"temporal": "deaccumulate"}})
    )
    np.testing.assert_allclose(deaccumulated_reader.read(0), reader.read(0))
    np.testing.assert_allclose(deaccumulated_reader.read(1), reader.read(1) - reader.read(0), atol=1e-4)
    mixed_file = write_grib(tmp_path / "c.grib", messages[0], encode_message(draw_field(1)))
    with pytest.raises(DataError, match=r"with stepType accum, instant; .*\{stepType: accum\}"):
        open_sources(build_config(mixed_file, p2=["t"]))


@pytest.mark.parametrize("edition", [1, 2])
def test_missing_values_are_read(tmp_path: Path, edition: int) -> None:
    values = draw_field(0)
    values[2, 3:9] = np.nan
    values[0, 0] = 9999.0  # the default missing value of ecCodes is a valid value here
    path = write_grib(tmp_path / "a.grib", encode_message(values, edition=edition))
    with pytest.raises(DataError, match="t at 2000-01-01T00:00: 6 of 144 values are missing"):
        open_sources(build_config(path, p2=["t"], variable_options={"t": {"valid_range": [0, 1e5]}})).read(0)
    reader = open_sources(
        build_config(path, p2=["t"], variable_options={"t": {"missing": "fill_mean", "valid_range": [0, 1e5]}})
    )
    np.testing.assert_array_equal(reader.masks["t"], np.isnan(values))
    np.testing.assert_allclose(reader.read(0)[0], values, atol=1e-2)


def test_several_fields_in_one_message_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.grib2"
    with open(path, "wb") as file:
        for level in (500, 850):
            multi_message = eccodes.codes_grib_multi_new()
            for name in ("u", "v"):
                content = encode_message(draw_field(level + (name == "v")), shortName=name, level=level)
                eccodes.codes_grib_multi_append(eccodes.codes_new_from_message(content), 4, multi_message)
            eccodes.codes_grib_multi_write(multi_message, file)
            eccodes.codes_grib_multi_release(multi_message)
    reader = open_sources(build_config(path, p3=["u", "v"], levels=[500, 850]))
    expected = [draw_field(number) for number in (500, 850, 501, 851)]
    np.testing.assert_allclose(reader.read(0), expected, atol=PACKING, rtol=1e-7)


def test_unknown_parameters_are_not_mixed_up(tmp_path: Path) -> None:
    keys = {"discipline": 0, "parameterCategory": 0}
    messages = [encode_message(draw_field(n), **keys, parameterNumber=n) for n in (220, 221)]
    path = write_grib(tmp_path / "a.grib", *messages)
    reader = open_sources(build_config(path, rename={"mine": "0.0.221"}, p2=["mine"]))
    np.testing.assert_allclose(reader.read(0)[0], draw_field(221), atol=PACKING, rtol=1e-7)


def test_times_without_all_levels_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = [
        encode_message(draw_field(0)),
        encode_message(draw_field(1), level=850),
        encode_message(draw_field(2), dataTime=600),
    ]
    path = write_grib(tmp_path / "a.grib", *messages)
    reader = open_sources(build_config(path, p3=["t"], levels=[500, 850]))
    assert len(reader.times) == 1
    np.testing.assert_allclose(reader.read(0), [draw_field(0), draw_field(1)], atol=1e-3)
    warning = "a.grib: t lacks levels at 1 of 2 times, the first is 2000-01-01T06:00; these times are left out"
    assert warning in caplog.text
    with pytest.raises(DataError, match="t does not have all its levels at all times"):
        open_grib(path, {})["t"].load()
    caplog.clear()
    one_level = open_sources(build_config(path, p3=["t"], levels=[500]))
    np.testing.assert_allclose(one_level.read(1)[0], draw_field(2), atol=1e-3)
    assert "lacks levels" not in caplog.text


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ("reduced_gg_pl_48_grib2", r"on a reduced grid \(reduced_gg\).*cdo setgridtype,regular"),
        ("sh_pl_grib2", "as spherical harmonics.*cdo sp2gpl"),
        ("polar_stereographic_pl_grib2", "a grid of the type polar_stereographic.*cdo remapbil"),
    ],
)
def test_unsupported_grids_are_refused(tmp_path: Path, sample: str, reason: str) -> None:
    content = eccodes.codes_get_message(eccodes.codes_grib_new_from_samples(sample))
    with pytest.raises(DataError, match=f"a.grib: t is .*{reason}"):
        open_sources(build_config(write_grib(tmp_path / "a.grib", content), p2=["t"]))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    complete_message = encode_message(draw_field(0))
    for name, content, reason in (
        ("cut.grib", complete_message + complete_message[:-20], "message 2 cannot be read as GRIB"),
        ("empty.grib", b"", "contains no GRIB message"),
        ("text.grib", b"<html>502 Bad Gateway</html>", "contains no GRIB message"),
    ):
        with pytest.raises(DataError, match=f"{name}: {reason}"):
            open_sources(build_config(write_grib(tmp_path / name, content), p2=["t"]))
    misnamed_file = write_file(tmp_path / "a.grib", {"t": np.full((1, H, W), 280, np.float32)}, hours=[0])
    with pytest.raises(DataError, match="has a different format, set data.sources.N.format"):
        open_sources(build_config(misnamed_file, p2=["t"]))
    netcdf_config = make_config("", sources=[{"path": str(misnamed_file), "format": "netcdf"}], p2=["t"])
    assert (open_sources(netcdf_config).read(0) == 280).all()


def test_missing_eccodes_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_grib(tmp_path / "a.grib", encode_message(draw_field(0)))
    monkeypatch.setitem(sys.modules, "eccodes", None)
    with pytest.raises(DataError, match=r"ecCodes .*pip install .*\[grib\]"):
        open_sources(build_config(path, p2=["t"]))


def test_training_store_is_written_from_grib(tmp_path: Path) -> None:
    messages = [encode_message(draw_field(n), dataDate=20000101 + n // 4, dataTime=n % 4 * 600) for n in range(32)]
    path = write_grib(tmp_path / "a.grib", *messages)
    conf = build_config(path, p3=["t"], levels=[500], store=str(tmp_path / "store.zarr"))
    write_training_store(conf, progress=False)
    reader = open_reader(conf)
    assert len(reader.times) == 32
    np.testing.assert_allclose(reader.read(17)[0], draw_field(17), atol=PACKING, rtol=1e-7)
