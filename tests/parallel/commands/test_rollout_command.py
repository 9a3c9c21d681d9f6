"""`credit rollout` on several ranks writes the files of one process, however the work is divided, also after a kill."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import netCDF4
import numpy as np
import pytest

from credit.cli.main import main
from credit.forecast.io.forecast_reader import open_forecasts
from tests.parallel.forked import launch
from tests.parallel.torchrun import REPOSITORY
from tests.smoke.conftest import world

pytestmark = pytest.mark.slow

# three initial times, so that two ranks have unequal shares, and batches that cut through ensembles
FORECASTS = (
    "inference.initial_times=[2000-02-09T00:00, 2000-02-10T06:00, 2000-02-12T00:00]", "inference.lead_time=36h",
    "inference.batch_size=2",
    "inference.ensemble={members: 3, perturbation: {kind: correlated}, feature_noise: {std: 0.3}}",
    "verification.events={warm: {channel: t2m, above_quantile: 0.8}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def forecast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and the forecasts of one process in ``one``."""
    folder = world(tmp_path_factory.mktemp("rollout"))
    assert main(["train", str(folder / "config.yml"), "trainer.max_steps=2"]) == 0
    assert main(["rollout", str(folder / "config.yml"), *FORECASTS, "inference.folder=one"]) == 0
    return folder


def rollout_on_two_ranks(folder: Path, name: str, *overrides: str) -> str:
    arguments = ["rollout", str(folder / "config.yml"), *FORECASTS, f"inference.folder={name}", *overrides]
    return launch("credit.cli.main", 2, *arguments)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_many_ranks_write_what_one_process_writes(forecast: Path) -> None:
    run = forecast / "run"
    output = rollout_on_two_ranks(forecast, "dealt")
    assert "rank 0: 2 forecasts written" in output and "rank 1: 1 forecasts written" in output
    assert contents(run / "dealt") == contents(run / "one")
    split_option = "inference.split=member"
    assert main(["rollout", str(forecast / "config.yml"), *FORECASTS, "inference.folder=members", split_option]) == 0
    rollout_on_two_ranks(forecast, "members_dealt", split_option)
    assert contents(run / "members_dealt") == contents(run / "members") and len(contents(run / "members")) == 9
    one_process = open_forecasts(run / "one")
    for name, overrides in {
        "split": ("inference.parallelism.tensor=2",),
        "sharded": ("inference.parallelism.shard=true", "inference.format=zarr"),
    }.items():
        rollout_on_two_ranks(forecast, name, *overrides)
        two_ranks = open_forecasts(run / name)
        assert two_ranks.initial_minutes.tolist() == one_process.initial_minutes.tolist()
        order = [two_ranks.channel_names.index(channel) for channel in one_process.channel_names]
        for initial in one_process.initial_minutes.tolist():
            for number in range(len(one_process.lead_minutes)):
                expected, read = (
                    one_process.read_members(initial, number),
                    two_ranks.read_members(initial, number)[:, order],
                )
                scale = np.abs(expected).max(axis=(0, 2, 3), keepdims=True)
                assert (np.abs(read - expected) / scale).max() < 1e-5, f"{name} {initial} {number}"


def test_a_rank_without_work_keeps_up_with_lagged_members(forecast: Path) -> None:
    """Members with a lag take more steps, and every step gathers the sharded weights of all ranks."""
    ensemble_option = "inference.ensemble={members: 3, lagged: 6h}"
    one_process = ["rollout", str(forecast / "config.yml"), *FORECASTS, ensemble_option, "inference.folder=lagged"]
    assert main(one_process) == 0
    rollout_on_two_ranks(forecast, "lagged_shared", ensemble_option, "inference.parallelism.shard=true")
    alone, shared = (open_forecasts(forecast / "run" / name) for name in ("lagged", "lagged_shared"))
    assert shared.initial_minutes.tolist() == alone.initial_minutes.tolist() and len(alone.initial_minutes) == 3
    for initial in alone.initial_minutes.tolist():
        expected, read = alone.read_members(initial, 5), shared.read_members(initial, 5)
        np.testing.assert_allclose(read, expected, rtol=1e-4, atol=1e-4)


def test_what_one_rank_cannot_score_is_said_where_forecasts_are_spread(forecast: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lacks"
    shutil.copytree(forecast, folder)
    config = folder / "config.yml"
    config.write_text(config.read_text().replace(str(forecast), str(folder)))
    with netCDF4.Dataset(folder / "data.nc", "r+") as data:  # 2000-02-13, which only the second rank scores
        data["t2m"][43 * 4] = np.nan
    with pytest.raises(AssertionError, match="t2m at 2000-02-13T00:00: the whole field is missing"):
        launch(
            "credit.cli.main", 2, "verify", str(config), *FORECASTS, "--online", "inference.batch_size=1",
            "inference.initial_times=[2000-02-09T00:00, 2000-02-12T00:00]", "inference.parallelism.shard=true",
        )  # fmt: skip


def test_killed_and_started_again_gives_the_same_files(forecast: Path) -> None:
    run = forecast / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
               "credit.cli.main", "rollout", str(forecast / "config.yml"), *FORECASTS,
               "inference.folder=killed"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while not list((run / "killed").glob("*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    expected_files = contents(run / "one")
    finished_files = {name: content for name, content in contents(run / "killed").items() if name.endswith(".nc")}
    assert finished_files.items() <= expected_files.items(), "a file that has its name is whole"
    rollout_on_two_ranks(forecast, "killed")
    assert {
        name: content for name, content in contents(run / "killed").items() if name.endswith(".nc")
    } == expected_files
    assert not list((run / "killed").glob("*.part*"))


def test_scores_do_not_depend_on_files_or_ranks(forecast: Path) -> None:
    run = forecast / "run"
    animated_channel = open_forecasts(run / "one").channel_names[0]
    drawn = ("verification.draw_figures=true", f"verification.animate=[{animated_channel}]")
    assert main(["verify", str(forecast / "config.yml"), *FORECASTS, "inference.folder=one", *drawn]) == 0
    table, expected, pictures = (run / "scores.csv").read_bytes(), scores(run), pictures_of_the_example(run)
    assert len(pictures) > 2
    for overrides in ((), ("inference.parallelism.tensor=2",)):
        (run / "scores.csv").unlink()
        launch(
            "credit.cli.main",
            2,
            "verify",
            str(forecast / "config.yml"),
            *FORECASTS,
            "--online",
            *drawn,
            *overrides,
        )
        content = scores(run)
        assert content.keys() == expected.keys()
        assert pictures_of_the_example(run).keys() == pictures.keys()
        if not overrides:
            assert (run / "scores.csv").read_bytes() == table
            assert pictures_of_the_example(run) == pictures
        for key, value in expected.items():
            if ":" not in key[4]:  # an event's, where a cell on the threshold may change sides
                assert content[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def pictures_of_the_example(folder: Path) -> dict[str, bytes]:
    """Return the files of the example's pictures."""
    kinds = ("maps", "hovmoeller", "animation")
    return {name: content for name, content in contents(folder / "figures").items() if name.startswith(kinds)}


def scores(folder: Path) -> dict[tuple[str, ...], float]:
    """Return the scores of the global region by what they are of."""
    with open(folder / "scores.csv", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["region"] == "global" and row["season"] == "all"]
    names = ("forecast", "variable", "level", "lead_hours", "metric")
    return {tuple(row[name] for name in names): float(row["value"]) for row in rows}
