"""Script that extracts the sample data of the package from the full simulation.

Usage: ``python -m credit.data.bundled.cut_sample SOURCE_FOLDER``.

Packed integers are copied without repacking. A chunk contains one latitude row at all times of a file. The
compressed files are 13 to 20 % smaller with these chunks than with chunks of complete maps.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from pathlib import Path

import cftime
import netCDF4
import numpy as np

# Name of a variable -> levels in hPa; None for 2-D variables.
FIELDS: dict[str, list[float] | None] = {
    "z": [850, 500, 250],
    "t": [850],
    "t2m": None,
    "msl": None,
    "sst": None,
}
STATIC = ("geopotential_at_surface", "land_sea_mask")
# File of the sample data -> source file, first day and last day. The files of 2000 are for training; the files of 2001
# contain the periods for validation and test.
FILES = {
    "speedy_2000q1.nc": ("speedy_t31_5.625deg_6h_2000Q1.nc", (2000, 1, 1), (2000, 3, 31)),
    "speedy_2000q2.nc": ("speedy_t31_5.625deg_6h_2000Q2.nc", (2000, 4, 1), (2000, 6, 30)),
    "speedy_2000q3.nc": ("speedy_t31_5.625deg_6h_2000Q3.nc", (2000, 7, 1), (2000, 9, 30)),
    "speedy_2000q4.nc": ("speedy_t31_5.625deg_6h_2000Q4.nc", (2000, 10, 1), (2000, 12, 31)),
    "speedy_2001q1.nc": ("speedy_t31_5.625deg_6h_2001Q1.nc", (2001, 2, 15), (2001, 3, 10)),
    "speedy_2001q2.nc": ("speedy_t31_5.625deg_6h_2001Q2.nc", (2001, 4, 1), (2001, 5, 20)),
}
# Largest total size of all files, because every installation of the package contains these files.
LIMIT_BYTES = 20_000_000


def cut_sample(source_folder: Path, target_folder: Path) -> Counter[str]:
    """Write the files of the sample data.

    Args:
        source_folder: folder of the full simulation.
        target_folder: folder of the sample data; existing files are overwritten.

    Returns:
        Mapping from each field (variable and level, such as ``z500``) to its compressed bytes in all files. The
        additional key ``total`` contains the total size of the files.
    """
    target_folder.mkdir(parents=True, exist_ok=True)
    sizes: Counter[str] = Counter()
    for name, (source_name, first, last) in FILES.items():
        target_path = target_folder / name
        with netCDF4.Dataset(source_folder / source_name) as source, netCDF4.Dataset(target_path, "w") as target:
            source.set_auto_maskandscale(False)
            _copy_sample(source, target, _find_times_within(source, first, last))
        sizes["total"] += target_path.stat().st_size
        sizes.update(_count_bytes_by_field(target_path))
    return sizes


def _find_times_within(source: netCDF4.Dataset, first: tuple[int, int, int], last: tuple[int, int, int]) -> np.ndarray:
    """Return the indices of the times from 0 h of one day to 23 h of the same or a later day.

    Args:
        source: file of the full simulation.
        first: first day as (year, month, day).
        last: last day as (year, month, day).
    """
    time = source["time"]
    begin = cftime.date2num(cftime.datetime(*first, calendar=time.calendar), time.units, time.calendar)
    end = cftime.date2num(cftime.datetime(*last, 23, calendar=time.calendar), time.units, time.calendar)
    return np.flatnonzero((time[:] >= begin) & (time[:] <= end))


def _copy_sample(source: netCDF4.Dataset, target: netCDF4.Dataset, times: np.ndarray) -> None:
    """Copy the part of a source file that belongs to the sample data to an empty file.

    Args:
        source: file of the full simulation.
        target: empty file, to which global attributes, coordinates, `FIELDS` and `STATIC` are copied.
        times: (N,) indices of the times to copy.
    """
    target.setncatts({name: source.getncattr(name) for name in source.ncattrs()})
    target.comment = f"{source.comment} Cut to some of the fields, levels and times; packed values unchanged."
    for name in ("time", "latitude", "longitude"):
        values = source[name][:]
        if name == "time":
            values = values[times]
        target.createDimension(name, len(values))
        _create_variable(target, source[name], name, (name,))[:] = values
    # Fields. A chunk contains all times and columns of one row on one level.
    columns = len(source["longitude"])
    for name, levels in FIELDS.items():
        variable = source[name]
        if levels is None:
            cut_variable = _create_variable(target, variable, name, variable.dimensions, (len(times), 1, columns))
            cut_variable[:] = variable[times]
            continue
        # Variables have different levels, so each variable needs a separate dimension.
        vertical = f"level_{name}"
        rows = [int(np.flatnonzero(source["level"][:] == level)[0]) for level in levels]
        target.createDimension(vertical, len(rows))
        _create_variable(target, source["level"], vertical, (vertical,))[:] = source["level"][rows]
        dimensions = ("time", vertical, "latitude", "longitude")
        cut_variable = _create_variable(target, variable, name, dimensions, (len(times), 1, 1, columns))
        cut_variable[:] = variable[times][:, rows]
    for name in STATIC:
        _create_variable(target, source[name], name, source[name].dimensions)[:] = source[name][:]


def _create_variable(
    target: netCDF4.Dataset,
    template: netCDF4.Variable,
    name: str,
    dimensions: tuple[str, ...],
    chunks: tuple[int, ...] | None = None,
) -> netCDF4.Variable:
    """Create a compressed variable with the type and attributes of an existing variable.

    Args:
        target: file in which the variable is created.
        template: variable of the source file, from which type and attributes are copied.
        name: name of the new variable.
        dimensions: names of the dimensions of the new variable.
        chunks: chunk shape of the new variable; None for the default of the netCDF library.

    Returns:
        The new variable. Values must be packed before they are assigned to this variable.
    """
    attributes = {key: template.getncattr(key) for key in template.ncattrs()}
    variable = target.createVariable(
        name,
        template.dtype,
        dimensions,
        zlib=len(dimensions) > 1,
        complevel=9,
        shuffle=True,
        chunksizes=chunks,
        fill_value=attributes.pop("_FillValue", None),
    )
    variable.setncatts(attributes)
    # Setting the attributes of packed values turns automatic packing on, so turn it off afterwards.
    variable.set_auto_maskandscale(False)
    return variable


def _count_bytes_by_field(path: Path) -> dict[str, int]:
    """Return a mapping from each field of a file (variable and level, such as ``z500``) to its compressed bytes.

    The values are compressed row by row, as in the chunks of the file.
    """
    sizes = {}
    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        for name, levels in FIELDS.items():
            values = file[name][:]
            fields = {name: values}
            if levels is not None:
                # Axis 1 is the axis of the levels.
                values_of_level = zip(levels, np.moveaxis(values, 1, 0), strict=True)
                fields = {f"{name}{level}": field for level, field in values_of_level}
            for label, field in fields.items():
                sizes[label] = sum(_count_compressed_bytes(field[:, row]) for row in range(field.shape[1]))
    return sizes


def _count_compressed_bytes(values: np.ndarray) -> int:
    """Return the size of an array in bytes after HDF5's shuffle filter and zlib compression at level 9."""
    # The shuffle filter of HDF5 stores the first bytes of all values, then the second bytes, and so on.
    shuffled = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize).T
    return len(zlib.compress(shuffled.tobytes(), 9))


def main() -> int:
    """Write the sample data, print the compressed size of each field, and return the exit status.

    Returns:
        0 on success, 1 if the sample is larger than `LIMIT_BYTES`, 2 for wrong arguments on the command line.
    """
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
