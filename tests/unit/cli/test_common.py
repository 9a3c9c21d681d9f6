"""What the commands set for the libraries behind them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Prints whether the pages of a tensor may be large ones: whether its mapping has the flag `hg` (MADV_HUGEPAGE). Whether
# the system then has large pages to give depends on how fragmented its memory is.
LARGE = """
import sys
from credit.cli.common import set_environment_defaults
if sys.argv[1] == "large":
    set_environment_defaults()
import torch
tensor = torch.ones(25 * 2**20)
middle = tensor.data_ptr() + tensor.nbytes // 2
inside = False
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if not first.endswith(":"):
        start, end = (int(bound, 16) for bound in first.split("-"))
        inside = start <= middle < end
    elif inside and first == "VmFlags:":
        print("hg" in line.split())
"""
ASKED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not ASKED.exists() or "[madvise]" not in ASKED.read_text(), reason="large pages not on request")
@pytest.mark.parametrize(("how", "expected"), [("large", "True"), ("plain", "False")])
def test_large_tensors_ask_for_large_pages(how: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", LARGE, how]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == expected
