"""Cuts the package's sample out of the full simulation: ``python -m credit.data.sample.cut_sample SOURCE_FOLDER``.

Packed integers are copied as they are, nothing is repacked. A chunk holds one latitude row of all times of a file:
neighbouring times of a cell lie close together and deflate 13 to 20 % smaller than in chunks of whole maps.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from pathlib import Path

import cftime
import netCDF4
import numpy as np

# variable -> its levels in hPa, None for 2-D variables
FIELDS: dict[str, list[float] | None] = {
    "z": [850, 500, 250],
    "t": [850],
    "t2m": None,
    "msl": None,
    "sst": None,
}
STATIC = ("geopotential_at_surface", "land_sea_mask")
# file -> source file, first and last day: a year to train on, then what validation and test need
FILES = {
    "speedy_2000q1.nc": ("speedy_t31_5.625deg_6h_2000Q1.nc", (2000, 1, 1), (2000, 3, 31)),
    "speedy_2000q2.nc": ("speedy_t31_5.625deg_6h_2000Q2.nc", (2000, 4, 1), (2000, 6, 30)),
    "speedy_2000q3.nc": ("speedy_t31_5.625deg_6h_2000Q3.nc", (2000, 7, 1), (2000, 9, 30)),
    "speedy_2000q4.nc": ("speedy_t31_5.625deg_6h_2000Q4.nc", (2000, 10, 1), (2000, 12, 31)),
    "speedy_2001q1.nc": ("speedy_t31_5.625deg_6h_2001Q1.nc", (2001, 2, 15), (2001, 3, 10)),
    "speedy_2001q2.nc": ("speedy_t31_5.625deg_6h_2001Q2.nc", (2001, 4, 1), (2001, 5, 20)),
}
LIMIT_BYTES = 20_000_000


def cut_sample(source_folder: Path, target_folder: Path) -> Counter[str]:
    """Write the sample's files.

    Args:
        source_folder: the folder with the full simulation.
        target_folder: where the files go; they are overwritten.

    Returns:
        Bytes on disk by field, over all files, and ``total`` with everything else of the files.
    """
    target_folder.mkdir(parents=True, exist_ok=True)
    sizes: Counter[str] = Counter()
    for name, (source_name, first, last) in FILES.items():
        target = target_folder / name
        with netCDF4.Dataset(source_folder / source_name) as source, netCDF4.Dataset(target, "w") as out:
            source.set_auto_maskandscale(False)
            _copy(source, out, _times_within(source, first, last))
        sizes["total"] += target.stat().st_size
        sizes.update(_bytes_by_field(target))
    return sizes


def _times_within(source: netCDF4.Dataset, first: tuple[int, int, int], last: tuple[int, int, int]) -> np.ndarray:
    time = source["time"]
    begin = cftime.date2num(cftime.datetime(*first, calendar=time.calendar), time.units, time.calendar)
    end = cftime.date2num(cftime.datetime(*last, 23, calendar=time.calendar), time.units, time.calendar)
    return np.flatnonzero((time[:] >= begin) & (time[:] <= end))


def _copy(source: netCDF4.Dataset, out: netCDF4.Dataset, times: np.ndarray) -> None:
    out.setncatts({name: source.getncattr(name) for name in source.ncattrs()})
    out.comment = f"{source.comment} Cut to some of the fields, levels and times; packed values unchanged."
    for name in ("time", "latitude", "longitude"):
        out.createDimension(name, len(times) if name == "time" else len(source[name]))
        values = source[name][times] if name == "time" else source[name][:]
        _create(out, source[name], name, (name,))[:] = values
    columns = len(source["longitude"])
    for name, levels in FIELDS.items():
        variable = source[name]
        if levels is None:
            made = _create(out, variable, name, variable.dimensions, (len(times), 1, columns))
            made[:] = variable[times]
            continue
        # each variable has its own levels, so its own dimension
        vertical = f"level_{name}"
        rows = [int(np.flatnonzero(source["level"][:] == level)[0]) for level in levels]
        out.createDimension(vertical, len(rows))
        _create(out, source["level"], vertical, (vertical,))[:] = source["level"][rows]
        dimensions = ("time", vertical, "latitude", "longitude")
        made = _create(out, variable, name, dimensions, (len(times), 1, 1, columns))
        made[:] = variable[times][:, rows]
    for name in STATIC:
        _create(out, source[name], name, source[name].dimensions)[:] = source[name][:]


def _create(
    out: netCDF4.Dataset,
    like: netCDF4.Variable,
    name: str,
    dimensions: tuple[str, ...],
    chunks: tuple[int, ...] | None = None,
) -> netCDF4.Variable:
    attributes = {key: like.getncattr(key) for key in like.ncattrs()}
    made = out.createVariable(
        name,
        like.dtype,
        dimensions,
        zlib=len(dimensions) > 1,
        complevel=9,
        shuffle=True,
        chunksizes=chunks,
        fill_value=attributes.pop("_FillValue", None),
    )
    made.setncatts(attributes)
    made.set_auto_maskandscale(False)  # after the attributes, which would switch it on
    return made


def _bytes_by_field(path: Path) -> dict[str, int]:
    """Return the size of each field's values, deflated on their own as the file stores them."""
    sizes = {}
    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        for name, levels in FIELDS.items():
            values = file[name][:]
            stack = [values] if levels is None else np.moveaxis(values, 1, 0)
            for level, field in zip(levels or [""], stack, strict=True):
                sizes[f"{name}{level}"] = sum(_deflated(field[:, row]) for row in range(field.shape[1]))
    return sizes


def _deflated(values: np.ndarray) -> int:
    shuffled = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T
    return len(zlib.compress(shuffled.tobytes(), 9))


def main() -> int:
    """Cut and print the bytes of each field."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    sizes = cut_sample(Path(sys.argv[1]), Path(__file__).parent / "speedy")
    for name, size in sizes.items():
        print(f"{name:12s} {size / 1e6:7.3f} MB")
    if sizes["total"] > LIMIT_BYTES:
        print(f"too large: at most {LIMIT_BYTES / 1e6:g} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
