"""What the commands set for the libraries behind them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LARGE = """
import resource, sys
from credit.cli.common import set_environment_defaults
if sys.argv[1] == "large":
    set_environment_defaults()
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(25 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ASKED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not ASKED.exists() or "[madvise]" not in ASKED.read_text(), reason="large pages not on request")
def test_large_tensors_lie_on_large_pages() -> None:
    def touched(how: str) -> int:
        environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
        command = [sys.executable, "-c", LARGE, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    assert touched("large") < 5000 < 20000 < touched("plain")
