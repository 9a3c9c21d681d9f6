"""HTTP client for complete files and byte ranges, which repeats requests after transient errors."""

from __future__ import annotations

import http.client
import logging
import random
import re
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime

from credit.errors import CreditError
from credit.realtime.clock import Clock

logger = logging.getLogger(__name__)

# Status codes of transient errors: timeout, too many requests, and errors of the server.
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# First and longest wait in seconds between two attempts without a Retry-After header.
_FIRST_WAIT = 1.0
_LONGEST_WAIT = 60.0
# Longest wait in seconds that a server may request with Retry-After; with a longer wait, the request fails.
_LONGEST_RETRY_AFTER = 900.0
# Values of Content-Encoding that mean compression. Other values, such as aws-chunked, do not change the bytes.
_COMPRESSIONS = ("gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


class TransportError(CreditError):
    """Error of a request that still fails after all repetitions; the message names the address.

    Attributes:
        is_absent: True if the file is not on the server.
    """

    def __init__(self, message: str, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


class _TransientError(Exception):
    """Failure of one attempt, which may succeed when it is repeated.

    Attributes:
        retry_after: wait in seconds that the server requests; None if it requests no wait.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class HttpClient:
    """HTTP client that reads files and byte ranges.

    A request is repeated after a timeout, a broken connection, a truncated answer, and the statuses 408, 429, 500, 502,
    503 and 504. The wait between attempts doubles from one second to a minute, unless the header Retry-After defines
    it. Proxies are read from the environment (``https_proxy``).

    Args:
        retries: largest number of repetitions of a request.
        timeout: longest wait in seconds for an answer.
        clock: clock whose deadline ends the repetitions.

    Attributes:
        bytes_received: number of bytes of all received bodies.
    """

    def __init__(self, retries: int, timeout: float, clock: Clock) -> None:
        self._retries = retries
        self._timeout = timeout
        self._clock = clock
        self.bytes_received = 0

    def read_file(self, url: str) -> bytes:
        """Return the content of a file.

        Raises:
            TransportError: if the file cannot be read.
        """
        return self._request_until_success(url, None)

    def read_range(self, url: str, offset: int, length: int) -> bytes:
        """Return `length` bytes of a file, starting at `offset`.

        Raises:
            TransportError: if the bytes cannot be read, or the server does not support byte ranges.
        """
        return self._request_until_success(url, (offset, length))

    def _request_until_success(self, url: str, byte_range: tuple[int, int] | None) -> bytes:
        """Request a file, or its `byte_range` (offset, length), until an attempt succeeds; return the bytes."""
        attempt = 0
        while True:
            try:
                return self._request_once(url, byte_range)
            except _TransientError as error:
                self.wait_before_retry(attempt, url, str(error), error.retry_after)
            attempt += 1

    def wait_before_retry(self, attempt: int, subject: str, reason: str, retry_after: float | None = None) -> None:
        """Wait before an attempt is repeated.

        Args:
            attempt: number of the failed attempt, starting at 0.
            subject: address or file, for the message.
            reason: reason of the failure.
            retry_after: wait in seconds that the server requests; None if it requests no wait.

        Raises:
            TransportError: if all attempts have failed, or the wait would end after the deadline.
        """
        if attempt >= self._retries:
            raise TransportError(f"{subject}: {reason}, in each of {attempt + 1} attempts")
        # Random waits prevent many clients from repeating their requests at the same moment.
        seconds = min(_LONGEST_WAIT, _FIRST_WAIT * 2**attempt) * random.uniform(0.75, 1.0)
        if retry_after is not None:
            seconds = retry_after
        if seconds > _LONGEST_RETRY_AFTER or not self._clock.can_wait(seconds):
            raise TransportError(f"{subject}: {reason}; there is no time to wait {seconds:.0f} s for another attempt")
        logger.info("%s: %s; next attempt in %.1f s", subject, reason, seconds)
        self._clock.sleep(seconds)

    def _request_once(self, url: str, byte_range: tuple[int, int] | None) -> bytes:
        """Make one attempt of a request and return the bytes; for arguments see `_request_until_success`.

        Raises:
            _TransientError: if a repeated attempt may succeed.
            TransportError: if repeating the attempt would not help.
        """
        # The lengths of compressed answers would differ from the lengths in the index.
        headers = {"Accept-Encoding": "identity", "User-Agent": "credit-weather"}
        if byte_range is not None:
            offset, length = byte_range
            headers["Range"] = f"bytes={offset}-{offset + length - 1}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=self._timeout) as answer:
                _require_uncompressed(url, answer)
                if byte_range is None:
                    body = answer.read()
                else:
                    _require_range(url, answer, offset, length)
                    # One additional byte is read to detect an answer that is too long.
                    body = answer.read(length + 1)
        except urllib.error.HTTPError as error:
            # The reason of an endless redirection has several lines.
            reason = f"the server answers {error.code} {' '.join(str(error.reason).split())}"
            retry_after = self._parse_retry_after(error.headers.get("Retry-After"))
            error.close()
            if error.code in _TRANSIENT:
                raise _TransientError(reason, retry_after) from error
            if error.code == 416:
                reason = (
                    f"the file ends before the requested {headers.get('Range')}; the index does not belong to this file"
                )
            # Object stores answer 403 if a file does not exist and listing is not allowed.
            raise TransportError(f"{url}: {reason}", is_absent=error.code in (403, 404, 410)) from error
        except (OSError, http.client.HTTPException) as error:
            # Timeouts, refused and broken connections, and bodies that are shorter than announced.
            raise _TransientError(f"{type(error).__name__}: {getattr(error, 'reason', None) or error}") from error
        self.bytes_received += len(body)
        if byte_range is not None and len(body) != length:
            raise _TransientError(f"{len(body)} bytes arrived instead of {length}")
        return body

    def _parse_retry_after(self, value: str | None) -> float | None:
        """Return the wait in seconds of a Retry-After header (a number of seconds or a date); None if there is none."""
        if value is None:
            return None
        if value.strip().isdigit():
            return float(value)
        try:
            return max(0.0, parsedate_to_datetime(value).timestamp() - self._clock.seconds())
        except ValueError:
            return None


def _require_uncompressed(url: str, answer: http.client.HTTPResponse) -> None:
    """Raise TransportError if a server sends compressed bytes although uncompressed bytes were requested.

    Raises:
        TransportError: if the bytes are compressed.
    """
    encoding = answer.headers.get("Content-Encoding", "")
    if any(name.strip().lower() in _COMPRESSIONS for name in encoding.split(",")):
        raise TransportError(
            f"{url}: the server sends the file compressed (Content-Encoding: {encoding}), although uncompressed bytes "
            "were requested; use a different server"
        )


def _require_range(url: str, answer: http.client.HTTPResponse, offset: int, length: int) -> None:
    """Raise TransportError if the header of an answer does not announce the requested bytes.

    Raises:
        TransportError: if the server would send the complete file, or different bytes.
    """
    if answer.status != 206:
        raise TransportError(
            f"{url}: the server answers {answer.status} to a request for a byte range, so it would send the complete "
            "file; use a server that supports byte ranges"
        )
    content_range = _CONTENT_RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if content_range is None or int(content_range[1]) != offset:
        raise TransportError(
            f"{url}: bytes {offset} to {offset + length - 1} were requested, but the server sends different bytes "
            f"(Content-Range: {answer.headers.get('Content-Range')})"
        )
