"""Test of the data source of a plugin on two ranks: the losses are those of the same data in a file.

Only rank 0 inspects the source, and both ranks read from it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.forked import launch
from tests.smoke.test_own_source import SHORT, write_archive
from tests.smoke.test_train import rows

pytestmark = pytest.mark.slow


def test_two_ranks_train_from_a_source(small_run: Path, command) -> None:
    """The fixture `command` changes the working folder to that of the run, so each rank finds the plugin there."""
    write_archive(small_run)
    assert command("train", "config.yml", "save_loc=file", *SHORT).returncode == 0
    rank_options = ("trainer.train_batch_size=2", "plugins=[lab_archive, tests.parallel.commands.forbid_large_gathers]")
    launch("credit.cli.main", 2, "train", "own.yml", "save_loc=own", *SHORT, *rank_options)
    rows_of_file, rows_of_source = rows(Path("file")), rows(Path("own"))
    assert len(rows_of_source) == len(rows_of_file) == 3
    for (_, _, loss, norm, _), (_, _, source_loss, source_norm, _) in zip(rows_of_file, rows_of_source, strict=True):
        assert source_loss == pytest.approx(loss, rel=1e-5) and source_norm == pytest.approx(norm, rel=1e-4)
    # If a rank cannot read a damaged file, the command reports the source and the time.
    (small_run / "archive" / "2000011006.npz").write_bytes(b"PK")
    with pytest.raises(AssertionError, match=r"data.sources.0 \(npz_archive\): read.*2000-01-10 06:00:00"):
        launch("credit.cli.main", 2, "train", "own.yml", "save_loc=bad", *SHORT, *rank_options)
