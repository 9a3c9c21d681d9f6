"""Tests of collectives of Python objects: results and errors of four ranks, and the loss of a rank."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.ranks import REPOSITORY, free_port
from tests.parallel.forked import launch


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["run_on_rank0", "run_on_all_ranks"])
def test_rank_reports_lost_connection_when_its_peer_dies(collective: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
                   "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}  # fmt: skip
    command = [sys.executable, "-m", "tests.parallel.runtime.object_collectives_worker", collective]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": rank, "LOCAL_RANK": rank},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == -9, outputs[0]
    assert processes[1].returncode == 3 and "the connection to another rank was lost" in outputs[1], outputs[1]


@pytest.mark.slow
def test_results_and_errors_of_four_ranks() -> None:
    assert launch("tests.parallel.runtime.collective_cases_worker", 4, timeout=120).count("is through") == 4
