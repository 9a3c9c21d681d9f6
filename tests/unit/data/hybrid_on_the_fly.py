"""Small atmosphere on hybrid levels, and functions that write it in the layouts of different archives."""

from __future__ import annotations

from pathlib import Path

import eccodes
import numpy as np
import xarray as xr

from credit.config.sections.data import DataConfig
from credit.physics.vertical import HybridLevels
from tests.unit.data.files_on_the_fly import make_config

H, W, K = 9, 16, 24
LAT, LON = np.linspace(90, -90, H), np.arange(W) * 22.5
P0 = 1e5
EPOCH = "hours since 2000-01-01"
HOURS = np.arange(40) * 6.0
R, G = 287.0597, 9.80665


def half_levels(count: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Return the coefficients a (Pa) and b of the half levels.

    They are pressure levels down to 60 hPa. Below, they change gradually to sigma levels.
    """
    eta = np.linspace(0.0, 1.0, count + 1) ** 1.5
    b = (np.maximum(eta - 0.06, 0.0) / 0.94) ** 1.3
    a = P0 * (eta - b)
    a[-1] = 0.0
    b[-1] = 1.0
    return a, b


def levels(count: int = K) -> HybridLevels:
    """Return the full levels. Their coefficients are the means of those of their two half levels."""
    a, b = half_levels(count)
    bounds = [np.stack([coefficients[:-1], coefficients[1:]], axis=1) for coefficients in (a, b)]
    return HybridLevels(np.arange(1.0, count + 1), *(coefficients.mean(axis=1) for coefficients in bounds), *bounds)


def build_atmosphere(times: int = len(HOURS)) -> dict[str, np.ndarray]:
    """Return t, u, v, q (times, K, H, W), sp, lnsp (times, H, W) and the surface geopotential zs (H, W)."""
    random = np.random.default_rng(0)
    height = np.clip(random.normal(500.0, 900.0, (H, W)), 0.0, 4000.0) * (random.random((H, W)) > 0.4)
    temperature_offset = 30.0 * np.cos(np.deg2rad(LAT))[:, None] + random.normal(0.0, 3.0, (times, H, W))
    surface = 101325.0 * np.exp(-height / 8000.0) * (1 + random.normal(0.0, 0.01, (times, H, W)))
    pressure = np.moveaxis(levels().pressure(surface), 0, 1)
    t = np.maximum(
        (260.0 + temperature_offset[:, None]) * (pressure / P0) ** 0.19, 205.0 + 0.2 * temperature_offset[:, None]
    )
    wind_speed = 40.0 * np.exp(-((np.log(pressure / 25000.0)) ** 2)) * np.cos(np.deg2rad(LAT))[:, None]
    q = 0.015 * (pressure / P0) ** 3 * np.cos(np.deg2rad(LAT))[:, None] ** 2
    fields = {
        "t": t,
        "u": wind_speed,
        "v": 0.3 * wind_speed + 1.0,
        "q": q,
        "sp": surface,
        "lnsp": np.log(surface),
        "zs": height * G,
    }
    return {name: values.astype(np.float32) for name, values in fields.items()}


UNITS = {
    "t": "K",
    "u": "m s-1",
    "v": "m s-1",
    "q": "kg kg-1",
    "sp": "Pa",
    "lnsp": "~",
    "zs": "m2 s-2",
    "PS": "Pa",
    "PHIS": "m2 s-2",
}


def write(path: Path, kind: str, fields: dict[str, np.ndarray], hours: np.ndarray = HOURS) -> Path:
    """Write fields to a file.

    `kind` is the convention for hybrid coefficients in netCDF, ``cam``, ``ecmwf`` or ``cf``. It may also be ``no`` for
    a netCDF file without coefficients, or ``grib``.
    """
    if kind == "grib":
        return _write_grib(path, fields, hours)
    hybrid_levels = levels()
    (a, b), (am, bm) = half_levels(), (hybrid_levels.a, hybrid_levels.b)
    level_values = {"cam": 1000.0 * (am / P0 + bm)}.get(kind, np.arange(1.0, K + 1))
    dataset = xr.Dataset(
        coords={
            "time": ("time", hours, {"units": EPOCH, "calendar": "standard"}),
            "lev": ("lev", level_values, {"units": "level", "positive": "down"}),
            "lat": ("lat", LAT, {"units": "degrees_north"}),
            "lon": ("lon", LON, {"units": "degrees_east"}),
        }
    )
    for name, values in fields.items():
        dims = {4: ("time", "lev", "lat", "lon"), 3: ("time", "lat", "lon"), 2: ("lat", "lon")}[values.ndim]
        dataset[name] = (dims, values, {"units": UNITS.get(name, UNITS.get(name.lower(), "K"))})
    if kind == "cam":
        dataset["lev"].attrs |= {"units": "hPa", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}
        dataset["lev"].attrs["formula_terms"] = "a: hyam b: hybm p0: P0 ps: PS"
        dataset["P0"] = ((), P0, {"units": "Pa"})
        dataset = dataset.assign(hyam=("lev", am / P0), hybm=("lev", bm), hyai=("ilev", a / P0), hybi=("ilev", b))
    elif kind == "ecmwf":
        dataset = dataset.assign(
            hyam=("nhym", am, {"units": "Pa"}), hybm=("nhym", bm), hyai=("nhyi", a, {"units": "Pa"}), hybi=("nhyi", b)
        )
    elif kind == "cf":
        dataset["lev"].attrs |= {"units": "1", "standard_name": "atmosphere_hybrid_sigma_pressure_coordinate"}
        dataset["lev"].attrs |= {"formula_terms": "ap: ap b: b ps: sp", "bounds": "lev_bnds"}
        dataset["lev_bnds"] = (("lev", "two"), np.stack([level_values - 0.5, level_values + 0.5], axis=1))
        dataset["lev_bnds"].attrs["formula_terms"] = "ap: ap_bnds b: b_bnds ps: sp"
        dataset = dataset.assign(ap=("lev", am / 100, {"units": "hPa"}), b=("lev", bm))
        dataset["ap_bnds"] = (("lev", "two"), hybrid_levels.a_bounds / 100, {"units": "hPa"})
        dataset["b_bnds"] = (("lev", "two"), hybrid_levels.b_bounds)
    dataset.to_netcdf(path, encoding={name: {"_FillValue": None} for name in dataset.variables})
    return path


def _write_grib(path: Path, fields: dict[str, np.ndarray], hours: np.ndarray) -> Path:
    pv = np.concatenate(half_levels())
    with open(path, "wb") as file:
        for position, hour in enumerate(hours):
            for name, values in fields.items():
                column = values if values.ndim == 2 else values[position]
                for level, field in enumerate(column if column.ndim == 3 else column[None], start=1):
                    file.write(_encode_message({"zs": "z"}.get(name, name), field, level, int(hour), pv))
    return path


def _encode_message(name: str, field: np.ndarray, level: int, hour: int, pv: np.ndarray) -> bytes:
    handle = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib2")
    keys = {
        "Ni": W, "Nj": H, "iDirectionIncrementInDegrees": 22.5, "jDirectionIncrementInDegrees": 22.5,
        "latitudeOfFirstGridPointInDegrees": 90, "latitudeOfLastGridPointInDegrees": -90,
        "longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 337.5,
        "typeOfLevel": "hybrid", "level": level, "shortName": name,
        "dataDate": 20000101 + hour // 24, "dataTime": hour % 24 * 100, "PVPresent": 1, "bitsPerValue": 24,
    }  # fmt: skip
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set_array(handle, "pv", pv)
    eccodes.codes_set_values(handle, field.astype(np.float64).ravel())
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


ATMOSPHERE = build_atmosphere()
LEVELS = [50, 200, 500, 850, 1000]
GROUND = {"surface_pressure": "sp", "surface_geopotential": "zs"}
DERIVED = {
    "z": {"derive": "geopotential"},
    "r": {"derive": "relative_humidity"},
    "ws": {"derive": "wind_speed"},
    "msl": {"derive": "mean_sea_level_pressure"},
}


def fields_of(*names: str, times: int = 40) -> dict[str, np.ndarray]:
    """Return variables of the atmosphere at its first times. The surface geopotential has no time axis."""
    return {name: ATMOSPHERE[name] if name == "zs" else ATMOSPHERE[name][:times] for name in names}


def config(path: Path, vertical: dict | None = GROUND, source: dict | None = None, **options: object) -> DataConfig:
    """Return a config with one source on hybrid levels."""
    settings = {"p3": ["t", "u", "q"], "levels": LEVELS} | options
    sources = [{"path": str(path), "vertical": vertical} | (source or {})]
    return make_config("", sources=sources, **settings)
