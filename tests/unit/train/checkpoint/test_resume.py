"""Tests of the start of a run: its own checkpoints come first, and only a path names a file of weights."""

from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from credit.config import build_config
from credit.config.batch_division import divide_global_batch
from credit.errors import CheckpointError, ConfigError
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.config_changes import require_same_run, warn_of_ignored_changes
from credit.train.checkpoint.resume import choose_checkpoint, create_run_folder, find_weights_file
from credit.train.checkpoint.train_state import TrainState, build_checkpoint_meta
from tests.unit.config.test_load import MINIMAL, with_key


def find_start(resume: str | Path, folder: Path) -> tuple[Path | None, Path | None]:
    """Return the checkpoint and the file of weights that a run begins with."""
    config = SimpleNamespace(trainer=SimpleNamespace(resume=str(resume)))
    origin = choose_checkpoint(config, folder)
    return origin, find_weights_file(config, origin)


@pytest.fixture
def run_checkpoint(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path / "run" / "checkpoints") as checkpointer:
        return checkpointer.save(1, {"model": {"x": torch.ones(2)}}, {}, {})


def test_a_run_continues_if_its_initial_weights_are_missing(
    tmp_path: Path, run_checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("weights.pt", "base/checkpoints/step_00000009"):
        with caplog.at_level(logging.WARNING):
            assert find_start(tmp_path / name, tmp_path / "run") == (run_checkpoint, None)
        assert f"{tmp_path / name} does not exist; the run continues from its own {run_checkpoint.name}" in caplog.text
        with pytest.raises(ConfigError, match="trainer.resume: .*no such checkpoint"):
            find_start(tmp_path / name, tmp_path / "another")
    with pytest.raises(ConfigError, match="trainer.resume: .*step_00000009: no such checkpoint"):
        find_start(run_checkpoint.parent / "step_00000009", tmp_path / "run")
    file = tmp_path / "weights.pt"
    file.touch()
    assert find_start(file, tmp_path / "run") == (run_checkpoint, None)
    assert find_start(file, tmp_path / "another") == (None, file)


@pytest.mark.parametrize("name", ["auto", "never", "latest"])
def test_words_of_resume_are_not_names_of_files(
    tmp_path: Path, run_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).touch()
    if name == "latest":
        assert find_start(name, tmp_path / "run") == (run_checkpoint, None)
    else:
        assert find_start(name, tmp_path / "another") == (None, None)


def test_ranks_with_equal_process_ids_can_create_the_run_folder_at_once(tmp_path: Path) -> None:
    """Threads have one process id, as processes on several hosts may have."""
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: create_run_folder(tmp_path / "run"), range(4000)))
    finally:
        sys.setswitchinterval(switch_interval)
    assert not list((tmp_path / "run").iterdir())


def test_a_config_of_an_earlier_version_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """The earlier config has durations in another form and lacks a key."""
    config = build_config(MINIMAL)
    trained = config.model_dump(mode="json")
    trained_by_older_version = {**trained, "data": {**trained["data"], "timestep": "360 min", "split_gap": "10d"}}
    trained_by_older_version["trainer"] = {key: value for key, value in trained["trainer"].items() if key != "tf32"}
    with caplog.at_level(logging.WARNING):
        require_same_run(config, trained_by_older_version, Path("step_00000001"))
    assert not caplog.text
    other_timestep = {**trained, "data": {**trained["data"], "timestep": "12h"}}
    with pytest.raises(CheckpointError, match="data.timestep: 12h in the checkpoint, 6h in the config"):
        require_same_run(config, other_timestep, Path("step_00000001"))
    longer_gap = {**trained, "data": {**trained["data"], "split_gap": "11d"}}
    with caplog.at_level(logging.WARNING):
        require_same_run(config, longer_gap, Path("step_00000001"))
    assert "data.split_gap (264h before, 240h now)" in caplog.text


def test_the_shorthand_of_hyperdiffusion_is_no_change_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    shorthand = build_config(with_key("model.hyperdiffusion", {}))
    listed = build_config(with_key("model.postprocess", [{"kind": "hyperdiffusion"}]))
    require_same_run(listed, shorthand.model_dump(mode="json"), Path("step_00000001"))
    assert not caplog.messages


def test_a_forecast_warns_of_keys_that_it_ignores(caplog: pytest.LogCaptureFixture) -> None:
    trained = build_config(MINIMAL).model_dump(mode="json")
    unchanged = build_config(with_key("trainer.learning_rate", 0.5))
    with_dropout = build_config(with_key("model.ff_dropout", 0.5))
    for config in (unchanged, with_dropout):
        warn_of_ignored_changes(config, trained, Path("step_00000001"))
    assert not caplog.messages
    changed = build_config(with_key("model.depth", [1, 1, 1, 1]))
    warn_of_ignored_changes(changed, trained, Path("step_00000001"))
    (message,) = caplog.messages
    assert "the forecasts use the model of step_00000001" in message
    assert "in the checkpoint, [1, 1, 1, 1] in the config" in message and "model.depth" in message


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_checkpoint_of_any_number_of_ranks_is_continued(num_ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    """The batches of a rank, such as 2 x 3 of a global batch of 12 on two ranks, are no change of the config."""
    raw = with_key("trainer.global_batch_size", 12)
    raw["trainer"]["train_batch_size"] = 3
    config = build_config(raw)
    divided = divide_global_batch(config, num_ranks)
    meta = build_checkpoint_meta(divided, SimpleNamespace(to_meta=dict), TrainState(), "standard", num_ranks)
    assert meta["samples_a_step"] == 12
    assert build_config(meta["config"]).trainer.global_batch_size == 12
    with caplog.at_level(logging.WARNING):
        require_same_run(config, meta["config"], Path("step_00000004"))
    assert not caplog.records
