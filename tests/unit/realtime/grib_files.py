"""GRIB 2 files with fields of the bundled sample in the formats of GFS and IFS, and their indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path

import eccodes
import numpy as np
import xarray as xr

import credit.data.bundled

GRAVITY = 9.80665
# Name of a channel -> (discipline, category, number, type of surface, scale, value), and its names in the indexes of
# GFS and IFS.
PARAMETERS = {
    "z850": ((0, 3, 5, 100, 0, 85000), ("HGT", "850 mb"), ("gh", "850")),
    "z500": ((0, 3, 5, 100, 0, 50000), ("HGT", "500 mb"), ("gh", "500")),
    "z250": ((0, 3, 5, 100, 0, 25000), ("HGT", "250 mb"), ("gh", "250")),
    "t850": ((0, 0, 0, 100, 0, 85000), ("TMP", "850 mb"), ("t", "850")),
    "t2m": ((0, 0, 0, 103, 0, 2), ("TMP", "2 m above ground"), ("2t", None)),
    "msl": ((0, 3, 1, 101, 0, 0), ("PRMSL", "mean sea level"), ("msl", None)),
    "sst": ((0, 0, 0, 1, 0, 0), ("TMP", "surface"), ("skt", None)),
    # Records between the requested ones, which the model does not read.
    "u500": ((0, 2, 2, 100, 0, 50000), ("UGRD", "500 mb"), ("u", "500")),
    "rh850": ((0, 1, 1, 100, 0, 85000), ("RH", "850 mb"), ("r", "850")),
}
# Order in the file. Some requested records are adjacent.
ORDER = ("msl", "z850", "t850", "rh850", "z500", "u500", "z250", "t2m", "sst")
_KEYS = (
    "discipline", "parameterCategory", "parameterNumber", "typeOfFirstFixedSurface",
    "scaleFactorOfFirstFixedSurface", "scaledValueOfFirstFixedSurface",
)  # fmt: skip


@dataclass
class GribFile:
    """GRIB file in memory: its messages in order, by name of the channel."""

    time: datetime
    messages: dict[str, bytes] = field(default_factory=dict)

    def content(self) -> bytes:
        """Return the bytes of the file."""
        return b"".join(self.messages.values())

    def rows(self) -> list[tuple[str, int, int]]:
        """Return name, offset and length of each message."""
        rows = []
        offset = 0
        for name, message in self.messages.items():
            rows.append((name, offset, len(message)))
            offset += len(message)
        return rows

    def gfs_index(self) -> str:
        """Return the index in the format of wgrib2."""
        lines = []
        for number, (name, offset, _) in enumerate(self.rows(), start=1):
            param, level = PARAMETERS[name.rstrip("'")][1]
            lines.append(f"{number}:{offset}:d={self.time:%Y%m%d%H}:{param}:{level}:anl:")
        return "\n".join(lines) + "\n"

    def ecmwf_index(self) -> str:
        """Return the index in the format of ECMWF's open data."""
        lines = []
        for name, offset, length in self.rows():
            param, level = PARAMETERS[name.rstrip("'")][2]
            row = {"domain": "g", "date": f"{self.time:%Y%m%d}", "time": f"{self.time:%H}00", "expver": "0001"}
            row |= {"class": "od", "type": "fc", "stream": "oper", "step": "0", "levtype": "sfc", "param": param}
            if level is not None:
                row |= {"levtype": "pl", "levelist": level}
            lines.append(json.dumps(row | {"_offset": offset, "_length": length}))
        return "\n".join(lines) + "\n"


