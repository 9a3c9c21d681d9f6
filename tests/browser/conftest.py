"""Fixtures of a browser and of a folder for pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import EXECUTABLE, Chromium


@pytest.fixture(scope="session")
def _session_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if EXECUTABLE is None:
        pytest.skip("there is no Chromium on this machine")
    browser = Chromium(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(_session_browser: Chromium) -> Iterator[Chromium]:
    """Browser that fails a test with console messages, or with requests other than for files and data."""
    _session_browser.problems.clear()
    _session_browser.requests.clear()
    _session_browser.show(1280, 900)
    yield _session_browser
    assert _session_browser.problems == []
    assert [
        address for address in _session_browser.requests if not address.startswith(("file:", "data:", "about:"))
    ] == []


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the pages."""
    return tmp_path_factory.mktemp("pages")
