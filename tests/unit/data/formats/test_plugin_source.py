"""Tests of plugin sources: the same fields, times and errors as for files with the same content."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import xarray as xr

from credit.config.sections import source as source_section
from credit.data.formats.files import OpenFiles
from credit.data.formats.plugin import source as plugin_source
from credit.data.formats.plugin.source import SourceVariable, register_source
from credit.data.sources.source_reader import SourceReader, open_sources
from credit.errors import ConfigError, DataError
from tests.unit.data import hybrid_on_the_fly as hybrid
from tests.unit.data.files_on_the_fly import make_config, random_fields, write_file

H, W = 8, 16
LAT, LON = np.linspace(90 - 90 / H, -90 + 90 / H, H), np.arange(W) * 360 / W
START = datetime(2000, 1, 1)


@pytest.fixture(autouse=True)
def _isolate_registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin_source, "_SOURCES", {})
    monkeypatch.setattr(source_section, "_OPTION_SECTIONS", {})
    return


class MemorySource:
    """Source with fields (N, [L,] H, W), or (H, W) for static variables."""

    def __init__(self, hours: Sequence[float] = (0, 6, 12, 18), **changes: Any) -> None:
        self.latitude, self.longitude = LAT, LON
        self.times: Any = [START + timedelta(hours=hour) for hour in hours]
        self.fields = {"t": random_fields(len(hours), 3, H, W), "u": random_fields(len(hours), H, W, seed=1)}
        self.variables: Any = {"t": SourceVariable("K", (250, 500, 850)), "u": SourceVariable("m s-1")}
        self.asked: list[tuple] = []
        for name, value in changes.items():
            setattr(self, name, value)

    def read(self, variable: str, time: Any, levels: tuple[float, ...] | None) -> Any:
        self.asked.append((variable, time, levels))
        field = self.fields[variable]
        if time is not None:
            field = field[[str(date) for date in self.times].index(str(time))]
        if levels is None:
            return field
        return np.stack([field[list(self.variables[variable].levels).index(level)] for level in levels])


def open_memory(memory: Any, p3: Sequence[str] = ("t",), p2: Sequence[str] = ("u",), **options: Any) -> SourceReader:
    """Open a config whose only source is `memory`."""

    class Given(type(memory)):
        def __new__(cls) -> Any:
            return memory

        def __init__(self) -> None:
            pass

    register_source("given")(Given)
    options.setdefault("sources", [{"type": "given"} | options.pop("source", {})])
    return open_sources(make_config("", p3=p3, p2=p2, levels=options.pop("levels", [850, 250]), **options))


def require_equal(reader: SourceReader, expected: SourceReader) -> None:
    """Check that two readers have the same times, grid, attributes and fields."""
    np.testing.assert_array_equal(reader.times, expected.times)
    np.testing.assert_array_equal(reader.static(), expected.static())
    assert reader.grid.describe_mismatch(expected.grid) is None
    assert reader.attributes == expected.attributes
    assert reader.packing_steps == expected.packing_steps
    indices = range(len(expected.times))
    for index in indices:
        np.testing.assert_array_equal(reader.read(index), expected.read(index))
    for fields, expected_fields in zip(reader.read_each(indices), expected.read_each(indices), strict=True):
        np.testing.assert_array_equal(fields, expected_fields)


def test_source_may_have_any_order_of_dimensions(tmp_path: Path) -> None:
    """Rows from the south, longitudes from -180, unsorted levels in Pa, unsorted times and a static field are read."""
    hours = [12, 0, 18, 6]
    ground = random_fields(H, W, seed=3)
    memory = MemorySource(hours, latitude=LAT[::-1], longitude=(LON + 180) % 360 - 180)
    levels = (85000.0, 25000.0, 50000.0)
    memory.fields["ground"] = ground
    memory.variables = {
        "t": SourceVariable("K", levels, "Pa", standard_name="air_temperature", packing_step=0.5),
        "u": SourceVariable("m s-1", standard_name="eastward_wind", long_name="Wind"),
        "ground": SourceVariable("1", is_static=True),
    }
    file = write_file(
        tmp_path / "a.nc",
        {"t": memory.fields["t"][np.argsort(hours)], "u": memory.fields["u"][np.argsort(hours)], "ground": ground},
        sorted(hours), lat=memory.latitude, lon=memory.longitude, levels=levels, level_units="Pa",
        attributes={"t": {"standard_name": "air_temperature"}, "ground": {"units": "1"},
                    "u": {"units": "m s-1", "standard_name": "eastward_wind", "long_name": "Wind"}},
    )  # fmt: skip
    reader = open_memory(memory, static=["ground"])
    assert reader.packing_steps.pop("t") == 0.5
    require_equal(reader, open_sources(make_config(file, p3=["t"], p2=["u"], static=["ground"], levels=[850, 250])))
    # Only two of three levels are read, in the order of the source.
    assert {levels for name, _, levels in memory.asked if name == "t"} == {(85000.0, 25000.0)}
    assert ("ground", None, None) in memory.asked


@pytest.mark.parametrize(
    "options",
    [
        {"grid": {"rows": 5, "columns": 10, "poles": True}, "regrid": "conservative"},
        {"variable_options": {"u": {"units": "km h-1"}}},
        {"variable_options": {"u": {"temporal": "accumulate"}}, "timestep": "12h"},
        {"source": {"rename": {"warm": "u"}}, "p2": ["warm"]},
        {"source": {"vertical": {"surface_pressure": "ps"}}, "levels": [400, 900]},
        {"variable_options": {"w": {"derive": "wind_speed", "inputs": {"eastward_wind": "u", "northward_wind": "v"}}},
         "p2": ["w"]},
    ],
    ids=["regridded", "units", "window", "renamed", "interpolated", "derived"],
)  # fmt: skip
def test_options_have_the_same_effect_on_files_and_sources(tmp_path: Path, options: dict[str, Any]) -> None:
    memory = MemorySource()
    memory.fields |= {"v": random_fields(4, H, W, seed=4), "ps": random_fields(4, H, W, seed=5) + 100_000}
    memory.variables |= {"v": SourceVariable("m s-1"), "ps": SourceVariable("Pa")}
    units = {name: {"units": variable.units} for name, variable in memory.variables.items()}
    file = write_file(tmp_path / "a.nc", memory.fields, lat=LAT, lon=LON, levels=[250, 500, 850], attributes=units)
    source = options.pop("source", {})
    expected = open_memory(SimpleReader(), sources=[{"path": str(file)} | source], **options)
    require_equal(open_memory(memory, source=source, **options), expected)


def test_source_on_hybrid_levels_equals_file(tmp_path: Path) -> None:
    """Fields on numbered model levels are interpolated and integrated to geopotential with coefficients of a table."""
    fields = hybrid.fields_of("t", "q", "sp", "zs", times=3)
    a, b = hybrid.half_levels()
    rows = [f"{n},{a_n:.9f},{b_n:.12f}" for n, (a_n, b_n) in enumerate(zip(a, b, strict=True))]
    (tmp_path / "table.csv").write_text("\n".join(["n,a,b", *rows]))
    vertical = {"vertical": hybrid.GROUND | {"coefficients": str(tmp_path / "table.csv")}}
    level_numbers = range(1, hybrid.K + 1)
    variables = {
        name: SourceVariable(hybrid.UNITS[name], level_numbers if name in "tq" else None, "1", is_static=name == "zs")
        for name in fields
    }
    memory = MemorySource(
        hybrid.HOURS[:3], latitude=hybrid.LAT, longitude=hybrid.LON, variables=variables, fields=fields
    )
    path = hybrid.write(tmp_path / "ml.nc", "no", fields, hybrid.HOURS[:3])
    options = {"p3": ["t", "z"], "p2": ["msl"], "levels": hybrid.LEVELS}
    options["variable_options"] = {name: hybrid.DERIVED[name] for name in ("z", "msl")}
    reader = open_memory(memory, source=vertical, **options)
    require_equal(reader, open_memory(SimpleReader(), sources=[{"path": str(path)} | vertical], **options))
    memory.asked.clear()
    reader.read(1)
    assert {len(levels) for name, _, levels in memory.asked if name == "t"} == {1, hybrid.K}
    # The sea level pressure reads only the lowest level. The other variables read whole columns at once.


class SimpleReader:
    def read(self) -> None: ...


@pytest.mark.parametrize(
    "times",
    [
        np.array(["2000-02-28T18", "2000-02-29T00", "2000-02-29T06", "2000-02-29T12"], dtype="datetime64[h]"),
        [cftime.datetime(2000, 2, 28 + (18 + 6 * n) // 24, (18 + 6 * n) % 24, calendar="360_day") for n in range(4)],
        xr.date_range("2000-02-28T18", periods=4, freq="6h", calendar="noleap", use_cftime=True).values,
        xr.date_range("2000-02-28T18", periods=4, freq="6h"),
    ],
    ids=["datetime64", "360_day", "noleap", "index"],
)
def test_each_field_belongs_to_its_time(times: Any) -> None:
    """The value of each field is its time. The times extend across 29 February."""
    memory = MemorySource(times=times, variables={"u": SourceVariable("1")})
    memory.read = lambda variable, time, levels: np.full((H, W), float(str(time)[8:10]) * 24 + float(str(time)[11:13]))
    days = {"train": "2000-02-28", "valid": "2000-03-03", "test": "2000-03-06"}
    splits = {name: [day, day] for name, day in days.items()}
    reader = open_memory(memory, p3=[], levels=[], splits=splits)
    assert len(reader.times) == 4
    for index, minutes in enumerate(reader.times):
        date = reader.calendar.datetime(minutes)
        assert set(reader.read(index).ravel()) == {date.day * 24 + date.hour}


def build_source_factory(**changes: Any) -> Callable[[], MemorySource]:
    """Return a function that builds a `MemorySource` with these arguments."""
    return lambda: MemorySource(**changes)


def with_fields(change_field: Callable[[np.ndarray], Any]) -> Callable[[], MemorySource]:
    """Return a function that builds a source whose fields at 6 UTC are changed."""

    def build_source() -> MemorySource:
        memory = MemorySource()
        read = memory.read

        def read_changed(name: str, time: datetime, levels: tuple[float, ...] | None) -> Any:
            field = read(name, time, levels)
            return change_field(field) if time.hour == 6 else field

        memory.read = read_changed
        return memory

    return build_source


def label_with_another_time(field: np.ndarray) -> xr.DataArray:
    return xr.DataArray(
        field, coords={"time": np.datetime64("2000-01-01T12", "ns")}, dims=("x", "y", "z")[: field.ndim]
    )


@pytest.mark.parametrize(
    ("build_source", "phrases"),
    [
        (build_source_factory(variables=None), ["variables must map names to SourceVariable"]),
        (build_source_factory(variables={"t": "K"}), ["variables must map names to SourceVariable"]),
        (build_source_factory(variables={"time": SourceVariable("K")}), ["time has the name of a coordinate"]),
        (build_source_factory(variables={"t": SourceVariable("K", (500, 500))}), ["levels of t contain a value twice"]),
        (build_source_factory(times=[]), ["times must be at least one date"]),
        (build_source_factory(times=[0, 6, 12, 18]), ["times fails", "must be a list of dates"]),
        (build_source_factory(times=[START] * 4), ["2000-01-01T00:00 occurs twice"]),
        (build_source_factory(times=[START + timedelta(seconds=n) for n in range(4)]), ["whole minutes", "0, 1"]),
        (build_source_factory(latitude=np.full(H, np.nan)), ["latitude must be a list of finite numbers"]),
        (build_source_factory(latitude=["north"] * H), ["latitude fails", "could not convert"]),
        (build_source_factory(longitude=LON[:5]), ["are not equally spaced around the globe"]),
        (build_source_factory(latitude_bounds=np.zeros(H)), ["latitude_bounds must be (8, 2) numbers"]),
        (build_source_factory(latitude_bounds="none"), ["latitude_bounds fails", "could not convert"]),
        (build_source_factory(version=lambda: 2), ["version must be a string or a number"]),
        (build_source_factory(attributes="mine"), ["attributes must map names to strings; is 'mine'"]),
        (build_source_factory(variables={"t": SourceVariable(None)}),
         ["the units of t must be a string, such as K; is None"]),
        (with_fields(lambda field: None), ["must return numbers of shape", "it returned object"]),
        (with_fields(lambda field: field.T),
         ["'t', 2000-01-01 06:00:00, (250.0, 850.0)", "shape (2, 8, 16)", "(16, 8, 2)"]),
        (with_fields(lambda field: field[0, 0, 0, 0]), ["'t', 2000-01-01 06:00:00", "IndexError"]),
        (with_fields(label_with_another_time), ["ValueError: it returns the field of 2000-01-01T12"]),
        (with_fields(lambda field: field * np.nan), ["t, level 850 at 2000-01-01T06:00", "missing"]),
        (with_fields(lambda field: np.ma.masked_less(field, 1e9)), ["t, level 850 at 2000-01-01T06:00", "missing"]),
        (with_fields(lambda field: field.astype(float) * 1e300), ["t, level 850 at 2000-01-01T06:00", "infinite"]),
    ],
)  # fmt: skip
def test_errors_name_the_source_and_the_field(build_source: Callable[[], MemorySource], phrases: list[str]) -> None:
    with pytest.raises(DataError) as error_info:
        reader = open_memory(build_source())
        reader.read(0)
        reader.read(1)
    text = str(error_info.value)
    assert all(word in text for word in phrases), text
    assert "data.sources.0 (given)" in text or phrases[0].startswith("t, level")


def test_missing_attribute_is_named() -> None:
    class Empty:
        def read(self) -> None: ...

    with pytest.raises(
        DataError, match=r"data.sources.0 \(given\): latitude fails \(AttributeError: .*has no attribute"
    ):
        open_memory(Empty())


def test_field_with_the_correct_time_coordinate_is_accepted() -> None:
    expected_reader = open_memory(MemorySource())
    labelled = MemorySource()
    read = labelled.read
    labelled.read = lambda name, time, levels: xr.DataArray(
        read(name, time, levels), coords={"time": np.datetime64(time, "ns")}, dims=("x", "y", "z")[: 3 - (not levels)]
    )
    require_equal(open_memory(labelled), expected_reader)


def test_options_are_passed_to_the_class() -> None:
    @register_source("counted")
    class SourceWithOptions(MemorySource):
        def __init__(self, number: int = 4, **others: Any) -> None:
            super().__init__(hours=range(0, 6 * number, 6))
            self.others = others

    source = {"type": "counted", "options": {"number": 7, "colour": "red"}}
    assert len(open_memory(SimpleReader(), sources=[source]).times) == 7


def test_decorators_above_register_source_take_effect() -> None:
    @dataclass
    @register_source("made_below")
    class DataclassSource(MemorySource):
        hours: Any

        def __post_init__(self) -> None:
            super().__init__(self.hours)

    source = {"type": "made_below", "options": {"hours": [0, 6]}}
    assert len(open_memory(SimpleReader(), sources=[source]).times) == 2


def test_forked_process_does_not_close_the_source_of_its_parent() -> None:
    closing_pids: list[int] = []
    read_end, write_end = os.pipe()

    class SourceWithConnection(MemorySource):
        def __del__(self) -> None:
            closing_pids.append(os.getpid())

    register_source("connected")(SourceWithConnection)
    reader = open_memory(SimpleReader(), sources=[{"type": "connected"}])
    closing_pids.clear()
    if os.fork() == 0:
        reader.read(0)
        os.write(write_end, str(len(closing_pids)).encode())
        os._exit(0)
    assert os.read(read_end, 10) == b"0"
    os.wait()


@pytest.mark.parametrize("wrong", [lambda: None, type("NoRead", (), {})])
def test_class_without_method_read_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="must be a class with a method read"):
        register_source("wrong")(wrong)


def test_name_is_refused_for_a_second_class() -> None:
    register_source("memory")(MemorySource)
    register_source("memory")(MemorySource)
    with pytest.raises(ConfigError, match="is taken by"):
        register_source("memory")(SimpleReader)


def test_fingerprint_changes_with_the_content_of_the_source() -> None:
    def fingerprint(**changes: Any) -> list[int]:
        memory = MemorySource(**changes)
        members = {"__new__": lambda cls: memory, "__init__": lambda self: None}
        register_source("given")(type("Given", (MemorySource,), members))
        conf = make_config("", p3=["t"], levels=[850], sources=[{"type": "given"}])
        return OpenFiles(conf.sources).fingerprint("data.sources.0 (given)", 0)

    variants = [
        {}, {"version": 2}, {"hours": (0, 6, 12)}, {"latitude": LAT[::-1]},
        {"variables": {"u": SourceVariable("m s-1")}},
        {"variables": {"t": SourceVariable("K", (250, 500, 851))}},
    ]  # fmt: skip
    fingerprints = [fingerprint(**changes) for changes in variants]
    assert fingerprints[0] == fingerprint() == fingerprint(hours=(18, 0, 12, 6))
    assert len({tuple(numbers) for numbers in fingerprints}) == len(variants)


MODULE = """
import numpy as np, os
from credit.data.formats.plugin.source import SourceVariable, register_source

@register_source("elsewhere")
class Elsewhere:
    latitude, longitude = np.linspace(78.75, -78.75, 8), np.arange(16) * 22.5

    def __init__(self):
        self.made_in = os.getpid()

    @property
    def times(self):
        assert not os.environ.get("NO_LOOKING"), "what there is was asked again"
        return np.array(["2000-01-01T00", "2000-01-01T06"], dtype="datetime64[m]")

    @property
    def variables(self):
        self.times
        return {"u": SourceVariable("m s-1")}

    def read(self, variable, time, levels):
        assert self.made_in == os.getpid(), "the source of another process"
        return np.full((8, 16), float(str(time)[11:13]))
"""


def test_another_process_reads_without_listing_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and new processes unpickle a reader. This imports the plugin's module and creates a new source."""
    (tmp_path / "elsewhere_source.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("elsewhere_source")
    reader = open_sources(make_config("", p2=["u"], sources=[{"type": "elsewhere"}]))
    assert reader.read(1).max() == 6.0
    (tmp_path / "reader.pickle").write_bytes(pickle.dumps(reader))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).read(1).max())"
    process = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "reader.pickle")],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[4]}", "NO_LOOKING": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.stdout == "6.0\n", process.stderr
    sys.modules.pop("elsewhere_source")
