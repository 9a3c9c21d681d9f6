"""`credit verify` without forecast files, of two runs, and of periods that the weights were trained on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from credit.cli.main import main
from credit.forecast.io.forecast_reader import open_forecasts


def prepare_two_runs(folder: Path) -> str:
    """Train two runs, write their forecasts and return the config file of the first run. The second is in `second`.

    The config has an event, and SEEPS of the variable rain.
    """
    path = folder / "config.yml"
    document = yaml.safe_load(path.read_text())
    document["data"]["variable_options"]["rain"]["temporal"] = "accumulate"
    document["verification"] |= {"events": {"warm": {"channel": "t2m", "above_quantile": 0.8}}, "seeps": ["rain"]}
    path.write_text(yaml.safe_dump(document))
    second = ("experiment=second try", f"save_loc={folder / 'second'}", "seed=1", "inference.folder=made")
    for overrides in ((), second):
        assert main(["train", str(path), "trainer.max_steps=3", *overrides]) == 0
        assert main(["rollout", str(path), *overrides]) == 0
    return str(path)


def read_figures(run: Path) -> dict[Path, bytes]:
    """Return the contents of the figures of a run."""
    return {path: path.read_bytes() for path in (run / "figures").iterdir()}


@pytest.mark.slow
def test_scores_without_files_and_against_second_run(small_run: Path, capsys: pytest.CaptureFixture) -> None:
    config = prepare_two_runs(small_run)
    run = small_run / "run"
    animated_channel = open_forecasts(run / "forecasts").channel_names[0]
    figure_options = ("verification.draw_figures=true", f"verification.animate=[{animated_channel}]")
    assert main(["verify", config, *figure_options]) == 0
    scores_of_files = (run / "scores.csv").read_bytes()
    figures_of_files = read_figures(run)
    assert {path.name.split("_")[0] for path in figures_of_files} >= {"maps", "hovmoeller", "animation"}
    assert sum(path.name.startswith("hovmoeller_latitude_") for path in figures_of_files) > 1
    assert b",brier_skill:warm," in scores_of_files and b",seeps," in scores_of_files

    # Forecasts that are computed while scoring give the same scores and figures.
    (run / "scores.csv").unlink()
    for path in (run / "forecasts").iterdir():
        path.unlink()
    assert main(["verify", config, *figure_options, "--online"]) == 0
    assert (run / "scores.csv").read_bytes() == scores_of_files
    assert read_figures(run) == figures_of_files
    capsys.readouterr()

    # Without figures, those of the previous verification are removed, and the scores are the same.
    assert main(["verify", config, "--online"]) == 0
    assert (run / "scores.csv").read_bytes() == scores_of_files
    assert not read_figures(run) and (run / "report.html").exists()
    capsys.readouterr()

    # The first run has no forecast files any more. The second run is named by its folder.
    assert main(["verify", config, str(small_run / "second"), "--online"]) == 0
    output = capsys.readouterr().out
    assert "Ratio: small / second_try" in output and "against_second_try" in output
    # The comparison does not change the scores of the first run.
    assert (run / "scores.csv").read_bytes() == scores_of_files
    require_consistent_comparison(run)
    require_json_names_second_run_by_folder(small_run, config, capsys)
    require_errors_about_the_second_run(small_run, config, capsys)


def require_consistent_comparison(run: Path) -> None:
    """Assert that the scores against the second run agree with those of the first, and the differences with both."""
    folder = run / "against_second_try"
    with xr.open_dataset(folder / "scores.nc") as scores, xr.open_dataset(run / "scores.nc") as run_scores:
        assert scores["reference"].values.tolist() == ["best_baseline", "second_try"]
        for name in ("rmse", "brier", "seeps"):
            xr.testing.assert_equal(scores[name].sel(forecast="model"), run_scores[name].sel(forecast="model"))
        assert np.isfinite(scores["brier"].sel(forecast="second_try")).all()
        for name in ("rmse", "brier", "seeps"):
            score = scores[name].sel(region="global", season="all")
            ratio = score.sel(forecast="model") / score.sel(forecast="second_try") - 1
            difference = scores[f"{name}_difference"].sel(reference="second_try", region="global", season="all")
            xr.testing.assert_allclose(difference.drop_vars("reference"), ratio)
            if name != "rmse":
                assert np.isfinite(difference).any()
    assert "second_try" in (folder / "report.html").read_text()


def require_json_names_second_run_by_folder(small_run: Path, config: str, capsys: pytest.CaptureFixture) -> None:
    """Assert that the JSON document names a second run of the same experiment by its folder."""
    experiment = yaml.safe_load((small_run / "second" / "config.yml").read_text())["experiment"]
    capsys.readouterr()
    namesake = f"experiment={experiment}"
    assert main(["verify", config, str(small_run / "second"), "--online", "--json", "--quiet", namesake]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["reference"] == "second" and document["files"]["report"].endswith("against_second/report.html")
    assert all(row["rmse"]["model"] > 0 for row in document["rows"])
    assert (small_run / "run" / "against_second" / "scores.csv").exists()


def require_errors_about_the_second_run(small_run: Path, config: str, capsys: pytest.CaptureFixture) -> None:
    """Assert that an invalid second run, or more than one, is refused with a message."""
    second = str(small_run / "second")
    # This argument is longer than a file name can be, which must not cause an error of its own.
    times = ", ".join(f"2000-02-{day:02d}T00:00:00" for day in range(9, 25))
    (small_run / "lr=0.1").mkdir()
    for arguments, messages in (
        ([second, str(small_run / "run")], ["one run is compared with one other"]),
        ([second, "verification.other_forecasts={second_try: x}"], ["is the name of another forecast here"]),
        ([f"{second}/made"], ["is not a run folder: config.yml is missing", "verification.other_forecasts"]),
        ([f"inference.initial_times=[{times}]", "verification.regions=[nowhere]"], ["nowhere"]),
        ([str(small_run / "lr=0.1")], ["lr=0.1: is not a run folder"]),
        ([str(small_run / "nowhere.yml")], ["nowhere.yml"]),
    ):
        capsys.readouterr()
        assert main(["verify", config, *arguments]) == 2
        error = capsys.readouterr().err
        assert all(message in error for message in messages), error


def test_seen_periods_are_not_scored_and_other_weights_are_named(small_run: Path, command: Callable) -> None:
    """Test periods that overlap with training are refused, and the report names forecasts of other weights.

    A run that begins with weights of another run inherits the periods that those weights were trained on.
    """
    config, run, second = small_run / "config.yml", small_run / "run", small_run / "second"
    tuned_overrides = (f"save_loc={second}", "experiment=second", f"trainer.resume={run / 'checkpoints' / 'latest'}",
                       "trainer.max_steps=4", 'data.splits.valid=["2000-02-01","2000-02-05"]')  # fmt: skip
    for overrides in (("trainer.max_steps=3",), tuned_overrides):
        for name in ("train", "rollout"):
            result = command(name, config, *overrides)
            assert result.returncode == 0, result.stderr
    splits = yaml.safe_load(config.read_text())["data"]["splits"]
    periods = {name: f"{splits[name][0]}T00:00/{splits[name][1]}T23:59" for name in ("train", "valid")}
    with xr.open_dataset(next((run / "forecasts").glob("*.nc"))) as run_forecast:
        assert run_forecast.attrs["seen_periods"] == ", ".join(periods.values())
    with xr.open_dataset(next((second / "forecasts").glob("*.nc"))) as tuned_forecast:
        assert tuned_forecast.attrs["seen_periods"] == ", ".join(
            [*periods.values(), "2000-02-01T00:00/2000-02-05T23:59"]
        )

    # The earlier periods leave room for a test period inside the period that the weights were trained on.
    earlier_periods = ('data.splits.train=["2000-01-01","2000-01-12"]', 'data.splits.valid=["2000-01-14","2000-01-16"]',
                       'data.splits.test=["2000-01-18","2000-01-24"]')  # fmt: skip
    for options in ((), ("--online",)):
        result = command("verify", config, *earlier_periods, *options)
        assert result.returncode == 2
        assert "data.splits.test 2000-01-18T00:00..2000-01-24T23:59" in result.stderr
        assert f"trained or selected on {periods['train'].replace('/', ' to ')}" in result.stderr
        assert "data.splits.test=[FIRST,LAST]" in result.stderr
    result = command("check", config, 'data.splits.valid=["2000-01-30","2000-01-31"]',
                     'data.splits.test=["2000-02-03","2000-02-19"]')  # fmt: skip
    assert result.returncode != 0 and "has seen a part of this period" in result.stdout + result.stderr

    result = command("verify", config, *earlier_periods, "--online", "verification.allow_seen=true")
    warning = f"Trained or selected on a part of the test period: model on {periods['train'].replace('/', ' to ')}"
    assert result.returncode == 0 and warning in result.stdout and warning in result.stderr
    assert warning in (run / "report.html").read_text()

    # Forecasts of this run, of the checkpoint in inference.checkpoint, and of another run.
    assert command("verify", config).returncode == 0
    assert "made with the weights" not in (report := (run / "report.html").read_text())
    assert "steps, last loss" in report and periods["train"] in report
    result = command("verify", config, f"inference.checkpoint={second / 'checkpoints' / 'latest'}")
    assert (
        result.returncode == 0 and "inference.checkpoint" in result.stderr and "uses that checkpoint" in result.stderr
    )
    assert "steps, last loss" in (run / "report.html").read_text()
    result = command("verify", config, f"inference.folder={second / 'forecasts'}")
    assert result.returncode == 0 and "step 4 of second. No checkpoint in" in result.stderr
    assert "contains these weights" in (report := (run / "report.html").read_text())
    assert "steps, last loss" not in report and ">second<" in report

    other = f"verification.other_forecasts={{tuned: {second / 'forecasts'}}}"
    result = command("verify", config, other, *earlier_periods)
    assert result.returncode == 2 and "verification.other_forecasts.tuned" in result.stderr
