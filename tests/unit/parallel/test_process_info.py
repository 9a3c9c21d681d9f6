"""Ranks from the variables that launchers export, and the address of rank 0."""

from __future__ import annotations

import pytest

from credit.errors import ConfigError
from credit.parallel.process_info import parse_first_host, read_process_info, require_one_process

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
         "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[003-004]"}  # fmt: skip


def test_no_launcher_is_one_process() -> None:
    launch = read_process_info({})
    assert (launch.rank, launch.world, launch.launcher, launch.is_main) == (0, 1, "none", True)


def test_a_shell_in_an_allocation_is_no_launcher() -> None:
    launch = read_process_info({"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    assert (launch.world, launch.job_id) == (1, "4711")


def test_variables_of_torchrun_are_read() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a",
           "MASTER_PORT": "1", "PBS_JOBID": "17.head", "TORCHELASTIC_RESTART_COUNT": "2"}  # fmt: skip
    launch = read_process_info(env)
    assert (launch.rank, launch.world, launch.local_rank, launch.launcher) == (3, 4, 1, "torchrun")
    assert launch.address is None and launch.job_id == "17.head" and launch.attempt == 2 and not launch.is_main


def test_slurm_ranks_take_the_address_of_the_first_host() -> None:
    launch = read_process_info(SLURM)
    assert (launch.rank, launch.world, launch.local_rank, launch.launcher) == (5, 8, 1, "slurm")
    assert launch.address == ("gpu003", 24711), "ranks of one job agree on host and port without talking"
    assert read_process_info({**SLURM, "SLURM_PROCID": "0"}).address == launch.address


def test_variables_of_mpi_take_precedence_over_those_of_slurm() -> None:
    env = {**SLURM, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}  # fmt: skip
    launch = read_process_info(env)
    assert (launch.rank, launch.world, launch.launcher) == (2, 4, "openmpi")
    assert launch.address == ("localhost", 24711)


def test_mpi_on_several_hosts_needs_an_address() -> None:
    env = {"PALS_RANKID": "0", "PALS_SIZE": "8", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "4"}
    with pytest.raises(ConfigError, match="export MASTER_ADDR="):
        read_process_info(env)
    assert read_process_info({**env, "MASTER_ADDR": "n1"}).address == ("n1", 20000)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "must be less than the number of ranks"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "export LOCAL_RANK"),
    ],
)
def test_bad_variables(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_process_info(env)


def test_a_command_for_one_process_refuses_several(monkeypatch: pytest.MonkeyPatch) -> None:
    require_one_process("rollout")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="credit rollout runs on one process, but torchrun has started 2"):
        require_one_process("rollout")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[003-007,9],login1", "gpu003"),
        ("n1,n2", "n1"),
        ("n1", "n1"),
        ("a,b[1-2]", "a"),
        ("rack[2,4]-hsn", "rack2-hsn"),
        ("rack[2,4]node[007-009],login[1-2]", "rack2node007"),
        ("gpu[1-2],cpu[1-2]", "gpu1"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert parse_first_host(nodes) == host
