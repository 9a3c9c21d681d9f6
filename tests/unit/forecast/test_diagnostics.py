"""Output diagnostics compared with closed forms and with the formulas for derived variables of the data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from credit.channels import ChannelMap
from credit.config import build_config
from credit.config.sections.data import DataConfig
from credit.config.sections.inference import InferenceConfig
from credit.errors import ConfigError, DataError
from credit.forecast.io.diagnostics import OutputDiagnostics
from credit.forecast.rollout import ForecastStart
from credit.physics import thermodynamics

SHAPE = (4, 6)
ATTRIBUTES = {
    "t": {"units": "K", "standard_name": "air_temperature"},
    "q": {"units": "g kg-1", "standard_name": "specific_humidity"},
    "u": {"units": "m s-1"}, "v": {"units": "m s-1"}, "u10": {"units": "m s-1"}, "v10": {"units": "m s-1"},
    "sp": {"units": "hPa", "standard_name": "surface_air_pressure"},
    "tp": {"units": "mm", "standard_name": "precipitation_amount", "temporal": "accumulate"},
    "zs": {"units": "m", "standard_name": "surface_altitude"},
}  # fmt: skip
VARIABLES = {
    "prognostic": {"vars_3D": ["t", "q", "u", "v"], "vars_2D": ["sp", "u10", "v10"]},
    "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]},
    "static": {"vars_3D": [], "vars_2D": ["zs"]},
}
PRESSURES = [850.0, 500.0, 1000.0]  # not sorted
START = ForecastStart(0, 0, 0)
# Half levels of six layers, from the top down.
HALF_A = np.array([0.0, 2000, 8000, 12000, 8000, 3000, 0])
HALF_B = np.array([0.0, 0.0, 0.02, 0.15, 0.45, 0.75, 1.0])


def write_coefficients(folder: Path) -> Path:
    path = folder / "levels.csv"
    rows = [f"{n},{a},{b}" for n, (a, b) in enumerate(zip(HALF_A, HALF_B, strict=True))]
    path.write_text("\n".join(["n,a,b", *rows]))
    return path


def build_test_diagnostics(
    tmp_path: Path, hybrid: bool = False, masks: dict[str, np.ndarray] | None = None, **inference: object
) -> OutputDiagnostics:
    levels = {
        "level_units": "model_level",
        "levels": [1, 2, 3, 4, 5, 6],
        "coefficients": str(write_coefficients(tmp_path)),
    }
    data = {
        "sources": [{"path": "x.nc"}],
        "variables": VARIABLES,
        "variable_options": {"tp": {"temporal": "accumulate"}},
        "splits": {name: ["2000-01-01", "2000-02-01"] for name in ("train", "valid", "test")},
        **(levels if hybrid else {"levels": PRESSURES}),
    }
    conf = DataConfig.model_validate(data)
    channels = ChannelMap.build(VARIABLES, conf.levels, level_units=conf.level_units)
    ground = np.full((1, *SHAPE), 300.0, dtype=np.float32)
    return OutputDiagnostics(InferenceConfig(**inference), conf, channels, ATTRIBUTES, ground, 1440, masks)


def build_fields(diagnostics: OutputDiagnostics, **values: object) -> np.ndarray:
    """Return fields of the model's channels; each value is a number, or has one number per level."""
    fields = []
    for name in dict.fromkeys(channel.variable for channel in diagnostics._model_channels.output):
        channels = [channel for channel in diagnostics._model_channels.output if channel.variable == name]
        level_values = np.broadcast_to(np.asarray(values.get(name, 1.0), dtype=float), len(channels))
        fields += [np.full(SHAPE, value) for value in level_values]
    return np.stack(fields).astype(np.float32)


def select_field(diagnostics: OutputDiagnostics, fields: np.ndarray, name: str) -> np.ndarray:
    return fields[[channel.name for channel in diagnostics.channels.output].index(name)]


def test_channel_names_distinguish_levels_from_heights(tmp_path: Path) -> None:
    derive = {"u500": {"kind": "wind_speed", "inputs": {"eastward_wind": "u10", "northward_wind": "v10"}}}
    diagnostics = build_test_diagnostics(tmp_path, hybrid=True, pressure_levels=[850, 500], derive=derive)
    names = [channel.name for channel in diagnostics.channels.output]
    assert {"u850", "u500hPa", "v500", "u500"} <= {*names}


def test_output_without_diagnostics_is_unchanged(tmp_path: Path) -> None:
    diagnostics = build_test_diagnostics(tmp_path)
    fields = build_fields(diagnostics)
    assert (
        diagnostics.compute(START, 360, fields) is fields
        and diagnostics.channels is diagnostics._model_channels
        and not diagnostics.needs_every_step
    )


