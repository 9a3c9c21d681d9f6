"""Job scripts of chains and arrays, run under a stand-in for PBS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import xarray as xr
import yaml

from credit.cli.main import main
from tests.hpc.standin_launcher import write_interpreter
from tests.hpc.standin_pbs import StandInPbs
from tests.smoke.conftest import CONFIG
from tests.smoke.test_train import rows

HOSTILE = "a b'c\"d; $(touch pwned) `touch pwned`\n#PBS -l walltime=99:00:00\n$HOME *é{{ 7*7 }}"


class PlannedRun:
    """Config and folders of a run whose training is replaced by the planned actions of `standin_launcher`."""

    def __init__(self, folder: Path, name: str = "run", **pbs: object) -> None:
        self.folder, self.save_loc = folder, folder / name
        self.tools = folder / "tools"
        self.tools.mkdir(parents=True)
        section = {
            "cluster": "pbs",
            "walltime": "1h",
            "python": str(write_interpreter(self.tools, self.save_loc)),
            **pbs,
        }
        config_document = {**CONFIG, "save_loc": str(self.save_loc), "pbs": section}
        config_document["data"] = {**config_document["data"], "sources": [{"path": "nowhere.nc"}]}
        self.config = folder / "config.yml"
        self.config.write_text(yaml.safe_dump(config_document))

    def submit(self, *arguments: str, plan: tuple[str, ...] = ()) -> int:
        (self.tools / "plan").write_text("\n".join(plan))
        return main(["submit", str(self.config), *arguments])

    def launches(self) -> list[dict]:
        path = self.tools / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.save_loc / "logs").glob("*.o*")))


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    return PlannedRun(tmp_path)


def test_finished_chain_deletes_remaining_jobs(run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture) -> None:
    assert run.submit("--chain", "4", plan=("requeue 10", "done 20", "never")) == 0
    assert "submitted: 1.head 2.head 3.head 4.head" in capsys.readouterr().out
    jobs = json.loads((run.save_loc / "jobs.json").read_text())
    assert jobs == {"train": {"scheduler": "pbs", "ids": ["1.head", "2.head", "3.head", "4.head"]}}
    assert [job["after"] for job in pbs.jobs()] == [[], [1], [2], [3]]
    pbs.run()
    assert len(run.launches()) == 2
    assert [call for call in pbs.calls() if call.startswith("qdel")] == ["qdel 4.head", "qdel 3.head"]
    assert {path.name for path in (run.save_loc / "logs").iterdir()} == {"small.o1", "small.o2"}
    assert "the run is done" in run.log()


@pytest.mark.parametrize(
    ("plan", "launched", "says"),
    [
        (("nothing",), 1, "training did not begin"),
        (("failed 0",), 1, "the run is failed: as planned"),
        (("requeue 10", "failed 20"), 2, "the run is failed"),
        (("crash 10", "crash 20", "done 30"), 3, "the run is done"),
        (("requeue 10", "requeue 10", "requeue 10", "never"), 3, "two jobs completed no step after step 10"),
        (("crash 0", "crash 0", "never"), 2, "two jobs completed no step after step 0"),
        (("requeue 10", "requeue 10", "requeue 20", "done 30"), 4, "the run is done"),
    ],
)
def test_chain_ends_at_success_failure_or_no_progress(
    run: PlannedRun, pbs: StandInPbs, plan: tuple[str, ...], launched: int, says: str
) -> None:
    run.submit("--chain", "6", plan=plan)
    pbs.run()
    assert len(run.launches()) == launched
    assert says in run.log()


def test_jobs_end_by_themselves_without_qdel(run: PlannedRun, pbs: StandInPbs) -> None:
    """Compute nodes of some sites do not have qdel."""
    run.submit("--chain", "4", plan=("requeue 5", "done 10", "never"))
    (pbs.folder / "bin" / "qdel").unlink()
    pbs.run()
    assert len(run.launches()) == 2
    assert len(list((run.save_loc / "logs").iterdir())) == 4
    assert run.log().count("qdel is not on this machine") == 2


def test_signal_requests_stop_and_chain_continues(run: PlannedRun, pbs: StandInPbs) -> None:
    run.submit("--chain", "3", plan=("stop 10", "done 20"))

    signalled_jobs = []

    def send_term(job: dict, process: subprocess.Popen) -> None:
        if not signalled_jobs and (run.save_loc / "STATUS").exists():
            signalled_jobs.append(job["id"])
            os.killpg(process.pid, signal.SIGTERM)

    pbs.run(watch=send_term)
    assert len(run.launches()) == 2
    assert not (run.save_loc / "STOP").exists(), "the next job would stop at once"


def test_killed_job_without_progress_ends_chain(run: PlannedRun, pbs: StandInPbs) -> None:
    run.submit("--chain", "4", plan=("stop 10", "stop 10", "never"))

    def kill_job(job: dict, process: subprocess.Popen) -> None:
        if (run.save_loc / "STATUS").exists() and json.loads((run.save_loc / "STATUS").read_text())["job_id"] == job[
            "id"
        ]:
            os.killpg(process.pid, signal.SIGKILL)

    pbs.run(watch=kill_job)
    assert len(run.launches()) == 2
    assert "the two previous jobs completed no step after step 0" in run.log()


def test_environment_of_job_has_precedence(run: PlannedRun, pbs: StandInPbs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "of the login node")
    monkeypatch.setenv("LEVELS", "here only")
    pbs.environment["TMPDIR"] = "of the job"
    run.submit("experiment=$TMPDIR-${LEVELS}", plan=("done 1",))
    pbs.run()
    (call,) = run.launches()
    assert (call["environment"]["TMPDIR"], call["environment"]["LEVELS"]) == ("of the job", "here only")


def test_job_has_end_of_walltime_in_environment(run: PlannedRun, pbs: StandInPbs) -> None:
    run.submit("pbs.walltime=90min", plan=("done 1",))
    pbs.run()
    (call,) = run.launches()
    assert float(call["environment"]["CREDIT_JOB_END"]) == pytest.approx(time.time() + 5400, abs=60)
    assert pbs.jobs()[0]["walltime"] == 5400
    # One GPU needs one process, which runs without a launcher.
    assert call["arguments"] == ["-m", "credit.cli.main", "train", str(run.config)]


def test_hostile_names_and_paths_are_quoted(tmp_path: Path, pbs: StandInPbs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / HOSTILE.replace("/", "_")
    run = PlannedRun(folder, name=HOSTILE.replace("/", "_"), environment={"NAME": HOSTILE.replace("$HOME", "")})
    # The config gets these values through environment variables, because a $ in its own values would be expanded.
    config_document = yaml.safe_load(run.config.read_text())
    hostile_config = folder / "it's $(touch pwned).yml"
    config_document |= {"experiment": "${STRANGE}"}
    config_document["save_loc"], config_document["pbs"]["python"], config_document["pbs"]["environment"] = (
        "$PLACE",
        "$TOOL",
        {"NAME": "$VALUE"},
    )
    hostile_config.write_text(yaml.safe_dump(config_document))
    for name, value in {"STRANGE": HOSTILE, "PLACE": str(run.save_loc), "VALUE": HOSTILE}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TOOL", str(run.tools / "python"))
    monkeypatch.chdir(folder)
    (run.tools / "plan").write_text("requeue 1\ndone 2")
    override = 'trainer.resume=it\'s "$(touch pwned)"\n'
    assert main(["submit", hostile_config.name, override, "--chain", "3"]) == 0
    pbs.run()
    assert len(run.launches()) == 2
    for call in run.launches():
        assert call["arguments"] == ["-m", "credit.cli.main", "train", str(hostile_config), override]
        assert call["cwd"] == str(folder)
        assert call["environment"]["NAME"] == HOSTILE
        # The config refers to these variables, and PBS does not pass the environment of the submission to the job.
        assert call["environment"]["STRANGE"] == HOSTILE and call["environment"]["PLACE"] == str(run.save_loc)
    assert pbs.jobs()[0]["walltime"] == 3600
    assert not list(tmp_path.rglob("pwned")) and not Path("/pwned").exists()


def test_cancel_deletes_last_job_first(run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture) -> None:
    run.submit("--chain", "3")
    assert run.submit("--cancel") == 0
    assert "deleted: 3.head 2.head 1.head" in capsys.readouterr().out
    assert [call for call in pbs.calls() if call.startswith("qdel")] == ["qdel 3.head", "qdel 2.head", "qdel 1.head"]
    assert all(job["state"] == "F" for job in pbs.jobs())
    # Cancelling jobs that have ended is not an error.
    assert run.submit("--cancel") == 0
    assert run.submit("--cancel", "--job", "rollout") == 2
    assert "of the kind rollout was submitted from this folder; submitted: train" in capsys.readouterr().err


def test_a_second_run_in_the_same_folder_is_refused(
    run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture
) -> None:
    run.submit("--chain", "2")
    assert run.submit() == 1
    assert "train is already queued or running: 1.head, 2.head" in capsys.readouterr().err
    assert len(pbs.jobs()) == 2
    # Jobs of another kind can be submitted at the same time.
    assert run.submit("--job", "preprocess") == 0
    run.submit("--cancel")
    assert run.submit() == 0
    jobs_by_kind = json.loads((run.save_loc / "jobs.json").read_text())
    assert {kind: entry["ids"] for kind, entry in jobs_by_kind.items()} == {
        "train": ["4.head"],
        "preprocess": ["3.head"],
    }


def test_incomplete_chain_is_deleted(run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture) -> None:
    (pbs.folder / "refuse").write_text("2")
    assert run.submit("--chain", "4") == 1
    assert "would exceed the queue's limit" in capsys.readouterr().err
    assert [job["state"] for job in pbs.jobs()] == ["F", "F"]
    assert not (run.save_loc / "jobs.json").exists()


def test_missing_scheduler_is_refused(run: PlannedRun, capsys: pytest.CaptureFixture) -> None:
    assert run.submit() == 1
    assert "qsub is not on this machine" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_run_in_two_jobs(small_run: Path, pbs: StandInPbs) -> None:
    """SIGTERM reaches all processes of the first job, also torchrun. The second job continues the run without a gap."""
    config_document = yaml.safe_load((small_run / "config.yml").read_text())
    config_document["pbs"] = {"cluster": "pbs", "walltime": "1h", "chain": 5, "gpus_per_node": 0, "ranks_per_node": 2}
    config_document["trainer"] |= {"log_every": 1, "max_steps": 20, "train_batch_size": 2}
    (small_run / "config.yml").write_text(yaml.safe_dump(config_document))
    assert main(["submit", str(small_run / "config.yml")]) == 0
    metrics, signalled_jobs = small_run / "run" / "metrics.jsonl", []

    def send_term(job: dict, process: subprocess.Popen) -> None:
        if not signalled_jobs and metrics.exists() and '"step": 5,' in metrics.read_text():
            signalled_jobs.append(job["number"])
            os.killpg(process.pid, signal.SIGTERM)

    pbs.run(watch=send_term, grace=200)
    log = "".join(path.read_text() for path in sorted((small_run / "run" / "logs").glob("*.o*")))
    assert signalled_jobs == [1]
    assert [row[0] for row in rows(small_run / "run")] == list(range(1, 21)), log
    assert json.loads((small_run / "run" / "STATUS").read_text())["status"] == "done"
    assert len(list((small_run / "run" / "logs").glob("*.o*"))) == 2, log


@pytest.mark.slow
def test_a_broken_config_stops_at_the_first_job(small_run: Path, pbs: StandInPbs) -> None:
    arguments = ["submit", str(small_run / "config.yml"), "--cluster", "pbs", "pbs.walltime=1h", "--chain", "3"]
    assert main(arguments) == 0
    (small_run / "data.nc").rename(small_run / "elsewhere.nc")
    pbs.run()
    (log,) = (small_run / "run" / "logs").glob("*.o*")
    assert "data.nc" in log.read_text() and "training did not begin" in log.read_text()


def test_array_starts_every_part_once(run: PlannedRun, pbs: StandInPbs) -> None:
    """Each of three jobs starts two processes, and each process gets one of the GPUs that the scheduler assigned."""
    run.submit("--job", "rollout", "--nodes", "3", "pbs.gpus_per_node=2")
    assert [job["indices"] for job in pbs.jobs()] == [[1, 2, 3]]
    pbs.environment["CUDA_VISIBLE_DEVICES"] = "3,5"
    pbs.run()
    parts = [(call["arguments"][-1], call["environment"]["CUDA_VISIBLE_DEVICES"]) for call in run.launches()]
    assert sorted(parts) == [(f"--part={part}/6", "3" if part % 2 else "5") for part in range(1, 7)]


@pytest.mark.slow
def test_parts_of_rollout_are_complete(small_run: Path, capsys: pytest.CaptureFixture) -> None:
    config = str(small_run / "config.yml")
    assert main(["train", config, "trainer.max_steps=1", "trainer.validate_every=1"]) == 0
    counts = []
    for part in (1, 2):
        assert main(["rollout", config, "inference.lead_time=24h", f"--part={part}/2"]) == 0
        counts.append(int(capsys.readouterr().out.splitlines()[-1].split()[0]))
    files = list((small_run / "run" / "forecasts").iterdir())
    # With inference.batch_size 4, the 11 forecasts form batches of 4, 4 and 3. The first part has two of them.
    assert counts == [4 + 3, 4] and len(files) == 11
    assert main(["rollout", config, "inference.lead_time=24h"]) == 0
    assert "0 forecasts written, 11 were already complete" in capsys.readouterr().out


@pytest.mark.slow
def test_rollout_with_tensor_parallelism_is_one_job(
    small_run: Path, pbs: StandInPbs, capsys: pytest.CaptureFixture
) -> None:
    config = str(small_run / "config.yml")
    assert main(["train", config, "trainer.max_steps=1", "trainer.validate_every=1"]) == 0
    submit_arguments = (
        "submit",
        config,
        "--cluster",
        "pbs",
        "--job",
        "rollout",
        "pbs.walltime=1h",
        "inference.lead_time=12h",
    )
    assert main([*submit_arguments, "inference.parallelism.tensor=2", "pbs.ranks_per_node=3"]) == 2
    assert "2 does not divide the 3 ranks of this job" in capsys.readouterr().err
    assert main([*submit_arguments, "inference.parallelism.tensor=2", "pbs.ranks_per_node=2"]) == 0
    assert [job["indices"] for job in pbs.jobs()] == [[None]]
    pbs.run()
    assert len(list((small_run / "run" / "forecasts").glob("*.nc"))) == 12


def test_scoring_waits_for_the_rollout(run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture) -> None:
    assert run.submit("--job", "verify", "--after", "rollout") == 2
    assert "--after rollout" in capsys.readouterr().err
    run.submit("--job", "rollout", "--nodes", "2")
    assert run.submit("--job", "verify", "--after", "rollout") == 0
    assert pbs.calls()[-1].startswith("qsub -W depend=afterok:1[].head ")
    pbs.run()
    # The job of the generic cluster starts four ranks with torchrun.
    rollout, second_rollout, verify = [call["arguments"] for call in run.launches()]
    assert rollout[2] == second_rollout[2] == "rollout" and "--nproc-per-node=4" in verify and "verify" in verify
    # After the rollout has ended, --after is refused, and no job is submitted.
    capsys.readouterr()
    calls = len([call for call in pbs.calls() if call.startswith("qsub")])
    assert run.submit("--job", "verify", "--after", "rollout") != 0
    assert "all of these jobs have ended" in capsys.readouterr().err
    assert len([call for call in pbs.calls() if call.startswith("qsub")]) == calls


def test_scoring_does_not_begin_after_a_failed_rollout(run: PlannedRun, pbs: StandInPbs) -> None:
    (run.tools / "python").write_text("#!/bin/sh\nexit 1\n")
    run.submit("--job", "rollout", "--nodes", "2")
    assert run.submit("--job", "verify", "--after", "rollout") == 0
    pbs.run()
    assert {path.name for path in (run.save_loc / "logs").iterdir()} == {"rollout_small.o1"}


@pytest.mark.slow
def test_scores_of_two_ranks_equal_those_of_one_process(small_run: Path, pbs: StandInPbs) -> None:
    config, scores = str(small_run / "config.yml"), small_run / "run" / "scores.csv"
    netcdf_scores = small_run / "run" / "scores.nc"
    assert main(["train", config, "trainer.max_steps=1", "trainer.validate_every=1"]) == 0
    assert main(["rollout", config]) == 0
    assert main(["verify", config]) == 0
    expected_csv, expected_netcdf = scores.read_bytes(), xr.load_dataset(netcdf_scores)
    submit_arguments = (
        "submit",
        config,
        "--cluster",
        "pbs",
        "--job",
        "verify",
        "pbs.walltime=1h",
        "pbs.ranks_per_node=2",
    )
    for options in ([], ["--online"]):
        scores.unlink()
        assert main([*submit_arguments, *options]) == 0
        pbs.run()
        assert scores.read_bytes() == expected_csv, options
        # scores.csv has eight digits, so compare the netCDF file for differences in the last digits.
        xr.testing.assert_equal(xr.load_dataset(netcdf_scores), expected_netcdf)
    assert len(list((small_run / "run" / "logs").glob("verify_small.o*"))) == 2
