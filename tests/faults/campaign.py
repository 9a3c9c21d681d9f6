"""Kills runs at random moments, again and again, and compares what comes out with a run that nobody disturbed.

    python -m tests.faults.campaign --kills 200

Each round starts the run where it stands and sends a random signal (KILL, TERM, USR1) to a random rank or to all: while
they start, a random time after a first new step, or as soon as a checkpoint is being written after that. Killed ranks
leave the others waiting: they must end by themselves. Then every checkpoint that counts as whole is read. At the end
the rows of the run must be those of the undisturbed one: equal on one process, to 1e-4 on several, where another order
of arrival changes sums.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from credit.train.checkpoint import checkpoint
from tests.faults.ranks import start, wait_for_end
from tests.smoke.conftest import world

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
STEADY = ("model.attn_dropout=0", "trainer.schedule.kind=constant", "trainer.schedule.warmup=0", "trainer.log_every=1",
          "trainer.validate_every=40", "trainer.checkpoint_every=3", "trainer.parallelism.timeout=1min")  # fmt: skip
ORPHAN_SECONDS = 100.0
MOST_STARTS = 60


@dataclass
class Findings:
    """What a campaign has seen."""

    kills: Counter = field(default_factory=Counter)
    in_starts: int = 0
    inside_saves: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    slowest_end: float = 0.0


def campaign(folder: Path, kills: int, ranks: int, steps: int, draw: random.Random) -> Findings:
    """Disturb runs of `steps` steps on `ranks` ranks until `kills` signals were sent."""
    findings = Findings()
    began = time.monotonic()
    undisturbed = train(folder, "undisturbed", ranks, steps)
    while not newest_row(folder / "undisturbed") and all(process.poll() is None for process in undisturbed):
        time.sleep(0.01)
    start_seconds = time.monotonic() - began
    assert wait_for_end(undisturbed, 600) == [0] * ranks, "the undisturbed run failed"
    expected = rows(folder / "undisturbed")
    while sum(findings.kills.values()) < kills:
        name = f"run{findings.runs}"
        for _ in range(MOST_STARTS):
            processes = train(folder, name, ranks, steps)
            disturbed = sum(findings.kills.values()) < kills and disturb(
                folder / name, processes, findings, draw, start_seconds
            )
            # of ranks that start, those that are left come to wait for the others first
            began, limit = time.monotonic(), ORPHAN_SECONDS + start_seconds if disturbed else 600
            codes = wait_for_end(processes, limit)
            waited = time.monotonic() - began
            if disturbed:
                findings.slowest_end = max(findings.slowest_end, waited)
            if waited >= limit:
                findings.lost.append(f"{name}: a rank did not end by itself, exit codes {codes}")
            inspect(folder / name, findings)
            status = read_status(folder / name)
            if status == "failed":
                findings.lost.append(f"{name}: {(folder / name / 'STATUS').read_text()}")
            if status == "done":
                break
        else:
            findings.lost.append(f"{name}: not done after {MOST_STARTS} starts")
        findings.runs += 1
        compare(name, rows(folder / name), expected, 0.0 if ranks == 1 else 1e-4, findings)
    return findings


def train(folder: Path, name: str, ranks: int, steps: int) -> list:
    """Start the run `name`, or go on with it."""
    batch = f"trainer.train_batch_size={4 // ranks}"
    arguments = ["train", str(folder / "config.yml"), f"save_loc={folder / name}", batch, *STEADY,
                 f"trainer.max_steps={steps}"]  # fmt: skip
    return start(arguments, ranks, log=folder / f"{name}.log")


def disturb(folder: Path, processes: list, findings: Findings, draw: random.Random, start_seconds: float) -> bool:
    """Wait for a moment of the start, a new step or a save, and send a signal; return whether the run had not ended."""
    before = newest_row(folder)
    moment = draw.random()
    in_start, in_save = moment < 0.2, moment > 0.6
    if in_start:
        time.sleep(draw.random() * start_seconds)
    deadline = time.monotonic() + (0 if in_start else 60 + 3 * start_seconds)
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if in_save and any(folder.glob("checkpoints/.step_*.part")) and newest_row(folder) > before:
            break
        if not in_save and newest_row(folder) > before:
            time.sleep(draw.random() * 1.5)
            break
        time.sleep(0.002)
    if any(process.poll() is not None for process in processes):
        return False
    findings.in_starts += newest_row(folder) <= before
    findings.inside_saves += any(folder.glob("checkpoints/.step_*.part"))
    number = draw.choice(SIGNALS)
    # a request to stop that only one rank hears is agreed by all
    for process in processes if draw.random() < 0.5 else [draw.choice(processes)]:
        process.send_signal(number)
    findings.kills[number.name] += 1
    return True


def inspect(folder: Path, findings: Findings) -> None:
    """Read every checkpoint that would be accepted."""
    for path in checkpoint.list_checkpoints(folder / "checkpoints"):
        problem = checkpoint.verify_checkpoint(path)
        if problem is not None:
            findings.lost.append(f"{path}: {problem}")


def compare(name: str, rows_found: list, expected: list, tolerance: float, findings: Findings) -> None:
    """Note where a run's rows are not those of the undisturbed one."""
    if [row[:2] for row in rows_found] != [row[:2] for row in expected]:
        findings.lost.append(f"{name}: steps {[row[0] for row in rows_found]}")
        return
    for row, expected_row in zip(rows_found, expected, strict=True):
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(row[2:], expected_row[2:], strict=True)):
            findings.lost.append(f"{name}: {row} instead of {expected_row}")
            return


def rows(folder: Path) -> list[tuple]:
    """Return step, epoch, loss, norm and rate of each training row."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in ("step", "epoch", "loss", "grad_norm", "lr")) for row in lines if "loss" in row]


def newest_row(folder: Path) -> int:
    """Return the step of the last row, 0 without any."""
    try:
        last = (folder / "metrics.jsonl").read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        return json.loads(last)["step"]
    except (OSError, ValueError):
        return 0


def read_status(folder: Path) -> str:
    """Return what STATUS says."""
    try:
        return json.loads((folder / "STATUS").read_text())["status"]
    except (OSError, ValueError):
        return ""


def main() -> int:
    """Print what happened; 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="signals in all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, kills dealt to each")
    parser.add_argument("--steps", type=int, default=40, help="length of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals")
    parser.add_argument("--folder", type=Path, help="where to run; temporary without")
    asked = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in asked.ranks:
            folder = (asked.folder or Path(temporary)) / f"ranks{ranks}"
            folder.mkdir(parents=True, exist_ok=True)
            findings = campaign(
                world(folder), -(-asked.kills // len(asked.ranks)), ranks, asked.steps, random.Random(asked.seed)
            )
            print(
                f"{ranks} ranks: {dict(findings.kills)}, {findings.in_starts} before a new step, "
                f"{findings.inside_saves} inside a save, {findings.runs} runs, "
                f"slowest end {findings.slowest_end:.1f} s, "
                f"lost: {findings.lost or 'nothing'}",
                flush=True,
            )
            lost += len(findings.lost)
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