@lru_cache
def sample_fields(time_index: int) -> Mapping[str, xr.DataArray]:
    """Return fields of the bundled sample, rows from north to south, by name of the channel, in its units.

    Args:
        time_index: index in the file of February and March 2001.
    """
    path = Path(credit.data.bundled.__file__).parent / "speedy" / "speedy_2001q1.nc"
    with xr.open_dataset(path) as dataset:
        fields_at_time = dataset.isel(time=time_index).sortby("latitude", ascending=False).load()
    fields = {f"z{level:g}": fields_at_time["z"].sel(level_z=level, drop=True) for level in (850.0, 500.0, 250.0)}
    fields["t850"] = fields_at_time["t"].isel(level_t=0, drop=True)
    fields |= {name: fields_at_time[name] for name in ("t2m", "msl")}
    # Over land, GFS has the temperature of the ground.
    fields["sst"] = fields_at_time["sst"].where(fields_at_time["sst"].notnull(), fields_at_time["t2m"])
    fields["u500"] = fields_at_time["t2m"] - 280
    fields["rh850"] = fields_at_time["t2m"] - 230
    return fields


def grib_values(name: str, values: np.ndarray) -> np.ndarray:
    """Return values in the units of the GRIB parameter: height for geopotential."""
    return values / GRAVITY if name.startswith("z") else values


def encode_message(
    name: str,
    values_HW: np.ndarray,
    time: datetime,
    centre: str = "kwbc",
    first_longitude: float = 0.0,
    **keys: object,
) -> bytes:
    """Return a GRIB 2 message.

    Args:
        name: name of the channel.
        values_HW: values in the units of the parameter, rows from north to south, NaN where missing.
        time: time of the analysis.
        centre: ``kwbc`` or ``ecmf``.
        first_longitude: longitude of the first column.
        **keys: keys of ecCodes that are set last.
    """
    rows, columns = values_HW.shape
    handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
    try:
        codes = dict(zip(_KEYS, PARAMETERS[name.rstrip("'")][0], strict=True))
        step = 360.0 / columns
        header = {
            "centre": centre, "tablesVersion": 2 if centre == "kwbc" else 32,
            "dataDate": int(f"{time:%Y%m%d}"), "dataTime": int(f"{time:%H%M}"), "stepRange": "0",
            **codes, "Ni": columns, "Nj": rows, "iDirectionIncrementInDegrees": step,
            "jDirectionIncrementInDegrees": 180.0 / rows,
            "latitudeOfFirstGridPointInDegrees": 90 - 90.0 / rows,
            "latitudeOfLastGridPointInDegrees": -90 + 90.0 / rows,
            "longitudeOfFirstGridPointInDegrees": first_longitude % 360,
            "longitudeOfLastGridPointInDegrees": (first_longitude + 360 - step) % 360,
            "bitsPerValue": 24,
        }  # fmt: skip
        if centre == "ecmf":
            # ECMWF uses other parameters for these channels.
            ecmwf_codes = {"msl": (0, 3, 0, 101, 0, 0), "sst": (0, 0, 17, 1, 0, 0)}.get(name)
            header |= dict(zip(_KEYS, ecmwf_codes, strict=True)) if ecmwf_codes else {}
            header["packingType"] = "grid_ccsds"
        for key, value in (header | keys).items():
            eccodes.codes_set(handle, key, value)
        if np.isnan(values_HW).any():
            eccodes.codes_set(handle, "bitmapPresent", 1)
            eccodes.codes_set(handle, "missingValue", 9999.0)
        eccodes.codes_set_values(handle, np.nan_to_num(values_HW, nan=9999.0).ravel().astype(float))
        return eccodes.codes_get_message(handle)
    finally:
        eccodes.codes_release(handle)


def build_file(time: datetime, time_index: int = 20, centre: str = "kwbc", first_longitude: float = 0.0) -> GribFile:
    """Return the file of an analysis with the fields of the sample."""
    file = GribFile(time)
    fields = sample_fields(time_index)
    for name in ORDER:
        values_HW = grib_values(name, fields[name].values)
        columns = round(first_longitude / 360 * values_HW.shape[1])
        values_HW = np.roll(values_HW, -columns, axis=1)
        file.messages[name] = encode_message(name, values_HW, time, centre, first_longitude)
    return file