def test_wind_speed_and_humidity_on_pressure_levels(tmp_path: Path) -> None:
    diagnostics = build_test_diagnostics(
        tmp_path,
        derive={
            "wind": {"kind": "wind_speed"},
            "wind10": {"kind": "wind_speed", "inputs": {"eastward_wind": "u10", "northward_wind": "v10"}},
            "r": {"kind": "relative_humidity_water"},
        },
    )
    fields = build_fields(diagnostics, u=[3, 5, 8], v=[4, 12, 15], u10=6, v10=8, t=[280, 260, 290], q=[5, 1, 8])
    out = diagnostics.compute(START, 360, fields)
    assert [select_field(diagnostics, out, f"wind{level:g}")[0, 0] for level in PRESSURES] == [5, 13, 17]
    assert select_field(diagnostics, out, "wind10")[0, 0] == 10
    for level, t, q in zip(PRESSURES, (280, 260, 290), (5e-3, 1e-3, 8e-3), strict=True):
        vapour = (
            q
            * level
            * 100
            / (
                thermodynamics.R_DRY / thermodynamics.R_VAPOUR
                + (1 - thermodynamics.R_DRY / thermodynamics.R_VAPOUR) * q
            )
        )
        expected = 100 * vapour / thermodynamics.saturation_pressure_water(np.array(float(t)))
        assert select_field(diagnostics, out, f"r{level:g}")[0, 0] == pytest.approx(expected, rel=1e-4)
    np.testing.assert_array_equal(out[: len(fields)], fields)
    assert (
        diagnostics.attributes["wind"]["standard_name"] == "wind_speed" and diagnostics.attributes["r"]["units"] == "%"
    )


def test_sums_over_hours(tmp_path: Path) -> None:
    diagnostics = build_test_diagnostics(
        tmp_path,
        derive={
            "total": {"kind": "accumulation", "of": "tp"},
            "tp12": {"kind": "accumulation", "of": "tp", "over": "12h"},
            "wind10": {"kind": "wind_speed", "inputs": {"eastward_wind": "u10", "northward_wind": "v10"}},
        },
    )
    assert diagnostics.needs_every_step
    values: dict[tuple[int, str], list[float]] = {}
    for lead in (360, 720, 1080, 1440):
        for member in (0, 1):  # the members alternate
            out = diagnostics.compute(
                ForecastStart(0, member, 0), lead, build_fields(diagnostics, tp=(member + 1) * lead / 360, u10=3, v10=4)
            )
            for name in ("total", "tp12", "wind10"):
                values.setdefault((member, name), []).append(float(select_field(diagnostics, out, name)[1, 2]))
    assert values[0, "total"] == [1, 3, 6, 10] and values[1, "total"] == [2, 6, 12, 20]
    assert (
        np.isnan(values[0, "tp12"][0]) and values[0, "tp12"][1:] == [3, 5, 7] and values[1, "tp12"][1:] == [6, 10, 14]
    )
    assert values[0, "wind10"] == [5] * 4
    assert not diagnostics._running_sums._earlier_fields, "a forecast that is over is forgotten"
    assert diagnostics.windows == {"total": 0, "tp12": 720}
    assert diagnostics.attributes["tp12"] == {
        "units": "mm", "long_name": "tp over the 12h before", "temporal": "accumulate",
        "standard_name": "precipitation_amount",
    }  # fmt: skip


def test_an_isothermal_dry_column(tmp_path: Path) -> None:
    """z = ground + R T ln(p_s / p). Fields that are linear in ln p between full levels are interpolated exactly."""
    surface, temperature = 95000.0, 270.0
    diagnostics = build_test_diagnostics(
        tmp_path, hybrid=True, pressure_levels=[500, 800],
        derive={"z": {"kind": "geopotential"}, "msl": {"kind": "mean_sea_level_pressure"}},
    )  # fmt: skip
    half = HALF_A + HALF_B * surface
    full = 0.5 * (half[1:] + half[:-1])
    out = diagnostics.compute(
        START, 360, build_fields(diagnostics, t=temperature, q=0.0, sp=surface / 100, u=np.log(full), v=2.0)
    )
    for pressure in (50000.0, 80000.0):
        name = f"{pressure / 100:g}"
        expected = thermodynamics.GRAVITY * 300.0 + thermodynamics.R_DRY * temperature * np.log(surface / pressure)
        assert select_field(diagnostics, out, f"z{name}")[0, 0] == pytest.approx(expected, rel=1e-5)
        assert select_field(diagnostics, out, f"u{name}")[0, 0] == pytest.approx(np.log(pressure), rel=1e-5)
        assert select_field(diagnostics, out, f"t{name}")[0, 0] == pytest.approx(temperature, rel=1e-6)
    msl = select_field(diagnostics, out, "msl")[0, 0]
    assert msl == pytest.approx(
        surface * np.exp(thermodynamics.GRAVITY * 300.0 / (thermodynamics.R_DRY * 272.0)), rel=2e-3
    )
    assert diagnostics.level_units == "hPa"
    assert {c.level for c in diagnostics.channels.output} == {500.0, 800.0, None}
    assert select_field(diagnostics, out, "sp")[0, 0] == pytest.approx(950.0)


def derive_wind_speed(u: str) -> dict:
    return {"derive": {"w": {"kind": "wind_speed", "inputs": {"eastward_wind": u}}}}


