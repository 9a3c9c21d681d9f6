"""Environment variables that commands set for libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Program that prints if the memory mapping of a tensor has the flag `hg` (MADV_HUGEPAGE), which permits large pages.
# The number of large pages that the system then provides depends on the fragmentation of its memory.
PROGRAM = """
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
LARGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not LARGE_PAGE_SETTING.exists() or "[madvise]" not in LARGE_PAGE_SETTING.read_text(),
    reason="large pages not on request",
)
@pytest.mark.parametrize(("how", "expected"), [("large", "True"), ("plain", "False")])
def test_large_tensors_request_large_pages(how: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    command = [sys.executable, "-c", PROGRAM, how]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == expected
