"""Remote zarr stores: s3://, gs://, https:// and all other protocols of fsspec."""

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
# Files that describe a store, of formats 3 and 2 (consolidated or not).
_DESCRIPTION_NAMES = ("zarr.json", ".zmetadata", ".zgroup")


def is_remote(path: Path | str) -> bool:
    """Return True if the path of a source is a URL, such as ``s3://bucket/store.zarr``."""
    return isinstance(path, str) and _URL.match(path) is not None


def open_remote_store(url: str, storage_options: Mapping[str, object], **options: object) -> xr.Dataset:
    """Open a remote zarr store of format 2 or 3 lazily.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.
        **options: options of ``xarray.open_dataset``.

    Raises:
        DataError: if the library of the protocol is not installed, or the address has no readable zarr store.
    """
    name, description = read_description(url, storage_options)
    # xarray warns if it is told to use consolidated metadata and there are none. Format 2 has them in a file of their
    # own, format 3 in zarr.json.
    is_consolidated = True
    if name != ".zmetadata":
        is_consolidated = json.loads(description).get("consolidated_metadata") is not None
    try:
        store = zarr.storage.FsspecStore.from_url(url, storage_options=dict(storage_options), read_only=True)
        return xr.open_dataset(store, engine="zarr", consolidated=is_consolidated, **options)
    except Exception as error:
        raise _build_unreadable_error(url, error) from error


def read_description(url: str, storage_options: Mapping[str, object]) -> tuple[str, bytes]:
    """Return the name and the content of the metadata file of a remote zarr store.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.

    Raises:
        DataError: if there is no such file, or it cannot be read.
    """
    try:
        files = fsspec.get_mapper(url, **storage_options)
        for name in _DESCRIPTION_NAMES:
            description = files.get(name)
            if description is not None:
                return name, description
    except ImportError as error:
        raise DataError(f"{url}: {error}; for s3, gs and http install: {install_command('cloud')}") from error
    except Exception as error:
        # The library of each protocol has its own errors.
        raise _build_unreadable_error(url, error) from error
    raise DataError(
        f"{url}: there is no zarr store ({', '.join(_DESCRIPTION_NAMES)}); check the address, and whether the store "
        "is public"
    )


def read_remote_fingerprint(url: str, storage_options: Mapping[str, object]) -> list[int]:
    """Return the size in bytes and the CRC32 checksum of the metadata file of a remote zarr store.

    They change when this file changes. Arguments and errors are those of `read_description`.
    """
    _, description = read_description(url, storage_options)
    return [len(description), zlib.crc32(description)]


def _build_unreadable_error(url: str, error: Exception) -> DataError:
    """Return the DataError for a remote store that cannot be read because of `error`."""
    return DataError(
        f"{url}: cannot be read as a zarr store ({type(error).__name__}: {error}); check the address, the network "
        "and the key storage_options next to its path (for public buckets {anon: true})"
    )
