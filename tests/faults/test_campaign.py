"""Short form of the campaign of kills (`python -m tests.faults.campaign` runs the long one), and loader processes."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.campaign import run_campaign
from tests.faults.ranks import start_ranks, wait_for_end
from tests.smoke.conftest import world
from tests.smoke.test_train import wait_for_row

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("ranks", "kills"), [(1, 3), (2, 2)])
def test_killed_runs_equal_undisturbed_run(tmp_path: Path, ranks: int, kills: int) -> None:
    report = run_campaign(world(tmp_path), kills, ranks, steps=12, draw=random.Random(7))
    assert not report.lost
    assert sum(report.kills.values()) == kills


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_loader_processes_end_with_the_run(tmp_path: Path, number: signal.Signals) -> None:
    folder = world(tmp_path)
    save_loc = f"save_loc={folder / 'run'}"
    arguments = ["train", str(folder / "config.yml"), save_loc, "data.num_workers=2", "trainer.max_steps=4000",
                 "trainer.log_every=1"]  # fmt: skip
    (process,) = start_ranks(arguments, 1, log=folder / "log")
    try:
        wait_for_row(folder / "run", 3, process)
        assert len(find_processes(save_loc)) == 3
        process.send_signal(number)
        (code,) = wait_for_end([process], 30)
        assert code == (85 if number == signal.SIGTERM else -number)
        deadline = time.monotonic() + 20
        while find_processes(save_loc) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not find_processes(save_loc)
    finally:
        process.kill()
        process.wait()


def find_processes(argument: str) -> list[int]:
    """Return the processes that were started with `argument`."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if argument in (path / "cmdline").read_text().split("\0"):
                process_ids.append(int(path.name))
        except OSError:
            continue
    return process_ids
