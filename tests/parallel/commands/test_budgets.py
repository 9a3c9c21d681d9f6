"""Test of budget fixers with tensor parallelism, in which every rank closes the budgets of the whole fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from credit.cli.main import main
from tests.parallel.forked import launch
from tests.smoke.test_budgets import write_air
from tests.smoke.test_train import rows

pytestmark = pytest.mark.slow

STEADY = ("trainer.log_every=1", "model.attn_dropout=0", "data.forecast_len=2")


def test_tensor_peers_train_as_one_process(tmp_path: Path) -> None:
    config = str(write_air(tmp_path))
    assert main(["train", config, *STEADY, f"save_loc={tmp_path}/one"]) == 0
    launch("credit.cli.main", 2, "train", config, *STEADY, "trainer.parallelism.tensor=2", f"save_loc={tmp_path}/split")
    rows_of_one, rows_of_split = rows(tmp_path / "one"), rows(tmp_path / "split")
    assert [row[0] for row in rows_of_split] == [1, 2, 3, 4, 5, 6]
    for (step, _, loss, norm, _), (_, _, split_loss, split_norm, _) in zip(rows_of_one, rows_of_split, strict=True):
        assert split_loss == pytest.approx(loss, rel=1e-5), step
        assert split_norm == pytest.approx(norm, rel=1e-4), step
