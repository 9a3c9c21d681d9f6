"""credit_train with trainer.preview: the same run, with rows and figures beside it."""

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
VIEW = "trainer.preview={lead_time: 24h, cases: 3, channels: [t2m, rain]}"


class Asked:
    """A watchdog that asks to stop when a certain thing begins, and the request."""

    def __init__(self, at: str) -> None:
        self._at, self._wish = at, None

    def record_activity(self, activity: str) -> None:
        self._wish = self._wish or ("asked" if activity == self._at else None)

    def find_reason(self, ahead_seconds: float) -> str | None:
        return self._wish


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run without views, in `plain`, and the same run with them, in `seen`."""
    from tests.smoke.conftest import world

    folder = world(tmp_path_factory.mktemp("early"))
    config = str(folder / "config.yml")
    assert main(["train", config, f"save_loc={folder}/plain", *SHORT]) == 0
    assert main(["train", config, f"save_loc={folder}/seen", *SHORT, VIEW, "trainer.loggers=[tensorboard]"]) == 0
    return folder


@pytest.mark.slow
def test_the_run_is_the_same_to_the_last_bit(runs: Path) -> None:
    plain, seen = runs / "plain", runs / "seen"
    assert rows(seen) == rows(plain) and len(rows(seen)) == 12
    valid = [[row["valid"] for row in log_of(folder) if "valid" in row] for folder in (plain, seen)]
    assert valid[0] == valid[1] and len(valid[0]) == 3
    names = [path.name for path in sorted((plain / "checkpoints" / "latest").glob("*.safetensors"))]
    assert names
    for name in names:
        assert (plain / "checkpoints" / "latest" / name).read_bytes() == (
            seen / "checkpoints" / "latest" / name
        ).read_bytes()


@pytest.mark.slow
def test_rows_and_figures(runs: Path) -> None:
    preview_scores = read_preview_scores(runs / "seen")
    assert sorted(preview_scores) == [4, 8, 12]
    assert list(preview_scores[4]) == [
        f"{kind}/{channel}/{hour}h"
        for kind in ("rmse", "persistence")
        for hour in (6, 12, 18, 24)
        for channel in ("t2m", "rain")
    ]
    # the same cases each time
    assert preview_scores[4]["persistence/t2m/24h"] == preview_scores[12]["persistence/t2m/24h"] > 1
    assert preview_scores[4]["rmse/t2m/24h"] != preview_scores[12]["rmse/t2m/24h"]
    assert {path.name for path in (runs / "seen" / "figures").iterdir()} == {
        "early_rmse.png", "early_map_t2m.png", "early_map_rain.png",
    }  # fmt: skip
    assert not (runs / "plain" / "figures").exists()


@pytest.mark.slow
def test_tensorboard_has_them(runs: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(runs / "seen" / "tensorboard")).Reload()
    assert set(events.Tags()["images"]) == {"early_rmse", "early_map_t2m", "early_map_rain"}
    assert [image.step for image in events.Images("early_rmse")] == [4, 8, 12]
    assert [scalar.step for scalar in events.Scalars("early/rmse/t2m/24h")] == [4, 8, 12]


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_view_makes_up_for_it(runs: Path) -> None:
    folder = runs / "stopped"
    config = load_config(runs / "config.yml", [f"save_loc={folder}", *SHORT, VIEW])
    folder.mkdir()

    def run(asked: Asked) -> str:
        launch = read_process_info()
        return assemble_training(config, launch, torch.device("cpu"), asked, lambda *_: []).run(asked, None)

    assert run(Asked("preview at step 8")) == "requeue"
    assert [row["step"] for row in log_of(folder) if "valid" in row] == [4]
    assert run(Asked("never")) == "done"
    assert rows(folder) == rows(runs / "plain")
    assert [row["step"] for row in log_of(folder) if "valid" in row] == [4, 8, 12]
    assert read_preview_scores(folder) == read_preview_scores(runs / "seen")


@pytest.mark.slow
def test_wrong_keys_are_named_before_training(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(runs / "config.yml")
    for override, says in (
        ("trainer.preview={lead_time: 7h}", "trainer.preview.lead_time: 7h is not a multiple of data.timestep"),
        ("trainer.preview={lead_time: 10d}", "trainer.preview.lead_time: 240h: data.splits.valid"),
        ("trainer.preview={channels: [t2n]}", 'trainer.preview.channels: "t2n" is not scored; did you mean'),
        ("trainer.preview={case: 3}", 'did you mean "cases"'),
    ):
        for name in ("check", "train"):
            assert main([name, config, f"save_loc={runs}/wrong", *SHORT, override]) == 2, (name, override)
            said = capsys.readouterr()
            assert says in said.out + said.err, (name, override)
    assert main(["check", config, f"save_loc={runs}/right", *SHORT, VIEW]) == 0
    assert "trainer.preview: 3 forecasts of 24 h, 2000-02-01T00:00 to" in capsys.readouterr().out
