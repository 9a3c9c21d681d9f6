"""A headless Chromium, driven over the pipe of its DevTools protocol: no port, no driver, and it ends with the pipe.

The protocol: https://chromedevtools.github.io/devtools-protocol. Messages are JSON, each ended by a zero byte.
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
_PATIENCE_S = 60.0  # a loaded machine starts a browser slowly
_KEY_CODES = {"End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
# the browser reads commands from descriptor 3 and answers on 4
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--force-color-profile=srgb", "--mute-audio",
)  # fmt: skip


class PageError(AssertionError):
    """The page or the browser did not do what it was asked to."""


class Chromium:
    """One browser with one page.

    Attributes:
        problems: what the page has written to the console as a warning or an error, and exceptions nobody caught.
        requests: addresses that the page has asked for.
    """

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        self._number, self._buffer, self._session = 0, b"", None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # Chromium refuses its sandbox to root
        options = [*_OPTIONS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), EXECUTABLE, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            target = self.command("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.command(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the browser, whatever it is doing."""
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
        until = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._receive(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, until: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise PageError(
                    f"{awaited}: the browser has {'ended' if ready else f'not answered in {_PATIENCE_S} s'}"
                )
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event: str | None, said: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(own.get("value", own.get("description"))) for own in said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def show(self, width: int, height: int, *, dark: bool = False, phone: bool = False, calm: bool = False) -> None:
        """Set the size of the screen in pixels, its colours, whether it is touched, and whether little shall move."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"}
        self.command("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, path: Path, part: str = "", *, script: bool = True) -> None:
        """Open a file, at `part` behind #, and wait until it is loaded and, where it has a script, ready."""
        self.command("Emulation.setScriptExecutionDisabled", value=not script)
        # by way of an empty page: from a file to another part of the same file nothing would be loaded
        for address in ("about:blank", path.as_uri() + part):
            self._loaded = False
            self.command("Page.navigate", url=address)
            until = time.monotonic() + _PATIENCE_S
            while not self._loaded:
                self._receive(until, f"loading {address}")
        if script:
            self.wait("document.documentElement.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + _PATIENCE_S
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise PageError(f"not true after {_PATIENCE_S} s: {condition}; {self.problems}")
            time.sleep(0.02)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a select element, as a user does."""
        place = json.dumps(selector)
        options = self.evaluate(f"[...document.querySelector({place}).options].map((own) => own.value)")
        if value not in options:
            raise PageError(f"{selector}: has no option {value}, but {options}")
        self.evaluate(
            f"(() => {{ const own = document.querySelector({place}); own.value = {json.dumps(value)};"
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
        """Scroll an element into view; return where it then is."""
        found = self.evaluate(
            f"(() => {{ const own = document.querySelector({json.dumps(selector)}); if (!own) return null;"
            "own.scrollIntoView({block: 'center', inline: 'center'}); const box = own.getBoundingClientRect();"
            "return [box.left, box.width, box.top + box.height / 2]; })()"
        )
        if found is None:
            raise PageError(f"{selector}: is not there")
        left, width, y = found
        return left + across * width, y

    def press(self, key: str) -> None:
        """Press a key, such as ArrowRight."""
        for kind in ("keyDown", "keyUp"):
            code = _KEY_CODES.get(key, 0)  # without it nothing is scrolled
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is to be seen as PNG."""
        found = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
