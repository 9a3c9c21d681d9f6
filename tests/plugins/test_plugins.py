"""Plugins of a model, a loss and a post-process through the commands: on one rank, and on 2 x 2 ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
import yaml

from credit.config import load_config
from tests.parallel.forked import launch, run_ranks
from tests.parallel.torchrun import REPOSITORY
from tests.registries import isolate

PLUGINS = ["tests.plugins.window_network", "tests.plugins.spread_loss", "tests.plugins.mean_anchor"]
CHANGES = {
    "plugins": PLUGINS,
    "model": {
        "type": "window_network",
        "width": 16,
        "postprocess": [{"kind": "mean_anchor", "variable": "t2m", "limit": 0.01}],
    },
    "loss": {"kind": "spread", "spread_share": 0.5},
    "trainer": {
        "max_steps": 6,
        "train_batch_size": 4,
        "valid_samples": 4,
        "valid_batch_size": 4,
        "learning_rate": 1.0e-3,
        "schedule": {"kind": "constant", "warmup": 0},
        "checkpoint_every": 3,
        "validate_every": 3,
        "log_every": 1,
    },
    "inference": {"lead_time": "48h", "initial_times": {"every": "240h"}},
}


@pytest.fixture(autouse=True)
def _remove_registered_plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove after each test what the plugins register, so that other tests of this process do not see it."""
    isolate(monkeypatch)
    yield
    for name in ("mean_anchor", "spread_loss", "window_network"):
        sys.modules.pop(f"tests.plugins.{name}", None)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Config with the data of the quickstart and the model, loss and post-process of the plugins."""
    quickstart = yaml.safe_load((REPOSITORY / "config" / "quickstart.yml").read_text(encoding="utf-8"))
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(quickstart | CHANGES))
    return path


def run_credit(*arguments: str | Path, folder: Path, expected_status: int = 0) -> str:
    """Run a command in a process of its own, in a folder, and return its output."""
    status, output = run_ranks("credit.cli.main", 1, *map(str, arguments), folder=folder, timeout=300)
    assert status == expected_status, output
    return output


def read_training_rows(folder: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_every_command_works_with_plugins(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = partial(run_credit, folder=tmp_path)
    assert "model: window_network, " in command("check", config, f"save_loc={run}")
    assert "GB" in command("plan", config, f"save_loc={run}", "--grid", "32x64", "--world-size", "4")
    command("doctor", config, f"save_loc={run}")

    # An uninterrupted run, and a run that stops after three steps and continues.
    command("train", config, f"save_loc={tmp_path / 'whole'}")
    command("train", config, f"save_loc={run}", "trainer.max_steps=3")
    command("train", config, f"save_loc={run}")
    assert read_training_rows(run) == read_training_rows(tmp_path / "whole")
    assert [step for step, _ in read_training_rows(run)] == [1, 2, 3, 4, 5, 6]

    command("rollout", config, f"save_loc={run}")
    forecasts = sorted((run / "forecasts").glob("*.nc"))
    assert forecasts
    with xr.open_dataset(forecasts[0]) as forecast:
        area = np.cos(np.deg2rad(forecast.latitude))
        mean = forecast.t2m.astype(np.float64).weighted(area).mean(("latitude", "longitude")).values.ravel()
    # The tolerance is larger than the limit, because the weights here are those of row centres instead of cell areas.
    assert np.abs(np.diff(mean)).max() < 0.0101

    command("verify", config, f"save_loc={run}")
    assert "t2m" in (run / "scores.csv").read_text()

    exported = tmp_path / "weights.safetensors"
    command("convert", config, f"save_loc={run}", "--export", exported)
    assert exported.stat().st_size > 1000


def test_wrong_keys_of_plugins_are_refused(config: Path, tmp_path: Path) -> None:
    for override, message in (
        ("model.widht=8", 'model.widht: unknown key; did you mean "width"'),
        ("loss.spread_share=2", "loss.spread_share: 2"),
        ("model.postprocess.0.limt=1", 'model.postprocess.0.limt: unknown key; did you mean "limit"'),
        ("model.postprocess.0.variable=z", 'model.postprocess.0.variable: "z" must be in prognostic.vars_2D'),
    ):
        assert message in run_credit("check", config, override, folder=tmp_path, expected_status=2)


def test_published_weights_of_a_plugin_are_converted(config: Path, tmp_path: Path) -> None:
    """`convert_published_state` of the model class renames the tensors of another implementation."""
    from credit.config.registry import MODELS

    section = load_config(config).model
    state = {"stem.convs.0.weight": torch.zeros(1), "head.weight": torch.ones(1)}
    converted = MODELS.find_class("window_network").convert_published_state(state, section)
    assert converted.keys() == {"embedding.convs.0.weight", "head.weight"}


@pytest.mark.slow
def test_plugins_on_two_by_two_ranks(config: Path, tmp_path: Path) -> None:
    """Losses on four ranks equal those of one process, and one process continues a checkpoint of four ranks."""
    one_rank, four_ranks = tmp_path / "one", tmp_path / "many"
    command = partial(run_credit, folder=tmp_path)
    command("train", config, f"save_loc={one_rank}", "trainer.train_batch_size=8")
    split = ("trainer.train_batch_size=4", "trainer.parallelism.tensor=2", "trainer.max_steps=3")
    launch("credit.cli.main", 4, "train", str(config), f"save_loc={four_ranks}", *split)
    command("train", config, f"save_loc={four_ranks}", "trainer.train_batch_size=8")
    for (step, loss), (other_step, other_loss) in zip(
        read_training_rows(one_rank), read_training_rows(four_ranks), strict=True
    ):
        assert step == other_step
        assert other_loss == pytest.approx(loss, rel=1e-5)
