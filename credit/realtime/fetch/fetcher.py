"""Fetching of the records of one analysis: reading of the index, byte-range requests, and verified files on the disk.

Each record is a separate file until the analysis is complete, so after an interruption, the next call fetches only the
missing records.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from credit.calendar import Calendar
from credit.config.realtime_section import RealtimeConfig
from credit.errors import CycleError, DataError
from credit.realtime.fetch.decoding import DecodedField, read_record
from credit.realtime.fetch.index import IndexEntry, find_entries, parse_index
from credit.realtime.fetch.message_check import HEADER_LENGTH, parse_length, require_complete_message
from credit.realtime.fetch.records import RecordRequest
from credit.realtime.fetch.transport import HttpClient, TransportError
from credit.utils.atomic import atomic_write

logger = logging.getLogger(__name__)

# Largest number of bytes of adjacent records that are fetched in one request, which limits the memory.
_MAX_REQUEST_BYTES = 2**22
_MAX_LISTED_RECORDS = 3


@dataclass(frozen=True)
class AnalysisFile:
    """GRIB file of one analysis on the server.

    Attributes:
        minutes: time of the analysis in minutes since 1900.
        url: address of the file.
        index_url: address of the index of the file.
        index_format: ``gfs_idx`` or ``ecmwf_index``.
    """

    minutes: int
    url: str
    index_url: str
    index_format: str

    @classmethod
    def from_config(cls, realtime: RealtimeConfig, minutes: int) -> AnalysisFile:
        """Return the file of the analysis at `minutes`, with the placeholders in its addresses replaced."""
        time = Calendar().datetime(minutes)
        # ECMWF's open data have a separate stream for the early cut-off analyses at 06 and 18 UTC.
        stream = "oper" if time.hour in (0, 12) else "scda"
        values = {"date": time.strftime("%Y%m%d"), "cycle": time.strftime("%H"), "stream": stream}
        url = realtime.url.format(**values)
        if realtime.index_url is not None:
            index_url = realtime.index_url.format(**values)
        elif realtime.format == "gfs_idx":
            index_url = f"{url}.idx"
        else:
            index_url = f"{url.removesuffix('.grib2')}.index"
        return cls(minutes, url, index_url, realtime.format)

    def describe(self, name: str, problem: str) -> str:
        """Return a one-line message with the time of the analysis, a field or file name, a problem and the address."""
        return f"analysis {Calendar().format(self.minutes)}: {name}: {problem} [{self.url}]"


class RecordFetcher:
    """Fetcher of the records of one analysis.

    Args:
        file: file on the server.
        requests: requested records.
        folder: folder of the records on the disk, one file per record.
        client: client that reads byte ranges. Damaged records are fetched again, as many times as the client repeats a
            request.
    """

    def __init__(self, file: AnalysisFile, requests: Sequence[RecordRequest], folder: Path, client: HttpClient) -> None:
        self._file = file
        self._requests = requests
        self._folder = folder
        self._client = client

    def record_path(self, request: RecordRequest) -> Path:
        """Return the path of a record on the disk."""
        return self._folder / f"{request.name}.grib2"

    def fetch(self) -> None:
        """Fetch and verify the records that are not yet on the disk.

        Raises:
            CycleError: if the index, a record or the file is missing, or a record is damaged or is not the requested
                record.
        """
        attempt = 0
        while True:
            problem = self._fetch_missing()
            if problem is None:
                return
            # The index may be older than the file, or the transfer may have damaged the record, so both are read again.
            try:
                self._client.wait_before_retry(attempt, "damaged record", problem)
            except TransportError as error:
                raise CycleError(f"{problem} (attempts: {attempt + 1})") from error
            attempt += 1

    def _fetch_missing(self) -> str | None:
        """Fetch the records that are not on the disk; return the first problem with their content, or None.

        Raises:
            CycleError: if a record cannot be fetched.
        """
        if not self._list_missing():
            return None
        index = self._call_client("index", self._client.read_file, self._file.index_url)
        self._discard_records_of_other_version(index)
        entries = self._find_in_index(index, self._list_missing())
        problem = None
        for group in self._group_adjacent(entries):
            start = group[0][1].offset
            length = group[-1][1].offset + group[-1][1].length - start
            names = ", ".join(request.name for request, _ in group[:_MAX_LISTED_RECORDS])
            body = self._call_client(names, self._client.read_range, self._file.url, start, length)
            for request, entry in group:
                first = entry.offset - start
                try:
                    self._store_record(request, body[first : first + entry.length])
                except DataError as error:
                    problem = problem or self._file.describe(request.describe(), str(error))
        return problem

    def _list_missing(self) -> list[RecordRequest]:
        """Return the requests whose records are not on the disk."""
        return [request for request in self._requests if not self.record_path(request).exists()]

    def _discard_records_of_other_version(self, index: bytes) -> None:
        """Delete the records on the disk unless they were fetched with the same `index`.

        A server may replace a file between two calls, and the records of two versions must not be mixed.
        """
        path = self._folder / "index"
        if path.exists() and path.read_bytes() == index:
            return
        if self._folder.exists():
            shutil.rmtree(self._folder)
        self._folder.mkdir(parents=True)
        atomic_write(path, lambda temporary: temporary.write_bytes(index))

    def _find_in_index(
        self, content: bytes, missing: Sequence[RecordRequest]
    ) -> list[tuple[RecordRequest, IndexEntry]]:
        """Return the missing records with their entries in the index, sorted by position in the file.

        Args:
            content: bytes of the index.
            missing: requests of the records that are not on the disk.

        Raises:
            CycleError: if the index cannot be parsed, or lacks a record.
        """
        try:
            index = parse_index(content.decode("utf-8", "replace"), self._file.index_format)
        except DataError as error:
            raise CycleError(self._file.describe(self._file.index_url.rpartition("/")[2], str(error))) from error
        pairs = []
        absent = []
        for request in missing:
            entries = find_entries(index, request, self._file.minutes)
            pairs += [(request, self._complete_entry(request, entry)) for entry in entries]
            if not entries:
                absent.append(request.describe())
        if absent:
            others = f" and {len(absent) - _MAX_LISTED_RECORDS} others" if len(absent) > _MAX_LISTED_RECORDS else ""
            names = ", ".join(absent[:_MAX_LISTED_RECORDS]) + others
            raise CycleError(self._file.describe(names, "not in the index"))
        return sorted(pairs, key=lambda pair: pair[1].offset)

    def _complete_entry(self, request: RecordRequest, entry: IndexEntry) -> IndexEntry:
        """Return an entry with its length, which is read from the header of the message if the index does not have it.

        Raises:
            CycleError: if the header cannot be read.
        """
        if entry.length is not None:
            return entry
        header = self._call_client(request.name, self._client.read_range, self._file.url, entry.offset, HEADER_LENGTH)
        # If the bytes are not a header, they are fetched again as a record, which is then rejected as damaged.
        return replace(entry, length=parse_length(header) or HEADER_LENGTH)

    def _group_adjacent(
        self, entries: Sequence[tuple[RecordRequest, IndexEntry]]
    ) -> list[list[tuple[RecordRequest, IndexEntry]]]:
        """Return groups of adjacent records; a group of several records has at most `_MAX_REQUEST_BYTES`.

        If the same record is requested for several channels, it is fetched once.
        """
        groups: list[list[tuple[RecordRequest, IndexEntry]]] = []
        end = None
        for request, entry in entries:
            is_adjacent = bool(groups) and entry.offset in (end, groups[-1][-1][1].offset)
            if is_adjacent and entry.offset + entry.length - groups[-1][0][1].offset <= _MAX_REQUEST_BYTES:
                groups[-1].append((request, entry))
            else:
                groups.append([(request, entry)])
            end = entry.offset + entry.length
        return groups

    def _store_record(self, request: RecordRequest, content: bytes) -> None:
        """Verify a record and write it to the disk.

        Raises:
            DataError: if the record is damaged or is not the requested record, or if the index lists a second record
                with different content.
        """
        require_complete_message(content)
        path = self.record_path(request)
        if path.exists():
            # The index lists the record twice. If the two records differ, the right record is not known.
            if path.read_bytes() != content:
                path.unlink()
                raise DataError("the index has two records with different content")
            return
        # The file is renamed to its final name after it has been decoded without an error.
        candidate = path.with_suffix(".candidate")
        atomic_write(candidate, lambda temporary: temporary.write_bytes(content))
        try:
            read_record(candidate, request, self._file.minutes)
            candidate.rename(path)
        finally:
            candidate.unlink(missing_ok=True)

    def read(self, request: RecordRequest) -> DecodedField:
        """Return the decoded field of a record that has been fetched, in the units of the message."""
        return read_record(self.record_path(request), request, self._file.minutes)

    def _call_client(self, name: str, read: Callable[..., bytes], *arguments: object) -> bytes:
        """Return the bytes that a method of the client reads.

        Raises:
            CycleError: if the call fails; the message names the analysis, the field and the address.
        """
        try:
            return read(*arguments)
        except TransportError as error:
            text = "not on the server" if error.is_absent else "not read"
            raise CycleError(f"analysis {Calendar().format(self._file.minutes)}: {name}: {text}: {error}") from error
