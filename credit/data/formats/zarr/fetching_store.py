"""Remote zarr store that repeats failed requests, fetches chunks in advance, and counts the fetched bytes."""

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

# HTTP statuses after which a repeated request may succeed: timeouts, too many requests, and server errors.
_TRANSIENT_STATUSES = frozenset((408, 425, 429, 500, 502, 503, 504))
# Errors for missing or unreadable files. Repeating the request would not help.
_PERMANENT_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
# A request is sent at most this many times. The delays between attempts double up to the longest delay and add up to at
# most two minutes. A random part prevents many processes from sending requests at the same moment.
MAX_ATTEMPTS = 8
FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 60.0


class FetchError(Exception):
    """Error for an object that could not be fetched, because the server failed or rejected the request.

    The content of the object is unknown, so readers must not treat the data as damaged.
    """


class FetchingStore(WrapperStore[FsspecStore]):
    """Remote zarr store whose objects are fetched by several threads in parallel.

    The store fetches the chunks that `fetch_ahead` names immediately. It keeps them compressed in memory until the next
    call of `fetch_ahead` names different chunks. All other objects are fetched when zarr reads them. A request that
    fails with a transient error is repeated with increasing delays.

    Args:
        url: address of the store.
        storage_options: options of the file system, such as ``{"anon": True}``.
        max_fetches: largest number of requests that run at the same time.

    Attributes:
        fetched_bytes: name of an array -> number of bytes that were fetched.
        fetched_objects: name of an array -> number of objects that were fetched.
    """

    def __init__(self, url: str, storage_options: Mapping[str, object], max_fetches: int) -> None:
        super().__init__(FsspecStore.from_url(url, storage_options=dict(storage_options), read_only=True))
        self.fetched_bytes: Counter[str] = Counter()
        self.fetched_objects: Counter[str] = Counter()
        self._url = url
        self._file_system, self._root = fsspec.core.url_to_fs(url, **storage_options)
        self._pool = ThreadPoolExecutor(max_fetches, "fetch")
        # Key of an object -> its fetch in advance. The condition is the lock for this mapping, because several threads
        # use it. It also wakes the threads that wait before they repeat a request.
        self._ahead: dict[str, Future[bytes | None]] = {}
        self._lock = threading.Condition()
        self._is_closed = False
        # Failed connections are repeated only after the server has answered once; before, the address may be wrong.
        self._has_answered = False

    def fetch_ahead(self, keys: Iterable[str]) -> None:
        """Begin to fetch objects in the given order, and drop all other objects from memory.

        Args:
            keys: keys of complete objects, such as ``temperature/3.0.0.0``.
        """
        with self._lock:
            previous = self._ahead
            self._ahead = {}
            for key in dict.fromkeys(keys):
                fetch = previous.pop(key, None)
                # Repeat a fetch that has failed.
                has_failed = fetch is not None and fetch.done() and fetch.exception() is not None
                if fetch is None or has_failed:
                    fetch = self._pool.submit(self._fetch, key, None, is_ahead=True)
                self._ahead[key] = fetch
            for fetch in previous.values():
                fetch.cancel()
            self._lock.notify_all()

    def wait(self) -> None:
        """Wait until all fetches that `fetch_ahead` has started have finished or failed."""
        with self._lock:
            fetches = list(self._ahead.values())
        wait(fetches)

    def close(self) -> None:
        """Cancel all fetches, including fetches that wait to be repeated."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        super().close()

    def read_object(self, key: str) -> bytes | None:
        """Return the content of an object; None if the store does not contain the object.

        Raises:
            FetchError: if the object cannot be fetched.
        """
        return self._pool.submit(self._fetch, key, None).result()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of an object; None if it does not exist. zarr calls this for every chunk."""
        fetch = None
        if byte_range is None:
            with self._lock:
                fetch = self._ahead.get(key)
        if fetch is None:
            fetch = self._pool.submit(self._fetch, key, byte_range)
        content = await asyncio.wrap_future(fetch)
        return None if content is None else prototype.buffer.from_bytes(content)

    def _fetch(self, key: str, byte_range: ByteRequest | None, is_ahead: bool = False) -> bytes | None:
        """Fetch an object or a part of an object, and repeat the request after transient errors.

        Args:
            key: key of the object.
            byte_range: requested part; None for the complete object.
            is_ahead: True to stop when `fetch_ahead` has dropped the object.

        Raises:
            FetchError: if all attempts fail, or an attempt fails with an error that is not transient.
        """
        path = f"{self._root.rstrip('/')}/{key}"
        start, end = _find_byte_limits(byte_range)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                content = self._file_system.cat_file(path, start=start, end=end)
            except FileNotFoundError:
                self._has_answered = True
                return None
            except Exception as error:
                # The library of each protocol defines its own error classes.
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
                    # Some HTTP servers send the complete object instead of a part.
                    raise FetchError(
                        f"{key}: received {len(content)} bytes instead of {num_bytes}; a store with shards needs a "
                        "server that sends parts of files (HTTP Range)"
                    )
                array_name = key.split("/")[0]
                with self._lock:
                    self.fetched_bytes[array_name] += len(content)
                    self.fetched_objects[array_name] += 1
                return content
        raise AssertionError("the last attempt returns or raises")

    def _wait_to_repeat(self, key: str, delay: float, is_ahead: bool) -> bool:
        """Wait before a request is repeated; return True immediately when the object is no longer needed."""

        def is_dropped() -> bool:
            return self._is_closed or (is_ahead and key not in self._ahead)

        with self._lock:
            return self._lock.wait_for(is_dropped, timeout=delay)

    def _is_transient(self, error: Exception) -> bool:
        """Return True if a request that failed with this error may succeed when it is repeated."""
        # aiohttp stores the HTTP status in `status`, gcsfs in `code`.
        for name in ("status", "code"):
            status = getattr(error, name, None)
            if isinstance(status, int):
                return status in _TRANSIENT_STATUSES
        if isinstance(error, _PERMANENT_ERRORS) or not self._has_answered:
            return False
        # If aiohttp is not imported, its errors cannot occur.
        client_error = getattr(sys.modules.get("aiohttp"), "ClientError", OSError)
        return isinstance(error, (OSError, client_error))

    def _with_store(self, store: FsspecStore) -> FetchingStore:
        """Raise NotImplementedError, because zarr calls this method only to open a store for writing."""
        raise NotImplementedError(f"{self._url}: a remote store is opened for reading only; write to a local folder")


def _find_byte_limits(byte_range: ByteRequest | None) -> tuple[int | None, int | None]:
    """Return the limits of a part of an object, as the arguments ``start`` and ``end`` of fsspec.

    `start` is the position of the first byte; it is negative if it is counted from the end of the object. `end` is the
    position after the last byte. None stands for the beginning or the end of the object.
    """
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
    """Return the seconds to wait after a failed attempt, at least the time in the header ``Retry-After``."""
    delay = min(FIRST_DELAY_SECONDS * 2 ** (attempt - 1), LONGEST_DELAY_SECONDS)
    delay *= random.uniform(0.5, 1.0)
    headers = getattr(error, "headers", None) or {}
    retry_after = str(headers.get("Retry-After", ""))
    # The header may also contain a date. This is rare, so a date is ignored.
    if retry_after.isdecimal():
        delay = max(delay, min(float(retry_after), LONGEST_DELAY_SECONDS))
    return delay
