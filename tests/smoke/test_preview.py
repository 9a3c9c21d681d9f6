"""`trainer.preview` adds score rows and figures to a training run, and does not change the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from credit.cli.main import main
from credit.config import load_config
from credit.parallel.process_info import read_process_info
from credit.train.build.training import assemble_training
from credit.train.monitor.run_files import read_preview_scores
from tests.smoke.test_train import rows

SHORT = ("trainer.max_steps=12", "trainer.validate_every=4", "trainer.checkpoint_every=2")
PREVIEW = "trainer.preview={lead_time: 24h, cases: 3, channels: [t2m, rain]}"


class StopAtActivity:
    """Watchdog and stop signal in one: it requests a stop when a given activity begins."""

    def __init__(self, at: str) -> None:
        self._at, self._wish = at, None

    def record_activity(self, activity: str) -> None:
        self._wish = self._wish or ("asked" if activity == self._at else None)

    def find_reason(self, ahead_seconds: float) -> str | None:
        return self._wish


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a run without previews, in `plain`, and the same run with previews, in `seen`."""
    from tests.smoke.conftest import world

    folder = world(tmp_path_factory.mktemp("early"))
    config = str(folder / "config.yml")
    assert main(["train", config, f"save_loc={folder}/plain", *SHORT]) == 0
    assert main(["train", config, f"save_loc={folder}/seen", *SHORT, PREVIEW, "trainer.loggers=[tensorboard]"]) == 0
    return folder


@pytest.mark.slow
def test_preview_does_not_change_the_run(runs: Path) -> None:
    plain, seen = runs / "plain", runs / "seen"
    assert rows(seen) == rows(plain) and len(rows(seen)) == 12
    valid = [[row["valid"] for row in read_log(folder) if "valid" in row] for folder in (plain, seen)]
    assert valid[0] == valid[1] and len(valid[0]) == 3
    names = [path.name for path in sorted((plain / "checkpoints" / "latest").glob("*.safetensors"))]
    assert names
    for name in names:
        assert (plain / "checkpoints" / "latest" / name).read_bytes() == (
            seen / "checkpoints" / "latest" / name
        ).read_bytes()


@pytest.mark.slow
def test_preview_writes_rows_and_figures(runs: Path) -> None:
    preview_scores = read_preview_scores(runs / "seen")
    assert sorted(preview_scores) == [4, 8, 12]
    assert list(preview_scores[4]) == [
        f"{kind}/{channel}/{hour}h"
        for kind in ("rmse", "persistence")
        for hour in (6, 12, 18, 24)
        for channel in ("t2m", "rain")
    ]
    # All previews use the same cases.
    assert preview_scores[4]["persistence/t2m/24h"] == preview_scores[12]["persistence/t2m/24h"] > 1
    assert preview_scores[4]["rmse/t2m/24h"] != preview_scores[12]["rmse/t2m/24h"]
    assert {path.name for path in (runs / "seen" / "figures").iterdir()} == {
        "early_rmse.png", "early_map_t2m.png", "early_map_rain.png",
    }  # fmt: skip
    assert not (runs / "plain" / "figures").exists()


@pytest.mark.slow
def test_tensorboard_has_previews(runs: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(runs / "seen" / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {"early_rmse", "early_map_t2m", "early_map_rain"}
    assert [image.step for image in events.Images("early_rmse")] == [4, 8, 12]
    assert [scalar.step for scalar in events.Scalars("early/rmse/t2m/24h")] == [4, 8, 12]


@pytest.mark.slow
def test_continued_run_repeats_interrupted_preview(runs: Path) -> None:
    folder = runs / "stopped"
    config = load_config(runs / "config.yml", [f"save_loc={folder}", *SHORT, PREVIEW])
    folder.mkdir()

    def run(stop_request: StopAtActivity) -> str:
        launch = read_process_info()
        return assemble_training(config, launch, torch.device("cpu"), stop_request, lambda *_: []).run(
            stop_request, None
        )

    assert run(StopAtActivity("preview at step 8")) == "requeue"
    assert [row["step"] for row in read_log(folder) if "valid" in row] == [4]
    assert run(StopAtActivity("never")) == "done"
    assert rows(folder) == rows(runs / "plain")
    assert [row["step"] for row in read_log(folder) if "valid" in row] == [4, 8, 12]
    assert read_preview_scores(folder) == read_preview_scores(runs / "seen")


@pytest.mark.slow
def test_invalid_preview_is_refused_before_training(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(runs / "config.yml")
    for override, message in (
        ("trainer.preview={lead_time: 7h}", "trainer.preview.lead_time: 7h is not a multiple of data.timestep"),
        ("trainer.preview={lead_time: 10d}", "trainer.preview.lead_time: 240h: data.splits.valid"),
        ("trainer.preview={channels: [t2n]}", 'trainer.preview.channels: "t2n" is not scored; did you mean'),
        ("trainer.preview={case: 3}", 'did you mean "cases"'),
    ):
        for name in ("check", "train"):
            assert main([name, config, f"save_loc={runs}/wrong", *SHORT, override]) == 2, (name, override)
            output = capsys.readouterr()
            assert message in output.out + output.err, (name, override)
    assert main(["check", config, f"save_loc={runs}/right", *SHORT, PREVIEW]) == 0
    assert "trainer.preview: 3 forecasts of 24 h, 2000-02-01T00:00 to" in capsys.readouterr().out
