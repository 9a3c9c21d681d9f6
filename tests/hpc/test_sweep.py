"""Sweep as an array of jobs, under a stand-in for PBS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from tests.hpc.standin_pbs import StandInPbs
from tests.smoke.conftest import CONFIG

# Stand-in for the interpreter of a job: it writes the STATUS of a run, which is a failure at the first run of seed 2.
INTERPRETER = """#!{python}
import json, os, pathlib, sys, yaml
if "credit.hpc.chain" in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
assert sys.argv[1:4] == ["-m", "credit.cli.main", "train"], sys.argv
config = yaml.safe_load(pathlib.Path(sys.argv[4]).read_text())
folder = pathlib.Path(config["save_loc"])
folder.mkdir(exist_ok=True)
is_failure = config["seed"] == 2 and not (folder / "STATUS").exists()
status = {{"status": "failed" if is_failure else "done", "step": 1, "reason": "as planned",
          "job_id": os.environ["PBS_JOBID"]}}
(folder / "STATUS").write_text(json.dumps(status))
with open({calls!r}, "a") as file:
    file.write(folder.name + "\\n")
"""


def test_array_trains_each_trial_and_second_call_repeats_failed_trial(
    tmp_path: Path, pbs: StandInPbs, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    calls = tmp_path / "calls"
    interpreter = tmp_path / "python"
    interpreter.write_text(INTERPRETER.format(python=sys.executable, calls=str(calls)))
    interpreter.chmod(0o755)
    document = {**CONFIG, "save_loc": str(tmp_path / "unused")}
    document["data"] = {**document["data"], "sources": [{"path": "nowhere.nc"}]}
    document["pbs"] = {"cluster": "pbs", "walltime": "1h", "python": str(interpreter)}
    config = tmp_path / "config.yml"
    config.write_text(yaml.safe_dump(document))
    folder = tmp_path / "a sweep"
    arguments = ["sweep", str(config), "-o", str(folder), "--grid", "seed=1,2,3", "--submit"]

    assert main([*arguments, "--dry-run"]) == 0
    assert "#PBS -J 1-3" in capsys.readouterr().out and not (folder / "sweep.json").exists()
    assert main(arguments) == 0
    assert "submitted  1[].head (trials: 3)" in capsys.readouterr().out
    (job,) = pbs.jobs()
    assert job["indices"] == [1, 2, 3]
    # While the jobs wait, the same command shows the table.
    assert main(arguments) == 0
    assert "queued or running: 1[].head" in capsys.readouterr().out and len(pbs.jobs()) == 1

    pbs.run()
    assert calls.read_text().split() == ["trial_0001", "trial_0002", "trial_0003"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "trial_0002 failed: as planned" in output and "(trials: 1)" in output
    assert "indices" in pbs.jobs()[-1] and pbs.jobs()[-1]["indices"] == [None]
    pbs.run()
    assert calls.read_text().split()[3:] == ["trial_0002"]
    assert main(arguments) == 0
    assert "submitted" not in capsys.readouterr().out
    assert json.loads((folder / "jobs.json").read_text())["train"]["scheduler"] == "pbs"
