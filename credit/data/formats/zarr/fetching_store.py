"""Remote zarr store that repeats failed requests, fetches chunks in advance, and counts what it fetches."""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import fsspec
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, WrapperStore

logger = logging.getLogger(__name__)

# HTTP statuses after which a request may succeed later: timeouts, too many requests, and errors of the server.
_TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
# Errors of a file that is not there or may not be read. Repeating the request would not help.
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# A request is sent at most this many times. The delays between attempts double up to the longest delay and add up to at
# most two minutes. A random part prevents many processes from sending requests at the same moment.
MAX_ATTEMPTS = 8
FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 60.0


class FetchError(Exception):
    """Error for an object that could not be fetched, because the server failed or refused it.

    The error says nothing about the content of the object, so readers must not treat the data as damaged.
    """


class FetchingStore(WrapperStore[FsspecStore]):
    """Remote zarr store whose objects are fetched by threads, several at a time.

    The chunks that `fetch_ahead` names are fetched at once and kept in memory, compressed, until it is called with
    other chunks. All other objects are fetched when zarr asks for them. A request that fails for a reason that may pass
    is repeated with growing delays.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.
        max_fetches: largest number of requests that run at the same time.

    Attributes:
        fetched_bytes: number of bytes that were fetched of each array, by its name.
        fetched_objects: number of objects that were fetched of each array, by its name.
    """

    def __init__(self, url: str, storage_options: Mapping[str, object], max_fetches: int) -> None:
        super().__init__(FsspecStore.from_url(url, storage_options=dict(storage_options), read_only=True))
        self.fetched_bytes: Counter[str] = Counter()
        self.fetched_objects: Counter[str] = Counter()
        self._url = url
        self._file_system, self._root = fsspec.core.url_to_fs(url, **storage_options)
        self._pool = ThreadPoolExecutor(max_fetches, "fetch")
        # Fetches in advance by the key of the object. Several threads use them, hence the lock. Its condition wakes the
        # threads that wait before they repeat a request.
        self._ahead: dict[str, Future[bytes | None]] = {}
        self._lock = threading.Condition()
        self._is_closed = False
        # Until the server has answered once, its address may be wrong, so failed connections are not repeated.
        self._has_answered = False

    def fetch_ahead(self, keys: Iterable[str]) -> None:
        """Begin to fetch objects in the given order, and drop all other objects from memory.

        Args:
            keys: keys of whole objects, such as ``temperature/3.0.0.0``.
        """
        with self._lock:
            previous = self._ahead
            self._ahead = {}
            for key in dict.fromkeys(keys):
                fetch = previous.pop(key, None)
                # A fetch that failed is no reason to fail again.
                has_failed = fetch is not None and fetch.done() and fetch.exception() is not None
                if fetch is None or has_failed:
                    fetch = self._pool.submit(self._fetch, key, None, is_ahead=True)
                self._ahead[key] = fetch
            for fetch in previous.values():
                fetch.cancel()
            self._lock.notify_all()

    def wait(self) -> None:
        """Wait until all objects that `fetch_ahead` named are fetched, or cannot be fetched."""
        with self._lock:
            fetches = list(self._ahead.values())
        wait(fetches)

    def close(self) -> None:
        """Give up all fetches; those that are waiting to be repeated stop."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def read_object(self, key: str) -> bytes | None:
        """Return the content of an object, None if the store does not have it.

        Raises:
            FetchError: if it cannot be fetched.
        """
        return self._pool.submit(self._fetch, key, None).result()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it, None if the store does not have it; zarr calls this for every chunk."""
        fetch = None
        if byte_range is None:
            with self._lock:
                fetch = self._ahead.get(key)
        if fetch is None:
            fetch = self._pool.submit(self._fetch, key, byte_range)
        content = await asyncio.wrap_future(fetch)
        return None if content is None else prototype.buffer.from_bytes(content)

    def _fetch(self, key: str, byte_range: ByteRequest | None, is_ahead: bool = False) -> bytes | None:
        """Fetch an object or a part of it, and repeat the request as often as is worthwhile.

        Args:
            key: key of the object.
            byte_range: the part; None for the whole object.
            is_ahead: True to give up when `fetch_ahead` has dropped the object.

        Raises:
            FetchError: if all attempts fail, or the first one fails and repeating it would not help.
        """
        path = f"{self._root.rstrip('/')}/{key}"
        start, end = _find_limits(byte_range)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                content = self._file_system.cat_file(path, start=start, end=end)
            except FileNotFoundError:
                self._has_answered = True
                return None
            except Exception as error:
                # The library of each protocol has its own errors.
                if not self._is_transient(error):
                    raise FetchError(f"{key}: {type(error).__name__}: {error}") from error
                if attempt == MAX_ATTEMPTS:
                    raise FetchError(
                        f"{key}: {attempt} requests failed, the last with {type(error).__name__}: {error}"
                    ) from error
                delay = _find_delay(error, attempt)
                logger.warning(
                    "%s/%s: %s: %s; trying again in %.0f s", self._url, key, type(error).__name__, error, delay
                )
                if self._wait_to_repeat(key, delay, is_ahead):
                    raise FetchError(f"{key}: given up after {type(error).__name__}: {error}") from error
            else:
                self._has_answered = True
                num_bytes = _count_bytes(byte_range)
                if num_bytes is not None and len(content) != num_bytes:
                    # Some HTTP servers send the whole object instead of a part.
                    raise FetchError(
                        f"{key}: {len(content)} bytes came instead of {num_bytes}; a store with shards needs a server "
                        "that sends parts of files (HTTP Range)"
                    )
                array_name = key.split("/")[0]
                with self._lock:
                    self.fetched_bytes[array_name] += len(content)
                    self.fetched_objects[array_name] += 1
                return content
        raise AssertionError("the last attempt returns or raises")

    def _wait_to_repeat(self, key: str, delay: float, is_ahead: bool) -> bool:
        """Wait for some seconds before a request is repeated; return True at once if it is not needed any more."""

        def is_dropped() -> bool:
            return self._is_closed or (is_ahead and key not in self._ahead)

        with self._lock:
            return self._lock.wait_for(is_dropped, timeout=delay)

    def _is_transient(self, error: Exception) -> bool:
        """Return True if a request that failed with this error may succeed when it is sent again."""
        # aiohttp calls the HTTP status `status`, gcsfs calls it `code`.
        for name in ("status", "code"):
            status = getattr(error, name, None)
            if isinstance(status, int):
                return status in _TRANSIENT_STATUSES
        if isinstance(error, _PERMANENT_ERRORS) or not self._has_answered:
            return False
        # Without aiohttp there is no error of aiohttp.
        client_error = getattr(sys.modules.get("aiohttp"), "ClientError", OSError)
        return isinstance(error, (OSError, client_error))

    def _with_store(self, store: FsspecStore) -> FetchingStore:
        """Refuse to copy this store around a writable one, which zarr does when a store is opened for writing."""
        raise NotImplementedError(f"{self._url}: a remote store is opened for reading only; write to a local folder")


