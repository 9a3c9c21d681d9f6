"""Job scripts under a real Slurm with one node, which the tests start."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from credit.cli.main import main
from tests.hpc.slurm_cluster import CannotStart, run_slurm
from tests.smoke.test_train import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The machine is one node without GPUs.
SITE = {
    "title": "This machine",
    "scheduler": "slurm",
    "start": ["srun", "--ntasks", "{ranks}", "--ntasks-per-node", "{ranks_per_node}", "--overlap"],
    "queues": {"short": {"max_walltime": "1h"}},
    "defaults": {"partition": "short", "walltime": "4min", "launch": "torchrun", "gpus_per_node": 0,
                 # Slurm may send the signal up to a minute early, so it arrives in the second minute.
                 "signal_seconds": 118},
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment variables of a running Slurm."""
    try:
        with run_slurm(tmp_path_factory.mktemp("slurm")) as environment:
            yield environment
    except CannotStart as reason:
        pytest.skip(f"no Slurm: {reason}")


@pytest.fixture
def config(
    tmp_path: Path, cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Path:
    """Config that trains on the bundled sample. The cluster file is in the same folder."""
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


def change_trainer(config: Path, **trainer: object) -> None:
    raw = yaml.safe_load(config.read_text())
    raw["trainer"] |= trainer
    config.write_text(yaml.safe_dump(raw))


def read_status(config: Path) -> dict:
    path = config.parent / "run" / "STATUS"
    return json.loads(path.read_text()) if path.exists() else {"status": "none", "step": 0}


def read_logs(config: Path) -> str:
    return "".join(path.read_text() for path in (config.parent / "run" / "logs").glob("*.out"))


def show_job(job_id: str) -> dict[str, str]:
    """Return the fields of a job that scontrol shows."""
    job_text = subprocess.run(["scontrol", "--oneliner", "show", "job", job_id], capture_output=True, text=True).stdout
    return dict(item.split("=", 1) for item in job_text.split() if "=" in item)


def wait_for(config: Path, condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{read_status(config)}\n{read_logs(config)}"
        time.sleep(0.2)


def read_job_id(config: Path) -> str:
    (job_id,) = json.loads((config.parent / "run" / "jobs.json").read_text())["train"]["ids"]
    return job_id


def test_run_saves_at_signal_is_requeued_and_finishes(config: Path) -> None:
    """The run has two ranks under torchrun. It saves at the signal of Slurm, is requeued, and finishes."""
    assert main(["submit", str(config), "--chain", "4", "slurm.ranks_per_node=2"]) == 0
    job_id = read_job_id(config)
    wait_for(config, lambda: read_status(config)["status"] == "requeue", 240)
    requeue_status = read_status(config)
    assert requeue_status["reason"] == "file STOP" and requeue_status["job_id"] == job_id
    assert (config.parent / "run" / "checkpoints" / f"step_{requeue_status['step']:08d}" / "manifest.json").is_file()
    # Lower max_steps, because the run would take hours.
    change_trainer(config, max_steps=requeue_status["step"] + 3)
    wait_for(config, lambda: read_status(config)["status"] == "done", 400)
    wait_for(config, lambda: show_job(job_id)["JobState"] == "COMPLETED", 30)
    # One restart is enough, except on a machine so slow that one job cannot take three steps.
    assert int(show_job(job_id)["Restarts"]) >= 1
    assert [row[0] for row in rows(config.parent / "run")] == list(range(1, requeue_status["step"] + 4))
    assert read_logs(config).count("the run is done") == 1


def test_a_broken_config_ends_at_the_first_job(config: Path) -> None:
    assert main(["submit", str(config), "--chain", "3"]) == 0
    raw = yaml.safe_load(config.read_text())
    raw["data"]["sources"] = [{"path": "nowhere.nc"}]
    config.write_text(yaml.safe_dump(raw))
    job_id = read_job_id(config)
    wait_for(config, lambda: show_job(job_id)["JobState"] == "FAILED", 200)
    assert show_job(job_id)["Restarts"] == "0"
    assert "nowhere.nc" in read_logs(config) and "training did not begin" in read_logs(config)


def test_cancelled_run_is_saved_and_not_requeued(config: Path) -> None:
    """The run has two ranks under srun."""
    options = ["slurm.ranks_per_node=2", "slurm.launch=srun", "slurm.walltime=1h"]
    assert main(["submit", str(config), "--chain", "3", *options]) == 0
    job_id = read_job_id(config)
    metrics = config.parent / "run" / "metrics.jsonl"
    wait_for(config, lambda: metrics.exists() and '"step": 3,' in metrics.read_text(), 300)
    assert main(["submit", str(config), "--cancel"]) == 0
    wait_for(config, lambda: show_job(job_id)["JobState"] == "CANCELLED", 90)
    assert read_status(config)["status"] == "requeue" and read_status(config)["step"] >= 3, read_logs(config)
    time.sleep(2)
    assert show_job(job_id)["JobState"] == "CANCELLED" and show_job(job_id)["Restarts"] == "0"
