"""Test that preview forecasts on two ranks have the scores of one process, also with tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from credit.cli.main import main
from credit.train.monitor.run_files import read_preview_scores
from tests.parallel.forked import launch

pytestmark = pytest.mark.slow

# Three cases on two ranks, so that one rank repeats a case, which does not count.
COMMON = (
    "trainer.max_steps=2", "trainer.validate_every=2", "model.attn_dropout=0",
    "trainer.preview={lead_time: 24h, cases: 3, channels: [z500, rain]}",
)  # fmt: skip


def test_previews_on_two_ranks_have_scores_of_one_process(small_run: Path) -> None:
    config = str(small_run / "config.yml")
    assert main(["train", config, *COMMON, "trainer.train_batch_size=8", f"save_loc={small_run}/one"]) == 0
    scores_of_one = read_preview_scores(small_run / "one")
    assert sorted(scores_of_one) == [2]
    for name, overrides in {
        "sharded": ("trainer.train_batch_size=4",),
        "split": ("trainer.train_batch_size=8", "trainer.parallelism.tensor=2"),
    }.items():
        launch("credit.cli.main", 2, "train", config, *COMMON, *overrides, f"save_loc={small_run}/{name}")
        scores_of_two = read_preview_scores(small_run / name)
        assert scores_of_two.keys() == scores_of_one.keys()
        # The tolerance allows for rounding errors in two steps of training.
        assert scores_of_two[2] == pytest.approx(scores_of_one[2], rel=1e-4), name
        persistence = {key: value for key, value in scores_of_one[2].items() if key.startswith("persistence")}
        assert {key: scores_of_two[2][key] for key in persistence} == pytest.approx(persistence, rel=1e-12)
        assert {path.name for path in (small_run / name / "figures").iterdir()} == {
            "early_rmse.png", "early_map_z500.png", "early_map_rain.png",
        }  # fmt: skip
