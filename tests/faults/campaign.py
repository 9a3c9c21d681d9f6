"""Kill training runs at random moments, and compare their results with those of an undisturbed run.

    python -m tests.faults.campaign --kills 200

Each round continues the run and sends a random signal (KILL, TERM, USR1) to one random rank or to all. The signal comes
during the start, a random time after the first new step, or while a checkpoint is written after that step. If one rank
is killed, the others must end by themselves. After each round, every complete checkpoint is read. At the end, the rows
of the run must equal those of the undisturbed run. The tolerance is 0 for one process. It is 1e-4 for several, because
sums depend on the order of arrival.
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
from tests.faults.ranks import start_ranks, wait_for_end
from tests.smoke.conftest import world

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1)
STEADY = ("model.attn_dropout=0", "trainer.schedule.kind=constant", "trainer.schedule.warmup=0", "trainer.log_every=1",
          "trainer.validate_every=40", "trainer.checkpoint_every=3", "trainer.parallelism.timeout=1min")  # fmt: skip
ORPHAN_SECONDS = 100.0
MAX_STARTS = 60


@dataclass
class CampaignReport:
    """Counts and errors of a campaign."""

    kills: Counter = field(default_factory=Counter)
    in_starts: int = 0
    inside_saves: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    slowest_end: float = 0.0


def run_campaign(folder: Path, kills: int, ranks: int, steps: int, draw: random.Random) -> CampaignReport:
    """Disturb runs of `steps` steps on `ranks` ranks until `kills` signals have been sent."""
    findings = CampaignReport()
    start_time = time.monotonic()
    undisturbed = train(folder, "undisturbed", ranks, steps)
    while not read_last_step(folder / "undisturbed") and all(process.poll() is None for process in undisturbed):
        time.sleep(0.01)
    start_seconds = time.monotonic() - start_time
    assert wait_for_end(undisturbed, 600) == [0] * ranks, "the undisturbed run failed"
    expected = read_rows(folder / "undisturbed")
    while sum(findings.kills.values()) < kills:
        name = f"run{findings.runs}"
        for _ in range(MAX_STARTS):
            processes = train(folder, name, ranks, steps)
            disturbed = sum(findings.kills.values()) < kills and disturb(
                folder / name, processes, findings, draw, start_seconds
            )
            # If a rank dies during the start, the others need the time of a start before they begin to wait.
            start_time, limit = time.monotonic(), ORPHAN_SECONDS + start_seconds if disturbed else 600
            codes = wait_for_end(processes, limit)
            waited = time.monotonic() - start_time
            if disturbed:
                findings.slowest_end = max(findings.slowest_end, waited)
            if waited >= limit:
                findings.lost.append(f"{name}: a rank did not end by itself, exit codes {codes}")
            verify_checkpoints(folder / name, findings)
            status = read_status(folder / name)
            if status == "failed":
                findings.lost.append(f"{name}: {(folder / name / 'STATUS').read_text()}")
            if status == "done":
                break
        else:
            findings.lost.append(f"{name}: not done after {MAX_STARTS} starts")
        findings.runs += 1
        compare_rows(name, read_rows(folder / name), expected, 0.0 if ranks == 1 else 1e-4, findings)
    return findings


def train(folder: Path, name: str, ranks: int, steps: int) -> list:
    """Start or continue the run `name`."""
    batch = f"trainer.train_batch_size={4 // ranks}"
    arguments = ["train", str(folder / "config.yml"), f"save_loc={folder / name}", batch, *STEADY,
                 f"trainer.max_steps={steps}"]  # fmt: skip
    return start_ranks(arguments, ranks, log=folder / f"{name}.log")


def disturb(folder: Path, processes: list, findings: CampaignReport, draw: random.Random, start_seconds: float) -> bool:
    """Wait for a moment of the start, a new step or a save, and send a signal; return False if the run ended before."""
    before = read_last_step(folder)
    moment = draw.random()
    in_start, in_save = moment < 0.2, moment > 0.6
    if in_start:
        time.sleep(draw.random() * start_seconds)
    deadline = time.monotonic() + (0 if in_start else 60 + 3 * start_seconds)
    while all(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if in_save and any(folder.glob("checkpoints/.step_*.part")) and read_last_step(folder) > before:
            break
        if not in_save and read_last_step(folder) > before:
            time.sleep(draw.random() * 1.5)
            break
        time.sleep(0.002)
    if any(process.poll() is not None for process in processes):
        return False
    findings.in_starts += read_last_step(folder) <= before
    findings.inside_saves += any(folder.glob("checkpoints/.step_*.part"))
    number = draw.choice(SIGNALS)
    # All ranks agree on a stop request that only one rank receives.
    for process in processes if draw.random() < 0.5 else [draw.choice(processes)]:
        process.send_signal(number)
    findings.kills[number.name] += 1
    return True


def verify_checkpoints(folder: Path, findings: CampaignReport) -> None:
    """Verify every checkpoint that the run would accept."""
    for path in checkpoint.list_checkpoints(folder / "checkpoints"):
        problem = checkpoint.verify_checkpoint(path)
        if problem is not None:
            findings.lost.append(f"{path}: {problem}")


def compare_rows(name: str, actual_rows: list, expected: list, tolerance: float, findings: CampaignReport) -> None:
    """Record a difference between the rows of a run and those of the undisturbed run."""
    if [row[:2] for row in actual_rows] != [row[:2] for row in expected]:
        findings.lost.append(f"{name}: steps {[row[0] for row in actual_rows]}")
        return
    for row, expected_row in zip(actual_rows, expected, strict=True):
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(row[2:], expected_row[2:], strict=True)):
            findings.lost.append(f"{name}: {row} instead of {expected_row}")
            return


def read_rows(folder: Path) -> list[tuple]:
    """Return step, epoch, loss, gradient norm and learning rate of each training row."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row[key] for key in ("step", "epoch", "loss", "grad_norm", "lr")) for row in lines if "loss" in row]


def read_last_step(folder: Path) -> int:
    """Return the step of the last row, or 0 if there is none."""
    try:
        last = (folder / "metrics.jsonl").read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        return json.loads(last)["step"]
    except (OSError, ValueError):
        return 0


def read_status(folder: Path) -> str:
    """Return the state in STATUS, or an empty string if it cannot be read."""
    try:
        return json.loads((folder / "STATUS").read_text())["status"]
    except (OSError, ValueError):
        return ""


def main() -> int:
    """Run the campaigns and print their counts; return 1 if there was an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="signals in all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, kills dealt to each")
    parser.add_argument("--steps", type=int, default=40, help="length of a run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and signals")
    parser.add_argument("--folder", type=Path, help="where to run; temporary without")
    options = parser.parse_args()
    lost = 0
    with tempfile.TemporaryDirectory() as temporary:
        for ranks in options.ranks:
            folder = (options.folder or Path(temporary)) / f"ranks{ranks}"
            folder.mkdir(parents=True, exist_ok=True)
            findings = run_campaign(
                world(folder),
                -(-options.kills // len(options.ranks)),
                ranks,
                options.steps,
                random.Random(options.seed),
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
