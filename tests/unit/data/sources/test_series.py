"""Tests of sources and files that follow each other in time, with other names, units or layouts of a variable."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from credit.config.sections.data import DataConfig
from credit.data.reader import open_reader
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.data.store.preprocess import write_training_store
from credit.errors import DataError
from tests.unit.data import hybrid_on_the_fly as hybrid
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
OLD_HOURS = range(0, 24, 6)
NEW_HOURS = range(24, 48, 6)
T = random_fields(8, 2, H, W)


def write_old_and_new(folder: Path) -> tuple[Path, Path]:
    """Write a day of an old archive (var130, Pa, from south to north) and the next day of a new one (t, hPa)."""
    lat_from_south = np.linspace(-78.75, 78.75, H)
    options = {"levels": [50000.0, 85000.0], "level_units": "Pa", "lat": lat_from_south}
    old = write_file(folder / "old.nc", {"var130": T[:4, :, ::-1]}, OLD_HOURS, **options)
    new = write_file(folder / "new.nc", {"t": T[4:]}, NEW_HOURS, levels=[500, 850])
    return old, new


def read_all(reader: SourceReader) -> np.ndarray:
    return np.stack([reader.read(index) for index in range(len(reader.times))])


def test_two_sources_follow_each_other(tmp_path: Path) -> None:
    old, new = write_old_and_new(tmp_path)
    sources = [{"path": str(new)}, {"path": str(old), "rename": {"t": "var130"}}]
    reader = open_sources(make_config("", sources=sources, p3=["t"], levels=[500, 850]))
    assert np.diff(reader.times).tolist() == [360] * 7
    np.testing.assert_array_equal(read_all(reader), T)
    np.testing.assert_array_equal(list(reader.read_each([2, 3, 4, 5])), T[2:6])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(reader)).read(6), T[6])


def test_two_names_in_the_files_of_one_source(tmp_path: Path) -> None:
    paths = write_old_and_new(tmp_path)
    sources = [{"path": [str(path) for path in paths], "rename": {"t": ["t", "var130"]}}]
    conf = make_config("", sources=sources, p3=["t"], levels=[500, 850])
    np.testing.assert_array_equal(read_all(open_sources(conf)), T)
    with pytest.raises(DataError, match='"ta" or "var131" is in no file of data.sources'):
        sources[0]["rename"] = {"t": ["ta", "var131"]}
        open_sources(make_config("", sources=sources, p3=["t"], levels=[500, 850]))


def test_of_two_names_in_one_file_the_first_is_read(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.nc", {"T": T[:4, 0], "t_old": T[:4, 1]})
    sources = [{"path": str(path), "rename": {"t": ["T", "t_old"]}}]
    np.testing.assert_array_equal(open_sources(make_config("", sources=sources, p2=["t"])).read(3)[0], T[3, 0])


def test_a_time_in_two_sources_is_refused_and_the_advice_works(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"t": T[:5, 0]}, range(0, 30, 6))
    second_file = write_file(tmp_path / "b.nc", {"t": T[3:, 0] + 1}, range(18, 48, 6))
    sources = [{"path": str(second_file)}, {"path": str(first_file)}]
    with pytest.raises(DataError) as error_info:
        open_sources(make_config("", sources=sources, p2=["t"]))
    text = str(error_info.value)
    assert "t is in data.sources 1 and 0 at the same 2 times, from 2000-01-01T18:00 to 2000-01-02T00:00" in text
    assert 'data.sources.0.period: ["2000-01-02T06:00", "2000-01-02T18:00"]' in text
    sources[0]["period"] = ["2000-01-02T06:00", "2000-01-02T18:00"]
    reader = open_sources(make_config("", sources=sources, p2=["t"]))
    np.testing.assert_array_equal(read_all(reader)[:, 0], np.concatenate([T[:5, 0], T[5:, 0] + 1]))


def test_period_selects_times_of_a_source(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_file(tmp_path / "a.nc", {"t": T[:, 0], "ground": T[0, 0]}, range(0, 48, 6))

    def open_period(*period: str) -> SourceReader:
        return open_sources(
            make_config("", sources=[{"path": str(path), "period": period}], p2=["t"], static=["ground"])
        )

    reader = open_period("2000-01-01T06:00", "2000-01-01")
    np.testing.assert_array_equal(read_all(reader)[:, 0], T[1:4, 0])
    later_file = write_file(tmp_path / "b.nc", {"t": T[:4, 0]}, range(480, 504, 6))
    sources = [{"path": [str(path), str(later_file)], "period": ["2000-01-01", "2000-01-03"]}]
    assert len(open_sources(make_config("", sources=sources, p2=["t"])).times) == 8
    assert f"{later_file} is not used: period and every of data.sources.0 exclude all its times" in caplog.text
    with pytest.raises(
        DataError, match=r"sources.0: period, every and .* exclude all times of t; its files have 2000-01-01T00"
    ):
        open_period("2001-01-01", "2001-12-31")
    with pytest.raises(DataError, match=r"data.sources.0.period: 1999-01-01 is before 2000-01-01"):
        open_period("2000-01-01", "1999-01-01")


@pytest.mark.parametrize("units", [("m2 s-2", "m**2 s**-2"), ("m^2/s^2", "m2 s-2"), ("J kg**-1", "m**2 s**-2")])
def test_two_spellings_of_a_unit_are_equal(tmp_path: Path, units: tuple[str, str]) -> None:
    first_file, second_file = (
        write_file(tmp_path / f"{number}.nc", {"z": T[:4, 0]}, hours, attributes={"z": {"units": spelling}})
        for number, (spelling, hours) in enumerate(zip(units, (OLD_HOURS, NEW_HOURS), strict=True))
    )
    reader = open_sources(make_config("", sources=[{"path": str(first_file)}, {"path": str(second_file)}], p2=["z"]))
    assert reader.attributes["z"]["units"] == units[0]
    assert len(reader.times) == 8


def test_other_units_are_refused_or_converted(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"t": T[:4, 0]}, OLD_HOURS)
    second_file = write_file(
        tmp_path / "b.nc", {"t": T[4:, 0] - 273.15}, NEW_HOURS, attributes={"t": {"units": "degC"}}
    )
    sources = [{"path": str(first_file)}, {"path": str(second_file)}]
    with pytest.raises(
        DataError, match='t is in "K" in .*a.nc and in "degC" in .*b.nc; set data.variable_options.t.units'
    ):
        open_sources(make_config("", sources=sources, p2=["t"]))
    reader = open_sources(make_config("", sources=sources, p2=["t"], variable_options={"t": {"units": "K"}}))
    np.testing.assert_allclose(read_all(reader)[:, 0], T[:, 0], atol=5e-5)


def test_units_of_different_quantities_are_refused(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"swe": T[:4, 0]}, OLD_HOURS, attributes={"swe": {"units": "kg m-2"}})
    second_file = write_file(tmp_path / "b.nc", {"sd": T[4:, 0]}, NEW_HOURS, attributes={"sd": {"units": "gpm"}})
    sources = [{"path": str(first_file)}, {"path": str(second_file), "rename": {"swe": "sd"}}]
    with pytest.raises(DataError, match='in "gpm" in .*; these are units of different quantities: name the variable'):
        open_sources(make_config("", sources=sources, p2=["swe"]))


def test_different_standard_names_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {"t": {"standard_name": "air_temperature"}}
    first_file = write_file(tmp_path / "a.nc", {"t": T[:4, 0]}, OLD_HOURS, attributes=names)
    names = {"skt": {"standard_name": "surface_temperature"}}
    second_file = write_file(tmp_path / "b.nc", {"skt": T[4:, 0]}, NEW_HOURS, attributes=names)
    sources = [{"path": str(first_file)}, {"path": str(second_file), "rename": {"t": "skt"}}]
    open_sources(make_config("", sources=sources, p2=["t"]))
    assert (
        f"t is called air_temperature in {first_file} and surface_temperature in {second_file}; check that these are "
        "the same variable" in caplog.text
    )
    caplog.clear()
    write_file(second_file, {"skt": T[4:, 0]}, NEW_HOURS, attributes={"skt": {"standard_name": "unknown"}})
    open_sources(make_config("", sources=sources, p2=["t"]))
    assert "is called" not in caplog.text


def test_static_fields_of_two_sources_must_agree(tmp_path: Path) -> None:
    ground = random_fields(H, W)
    first_file = write_file(tmp_path / "a.nc", {"t": T[:4, 0], "ground": ground}, OLD_HOURS)
    second_file = write_file(tmp_path / "b.nc", {"t": T[4:, 0], "ground": ground}, NEW_HOURS)
    sources = [{"path": str(first_file)}, {"path": str(second_file)}]
    conf = make_config("", sources=sources, p2=["t"], static=["ground"])
    np.testing.assert_array_equal(open_sources(conf).static()[0], ground)
    write_file(second_file, {"t": T[4:, 0], "ground": ground + 1}, NEW_HOURS)
    with pytest.raises(DataError, match=r"ground is static and differs between .*a\.nc .* and .*b\.nc"):
        open_sources(conf)
    sources[1]["variables"] = ["t"]
    conf = make_config("", sources=sources, p2=["t"], static=["ground"])
    np.testing.assert_array_equal(open_sources(conf).static()[0], ground)


def test_sources_with_different_time_policies_are_refused(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"t": T[:4, 0], "sst": T[:4, 1]}, OLD_HOURS)
    second_file = write_file(tmp_path / "b.nc", {"sst": T[4:, 0]}, NEW_HOURS)
    sources = [{"path": str(first_file)}, {"path": str(second_file), "times": "persist"}]
    with pytest.raises(DataError, match="sst is in data.sources 0 and 1, whose times are exact and persist"):
        open_sources(make_config("", sources=sources, p2=["t"], forcing=["sst"]))


def test_sums_over_different_intervals_are_refused(tmp_path: Path) -> None:
    first_file = write_file(tmp_path / "a.nc", {"tp": T[:4, 0]}, OLD_HOURS)
    second_file = write_file(tmp_path / "b.nc", {"tp": T[4:, 0]}, range(24, 28))
    options = {
        "sources": [{"path": str(first_file)}, {"path": str(second_file)}],
        "variable_options": {"tp": {"temporal": "accumulate"}},
        "p2": ["tp"],
    }
    with pytest.raises(DataError, match=r"tp: its sources .*data.sources.0: 6h, data.sources.1: 1h.* no time bounds"):
        open_sources(make_config("", **options))


def test_mean_in_a_later_source_causes_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_file = write_file(tmp_path / "a.nc", {"t": T[:4, 0]}, OLD_HOURS)
    mean = {"t": {"cell_methods": "time: mean"}}
    second_file = write_file(tmp_path / "b.nc", {"t": T[4:, 0]}, NEW_HOURS, attributes=mean)
    open_sources(make_config("", sources=[{"path": str(first_file)}, {"path": str(second_file)}], p2=["t"]))
    assert 't is treated as instantaneous, but its cell_methods are "time: mean"' in caplog.text


def test_hybrid_levels_then_pressure_levels(tmp_path: Path) -> None:
    fields = hybrid.fields_of("u", "sp", times=4)
    old = hybrid.write(tmp_path / "ml.nc", "ecmwf", fields, hybrid.HOURS[:4])
    vertical = {"surface_pressure": "sp"}
    old_conf = make_config("", sources=[{"path": str(old), "vertical": vertical}], p3=["u"], levels=[500, 850])
    expected = read_all(open_sources(old_conf))
    pressure = np.concatenate([expected[:2], expected[1:3]])
    later_hours = [float(hour) + 24 * 30 for hour in hybrid.HOURS[:4]]
    grid = {"lat": open_sources(old_conf).grid.lat, "lon": open_sources(old_conf).grid.lon}
    units = {"u": {"units": open_sources(old_conf).attributes["u"]["units"]}}
    new = write_file(tmp_path / "pl.nc", {"u": pressure}, later_hours, levels=[500, 850], attributes=units, **grid)
    sources = [{"path": str(old), "vertical": vertical}, {"path": str(new)}]
    reader = open_sources(make_config("", sources=sources, p3=["u"], levels=[500, 850]))
    np.testing.assert_array_equal(read_all(reader), np.concatenate([expected, pressure]))


def test_a_store_of_two_sources(tmp_path: Path) -> None:
    fields = random_fields(40, H, W)
    first_file = write_file(tmp_path / "a.nc", {"T": fields[:13]}, np.arange(13) * 6)
    second_file = write_file(tmp_path / "b.nc", {"t": fields[13:]}, np.arange(13, 40) * 6)
    sources = [{"path": str(first_file), "rename": {"t": "T"}}, {"path": str(second_file)}]
    conf: DataConfig = make_config("", sources=sources, p2=["t"], store=str(tmp_path / "store.zarr"))
    write_training_store(conf, progress=False)
    reader = open_reader(conf)
    np.testing.assert_array_equal(np.stack([reader.read(index)[0] for index in range(32)]), fields[:32])


def test_contributions_of_sources_are_described(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = write_old_and_new(tmp_path)
    write_file(tmp_path / "oldest.nc", {"T": T[:4]}, OLD_HOURS, levels=[500, 850])
    copy = write_file(tmp_path / "new_copy.nc", {"t": T[4:]}, NEW_HOURS, levels=[500, 850])
    sources = [
        {"path": str(tmp_path / "old*.nc"), "rename": {"t": "var130"}},
        {"path": [str(new), str(copy)]},
        {"path": str(old), "rename": {"t": "var130"}, "period": ["2001-01-01", "2001-01-02"]},
    ]
    conf = make_config("", sources=sources[:2], p3=["t"], levels=[500, 850])
    with caplog.at_level(logging.WARNING):
        reader = open_sources(conf)
    assert len(reader.times) == 8
    warnings = [record.message for record in caplog.records if "is not used" in record.message]
    assert len(warnings) == 2
    assert warnings[0] == (f"{tmp_path}/oldest.nc is not used: it has none of the requested variables (var130), but T")
    assert warnings[1] == f"{copy} is not used: its variables are read from other files that come first (t)"
    lines = [contribution.describe(conf, reader.calendar) for contribution in reader.list_contributions(conf)]
    assert lines == [
        f"data.sources.0 ({tmp_path}/old*.nc): 2 files (1 of them not used); "
        "2000-01-01T00:00..2000-01-01T18:00, 4 times; t (named var130 in the files)",
        f"data.sources.1 ({new}, {copy}): 2 files (1 of them not used); 2000-01-02T00:00..2000-01-02T18:00, 4 times; t",
    ]
    caplog.clear()
    with pytest.raises(DataError, match="data.sources.2: period, every and .* exclude all times of t"):
        open_sources(make_config("", sources=sources, p3=["t"], levels=[500, 850]))
    assert "oldest.nc is not used" in caplog.text, "an error may come of it"
