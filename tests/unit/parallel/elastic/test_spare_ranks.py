"""Numbers of ranks that can train, and spare ranks that wait for the end of the run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from credit.config.sections.execution import ParallelismConfig
from credit.errors import ConfigError
from credit.parallel.elastic.spare_ranks import (
    choose_num_ranks,
    count_smallest_mesh_ranks,
    release_spare_ranks,
    wait_for_run_end,
)
from credit.parallel.mesh import plan_degrees
from credit.parallel.process_info import ProcessInfo, read_process_info
from tests.faults.ranks import free_port

SETTINGS = [
    {},
    {"data": "ddp"},
    {"data": "ddp", "ensemble": 2},
    {"tensor": 2},
    {"replicate": 2, "ensemble": 3},
    {"domain": 2, "tensor": 2},
    {"data": "none", "tensor": 3},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("global_batch", [12, 16, 30])
def test_choose_num_ranks_returns_the_largest_valid_number(settings: dict, global_batch: int) -> None:
    """Compare with a trial of every number of ranks."""
    parallelism = ParallelismConfig(**settings)
    for available in range(1, 26):
        valid_numbers = []
        for num_ranks in range(1, available + 1):
            try:
                if global_batch % plan_degrees(parallelism, num_ranks).num_sample_ranks == 0:
                    valid_numbers.append(num_ranks)
            except ConfigError:
                continue
        if valid_numbers:
            assert choose_num_ranks(parallelism, global_batch, available) == valid_numbers[-1]
            assert valid_numbers[0] % count_smallest_mesh_ranks(parallelism) == 0
        else:
            with pytest.raises(ConfigError, match=r"smallest mesh"):
                choose_num_ranks(parallelism, global_batch, available)


def test_too_few_ranks() -> None:
    with pytest.raises(ConfigError, match="the smallest mesh needs 8 ranks, but only 7 ranks remain"):
        choose_num_ranks(ParallelismConfig(tensor=4, replicate=2), 64, 7)
    with pytest.raises(ConfigError, match="trainer.global_batch_size: 3 must be a multiple of 2"):
        choose_num_ranks(ParallelismConfig(replicate=2), 3, 8)


@pytest.mark.parametrize("fails", [False, True])
def test_spare_ranks_learn_how_the_run_ended(fails: bool) -> None:
    main = ProcessInfo(0, 3, 0, "torchrun", address=("localhost", free_port()), can_restart=True)
    outcomes: list[bool] = []
    spare_ranks = [
        threading.Thread(target=lambda rank=rank: outcomes.append(wait_for_run_end(replace(main, rank=rank))))
        for rank in (1, 2)
    ]
    if fails:
        with pytest.raises(RuntimeError, match="lost"), release_spare_ranks(main, 1):
            for thread in spare_ranks:
                thread.start()
            raise RuntimeError("lost")
    else:
        with release_spare_ranks(main, 1):
            for thread in spare_ranks:
                thread.start()
            time.sleep(0.3)
            assert not outcomes
    for thread in spare_ranks:
        thread.join(20)
    assert outcomes == [not fails] * 2


def test_a_spare_rank_ends_with_rank_0() -> None:
    """The process of rank 0 serves the store; without the store, a spare rank fails with a DistError."""
    port = free_port()
    server = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            wait_for_run_end(ProcessInfo(1, 2, 1, "torchrun", address=("localhost", port)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    del server
    thread.join(30)
    assert len(errors) == 1 and isinstance(errors[0], dist.DistError)


def test_restarts_of_torchrun() -> None:
    """Each node counts its own restarts, so keys of a new store must not depend on the count."""
    variables = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500",
                 "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "4", "TORCHELASTIC_RUN_ID": "17.1",
                 "TORCHELASTIC_USE_AGENT_STORE": "False"}  # fmt: skip
    process = read_process_info(variables)
    assert (process.attempt, process.can_restart, process.launch_id) == (2, True, "17.1")
    assert process.store_prefix == read_process_info(variables | {"TORCHELASTIC_RESTART_COUNT": "0"}).store_prefix
    shared = read_process_info(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert shared.has_agent_store and shared.store_prefix == "attempt_2"
    single = read_process_info(variables | {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"})
    assert not single.can_restart and single.launch_id == ""


def test_a_spare_rank_that_is_terminated_does_not_fail() -> None:
    """A scheduler ends a job by SIGTERM to all ranks; a failed spare rank would make torchrun restart saving ranks."""
    port = free_port()
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    code = (
        "from credit.cli.train import _wait_as_spare_rank\n"
        "from credit.parallel.elastic import spare_ranks\n"
        "from credit.parallel.process_info import ProcessInfo\n"
        "print('waits', flush=True)\n"
        f"_wait_as_spare_rank(ProcessInfo(1, 2, 0, 'torchrun', address=('localhost', {port})))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == "waits\n"
        time.sleep(2.0)
        process.terminate()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    del store
