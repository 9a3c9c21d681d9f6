"""Reader of remote zarr stores: s3://, gs://, https:// and all other protocols of fsspec."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xarray as xr
import zarr

from credit.data.formats.zarr.anemoi import is_anemoi, open_anemoi
from credit.data.formats.zarr.array_chunks import REMOTE_ARRAYS, RemoteArrays
from credit.data.formats.zarr.fetching_store import FetchError, FetchingStore
from credit.errors import CreditError, DataError, UnavailableError
from credit.utils.installation import install_command

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
# Names of the metadata files of stores of format 3, and of format 2 (consolidated and not consolidated).
_DESCRIPTION_NAMES = ("zarr.json", ".zmetadata", ".zgroup")
# Attributes in which ARCO-ERA5 stores the date up to which it contains data.
_GROWTH_ATTRIBUTES = ("valid_time_stop", "valid_time_stop_era5t", "last_updated")
# Default of `preprocess.fetches`: number of requests that run at the same time.
DEFAULT_FETCHES = 8


def is_remote(path: Path | str) -> bool:
    """Return True if the path of a source is a URL, such as ``s3://bucket/store.zarr``."""
    return isinstance(path, str) and _URL.match(path) is not None


def open_remote_store(
    url: str, storage_options: Mapping[str, object], max_fetches: int = DEFAULT_FETCHES, **options: object
) -> xr.Dataset:
    """Open a remote zarr store of format 2 or 3 lazily.

    The encoding of the dataset contains the entry `REMOTE_ARRAYS`, which is needed to fetch chunks in advance.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.
        max_fetches: largest number of requests that run at the same time.
        **options: options of ``xarray.open_dataset``.

    Raises:
        DataError: if the library of the protocol is not installed, or there is no readable zarr store at the address.
    """
    with _explain_errors(url):
        store = FetchingStore(url, storage_options, max_fetches)
        name, description = _read_first_description(store)
        # xarray warns if consolidated metadata are requested but do not exist. Format 2 stores them in a separate file,
        # and format 3 in zarr.json.
        is_consolidated = True
        if name != ".zmetadata":
            is_consolidated = json.loads(description).get("consolidated_metadata") is not None
        group = zarr.open_group(store, mode="r", use_consolidated=is_consolidated)
        if is_anemoi(group.attrs):
            dataset = open_anemoi(group, url)
        else:
            dataset = xr.open_dataset(store, engine="zarr", consolidated=is_consolidated, **options)
    dataset.encoding[REMOTE_ARRAYS] = RemoteArrays(store, group)
    return dataset


def read_remote_fingerprint(url: str, storage_options: Mapping[str, object]) -> list[int]:
    """Return the size in bytes and the CRC32 checksum of the metadata file of a remote zarr store.

    Size and checksum change when this file changes. Changes of the dates up to which a growing store contains data
    (``valid_time_stop``) are ignored, because these dates change every month.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.

    Raises:
        DataError: if the metadata file does not exist or cannot be read.
    """
    with _explain_errors(url):
        store = FetchingStore(url, storage_options, max_fetches=1)
        name, description = _read_first_description(store)
        store.close()
    content = json.loads(description)
    attributes = content.get("attributes", {})
    if name == ".zmetadata":
        attributes = content.get("metadata", {}).get(".zattrs", {})
    if not attributes.keys().isdisjoint(_GROWTH_ATTRIBUTES):
        for key in _GROWTH_ATTRIBUTES:
            attributes.pop(key, None)
        description = json.dumps(content, sort_keys=True).encode()
    return [len(description), zlib.crc32(description)]


def _read_first_description(store: FetchingStore) -> tuple[str, bytes]:
    """Return the name and the content of the metadata file of a remote store.

    Raises:
        FileNotFoundError: if the store has no metadata file.
    """
    for name in _DESCRIPTION_NAMES:
        description = store.read_object(name)
        if description is not None:
            return name, description
    raise FileNotFoundError


@contextmanager
def _explain_errors(url: str) -> Iterator[None]:
    """Return a context manager that converts errors of libraries to errors with the name of the store and advice.

    Raises:
        UnavailableError: instead of a `FetchError`.
        DataError: instead of any other error.
    """
    try:
        yield
    except CreditError:
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{url}: there is no zarr store ({', '.join(_DESCRIPTION_NAMES)}); check the address, and whether the "
            "store is public"
        ) from error
    except ImportError as error:
        raise DataError(f"{url}: {error}; for s3, gs and http install: {install_command('cloud')}") from error
    except Exception as error:
        # xarray and zarr raise many different errors for damaged metadata.
        error_class = DataError
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, FetchError):
            error_class = UnavailableError
            reason = str(error)
        raise error_class(
            f"{url}: cannot be read as a zarr store ({reason}); check the address, the network "
            "and the key storage_options next to its path (for public buckets {anon: true})"
        ) from error
