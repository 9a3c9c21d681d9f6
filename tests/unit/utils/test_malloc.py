"""Retention of freed memory by malloc."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
from credit.utils.malloc import retain_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    retain_freed_memory(torch.device("cpu"))
def step():
    tensors = [torch.ones(5 * 2**20) for _ in range(5)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_reused() -> None:
    def count_page_faults(mode: str) -> int:
        # This fixes the initial threshold of glibc, at which every large tensor is returned to the system.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17), "THP_MEM_ALLOC_ENABLE": "0"}
        command = [sys.executable, "-c", SCRIPT, mode]
        process = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return int(process.stdout)

    assert count_page_faults("keep") < 1000 < 10000 < count_page_faults("plain")
