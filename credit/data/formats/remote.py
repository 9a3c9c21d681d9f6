"""Zarr stores that are not on a disk: s3://, gs://, https:// and whatever else fsspec knows."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import fsspec
import xarray as xr
import zarr

from credit.errors import DataError
from credit.utils.installation import install_command

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
_DESCRIPTIONS = ("zarr.json", ".zmetadata", ".zgroup")


def is_remote(path: Path | str) -> bool:
    """Whether a source's path is a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


def open_remote(url: str, storage_options: Mapping[str, object], **options: object) -> xr.Dataset:
    """Open a remote zarr store of format 2 or 3 lazily.

    Args:
        url: where it is.
        storage_options: for the file system, such as ``{"anon": True}``.
        **options: for ``xarray.open_dataset``.

    Raises:
        DataError: if the protocol's library is not installed, or there is no zarr store that can be read.
    """
    name, description = read_description(url, storage_options)
    consolidated = name == ".zmetadata" or json.loads(description).get("consolidated_metadata") is not None
    try:
        store = zarr.storage.FsspecStore.from_url(url, storage_options=dict(storage_options), read_only=True)
        return xr.open_dataset(store, engine="zarr", consolidated=consolidated, **options)
    except Exception as error:
        raise _unreachable(url, error) from error


def read_description(url: str, storage_options: Mapping[str, object]) -> tuple[str, bytes]:
    """Return name and content of the file that describes a remote zarr store.

    Raises:
        DataError: if there is none, or it cannot be reached.
    """
    try:
        files = fsspec.get_mapper(url, **storage_options)
        found = ((name, files.get(name)) for name in _DESCRIPTIONS)
        name, description = next((item for item in found if item[1] is not None), (None, None))
    except ImportError as error:
        raise DataError(f"{url}: {error}; for s3, gs and http install: {install_command('cloud')}") from error
    except Exception as error:
        # each protocol's library has its own errors
        raise _unreachable(url, error) from error
    if name is None:
        raise DataError(
            f"{url}: there is no zarr store ({', '.join(_DESCRIPTIONS)}); it is perhaps elsewhere or not public"
        )
    return name, description


def remote_fingerprint(url: str, storage_options: Mapping[str, object]) -> list[int]:
    """Return bytes and checksum of a remote store's description."""
    _, description = read_description(url, storage_options)
    return [len(description), zlib.crc32(description)]


def _unreachable(url: str, error: Exception) -> DataError:
    return DataError(
        f"{url}: cannot be read as a zarr store ({type(error).__name__}: {error}); look at the address, the network "
        "and the key storage_options beside its path (for public buckets {anon: true})"
    )
