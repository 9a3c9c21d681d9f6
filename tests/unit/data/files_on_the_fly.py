"""Helpers that write small netCDF files and build data sections for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import netCDF4
import numpy as np

from credit.config.sections.data import DataConfig

SPLITS = {
    "train": ["2000-01-01", "2000-01-04"],
    "valid": ["2000-01-06", "2000-01-06"],
    "test": ["2000-01-08", "2000-01-08"],
}
# Units in which the value 280 is plausible. All other variables are in K.
_UNITS = {"u": "m s-1", "v": "m s-1", "u10": "m s-1", "v10": "m s-1", "wind": "m s-1", "z": "1"}


def random_fields(*shape: int, seed: int = 0) -> np.ndarray:
    """Return float32 noise with the mean 280 and the standard deviation 5."""
    return np.random.default_rng(seed).normal(280.0, 5.0, shape).astype(np.float32)


def write_file(
    path: Path,
    fields: dict[str, np.ndarray],
    hours: Sequence[float] | None = (0, 6, 12, 18),
    *,
    lat: Sequence[float] | None = None,
    lon: Sequence[float] | None = None,
    levels: Sequence[float] | None = None,
    dims: dict[str, tuple[str, ...]] | None = None,
    units: str = "hours since 2000-01-01 00:00:00",
    calendar: str = "standard",
    level_units: str | None = "hPa",
    attributes: dict[str, dict] | None = None,
    packed: dict[str, float] | None = None,
    time_bounds: np.ndarray | None = None,
) -> Path:
    """Write fields (time, [level,] lat, lon) to a netCDF file.

    `dims` maps a name to other dimensions, and `packed` maps a name to its scale_factor.
    """
    rows, columns = next(iter(fields.values())).shape[-2:] if dims is None else (len(lat), len(lon))
    lat = np.linspace(90 - 90 / rows, -90 + 90 / rows, rows) if lat is None else np.asarray(lat)
    lon = np.arange(columns) * 360 / columns if lon is None else np.asarray(lon)
    path.unlink(missing_ok=True)  # a reader may still have the old file open
    with netCDF4.Dataset(path, "w") as file:
        coordinates = {"lat": (lat, "degrees_north"), "lon": (lon, "degrees_east")}
        if levels is not None:
            coordinates["level"] = (np.asarray(levels, dtype=float), level_units)
        if hours is not None:
            coordinates["time"] = (np.asarray(hours, dtype=float), units)
        for name, (values, unit) in coordinates.items():
            file.createDimension(name, len(values))
            file.createVariable(name, "f8", (name,))[:] = values
            if unit is not None:
                file[name].units = unit
        if hours is not None:
            file["time"].calendar = calendar
        if time_bounds is not None:
            file.createDimension("two", 2)
            file["time"].bounds = "time_bnds"
            file.createVariable("time_bnds", "f8", ("time", "two"))[:] = time_bounds
        for name, values in fields.items():
            axes = (dims or {}).get(name)
            if axes is None:
                axes = {4: ("time", "level", "lat", "lon"), 3: ("time", "lat", "lon"), 2: ("lat", "lon")}[values.ndim]
            for axis, length in zip(axes, values.shape, strict=True):
                if axis not in file.dimensions:
                    file.createDimension(axis, length)
            scale = (packed or {}).get(name)
            variable = file.createVariable(name, "i2" if scale else "f4", axes, fill_value=-32767 if scale else None)
            variable.units = _UNITS.get(name, "K")
            variable.setncatts((attributes or {}).get(name, {}))
            if scale:
                variable.scale_factor = scale
                variable.add_offset = 280.0
            variable[:] = np.ma.array(np.nan_to_num(values, nan=280.0), mask=np.isnan(values)) if scale else values
    return path


def make_config(
    path: str | Path | Sequence[str | Path],
    *,
    p2: Sequence[str] = (),
    p3: Sequence[str] = (),
    static: Sequence[str] = (),
    forcing: Sequence[str] = (),
    levels: Sequence[float] = (),
    sources: list[dict] | None = None,
    **options: object,
) -> DataConfig:
    """Return a data section. `path` is its only source unless `sources` is given.

    `p3` and `p2` are the prognostic variables with and without levels.
    """
    paths = [str(item) for item in path] if isinstance(path, list | tuple) else str(path)
    options.setdefault("splits", SPLITS)
    options.setdefault("split_gap", "24h")
    return DataConfig(
        sources=sources or [{"path": paths}],
        variables={
            "prognostic": {"vars_3D": list(p3), "vars_2D": list(p2)},
            "dynamic_forcing": {"vars_2D": list(forcing)},
            "static": {"vars_2D": list(static)},
        },
        levels=list(levels),
        **options,
    )
