"""Job scripts under a real Slurm of one node, which these tests start themselves."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from tests.hpc.slurm_cluster import CannotStart, slurm
from tests.smoke.test_train import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# the machine is one node with two slots; jobs of this Slurm have no GPUs
SITE = {
    "title": "This machine",
    "scheduler": "slurm",
    "start": ["srun", "--ntasks", "{ranks}", "--ntasks-per-node", "{ranks_per_node}", "--overlap"],
    "queues": {"short": {"max_walltime": "1h"}},
    "defaults": {"partition": "short", "walltime": "4min", "launch": "torchrun", "gpus_per_node": 0,
                 # Slurm may be up to a minute early: the signal comes in the second minute
                 "signal_seconds": 118},
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a running Slurm."""
    try:
        with slurm(tmp_path_factory.mktemp("slurm")) as environment:
            yield environment
    except CannotStart as reason:
        pytest.skip(f"no Slurm: {reason}")


@pytest.fixture
def config(
    tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Path:
    """A config that trains on the package's sample, and the site's file beside it."""
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster[name])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["init", "quickstart"]) == 0
    raw = yaml.safe_load(capsys.readouterr().out)
    raw |= {"save_loc": str(tmp_path / "run"), "slurm": {"cluster": str(tmp_path / "here.yml")}}
    raw["data"]["splits"]["train"] = ["2000-01-01", "2000-01-20"]
    raw["model"] |= {"dim": [8, 16, 32, 64], "dim_head": 8}
    raw["trainer"] = {"device": "cpu", "max_steps": 100_000, "train_batch_size": 1, "valid_samples": 2, "log_every": 1,
                      "validate_every": 100_000, "checkpoint_every": 100_000}  # fmt: skip
    (tmp_path / "here.yml").write_text(yaml.safe_dump(SITE))
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(raw))
    return path


def change(config: Path, **trainer: object) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["trainer"] |= trainer
    config.write_text(yaml.safe_dump(raw))


def status(config: Path) -> dict:
    path = config.parent / "run" / "STATUS"
    return json.loads(path.read_text()) if path.exists() else {"status": "none", "step": 0}


def log(config: Path) -> str:
    return "".join(path.read_text() for path in (config.parent / "run" / "logs").glob("*.out"))


def job(job_id: str) -> dict[str, str]:
    """Return what Slurm knows of a job."""
    shown = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True).stdout
    return dict(item.split("=", 1) for item in shown.split() if "=" in item)


def wait_for(config: Path, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{status(config)}\n{log(config)}"
        time.sleep(0.2)


def job_id(config: Path) -> str:
    (only,) = json.loads((config.parent / "run" / "jobs.json").read_text())["train"]["ids"]
    return only


def test_saved_before_the_end_requeued_and_finished(config: Path) -> None:
    """Two ranks under torchrun, signalled by Slurm, go on by themselves to the end."""
    assert main(["submit", str(config), "--chain", "4", "slurm.ranks_per_node=2"]) == 0
    name = job_id(config)
    wait_for(config, lambda: status(config)["status"] == "requeue", 240)
    reached = status(config)
    assert reached["reason"] == "file STOP" and reached["job_id"] == name
    assert (config.parent / "run" / "checkpoints" / f"step_{reached['step']:08d}" / "manifest.json").is_file()
    # it would go on for hours
    change(config, max_steps=reached["step"] + 3)
    wait_for(config, lambda: status(config)["status"] == "done", 400)
    wait_for(config, lambda: job(name)["JobState"] == "COMPLETED", 30)
    # once, but for a machine so slow that not even three steps fit into a job
    assert int(job(name)["Restarts"]) >= 1
    assert [row[0] for row in rows(config.parent / "run")] == list(range(1, reached["step"] + 4))
    assert log(config).count("the run is done") == 1


def test_a_broken_config_ends_at_the_first_job(config: Path) -> None:
    assert main(["submit", str(config), "--chain", "3"]) == 0
    raw = yaml.safe_load(config.read_text())
    raw["data"]["sources"] = [{"path": "nowhere.nc"}]
    config.write_text(yaml.safe_dump(raw))
    name = job_id(config)
    wait_for(config, lambda: job(name)["JobState"] == "FAILED", 200)
    assert job(name)["Restarts"] == "0"
    assert "nowhere.nc" in log(config) and "training did not begin" in log(config)


def test_cancelled_is_saved_and_not_requeued(config: Path) -> None:
    """Two ranks under srun."""
    options = ["slurm.ranks_per_node=2", "slurm.launch=srun", "slurm.walltime=1h"]
    assert main(["submit", str(config), "--chain", "3", *options]) == 0
    name = job_id(config)
    metrics = config.parent / "run" / "metrics.jsonl"
    wait_for(config, lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), 300)
    assert main(["submit", str(config), "--cancel"]) == 0
    wait_for(config, lambda: job(name)["JobState"] == "CANCELLED", 90)
    assert status(config)["status"] == "requeue" and status(config)["step"] >= 3, log(config)
    time.sleep(2)
    assert job(name)["JobState"] == "CANCELLED" and job(name)["Restarts"] == "0"
