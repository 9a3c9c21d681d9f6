"""Tests that commands on ranks that share the members of an ensemble give the files and scores of one process."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from credit.cli.main import main
from credit.forecast.io.forecast_reader import open_forecasts
from tests.parallel.commands.test_train_command import find_rank_pid, start_two_ranks
from tests.parallel.forked import launch
from tests.smoke.conftest import world
from tests.smoke.test_train import rows, wait_for_row

pytestmark = pytest.mark.slow

TRAINING = (
    "trainer.max_steps=3", "trainer.members=4", "loss.kind=crps", "data.forecast_len=2",
    "model.noise={kind: global, channels: 4, memory: [0h, forecast]}", "trainer.valid_members=4",
    "trainer.valid_samples=4", "trainer.validate_every=3",
)  # fmt: skip
# Five members in batches of two make three batches, so that one of two ranks computes a batch that is discarded.
FORECASTS = (
    *TRAINING,
    "inference.initial_times=[2000-02-09T00:00, 2000-02-10T06:00, 2000-02-12T00:00]", "inference.lead_time=24h",
    "inference.batch_size=2", "inference.ensemble={members: 5}",
    "verification.events={warm: {channel: t2m, above_quantile: 0.8}}",
)  # fmt: skip
SHARED = "inference.parallelism.ensemble=2"


@pytest.fixture(scope="module")
def ensemble_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an ensemble that was trained on one process, and its forecasts in ``one``."""
    folder = world(tmp_path_factory.mktemp("ensemble"))
    assert main(["train", str(folder / "config.yml"), *TRAINING]) == 0
    assert main(["rollout", str(folder / "config.yml"), *FORECASTS, "inference.folder=one"]) == 0
    return folder


