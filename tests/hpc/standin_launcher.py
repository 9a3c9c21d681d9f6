"""Stand-in for the Python interpreter of a job: it records its calls and writes the STATUS that a plan gives.

The helper of the job script (``-m credit.hpc.chain``) runs with the real interpreter. Commands other than training do
nothing. The plan has one line for each job of a chain. ``requeue 10``, ``done 20`` and ``failed 10`` write this state
and step to STATUS. ``crash 10`` writes ``running``, and ``nothing`` writes no STATUS. ``stop 10`` waits for the file
STOP and then writes ``requeue``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def train(folder: Path, run: Path) -> int:
    signal.signal(signal.SIGTERM, lambda *_: None)
    with (folder / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"arguments": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd()}) + "\n")
    if "train" not in sys.argv:
        return 0
    number = len((folder / "calls.jsonl").read_text().splitlines())
    action, _, step = (folder / "plan").read_text().splitlines()[number - 1].partition(" ")
    if action == "nothing":
        return 2
    if action == "stop":
        status = {"status": "running", "step": 0, "reason": "", "job_id": os.environ["PBS_JOBID"]}
        (run / "STATUS").write_text(json.dumps(status))
        while not (run / "STOP").exists():
            time.sleep(0.01)
    state = {"stop": "requeue", "crash": "running"}.get(action, action)
    status = {"status": state, "step": int(step), "reason": "as planned", "job_id": os.environ["PBS_JOBID"]}
    (run / "STATUS").write_text(json.dumps(status))
    # The exit code is 0 for every state: a launcher does not pass on the exit codes of training.
    return 0


def write_interpreter(folder: Path, run: Path) -> Path:
    """Write the stand-in for the interpreter of a job with run folder `run`, and return its path."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "if 'credit.hpc.chain' in sys.argv:\n"
        "    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
        "from pathlib import Path\n"
        "from standin_launcher import train\n"
        f"sys.exit(train(Path({str(folder)!r}), Path({str(run)!r})))\n"
    )
    path.chmod(0o755)
    return path
