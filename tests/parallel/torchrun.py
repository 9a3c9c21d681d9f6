"""Launch of a worker module on several ranks with torchrun and a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def launch(module: str, ranks: int, *arguments: str, timeout: float = 500.0, restarts: int = 0) -> str:
    """Run ``python -m module arguments`` under torchrun and return its output.

    If a rank fails, torchrun ends the other ranks.

    Raises:
        AssertionError: with the output, if a rank fails or the run takes longer than `timeout` seconds.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               f"--max-restarts={restarts}", "-m", module, *arguments]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            output, _ = process.communicate()
            raise AssertionError(f"{module} on {ranks} ranks hangs; it said:\n{output[-4000:]}") from None
    assert process.returncode == 0, f"{module} on {ranks} ranks failed:\n{output[-40000:]}"
    return output
