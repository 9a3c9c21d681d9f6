"""Index of a GRIB2 file of forecasts: a JSON file ``NAME.grib2.json`` in the same folder.

A GRIB2 file contains no global attributes and no names of variables. The index contains these attributes and names, and
the position of every message. The writer uses the index to decide if an existing forecast belongs to the same run. The
reader uses the index to find fields without a search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from credit.errors import DataError


@dataclass(frozen=True)
class GribIndex:
    """Content of the index of a GRIB2 file.

    Attributes:
        attributes: global attributes, the same as in a netCDF file.
        content: coordinates and fields, with the keys ``coordinates``, ``fields`` and ``settings``.
        size: size of the file in bytes.
        messages: name of a variable -> offsets of its messages in bytes, as lists over lead times, members and levels;
            -1 if there is no message.
    """

    attributes: dict[str, object]
    content: dict[str, dict]
    size: int
    messages: dict[str, list[list[list[int]]]]

    def to_json(self) -> str:
        """Return the content of the index file, a JSON string."""
        return json.dumps(asdict(self)) + "\n"


def build_index_path(path: Path) -> Path:
    """Return the path of the index of a GRIB2 file."""
    return path.with_name(f"{path.name}.json")


def load_index(path: Path) -> GribIndex:
    """Return the index of a GRIB2 file, read from the index file in the same folder.

    Args:
        path: path of the GRIB2 file.

    Raises:
        DataError: if the index is missing or damaged, or does not belong to the file.
    """
    index_file = build_index_path(path)
    remedy = "run credit rollout again, which completes the forecast"
    try:
        stored = json.loads(index_file.read_text(encoding="utf-8"))
        index = GribIndex(**stored)
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: the index {index_file.name} is missing. GRIB2 forecasts are read with the index that credit "
            f"rollout writes; {remedy}, or convert forecasts of other programs to netCDF"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{index_file}: cannot be read ({error}); {remedy}") from error
    if index.size != size:
        raise DataError(f"{path}: has {size} bytes instead of {index.size}; {remedy}")
    return index


def to_json_values(content: Mapping[str, object]) -> dict[str, dict]:
    """Return values converted to the types that JSON can store, for example tuples to lists."""
    return json.loads(json.dumps(content))