def _find_limits(byte_range: ByteRequest | None) -> tuple[int | None, int | None]:
    """Return the first byte and the byte after the last one of a part of an object, as fsspec counts them."""
    if byte_range is None:
        return None, None
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, byte_range.end
    if isinstance(byte_range, OffsetByteRequest):
        return byte_range.offset, None
    if isinstance(byte_range, SuffixByteRequest):
        return -byte_range.suffix, None
    raise TypeError(f"{byte_range!r} is not a byte range of zarr")


def _count_bytes(byte_range: ByteRequest | None) -> int | None:
    """Return the number of bytes of a part of an object; None if it depends on the size of the object."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.end - byte_range.start
    if isinstance(byte_range, SuffixByteRequest):
        return byte_range.suffix
    return None


def _find_delay(error: Exception, attempt: int) -> float:
    """Return the seconds to wait after a failed attempt; a server may say how many with ``Retry-After``."""
    delay = min(FIRST_DELAY_SECONDS * 2 ** (attempt - 1), LONGEST_DELAY_SECONDS)
    delay *= random.uniform(0.5, 1.0)
    headers = getattr(error, "headers", None) or {}
    retry_after = str(headers.get("Retry-After", ""))
    # The header may also be a date, which is rare and ignored.
    if retry_after.isdecimal():
        delay = max(delay, min(float(retry_after), LONGEST_DELAY_SECONDS))
    return delay
