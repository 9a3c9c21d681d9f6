"""Zarr stores on a disk."""

from __future__ import annotations

import json
from pathlib import Path

import xarray as xr
import zarr

from credit.data.formats.zarr.anemoi import is_anemoi, open_anemoi


def open_local_store(path: Path, **options: object) -> xr.Dataset:
    """Open a zarr store on a disk lazily, of format 2 or 3, and of the layout of xarray or of anemoi-datasets.

    Args:
        path: folder of the store.
        **options: options of ``xarray.open_dataset``.

    Raises:
        DataError: see `credit.data.formats.zarr.anemoi.open_anemoi`.
        Exception: of several classes, if xarray or zarr cannot read the store.
    """
    is_consolidated = _is_consolidated(path)
    group = zarr.open_group(path, mode="r", use_consolidated=is_consolidated)
    if is_anemoi(group.attrs):
        return open_anemoi(group, str(path))
    return xr.open_dataset(path, engine="zarr", consolidated=is_consolidated, **options)


def _is_consolidated(path: Path) -> bool:
    """Return True if a zarr store has consolidated metadata.

    xarray warns if it is told to use consolidated metadata and there are none.
    """
    description = path / "zarr.json"
    if description.exists():
        return json.loads(description.read_text()).get("consolidated_metadata") is not None
    return (path / ".zmetadata").exists()
