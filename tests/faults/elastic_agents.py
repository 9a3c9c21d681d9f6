"""Agents of torchrun that represent nodes: each starts one rank and can be killed together with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.ranks import REPOSITORY, free_port

# As in the job script, a node is lost after 3 missed keep-alive messages. The others wait a few seconds for late
# nodes.
RENDEZVOUS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5,join_timeout=120"


class Agents:
    """Launch of ``credit train`` by several agents with one rank each, between `min_nodes` and all of them.

    Args:
        num_agents: number of agents.
        min_nodes: smallest number of agents with which the launch continues.
        arguments: arguments of ``credit``.
        log_folder: folder of the output of each agent and its rank, ``agent_N.log``.
        environ: further environment variables.
        max_restarts: largest number of restarts.
    """

    def __init__(
        self, num_agents: int, min_nodes: int, arguments: Sequence[str], log_folder: Path, max_restarts: int = 3,
        **environ: str,
    ) -> None:  # fmt: skip
        self.log_folder = log_folder
        # The first agent hosts the store of the rendezvous, as on a cluster.
        endpoint = f"localhost:{free_port()}"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY),
                     "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environ}  # fmt: skip
        self.processes: list[subprocess.Popen] = []
        for index in range(num_agents):
            is_host = int(index == 0)
            command = [
                sys.executable, "-m", "torch.distributed.run", f"--nnodes={min_nodes}:{num_agents}",
                "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=launch",
                f"--rdzv-conf={RENDEZVOUS},is_host={is_host}", f"--max-restarts={max_restarts}",
                "--monitor-interval=0.5", "-m", "credit.cli.main", *arguments,
            ]  # fmt: skip
            with (log_folder / f"agent_{index}.log").open("w") as log:
                self.processes.append(
                    subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
                )

    def kill(self, index: int) -> None:
        """Kill an agent and its rank at once, as if their node had failed."""
        # torchrun starts ranks in sessions of their own, so they are found as its children.
        process = self.processes[index]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
        process.wait()

    def find_agent_of_rank(self, rank: int) -> int:
        """Return the agent whose process has the environment variable ``RANK`` of a rank."""
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                continue
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
                    return index
        raise AssertionError(f"no agent has rank {rank}")

    def wait(self, timeout: float) -> list[int]:
        """Wait until all agents have ended; return their exit codes."""
        return [process.wait(timeout) for process in self.processes]

    def log(self) -> str:
        """Return the output of all agents and ranks."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.log_folder.glob("agent_*.log")))

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *error: object) -> None:
        for index, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(index)
