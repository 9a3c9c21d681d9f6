"""credit verify: without files, and of two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import yaml

from credit.cli.main import main
from credit.forecast.archive import open_forecasts


@pytest.mark.slow
def test_without_files_and_against_another_run(small_run: Path, capsys: pytest.CaptureFixture) -> None:
    """With an event and SEEPS, which the waves' rain stands for."""
    raw = yaml.safe_load((small_run / "config.yml").read_text())
    raw["data"]["fields"]["rain"]["temporal"] = "accumulate"
    raw["verification"] |= {"events": {"warm": {"channel": "t2m", "above_quantile": 0.8}}, "seeps": ["rain"]}
    (small_run / "config.yml").write_text(yaml.safe_dump(raw))
    config, run = str(small_run / "config.yml"), small_run / "run"
    second = ("experiment=second try", f"save_loc={small_run / 'second'}", "seed=1", "inference.folder=made")
    for own in ((), second):
        assert main(["train", config, "trainer.max_steps=3", *own]) == 0
        assert main(["rollout", config, *own]) == 0
    animated = f"verification.animate=[{open_forecasts(run / 'forecasts').channel_names[0]}]"
    assert main(["verify", config, animated]) == 0
    from_files, pictures = (run / "scores.csv").read_bytes(), {p: p.read_bytes() for p in (run / "figures").iterdir()}
    assert {path.name.split("_")[0] for path in pictures} >= {"maps", "hovmoeller", "animation"}
    assert sum(path.name.startswith("hovmoeller_latitude_") for path in pictures) > 1
    assert b",brier_skill:warm," in from_files and b",seeps," in from_files
    (run / "scores.csv").unlink()
    for path in (run / "forecasts").iterdir():
        path.unlink()
    assert main(["verify", config, animated, "--online"]) == 0
    assert (run / "scores.csv").read_bytes() == from_files
    assert {path: path.read_bytes() for path in (run / "figures").iterdir()} == pictures
    capsys.readouterr()

    # the first run has no files left, the second is named by its folder
    assert main(["verify", config, str(small_run / "second"), "--online"]) == 0
    said = capsys.readouterr().out
    assert "Ratio: model over second_try" in said and "against_second_try" in said
    assert (run / "scores.csv").read_bytes() == from_files  # as it was
    with xr.open_dataset(run / "against_second_try" / "scores.nc") as scores, xr.open_dataset(run / "scores.nc") as own:
        assert scores["reference"].values.tolist() == ["best_baseline", "second_try"]
        for name in ("rmse", "brier", "seeps"):
            xr.testing.assert_equal(scores[name].sel(forecast="model"), own[name].sel(forecast="model"))
        assert np.isfinite(scores["brier"].sel(forecast="second_try")).all()
        rmse = scores["rmse"].sel(region="global", season="all")
        ratio = rmse.sel(forecast="model") / rmse.sel(forecast="second_try") - 1
        difference = scores["rmse_difference"].sel(reference="second_try", region="global", season="all")
        xr.testing.assert_allclose(difference.drop_vars("reference"), ratio)
        for name in ("brier", "seeps"):
            own = scores[name].sel(region="global", season="all")
            ratio = own.sel(forecast="model") / own.sel(forecast="second_try") - 1
            difference = scores[f"{name}_difference"].sel(reference="second_try", region="global", season="all")
            xr.testing.assert_allclose(difference.drop_vars("reference"), ratio)
            assert np.isfinite(difference).any()
    assert "second_try" in (run / "against_second_try" / "report.html").read_text()

    # a run that was trained on what is to be scored
    raw = yaml.safe_load((small_run / "second" / "config.yml").read_text())
    raw["data"]["splits"] = {"train": ["2000-01-01", "2000-02-10"], "valid": ["2000-02-12", "2000-02-15"],
                             "test": ["2000-02-17", "2000-02-19"]}  # fmt: skip
    (small_run / "third.yml").write_text(yaml.safe_dump({**raw, "experiment": "third"}))
    assert main(["verify", config, str(small_run / "third.yml"), "--online"]) == 2
    said = capsys.readouterr().err
    assert "third has seen a part of this period, its data.splits.train 2000-01-01T00:00..2000-02-10T23:59" in said
    assert "data.splits.test 2000-02-08T00:00" in said and "data.splits.test=[FIRST,LAST]" in said

    assert main(["verify", config, str(small_run / "second"), str(run)]) == 2
    assert "one run is compared with one other" in capsys.readouterr().err
    assert main(["verify", config, str(small_run / "second"), "verification.other_forecasts={second_try: x}"]) == 2
    assert "is the name of another forecast here" in capsys.readouterr().err
    namesake = f"experiment={yaml.safe_load((small_run / 'second' / 'config.yml').read_text())['experiment']}"
    assert main(["verify", config, str(small_run / "second"), "--online", namesake]) == 0
    assert (run / "against_second" / "scores.csv").exists()
    assert main(["verify", config, str(small_run / "second" / "made")]) == 2
    assert "no run's folder" in (said := capsys.readouterr().err) and "verification.other_forecasts" in said
    assert main(["verify", config, str(small_run / "nowhere.yml")]) == 2
    assert "nowhere.yml" in capsys.readouterr().err
