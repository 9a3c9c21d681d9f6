"""Reader of zarr stores on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import xarray as xr
import zarr

from credit.data.formats.zarr.anemoi import is_anemoi, open_anemoi


def open_local_store(path: Path, **options: object) -> xr.Dataset:
    """Open a zarr store of format 2 or 3 on a disk lazily; xarray or anemoi-datasets may have written it.

    Args:
        path: folder of the store.
        **options: options of ``xarray.open_dataset``.

    Raises:
        DataError: for the same reasons as `credit.data.formats.zarr.anemoi.open_anemoi`.
        Exception: if xarray or zarr cannot read the store; the exception has one of several classes.
    """
    is_consolidated = _is_consolidated(path)
    group = zarr.open_group(path, mode="r", use_consolidated=is_consolidated)
    if is_anemoi(group.attrs):
        return open_anemoi(group, str(path))
    return xr.open_dataset(path, engine="zarr", consolidated=is_consolidated, **options)


def _is_consolidated(path: Path) -> bool:
    """Return True if a zarr store contains consolidated metadata.

    xarray prints a warning if consolidated metadata are requested but do not exist.
    """
    description = path / "zarr.json"
    if description.exists():
        return json.loads(description.read_text()).get("consolidated_metadata") is not None
    return (path / ".zmetadata").exists()
