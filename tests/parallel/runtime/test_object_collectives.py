"""A rank whose peer dies during a collective of Python objects ends with an error that says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.ranks import REPOSITORY, free_port
from tests.parallel.forked import launch


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["run_on_rank0", "run_on_all_ranks"])
def test_a_rank_that_is_left_alone_says_so(collective: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
               "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}  # fmt: skip
    command = [sys.executable, "-m", "tests.parallel.runtime.object_collectives_worker", collective]
    ranks = [
        subprocess.Popen(
            command,
            env=environ | {"RANK": rank, "LOCAL_RANK": rank},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in "01"
    ]
    try:
        outputs = [process.communicate(timeout=200)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[0].returncode == -9, outputs[0]
    assert ranks[1].returncode == 3 and "the connection to another rank was lost" in outputs[1], outputs[1]


@pytest.mark.slow
def test_results_and_errors_of_four_ranks() -> None:
    assert launch("tests.parallel.runtime.collective_cases_worker", 4, timeout=120).count("is through") == 4
