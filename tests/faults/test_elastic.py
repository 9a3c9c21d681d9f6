"""Runs that lose nodes continue on the remaining ranks, with the samples and losses of an undisturbed run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from tests.faults.elastic_agents import Agents
from tests.smoke.conftest import world
from tests.smoke.test_train import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Four ranks with 3 samples each are a global batch of 12; three ranks take 2 x 2 samples each.
OPTIONS = ("trainer.train_batch_size=3", "trainer.global_batch_size=12", "trainer.validate_every=1000",
           "trainer.checkpoint_every=4", "trainer.log_every=1", "model.attn_dropout=0", "trainer.max_steps=16",
           "trainer.valid_samples=1", "model.use_spectral_norm=false")  # fmt: skip


def wait_for_step(run: Path, step: int, agents: Agents, seconds: float = 300.0) -> float:
    """Wait until metrics.jsonl has the row of a step, and return the seconds that it took."""
    start_time = time.monotonic()
    while not (run / "metrics.jsonl").exists() or f'"step": {step},' not in (run / "metrics.jsonl").read_text():
        assert time.monotonic() < start_time + seconds, agents.log()
        assert any(process.poll() is None for process in agents.processes), agents.log()
        time.sleep(0.02)
    return time.monotonic() - start_time


def kill_and_measure(agents: Agents, index: int, run: Path, limit: float) -> tuple[float, int]:
    """Kill an agent with its rank; return the seconds until the next optimizer step ends, and the resumed step.

    The resumed step is that of the checkpoint from which the run continues.
    """
    metrics = run / "metrics.jsonl"
    inode = metrics.stat().st_ino
    agents.kill(index)
    kill_time = time.monotonic()
    # The restarted run first replaces the file by one without rows after the checkpoint.
    while metrics.stat().st_ino == inode:
        assert time.monotonic() < kill_time + limit, agents.log()
        time.sleep(0.02)
    resumed_step = max(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    while f'"step": {resumed_step + 1},' not in metrics.read_text():
        assert time.monotonic() < kill_time + limit, agents.log()
        time.sleep(0.02)
    return time.monotonic() - kill_time, resumed_step


def test_three_of_four_agents_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the kill of an agent and its rank, the next step ends within a time limit, and the losses are unchanged."""
    folder = world(tmp_path)
    config, run = str(folder / "config.yml"), folder / "run"
    with Agents(4, 4, ["train", config, *OPTIONS, f"save_loc={folder / 'whole'}"], tmp_path) as agents:
        assert agents.wait(800) == [0] * 4, agents.log()
    with Agents(4, 3, ["train", config, *OPTIONS], tmp_path) as agents:
        first_start = wait_for_step(run, 5, agents)
        # A restart does less than the first start, whose time shows the load of the machine.
        limit = max(60.0, 1.5 * first_start + 15.0)
        seconds, resumed_step = kill_and_measure(agents, 3, run, limit)
        codes = agents.wait(600)
    with capsys.disabled():
        print(f"\nfirst start {first_start:.1f} s, from the kill to the next step {seconds:.1f} s")
    assert codes == [0, 0, 0, -9], agents.log()
    assert json.loads((run / "STATUS").read_text())["status"] == "done"
    undisturbed, disturbed = rows(folder / "whole"), rows(run)
    assert [row[:2] for row in disturbed] == [row[:2] for row in undisturbed]
    # Four ranks compute equal numbers in both runs. With three ranks, rounding differs, and the difference grows.
    assert 4 <= resumed_step < 12 and disturbed[:resumed_step] == undisturbed[:resumed_step]
    for (step, _, loss, norm, _), (_, _, other_loss, other_norm, _) in zip(undisturbed, disturbed, strict=True):
        tolerance = 1e-5 if step <= resumed_step + 5 else 1e-3
        assert other_loss == pytest.approx(loss, rel=tolerance), step
        assert other_norm == pytest.approx(norm, rel=10 * tolerance), step
    saved_trainer = yaml.safe_load((run / "config.yml").read_text())["trainer"]
    assert (saved_trainer["train_batch_size"], saved_trainer["global_batch_size"]) == (3, 12)


def test_loss_of_rendezvous_node_ends_all_agents(tmp_path: Path) -> None:
    """The other agents end by themselves, so the job script can start them again on the remaining nodes."""
    folder = world(tmp_path)
    run = folder / "run"
    arguments = ["train", str(folder / "config.yml"), *OPTIONS, "trainer.max_steps=12"]
    with Agents(2, 1, arguments, tmp_path) as agents:
        wait_for_step(run, 5, agents)
        agents.kill(0)
        codes = agents.wait(600)
        assert codes[1] not in (0, -9), agents.log()
    assert json.loads((run / "STATUS").read_text())["status"] in ("running", "requeue")
    with Agents(1, 1, arguments, tmp_path) as agents:
        assert agents.wait(600) == [0], agents.log()
    assert json.loads((run / "STATUS").read_text())["status"] == "done"
    assert [row[0] for row in rows(run)] == list(range(1, 13))


@pytest.mark.parametrize(("fault", "num_starts"), [("error", 1), ("shape", 2)])
def test_restarts_end_if_an_error_is_repeated(tmp_path: Path, fault: str, num_starts: int) -> None:
    """A data error is not tried again. Any other error, such as out of memory, is tried once more."""
    folder = world(tmp_path)
    run = folder / "run"
    arguments = ["train", str(folder / "config.yml"), *OPTIONS, "plugins=[tests.faults.inject]"]
    inject = json.dumps({"steps": [5], "always": True, fault: True})
    with Agents(1, 1, arguments, tmp_path, max_restarts=3, CREDIT_TEST_INJECT=inject) as agents:
        assert agents.wait(600)[0] != 0
    assert agents.log().count("does not train") == 4 - num_starts, agents.log()
    status = json.loads((run / "STATUS").read_text())
    assert (status["status"], status["step"]) == ("failed", 4)
    assert [row[0] for row in rows(run)] == list(range(1, 6))


def test_surplus_rank_waits_for_the_others(tmp_path: Path) -> None:
    """Three ranks and a global batch of 4: two train, and the third ends with them."""
    folder = world(tmp_path)
    arguments = ["train", str(folder / "config.yml"), *OPTIONS, "trainer.global_batch_size=4", "trainer.max_steps=2"]
    with Agents(3, 3, arguments, tmp_path) as agents:
        assert agents.wait(600) == [0, 0, 0], agents.log()
    assert "2 of 3 ranks train" in agents.log() and "ranks: 2 = replicate 1 x shard 2" in agents.log()
    assert [row[0] for row in rows(folder / "run")] == [1, 2]
