"""Process groups and connections are open files: a thousand ranks may need more than a shell allows."""

from __future__ import annotations

import sys

import pytest

from tests.parallel.forked import launch


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_ranks_may_open_as_many_files_as_they_need() -> None:
    assert launch("tests.parallel.runtime.open_files_worker", 2, timeout=120).count("is through") == 2
