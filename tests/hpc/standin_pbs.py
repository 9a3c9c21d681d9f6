"""Stand-in for PBS: qsub, qstat, qdel and qrls with the options of our scripts, and a scheduler that runs the jobs.

The commands (``python standin_pbs.py qsub ...``) store jobs as files in a folder. `StandInPbs.run` is the scheduler,
which runs the jobs one after another. Unknown options are refused, so that tests find errors in directives.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest import MonkeyPatch

OPTIONS_WITH_VALUE = ("-N", "-A", "-q", "-S", "-j", "-r", "-k", "-o", "-e", "-W", "-J", "-l")
# Exit codes of qstat and qdel in PBS.
ENDED, UNKNOWN = 35, 153


class StandInPbs:
    """Server of the stand-in; it puts its commands at the front of PATH."""

    def __init__(self, folder: Path, monkeypatch: MonkeyPatch) -> None:
        self.folder = folder
        commands = folder / "bin"
        commands.mkdir(parents=True)
        for name in ("qsub", "qstat", "qdel", "qrls"):
            program = commands / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{Path(__file__)}" {name} "$@"\n')
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("STANDIN_PBS", str(folder))
        # Environment of the jobs. Variables that a test sets later do not reach them.
        self.environment = dict(os.environ)
        # Names of the nodes of each job.
        self.nodes = ["localhost"]

    def jobs(self) -> list[dict]:
        """Return all jobs in the order of their submission."""
        return [load_job(path) for path in sorted(self.folder.glob("*.json"), key=lambda path: int(path.stem))]

    def calls(self) -> list[str]:
        """Return the commands that were called."""
        return (self.folder / "calls").read_text().splitlines()

    def run(self, watch: Callable[[dict, subprocess.Popen], None] | None = None, grace: float = 10.0) -> None:
        """Run jobs until none can start, and call `watch` every 0.02 s while a job runs.

        A job gets SIGTERM at the end of its walltime, and SIGKILL `grace` seconds later.
        """
        while ready_jobs := [
            job for job in self.jobs() if job["state"] == "Q" and not job["held"] and self._is_free(job)
        ]:
            codes = [self._run(ready_jobs[0], index, watch, grace) for index in ready_jobs[0]["indices"]]
            job = load_job(self.folder / f"{ready_jobs[0]['number']}.json")
            save_job(self.folder, {**job, "state": "F", "failed": any(codes)})
            for waiting in self.jobs():
                # A job that depends on the success of a failed job never runs.
                if waiting["after_ok"] and job["number"] in waiting["after"] and any(codes):
                    save_job(self.folder, {**waiting, "state": "F"})
        # Every job has ended: deleting a job also deletes the jobs that depend on it.
        assert all(job["state"] == "F" for job in self.jobs() if not job["held"])

    def _is_free(self, job: dict) -> bool:
        return all(load_job(self.folder / f"{number}.json")["state"] == "F" for number in job["after"])

    def _run(self, job: dict, index: int | None, watch: Callable | None, grace: float) -> int:
        nodes = self.folder / "nodes"
        nodes.write_text("".join(f"{name}\n" for name in self.nodes))
        variables = {"PBS_JOBID": job["id"], "PBS_O_WORKDIR": job["cwd"], "PBS_NODEFILE": str(nodes)}
        if index is not None:
            variables |= {"PBS_ARRAY_INDEX": str(index)}
        log = Path(job["cwd"]) / f"{job['name']}.o{job['number']}"
        with log.open("ab") as out:
            # Like PBS, do not start in the folder of the submission.
            process = subprocess.Popen(
                ["bash", job["script"]], cwd="/", env={**self.environment, **variables}, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        save_job(self.folder, {**job, "state": "R", "pid": process.pid})
        start_time = time.monotonic()
        term_time = None
        while process.poll() is None:
            if watch is not None:
                watch(job, process)
            if term_time is None and time.monotonic() - start_time > job["walltime"]:
                term_time = time.monotonic()
                os.killpg(process.pid, signal.SIGTERM)
            if term_time is not None and time.monotonic() - term_time > grace:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        return process.returncode


def load_job(path: Path) -> dict:
    return json.loads(path.read_text())


def save_job(folder: Path, job: dict) -> None:
    part_path = folder / "part"
    part_path.write_text(json.dumps(job))
    part_path.replace(folder / f"{job['number']}.json")


def find_job(folder: Path, job_id: str) -> dict:
    """Return a job, or exit with the code of PBS if the job is unknown or has ended."""
    path = folder / f"{re.split(r'[.[]', job_id)[0]}.json"
    if not path.exists():
        exit_with_error(UNKNOWN, f"Unknown Job Id {job_id}")
    job = load_job(path)
    if job["state"] == "F":
        exit_with_error(ENDED, f"{job_id} Job has finished")
    return job


def exit_with_error(code: int, message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)


def parse_options(words: list[str]) -> dict[str, list[str]]:
    """Return the values of each option. The path of the script has an empty name."""
    job_options: dict[str, list[str]] = {}
    remaining_words = list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        if word == "-h":
            job_options["-h"] = [""]
        elif word in OPTIONS_WITH_VALUE:
            job_options.setdefault(word, []).append(remaining_words.pop(0))
        elif word.startswith("-"):
            exit_with_error(2, f"illegal option {word}")
        else:
            job_options.setdefault("", []).append(word)
    return job_options


def read_directives(script: Path) -> list[str]:
    """Return the words of the directives before the first command of a script."""
    words: list[str] = []
    for line in script.read_text().splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#PBS "):
            words += line.split()[1:]
    return words


def qsub(folder: Path, words: list[str]) -> None:
    if (folder / "refuse").exists() and len(list(folder.glob("*.json"))) >= int((folder / "refuse").read_text()):
        exit_with_error(1, "qsub: would exceed the queue's limit")
    command_options = parse_options(words)
    (script,) = command_options[""]
    job_options = {**parse_options(read_directives(Path(script))), **command_options}
    limits = dict(item.split("=", 1) for item in job_options["-l"])
    assert re.fullmatch(r"[A-Za-z][\w.-]{0,14}", job_options["-N"][0]), f"illegal -N value {job_options['-N']}"
    assert job_options["-j"] == ["oe"] and limits["select"]
    hours, minutes, seconds = map(int, limits["walltime"].split(":"))
    kind, after = "", []
    # The -W options contain those of the directives, of which only tolerate_node_failures is allowed.
    tolerated = [value for value in read_directives(Path(script)) if value.startswith("tolerate_node_failures=")]
    assert tolerated in ([], ["tolerate_node_failures=all"])
    for value in job_options.get("-W", []):
        if value in tolerated:
            continue
        kind, ids = re.fullmatch(r"depend=(afterany|afterok):(.+)", value).groups()
        after = [find_job(folder, after_id)["number"] for after_id in ids.split(":")]
    number = len(list(folder.glob("*.json"))) + 1
    first, last = map(int, job_options["-J"][0].split("-")) if "-J" in job_options else (0, 0)
    copy = folder / f"{number}.SC"
    copy.write_bytes(Path(script).read_bytes())
    job_id = f"{number}[].head" if "-J" in job_options else f"{number}.head"
    job = {
        "number": number, "id": job_id, "name": job_options["-N"][0],
        "script": str(copy), "cwd": os.getcwd(), "after": after,
        "after_ok": kind == "afterok", "held": "-h" in job_options, "state": "Q",
        "walltime": hours * 3600 + minutes * 60 + seconds,
        "indices": list(range(first, last + 1)) if "-J" in job_options else [None],
    }  # fmt: skip
    save_job(folder, job)
    print(job["id"])


def qstat(folder: Path, words: list[str]) -> None:
    print(find_job(folder, words[0])["state"])


def qrls(folder: Path, words: list[str]) -> None:
    save_job(folder, {**find_job(folder, words[0]), "held": False})


def qdel(folder: Path, words: list[str]) -> None:
    job = find_job(folder, words[0])
    if job["state"] == "R":
        os.killpg(job["pid"], signal.SIGTERM)
        return
    save_job(folder, {**job, "state": "F"})
    for path in folder.glob("*.json"):
        # A job that depends on a deleted job never runs.
        dependent_job = load_job(path)
        if job["number"] in dependent_job["after"] and dependent_job["state"] == "Q":
            qdel(folder, [dependent_job["id"]])


if __name__ == "__main__":
    server_folder = Path(os.environ["STANDIN_PBS"])
    with (server_folder / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]).replace("\n", "?") + "\n")
    {"qsub": qsub, "qstat": qstat, "qrls": qrls, "qdel": qdel}[sys.argv[1]](server_folder, sys.argv[2:])
