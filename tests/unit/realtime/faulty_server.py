"""HTTP server of files in memory, with the faults of real servers."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FaultyServer:
    """Server of files that counts its requests.

    Attributes:
        files: path -> content.
        faults: functions of a handler that return True if they answered the request in place of the server.
        requests: (path, range header or None) of each request.
        bytes_sent: bytes of all bodies of GRIB files.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: list[Callable[[BaseHTTPRequestHandler], bool]] = []
        self.requests: list[tuple[str, str | None]] = []
        self.bytes_sent = 0
        self.url = ""

    def reset(self) -> None:
        """Remove all files and faults, and reset the counts."""
        self.files.clear()
        self.faults.clear()
        self.requests.clear()
        self.bytes_sent = 0

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = handler.path.lstrip("/")
        self.requests.append((path, handler.headers.get("Range")))
        for fault in self.faults:
            if fault(handler):
                return
        content = self.files.get(path)
        if content is None:
            handler.send_error(404)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if match is None:
            send_answer(handler, 200, content)
            return
        first, last = int(match[1]), int(match[2])
        if first >= len(content):
            handler.send_error(416)
            return
        body = content[first : last + 1]
        self.bytes_sent += len(body)
        send_answer(handler, 206, body, {"Content-Range": f"bytes {first}-{first + len(body) - 1}/{len(content)}"})


def send_answer(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    """Send an answer; `headers` may replace the header Content-Length."""
    handler.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def serve() -> Iterator[FaultyServer]:
    """Run a server on a free port inside the block."""
    server = FaultyServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http_server.server_address[1]}"
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http_server.shutdown()
        http_server.server_close()
        thread.join()


def build_range_fault(answer: Callable[[BaseHTTPRequestHandler], None], times: int = 10**9) -> Callable:
    """Return a fault that answers the first `times` requests for a byte range of a GRIB file."""
    num_left = [times]

    def fault(handler: BaseHTTPRequestHandler) -> bool:
        if handler.headers.get("Range") is None or num_left[0] == 0:
            return False
        num_left[0] -= 1
        answer(handler)
        return True

    return fault
