"""Fixtures for all tests."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).parent.parent


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which would take about 4 % of the CPU time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root folder of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the larger data sets, next to the repository. Tests that need it are skipped if it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


@pytest.fixture(autouse=True, scope="session")
def _use_one_thread() -> None:
    """Compute on one thread, because tests run in several processes at once."""
    torch.set_num_threads(1)