@pytest.mark.parametrize(
    ("hybrid", "inference", "says"),
    [
        (False, {"derive": {"t": {"kind": "wind_speed"}}}, "inference.derive.t: t is already an output"),
        (False, {"derive": {"z": {"kind": "geopotential"}}}, "geopotential is computed on model levels"),
        (False, {"pressure_levels": [500]}, "data.levels are already pressure levels"),
        (
            False,
            derive_wind_speed("uu"),
            "uu is not an output.*did you",
        ),
        (
            False,
            derive_wind_speed("u10"),
            "not on the same levels",
        ),
        (False, {"derive": {"s": {"kind": "accumulation", "of": "u10"}}}, "u10 is not a sum over the step"),
        (False, {"derive": {"s": {"kind": "accumulation", "of": "tp", "over": "9h"}}}, "9h is not a multiple"),
        (
            False,
            {"derive": {"s": {"kind": "accumulation", "of": "tp", "over": "30h"}}},
            "derive.s.over: 30h is longer than the last lead time that is written, 24h, .* everywhere; shorten",
        ),
        (
            True,
            {"derive": {"z": {"kind": "geopotential", "inputs": {"temperature": "u10"}}}},
            "inference.derive.z: u10 has no levels",
        ),
        (True, {"pressure_levels": [500, 1]}, "inference.pressure_levels: 1 hPa is above the uppermost level of t"),
        (
            True,
            {"pressure_levels": [500], "surface_pressure": "u10"},
            "the units of surface_pressure must be Pa or hPa",
        ),
        (True, {"pressure_levels": [500], "surface_pressure": "ps"}, 'inference.surface_pressure: "ps" is not among'),
    ],
)
def test_message_names_what_cannot_be_computed(tmp_path: Path, hybrid: bool, inference: dict, says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        build_test_diagnostics(tmp_path, hybrid, **inference)


def test_variables_derived_from_masked_ones_are_masked(tmp_path: Path) -> None:
    cells = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    masks = {"u10": cells < 3, "v10": cells > 20, "tp": cells == 7}
    derive = {
        "ws": {"kind": "wind_speed", "inputs": {"eastward_wind": "u10", "northward_wind": "v10"}},
        "aloft": {"kind": "wind_speed"}, "tp24": {"kind": "accumulation", "of": "tp", "over": "24h"},
    }  # fmt: skip
    diagnostics = build_test_diagnostics(tmp_path, masks=masks, derive=derive)
    assert set(diagnostics.masks) == {*masks, "ws", "tp24"}
    np.testing.assert_array_equal(diagnostics.masks["ws"], (cells < 3) | (cells > 20))
    np.testing.assert_array_equal(diagnostics.masks["tp24"], cells == 7)


def test_unused_coefficients_are_refused(tmp_path: Path) -> None:
    """In this config, only output on pressure levels or derived output would need `data.coefficients`."""
    raw = {
        "experiment": "x", "save_loc": "x", "model": {"type": "wxformer"}, "trainer": {"max_steps": 1},
        "data": {
            "sources": [{"path": "x.nc"}], "variables": VARIABLES, "level_units": "model_level", "levels": [1, 2],
            "coefficients": str(write_coefficients(tmp_path)),
            "splits": {name: ["2000-01-01", "2000-02-01"] for name in ("train", "valid", "test")},
        },
    }  # fmt: skip
    for inference in ({"pressure_levels": [500]}, {"derive": {"msl": {"kind": "mean_sea_level_pressure"}}}):
        build_config({**raw, "inference": inference})
    with pytest.raises(ConfigError, match="data.coefficients has no effect without .* inference.pressure_levels or"):
        build_config(raw)


@pytest.mark.parametrize(
    "name", ["time", "level_2", "level_t", "latitude", "time_6h", "valid_time_bnds", "written", "a/b", ""]
)
def test_names_that_files_cannot_hold(name: str) -> None:
    with pytest.raises(ValueError, match=f'"{name}" is (not a valid variable name|the name of a coordinate)'):
        InferenceConfig(derive={name: {"kind": "wind_speed"}})


def test_names_that_forecast_centres_use_are_valid() -> None:
    InferenceConfig(derive={name: {"kind": "wind_speed"} for name in ("10si", "10m_wind_speed", "time_mean_wind")})


@pytest.mark.parametrize("levels", [[500, 500], [500, 0], [-5]])
def test_invalid_pressure_levels_are_refused(levels: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0 and must not be repeated"):
        InferenceConfig(pressure_levels=levels)


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"kind": "accumulation"}, "of: is required for kind accumulation"),
        ({"kind": "wind_speed", "over": "6h"}, "over: only for kind accumulation"),
        ({"kind": "wind_speed", "inputs": {"u": "u10"}}, '"u" is not among eastward_wind, northward_wind'),
    ],
)
def test_invalid_derived_variables_are_refused(own: dict, says: str) -> None:
    raw = {
        "experiment": "x", "save_loc": "x", "model": {"type": "wxformer"}, "trainer": {"max_steps": 1},
        "data": {
            "sources": [{"path": "x.nc"}], "variables": VARIABLES, "levels": PRESSURES,
            "splits": {name: ["2000-01-01", "2000-02-01"] for name in ("train", "valid", "test")},
        },
        "inference": {"derive": {"w": own}},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=says):
        build_config(raw)
