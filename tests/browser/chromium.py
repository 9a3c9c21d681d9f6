"""Headless Chromium that is controlled through pipes with the DevTools protocol; it ends when the pipes are closed.

Protocol: https://chromedevtools.github.io/devtools-protocol. Messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_TIMEOUT_S = 60.0  # A loaded machine starts a browser slowly.
_KEY_CODES = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
# The browser reads commands from file descriptor 3 and answers on 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--mute-audio",
)  # fmt: skip


class PageError(AssertionError):
    """Failed action of the page or the browser."""


class Chromium:
    """Browser with one page.

    Attributes:
        problems: warnings and errors that the page wrote to the console, and uncaught exceptions.
        requests: addresses that the page requested.
    """

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._number, self._buffer, self._session = 0, b"", None
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        # Chromium cannot use its sandbox as root.
        options = [*_OPTIONS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(read_end), str(write_end), EXECUTABLE, *options, "about:blank"],
            pass_fds=(read_end, write_end), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        try:
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.command(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the browser; kill it if it does not end within 5 s."""
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            block = os.read(self._from, 1 << 20) if ready else b""
            if not block:
                raise PageError(f"{awaited}: the browser has {'ended' if ready else f'not answered in {_TIMEOUT_S} s'}")
            self._buffer += block
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(
                " ".join(str(argument.get("value", argument.get("description"))) for argument in parameters["args"])
            )
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def show(self, width: int, height: int, *, dark: bool = False, phone: bool = False, calm: bool = False) -> None:
        """Set the screen: size in pixels, dark mode, touch input of a phone, and reduced motion (`calm`)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}
        self.command("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, path: Path, part: str = "", *, script: bool = True) -> None:
        """Open a file with the fragment `part`, and wait until it is loaded and its script is ready."""
        self.command("Emulation.setScriptExecutionDisabled", value=not script)
        # Open an empty page first, because a change of the fragment alone does not load the file again.
        for address in ("about:blank", path.as_uri() + part):
            self._loaded = False
            self.command("Page.navigate", url=address)
            deadline = time.monotonic() + _TIMEOUT_S
            while not self._loaded:
                self._receive(deadline, f"loading {address}")
        if script:
            self.wait("document.documentElement.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise PageError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(condition):
            if time.monotonic() > deadline:
                raise PageError(f"not true after {_TIMEOUT_S} s: {condition}; {self.problems}")
            time.sleep(0.02)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element, and send the event of a user's choice."""
        quoted_selector = json.dumps(selector)
        options = self.evaluate(f"[...document.querySelector({quoted_selector}).options].map((own) => own.value)")
        if value not in options:
            raise PageError(f"{selector}: has no option {value}, but {options}")
        self.evaluate(
            f"(() => {{ const own = document.querySelector({quoted_selector}); own.value = {json.dumps(value)};"
            "own.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def click(self, selector: str, across: float = 0.5) -> None:
        """Press the mouse on an element, at a share of its width."""
        x, y = self.place(selector, across)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str, across: float = 0.5) -> None:
        """Move the mouse over an element."""
        x, y = self.place(selector, across)
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, selector: str, across: float = 0.5) -> None:
        """Touch an element with a finger."""
        x, y = self.place(selector, across)
        self.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def place(self, selector: str, across: float = 0.5) -> tuple[float, float]:
        """Scroll an element into view; return the position of a point on it."""
        box = self.evaluate(
            f"(() => {{ const own = document.querySelector({json.dumps(selector)}); if (!own) return null;"
            "own.scrollIntoView({block: 'center', inline: 'center'}); const box = own.getBoundingClientRect();"
            "return [box.left, box.width, box.top + box.height / 2]; })()"
        )
        if box is None:
            raise PageError(f"{selector}: is not there")
        left, width, y = box
        return left + across * width, y

    def press(self, key: str) -> None:
        """Press a key, such as ArrowRight."""
        for kind in ("keyDown", "keyUp"):
            code = _KEY_CODES.get(key, 0)  # Without the code, the page does not scroll.
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write the visible part of the page, or the whole page, as PNG."""
        answer = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