def read_steps(run: Path) -> list[dict[str, float]]:
    """Return the rows of the log of a run that have a loss."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def run_on_ranks(num_ranks: int, command: str, folder: Path, *overrides: str) -> str:
    """Run a command of `credit` on several ranks and return its output."""
    return launch("credit.cli.main", num_ranks, command, str(folder / "config.yml"), *FORECASTS, *overrides)


def test_files_are_those_of_one_process(ensemble_folder: Path) -> None:
    run = ensemble_folder / "run"
    output = run_on_ranks(2, "rollout", ensemble_folder, SHARED, "inference.folder=two")
    assert "rank 0: 3 forecasts written" in output and "rank 1" not in output
    output = run_on_ranks(4, "rollout", ensemble_folder, SHARED, "inference.folder=four")
    assert "rank 0: 2 forecasts written" in output and "rank 2: 1 forecasts written" in output
    expected = {path.name: path.read_bytes() for path in (run / "one").iterdir()}
    assert len(expected) == 3
    for folder in ("two", "four"):
        assert {path.name: path.read_bytes() for path in (run / folder).iterdir()} == expected, folder


@pytest.mark.parametrize(
    ("num_ranks", "parallelism"),
    [(2, (SHARED,)), (4, (SHARED, "inference.parallelism.tensor=2"))],
    ids=["2 ranks", "tensor 2 x ensemble 2"],
)
def test_zarr_stores_have_the_same_values(ensemble_folder: Path, num_ranks: int, parallelism: tuple[str, ...]) -> None:
    """Every rank writes its own members. The plugin shows that ranks do not send fields to each other."""
    zarr_option = "inference.format=zarr"
    config = str(ensemble_folder / "config.yml")
    assert main(["rollout", config, *FORECASTS, zarr_option, "inference.folder=zarr_one"]) == 0
    folder = f"zarr_{num_ranks}"
    plugins = "plugins=[tests.parallel.commands.forbid_sends]"
    options = (*parallelism, zarr_option, plugins, f"inference.folder={folder}")
    assert "rank 0: 3 forecasts written" in run_on_ranks(num_ranks, "rollout", ensemble_folder, *options)
    expected, rank_forecasts = (open_forecasts(ensemble_folder / "run" / name) for name in ("zarr_one", folder))
    assert rank_forecasts.initial_minutes.tolist() == expected.initial_minutes.tolist()
    tolerance = 0 if num_ranks == 2 else 1e-4
    for initial in expected.initial_minutes.tolist():
        for lead in range(len(expected.lead_minutes)):
            members, expected_members = rank_forecasts.read_members(initial, lead), expected.read_members(initial, lead)
            np.testing.assert_allclose(members, expected_members, rtol=tolerance, atol=tolerance)
    assert "rank 0: 0 forecasts written, 3 were already complete" in run_on_ranks(
        num_ranks, "rollout", ensemble_folder, *options
    )


def test_rank_that_cannot_write_stops_all_ranks_of_a_store(ensemble_folder: Path) -> None:
    """Both ranks report the error at the end of the round, and no forecast counts as complete."""
    options = (SHARED, "inference.format=zarr", "inference.folder=zarr_full")
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(2, "rollout", ensemble_folder, *options, "plugins=[tests.parallel.commands.fail_on_rank1]")
    assert str(failure.value).count("credit rollout: [Errno 28] No space left") == 2, failure.value
    assert "rank 0: 3 forecasts written" in run_on_ranks(2, "rollout", ensemble_folder, *options)


@pytest.mark.parametrize("format", ["netcdf", "zarr"])
def test_lagged_members_have_the_values_of_one_process(ensemble_folder: Path, format: str) -> None:
    """Lagged members take more steps than others, and files have only every second step."""
    options = (
        "inference.ensemble={members: 5, lagged: 6h}", "inference.output_every=12h", f"inference.format={format}",
        "inference.initial_times=[2000-02-10T06:00, 2000-02-12T00:00]",
    )  # fmt: skip
    arguments = ["rollout", str(ensemble_folder / "config.yml"), *FORECASTS, *options]
    assert main([*arguments, f"inference.folder=lagged_one_{format}"]) == 0
    run_on_ranks(2, "rollout", ensemble_folder, SHARED, *options, f"inference.folder=lagged_two_{format}")
    expected, rank_forecasts = (
        open_forecasts(ensemble_folder / "run" / f"lagged_{name}_{format}") for name in ("one", "two")
    )
    assert rank_forecasts.initial_minutes.tolist() == expected.initial_minutes.tolist()
    assert rank_forecasts.lead_minutes.tolist() == expected.lead_minutes.tolist() == [720, 1440]
    for initial in expected.initial_minutes.tolist():
        for lead in range(2):
            np.testing.assert_array_equal(
                rank_forecasts.read_members(initial, lead), expected.read_members(initial, lead)
            )


def test_sharded_weights_give_the_values_of_one_process(ensemble_folder: Path) -> None:
    """Every rank gathers weights from all ranks, so all ranks must compute the same number of batches."""
    run_on_ranks(2, "rollout", ensemble_folder, SHARED, "inference.parallelism.shard=true", "inference.folder=sharded")
    expected, sharded = (open_forecasts(ensemble_folder / "run" / name) for name in ("one", "sharded"))
    assert sharded.initial_minutes.tolist() == expected.initial_minutes.tolist()
    for initial in expected.initial_minutes.tolist():
        np.testing.assert_allclose(
            sharded.read_members(initial, 3), expected.read_members(initial, 3), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("overrides", [(), ("inference.parallelism.shard=true",)])
def test_scores_without_files_are_those_of_one_process(ensemble_folder: Path, overrides: tuple[str, ...]) -> None:
    run = ensemble_folder / "run"
    assert main(["verify", str(ensemble_folder / "config.yml"), *FORECASTS, "--online"]) == 0
    expected_text = (run / "scores.csv").read_text()
    (run / "scores.csv").unlink()
    run_on_ranks(2, "verify", ensemble_folder, SHARED, "--online", *overrides)
    if not overrides:
        assert (run / "scores.csv").read_text() == expected_text
    expected, scores = parse_scores(expected_text), parse_scores((run / "scores.csv").read_text())
    assert scores.keys() == expected.keys() and len(expected) == len(expected_text.splitlines()) - 1 > 100
    for key, value in expected.items():
        assert scores[key] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), key


def parse_scores(text: str) -> dict[tuple[str, ...], float]:
    """Return the values of a table of scores; a key has the entries of all other columns."""
    scores = {}
    for row in csv.DictReader(io.StringIO(text)):
        value = float(row.pop("value"))
        scores[tuple(row.values())] = value
    return scores


def test_training_takes_the_same_steps(ensemble_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Two ranks share the members of a sample. Then one process continues the run from its checkpoint."""
    folder = world(tmp_path)
    arguments = (str(folder / "config.yml"), *TRAINING)
    launch("credit.cli.main", 2, "train", *arguments, "trainer.parallelism.ensemble=2", "trainer.max_steps=3")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    expected_rows = [json.loads(line) for line in (ensemble_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    expected_steps = [row for row in expected_rows if "loss" in row]
    assert len(steps) == len(expected_steps) > 0
    for row, expected in zip(steps, expected_steps, strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4), key
    validations = [row["valid"] for row in rows if row.get("valid")]
    expected_validations = [row["valid"] for row in expected_rows if row.get("valid")]
    assert len(validations) == len(expected_validations) == 1
    for key in ("loss", "fair_crps", "calibration"):
        assert validations[0][key] == pytest.approx(expected_validations[0][key], rel=1e-3), key
    assert main(["train", *arguments, "trainer.max_steps=4"]) == 0


STEADY = (
    *TRAINING, "model.attn_dropout=0", "trainer.schedule.kind=constant", "trainer.schedule.warmup=0",
    "trainer.log_every=1",
    "trainer.train_batch_size=4", "trainer.validate_every=4", "trainer.checkpoint_every=4",
)  # fmt: skip


def test_one_rank_of_a_group_reads_each_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks form two groups. Together they read the samples of one process, each of them once."""
    reads = {}
    for name, num_ranks in (("one", 1), ("groups", 4)):
        reads_folder = tmp_path / name / "reads"
        reads_folder.mkdir(parents=True)
        folder = world(tmp_path / name)
        monkeypatch.setenv("READS_FOLDER", str(reads_folder))
        # Two groups, each with half of the batch, take the samples of one process.
        batch = 4 * min(num_ranks, 2) // num_ranks
        overrides = [f"trainer.train_batch_size={batch}", "plugins=[tests.parallel.commands.count_reads]"]
        if num_ranks > 1:
            overrides.append("trainer.parallelism.ensemble=2")
        launch("credit.cli.main", num_ranks, "train", str(folder / "config.yml"), *STEADY, *overrides)
        reads[name] = {path.name: path.read_text().split() for path in reads_folder.iterdir()}
    assert reads["groups"].keys() == {"rank_0", "rank_2"}
    samples = sorted(sample for rank_reads in reads["groups"].values() for sample in rank_reads)
    assert samples == sorted(reads["one"]["rank_0"]) and len(samples) == 3 * 4


def test_run_continues_on_meshes_with_other_ensemble_degrees(tmp_path: Path) -> None:
    """Each part of the run continues on another mesh, and the losses are those of one process."""
    folder = world(tmp_path)
    config = str(folder / "config.yml")
    run_parts = [
        (2, 4, ("trainer.parallelism.ensemble=2",)),
        (4, 6, ("trainer.parallelism.ensemble=2", "trainer.train_batch_size=2")),
        (1, 8, ()),
    ]
    reference_run, changing_run = f"save_loc={folder / 'one'}", f"save_loc={folder / 'many'}"
    launch("credit.cli.main", 1, "train", config, *STEADY, "trainer.max_steps=8", reference_run)
    for num_ranks, steps, overrides in run_parts:
        launch(
            "credit.cli.main",
            num_ranks,
            "train",
            config,
            *STEADY,
            f"trainer.max_steps={steps}",
            changing_run,
            *overrides,
        )
    expected_steps, steps = read_steps(folder / "one"), read_steps(folder / "many")
    assert [row["step"] for row in steps] == [row["step"] for row in expected_steps] == list(range(1, 9))
    for row, expected in zip(steps, expected_steps, strict=True):
        # The first five steps agree to 1e-5. Then rounding errors grow faster where members have equal values.
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5 if row["step"] <= 5 else 1e-3), row["step"]


def test_killed_rank_of_a_group_restarts_the_run(tmp_path: Path) -> None:
    """With ``torchrun --max-restarts``, the run resumes and ends with the same losses."""
    folder = world(tmp_path)
    overrides = (*STEADY, "trainer.max_steps=10", "trainer.parallelism.ensemble=2")
    with start_two_ranks(folder, *overrides, f"save_loc={folder / 'whole'}"):
        pass
    with start_two_ranks(folder, *overrides, f"save_loc={folder / 'killed'}", restarts=1) as process:
        wait_for_row(folder / "killed", 6, process)
        os.kill(find_rank_pid(f"save_loc={folder / 'killed'}", 1), signal.SIGKILL)
    assert rows(folder / "killed") == rows(folder / "whole")
