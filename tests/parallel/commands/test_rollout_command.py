"""Tests that `credit rollout` and `credit verify` on several ranks give the files and scores of one process."""

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

# Three initial times, so that two ranks have unequal shares. Batches of two divide ensembles of three members.
FORECASTS = (
    "inference.initial_times=[2000-02-09T00:00, 2000-02-10T06:00, 2000-02-12T00:00]", "inference.lead_time=36h",
    "inference.batch_size=2",
    "inference.ensemble={members: 3, perturbation: {kind: correlated}, feature_noise: {std: 0.3}}",
    "verification.events={warm: {channel: t2m, above_quantile: 0.8}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def forecast_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a model, and with the forecasts of one process in ``one``."""
    folder = world(tmp_path_factory.mktemp("rollout"))
    assert main(["train", str(folder / "config.yml"), "trainer.max_steps=2"]) == 0
    assert main(["rollout", str(folder / "config.yml"), *FORECASTS, "inference.folder=one"]) == 0
    return folder


def rollout_on_two_ranks(folder: Path, name: str, *overrides: str) -> str:
    arguments = ["rollout", str(folder / "config.yml"), *FORECASTS, f"inference.folder={name}", *overrides]
    return launch("credit.cli.main", 2, *arguments)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the files of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_ranks_write_the_forecasts_of_one_process(forecast_folder: Path) -> None:
    run = forecast_folder / "run"
    output = rollout_on_two_ranks(forecast_folder, "dealt")
    assert "rank 0: 2 forecasts written" in output and "rank 1: 1 forecasts written" in output
    assert read_files(run / "dealt") == read_files(run / "one")
    split_option = "inference.split=member"
    assert (
        main(["rollout", str(forecast_folder / "config.yml"), *FORECASTS, "inference.folder=members", split_option])
        == 0
    )
    rollout_on_two_ranks(forecast_folder, "members_dealt", split_option)
    assert read_files(run / "members_dealt") == read_files(run / "members") and len(read_files(run / "members")) == 9
    one_process = open_forecasts(run / "one")
    for name, overrides in {
        "split": ("inference.parallelism.tensor=2",),
        "sharded": ("inference.parallelism.shard=true", "inference.format=zarr"),
    }.items():
        rollout_on_two_ranks(forecast_folder, name, *overrides)
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


def test_rank_without_forecast_takes_part_in_steps_of_lagged_members(forecast_folder: Path) -> None:
    """Members with a lag take more steps, and every step gathers the sharded weights of all ranks."""
    ensemble_option = "inference.ensemble={members: 3, lagged: 6h}"
    arguments = ["rollout", str(forecast_folder / "config.yml"), *FORECASTS, ensemble_option, "inference.folder=lagged"]
    assert main(arguments) == 0
    rollout_on_two_ranks(forecast_folder, "lagged_shared", ensemble_option, "inference.parallelism.shard=true")
    one_process, two_ranks = (open_forecasts(forecast_folder / "run" / name) for name in ("lagged", "lagged_shared"))
    assert (
        two_ranks.initial_minutes.tolist() == one_process.initial_minutes.tolist()
        and len(one_process.initial_minutes) == 3
    )
    for initial in one_process.initial_minutes.tolist():
        expected, read = one_process.read_members(initial, 5), two_ranks.read_members(initial, 5)
        np.testing.assert_allclose(read, expected, rtol=1e-4, atol=1e-4)


def test_missing_field_that_one_rank_scores_is_reported(forecast_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lacks"
    shutil.copytree(forecast_folder, folder)
    config = folder / "config.yml"
    config.write_text(config.read_text().replace(str(forecast_folder), str(folder)))
    with netCDF4.Dataset(folder / "data.nc", "r+") as data:
        # 2000-02-13, which only the second rank scores.
        data["t2m"][43 * 4] = np.nan
    with pytest.raises(AssertionError, match="t2m at 2000-02-13T00:00: the whole field is missing"):
        launch(
            "credit.cli.main", 2, "verify", str(config), *FORECASTS, "--online", "inference.batch_size=1",
            "inference.initial_times=[2000-02-09T00:00, 2000-02-12T00:00]", "inference.parallelism.shard=true",
        )  # fmt: skip


def test_rollout_that_restarts_after_kill_writes_the_same_files(forecast_folder: Path) -> None:
    run = forecast_folder / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
               "credit.cli.main", "rollout", str(forecast_folder / "config.yml"), *FORECASTS,
               "inference.folder=killed"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + 120
        while not list((run / "killed").glob("*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    expected_files = read_files(run / "one")
    finished_files = {name: content for name, content in read_files(run / "killed").items() if name.endswith(".nc")}
    assert finished_files.items() <= expected_files.items(), "a file that has its name is whole"
    rollout_on_two_ranks(forecast_folder, "killed")
    assert {
        name: content for name, content in read_files(run / "killed").items() if name.endswith(".nc")
    } == expected_files
    assert not list((run / "killed").glob("*.part*"))


def test_scores_do_not_depend_on_files_or_ranks(forecast_folder: Path) -> None:
    run = forecast_folder / "run"
    animated_channel = open_forecasts(run / "one").channel_names[0]
    figure_options = ("verification.draw_figures=true", f"verification.animate=[{animated_channel}]")
    assert (
        main(["verify", str(forecast_folder / "config.yml"), *FORECASTS, "inference.folder=one", *figure_options]) == 0
    )
    score_file_content, expected, figures = (
        (run / "scores.csv").read_bytes(),
        read_scores(run),
        read_example_figures(run),
    )
    assert len(figures) > 2
    for overrides in ((), ("inference.parallelism.tensor=2",)):
        (run / "scores.csv").unlink()
        launch(
            "credit.cli.main",
            2,
            "verify",
            str(forecast_folder / "config.yml"),
            *FORECASTS,
            "--online",
            *figure_options,
            *overrides,
        )
        content = read_scores(run)
        assert content.keys() == expected.keys()
        assert read_example_figures(run).keys() == figures.keys()
        if not overrides:
            assert (run / "scores.csv").read_bytes() == score_file_content
            assert read_example_figures(run) == figures
        for key, value in expected.items():
            # Omit scores of events, because a cell near the threshold may change sides.
            if ":" not in key[4]:
                assert content[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key


def read_example_figures(folder: Path) -> dict[str, bytes]:
    """Return the contents of the figures of the example forecast, by file name."""
    kinds = ("maps", "hovmoeller", "animation")
    return {name: content for name, content in read_files(folder / "figures").items() if name.startswith(kinds)}


def read_scores(folder: Path) -> dict[tuple[str, ...], float]:
    """Return the scores of the globe for all seasons, by forecast, variable, level, lead time and metric."""
    with open(folder / "scores.csv", newline="") as handle:
        rows = [row for row in csv.DictReader(handle) if row["region"] == "global" and row["season"] == "all"]
    names = ("forecast", "variable", "level", "lead_hours", "metric")
    return {tuple(row[name] for name in names): float(row["value"]) for row in rows}
