"""Test of the limit of open files, which `process_group` raises.

Each connection between ranks is an open file, and a thousand ranks may need more than a shell allows.
"""

from __future__ import annotations

import sys

import pytest

from tests.parallel.forked import launch


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts open files in /proc")
def test_process_group_raises_the_limit_of_open_files() -> None:
    assert launch("tests.parallel.runtime.open_files_worker", 2, timeout=120).count("is through") == 2
