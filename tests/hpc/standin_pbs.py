"""qsub, qstat, qdel and qrls that honour what our scripts use, and run the jobs for real, one after another.

As commands (``python standin_pbs.py qsub ...``) they write and read a folder; `StandInPbs.run` is the scheduler. What
is not known here is refused, so that a slip in a directive is found.
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

WITH_VALUE = ("-N", "-A", "-q", "-S", "-j", "-r", "-k", "-o", "-e", "-W", "-J", "-l")
# of qstat and qdel
ENDED, UNKNOWN = 35, 153


class StandInPbs:
    """The server; its commands go to the front of PATH."""

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
        # of the jobs; what is exported afterwards does not reach them
        self.environment = dict(os.environ)
        # Names of the nodes of each job.
        self.nodes = ["localhost"]

    def jobs(self) -> list[dict]:
        """Return all jobs in the order of their submission."""
        return [load(path) for path in sorted(self.folder.glob("*.json"), key=lambda path: int(path.stem))]

    def calls(self) -> list[str]:
        """Return the commands that were called."""
        return (self.folder / "calls").read_text().splitlines()

    def run(self, watch: Callable[[dict, subprocess.Popen], None] | None = None, grace: float = 10.0) -> None:
        """Run what may run until nothing is left; `watch` is called now and then while a job runs.

        A job gets TERM at the end of its walltime, and KILL when the grace is over.
        """
        while ready := [job for job in self.jobs() if job["state"] == "Q" and not job["held"] and self._is_free(job)]:
            codes = [self._run(ready[0], index, watch, grace) for index in ready[0]["indices"]]
            job = load(self.folder / f"{ready[0]['number']}.json")
            store(self.folder, {**job, "state": "F", "failed": any(codes)})
            for waiting in self.jobs():
                # what waits for a job to end well will never run
                if waiting["after_ok"] and job["number"] in waiting["after"] and any(codes):
                    store(self.folder, {**waiting, "state": "F"})
        # nothing waits for a job that was deleted before it ran
        assert all(job["state"] == "F" for job in self.jobs() if not job["held"])

    def _is_free(self, job: dict) -> bool:
        return all(load(self.folder / f"{number}.json")["state"] == "F" for number in job["after"])

    def _run(self, job: dict, index: int | None, watch: Callable | None, grace: float) -> int:
        nodes = self.folder / "nodes"
        nodes.write_text("".join(f"{name}\n" for name in self.nodes))
        variables = {"PBS_JOBID": job["id"], "PBS_O_WORKDIR": job["cwd"], "PBS_NODEFILE": str(nodes)}
        if index is not None:
            variables |= {"PBS_ARRAY_INDEX": str(index)}
        log = Path(job["cwd"]) / f"{job['name']}.o{job['number']}"
        with log.open("ab") as out:
            # like PBS, not where it was submitted
            process = subprocess.Popen(
                ["bash", job["script"]], cwd="/", env={**self.environment, **variables}, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        store(self.folder, {**job, "state": "R", "pid": process.pid})
        began = time.monotonic()
        asked = None
        while process.poll() is None:
            if watch is not None:
                watch(job, process)
            if asked is None and time.monotonic() - began > job["walltime"]:
                asked = time.monotonic()
                os.killpg(process.pid, signal.SIGTERM)
            if asked is not None and time.monotonic() - asked > grace:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.02)
        return process.returncode


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def store(folder: Path, job: dict) -> None:
    part = folder / "part"
    part.write_text(json.dumps(job))
    part.replace(folder / f"{job['number']}.json")


def find(folder: Path, job_id: str) -> dict:
    """Return a job, or leave as PBS does."""
    path = folder / f"{re.split(r'[.[]', job_id)[0]}.json"
    if not path.exists():
        leave(UNKNOWN, f"Unknown Job Id {job_id}")
    job = load(path)
    if job["state"] == "F":
        leave(ENDED, f"{job_id} Job has finished")
    return job


def leave(code: int, why: str) -> None:
    print(why, file=sys.stderr)
    sys.exit(code)


def options(words: list[str]) -> dict[str, list[str]]:
    """Return option -> values; the script's place is under the empty name."""
    job_options: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "-h":
            job_options["-h"] = [""]
        elif word in WITH_VALUE:
            job_options.setdefault(word, []).append(rest.pop(0))
        elif word.startswith("-"):
            leave(2, f"illegal option {word}")
        else:
            job_options.setdefault("", []).append(word)
    return job_options


def directives(script: Path) -> list[str]:
    """Return the words of the directives: those before the first command."""
    words: list[str] = []
    for line in script.read_text().splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#PBS "):
            words += line.split()[1:]
    return words


def qsub(folder: Path, words: list[str]) -> None:
    if (folder / "refuse").exists() and len(list(folder.glob("*.json"))) >= int((folder / "refuse").read_text()):
        leave(1, "qsub: would exceed the queue's limit")
    given = options(words)
    (script,) = given[""]
    job_options = {**options(directives(Path(script))), **given}
    limits = dict(item.split("=", 1) for item in job_options["-l"])
    assert re.fullmatch(r"[A-Za-z][\w.-]{0,14}", job_options["-N"][0]), f"illegal -N value {job_options['-N']}"
    assert job_options["-j"] == ["oe"] and limits["select"]
    hours, minutes, seconds = map(int, limits["walltime"].split(":"))
    kind, after = "", []
    # Options of the command are added to the directives, and these have the depend of no other job.
    tolerated = [value for value in directives(Path(script)) if value.startswith("tolerate_node_failures=")]
    assert tolerated in ([], ["tolerate_node_failures=all"])
    for value in job_options.get("-W", []):
        if value in tolerated:
            continue
        kind, ids = re.fullmatch(r"depend=(afterany|afterok):(.+)", value).groups()
        after = [find(folder, after_id)["number"] for after_id in ids.split(":")]
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
    store(folder, job)
    print(job["id"])


def qstat(folder: Path, words: list[str]) -> None:
    print(find(folder, words[0])["state"])


def qrls(folder: Path, words: list[str]) -> None:
    store(folder, {**find(folder, words[0]), "held": False})


def qdel(folder: Path, words: list[str]) -> None:
    job = find(folder, words[0])
    if job["state"] == "R":
        os.killpg(job["pid"], signal.SIGTERM)
        return
    store(folder, {**job, "state": "F"})
    for path in folder.glob("*.json"):
        # what waits for a job that never ran will never run
        later = load(path)
        if job["number"] in later["after"] and later["state"] == "Q":
            qdel(folder, [later["id"]])


if __name__ == "__main__":
    place = Path(os.environ["STANDIN_PBS"])
    with (place / "calls").open("a") as calls:
        calls.write(" ".join(sys.argv[1:]).replace("\n", "?") + "\n")
    {"qsub": qsub, "qstat": qstat, "qrls": qrls, "qdel": qdel}[sys.argv[1]](place, sys.argv[2:])
