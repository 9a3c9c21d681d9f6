"""A browser for the tests of this folder, and pages to look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import EXECUTABLE, Chromium


@pytest.fixture(scope="session")
def _running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if EXECUTABLE is None:
        pytest.skip("there is no Chromium on this machine")
    running = Chromium(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def browser(_running: Chromium) -> Iterator[Chromium]:
    """A browser; after each test there must have been no problem and no request but for files and data."""
    _running.problems.clear()
    _running.requests.clear()
    _running.show(1280, 900)
    yield _running
    assert _running.problems == []
    assert [own for own in _running.requests if not own.startswith(("file:", "data:", "about:"))] == []


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pages are written."""
    return tmp_path_factory.mktemp("pages")
