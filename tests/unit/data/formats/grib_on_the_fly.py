"""Small GRIB files that tests write with ecCodes."""

from __future__ import annotations

from pathlib import Path

import eccodes
import numpy as np

H, W = 9, 16
LAT = np.linspace(90, -90, H)
LON = np.arange(W) * 22.5


def draw_field(seed: int) -> np.ndarray:
    """Return a random field (H, W) float64, north to south. 24 bits represent it to 1e-5 of its range."""
    return np.random.default_rng(seed).normal(280.0, 5.0, (H, W))


def encode_message(values: np.ndarray, *, edition: int = 2, **keys: float | int | str) -> bytes:
    """Return one message. `values` (H, W) are written in the order given, from north to south and eastward by default.

    Args:
        values: NaN where missing.
        edition: 1 or 2.
        **keys: GRIB keys, set in this order; by default t at 500 hPa, 2000-01-01T00:00, analysis.
    """
    handle = eccodes.codes_grib_new_from_samples(f"regular_ll_pl_grib{edition}")
    grid_keys = {
        "Ni": W, "Nj": H, "iDirectionIncrementInDegrees": 22.5, "jDirectionIncrementInDegrees": 22.5,
        "latitudeOfFirstGridPointInDegrees": 90, "latitudeOfLastGridPointInDegrees": -90,
        "longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 337.5,
    }  # fmt: skip
    default_keys = {"shortName": "t", "dataDate": 20000101, "dataTime": 0, "typeOfLevel": "isobaricInhPa", "level": 500}
    default_keys = {key: value for key, value in default_keys.items() if key != "shortName" or "paramId" not in keys}
    for key, value in {**grid_keys, **default_keys, **keys, "bitsPerValue": 24}.items():
        eccodes.codes_set(handle, key, value)
    if np.isnan(values).any():
        eccodes.codes_set(handle, "bitmapPresent", 1)
        eccodes.codes_set(handle, "missingValue", 1e30)
    eccodes.codes_set_values(handle, np.nan_to_num(values, nan=1e30).ravel())
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


def write_grib(path: Path, *messages: bytes) -> Path:
    """Write messages one after the other, and return the path."""
    path.write_bytes(b"".join(messages))
    return path
