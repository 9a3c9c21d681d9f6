"""Jobs with `min_nodes` under a stand-in for PBS: one remote shell for each node, and new launches after an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from credit.cli.main import main
from tests.hpc.standin_pbs import StandInPbs
from tests.hpc.test_pbs import PlannedRun

BATCH_SIZES = ("trainer.global_batch_size=12", "trainer.train_batch_size=3")


@pytest.fixture
def run(tmp_path: Path, pbs: StandInPbs) -> PlannedRun:
    """Run on three nodes with min_nodes 2. A fake ssh runs the commands of each node on this machine."""
    pbs.nodes = ["node1", "node2", "node3"]
    # Like ssh, the script passes on the standard input, but no environment.
    shell = pbs.folder / "bin" / "ssh"
    shell.write_text(
        '#!/bin/bash\nnode=$7\nshift 7\n[ -e "' + str(pbs.folder) + '/lost_$node" ] && exit 255\n'
        'env -i PATH=/usr/bin:/bin NODE="$node" "$@"\n'
    )
    shell.chmod(0o755)
    section = {"nodes": 3, "min_nodes": 2, "gpus_per_node": 1, "environment": {"GREETING": 'it\'s a "test"'}}
    return PlannedRun(tmp_path / "a run's folder", name="the run", **section)


def list_started_nodes(run: PlannedRun) -> list[str]:
    return sorted(call["environment"]["NODE"] for call in run.launches())


def test_one_agent_on_each_node(run: PlannedRun, pbs: StandInPbs, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.submit(*BATCH_SIZES, "--nodes", "3", plan=("done 10",) * 3) == 0
    assert "3 nodes: 3 of 3 ranks train\n2 nodes: 2 of 2 ranks train" in capsys.readouterr().err
    pbs.run()
    assert list_started_nodes(run) == ["node1", "node2", "node3"]
    for call in run.launches():
        assert call["cwd"] == str(Path.cwd())
        assert call["environment"]["GREETING"] == 'it\'s a "test"'
        assert call["environment"]["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
        arguments = call["arguments"]
        assert {"--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=4", "--rdzv-id=1.head.1"} <= set(arguments)
        assert arguments[-5:] == ["-m", "credit.cli.main", "train", str(run.config), *BATCH_SIZES][-5:]
    assert "the run is done" in run.log()


def test_the_launcher_starts_again_after_an_error(run: PlannedRun, pbs: StandInPbs) -> None:
    """The first launch loses a node and crashes. The second launch uses another port on the remaining nodes."""
    (pbs.folder / "lost_node3").touch()
    run.submit(*BATCH_SIZES, plan=("crash 10", "crash 10", "done 20", "done 20"))
    pbs.run()
    assert list_started_nodes(run) == ["node1", "node1", "node2", "node2"]
    ids = [next(text for text in call["arguments"] if text.startswith("--rdzv-id=")) for call in run.launches()]
    assert sorted(ids) == ["--rdzv-id=1.head.1"] * 2 + ["--rdzv-id=1.head.2"] * 2
    assert len({call["environment"]["MASTER_PORT"] for call in run.launches()}) == 2
    assert "it starts again on the remaining nodes" in run.log()
    starts = (run.save_loc / "jobs" / "starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 10]


@pytest.mark.parametrize(
    ("plan", "launches"),
    [
        # A requeued run continues in the next job, and a failed run does not continue.
        (("requeue 10",) * 3, 1),
        (("failed 10",) * 3, 1),
        # One spare node allows one more launch.
        (("crash 10",) * 3 + ("crash 20",) * 3 + ("crash 30",) * 3, 2),
        # Two launches completed no step.
        (("crash 0",) * 9, 2),
    ],
)
def test_number_of_launches_is_limited(run: PlannedRun, pbs: StandInPbs, plan: tuple[str, ...], launches: int) -> None:
    run.submit(*BATCH_SIZES, plan=plan)
    pbs.run()
    assert len(run.launches()) == 3 * launches


def test_impossible_node_counts_are_refused(run: PlannedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.submit() == 2
    assert "pbs.min_nodes: 2: needs trainer.global_batch_size" in capsys.readouterr().err
    assert run.submit(*BATCH_SIZES, "trainer.parallelism.tensor=3", "--dry-run") == 2
    assert "the smallest mesh needs 3 ranks, but only 2 ranks remain" in capsys.readouterr().err
    # Without spare nodes, all ranks must divide the batch.
    assert main(["submit", str(run.config), "--nodes", "5", "pbs.min_nodes=null", "trainer.global_batch_size=12"]) == 2
    assert "12 samples cannot be divided equally among 5 ranks" in capsys.readouterr().err
