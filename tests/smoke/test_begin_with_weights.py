"""Runs that begin with weights: of our export, of a file that DDP saved, or of the folder of another run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

# One training step with a learning rate so small that the weights stay equal.
FROZEN = ["trainer.max_steps=1", "trainer.learning_rate=1.0e-30", "trainer.weight_decay=0", "trainer.validate_every=1",
          "trainer.use_ema=false"]  # fmt: skip


def read_statistics(file: Path) -> dict:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["credit"])["statistics"]


@pytest.fixture
def exported_weights(small_run: Path, command) -> Path:
    """Weights exported from a short run. The same weights are in ddp.pt, in the format of DDP."""
    config, file = small_run / "config.yml", small_run / "weights.safetensors"
    assert command("train", config, "trainer.max_steps=10").returncode == 0
    assert command("convert", config, "--export", file).returncode == 0
    torch.save({"model": {f"module.{k}": v for k, v in load_file(file).items()}}, small_run / "ddp.pt")
    return file


def load_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the weights in an exported file, without its static fields."""
    return {name: value for name, value in load_file(file).items() if not name.startswith("assets/")}


def test_run_begins_with_weights_and_statistics_of_file(small_run: Path, exported_weights: Path, command) -> None:
    config, export_path = small_run / "config.yml", small_run / "again.safetensors"
    # A different training period has different statistics. An export contains the statistics of its weights.
    shorter_period = "data.splits.train=[2000-01-01, 2000-01-12]"
    expected_weights, expected_statistics = load_weights(exported_weights), read_statistics(exported_weights)
    for name, has_statistics in (("weights.safetensors", True), ("ddp.pt", False)):
        save_loc = f"save_loc={small_run / Path(name).stem}"
        arguments = [config, save_loc, shorter_period, f"trainer.resume={small_run / name}"]
        checked = command("check", *arguments)
        assert checked.returncode == 0 and f"the run begins with the weights in {small_run / name}" in checked.stdout
        trained = command("train", *arguments, *FROZEN)
        assert trained.returncode == 0, trained.stderr
        assert ("does not contain the statistics" in trained.stderr) != has_statistics
        assert command("convert", config, save_loc, "--export", export_path).returncode == 0
        weights = load_weights(export_path)
        assert expected_weights.keys() == weights.keys()
        for key, value in expected_weights.items():
            # The power iteration in the step changes the vectors of spectral norm.
            if not key.endswith((".u", ".v")):
                assert torch.equal(weights[key], value), key
        assert (read_statistics(export_path) == expected_statistics) == has_statistics
        # The run continues from its own checkpoints, and does not need the file any more.
        (small_run / name).rename(small_run / f"gone.{name}")
        assert command("train", *arguments, *FROZEN, "trainer.max_steps=2").returncode == 0
        rows = (small_run / Path(name).stem / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows]
        assert sorted(set(steps)) == [1, 2]


def test_weights_of_another_model_are_refused(small_run: Path, exported_weights: Path, command) -> None:
    new_run = [small_run / "config.yml", f"save_loc={small_run / 'new'}"]
    for name, changes, message in (
        ("ddp.pt", ["model.dim=[16, 32, 64, 128]"], "these weights are of a different model"),
        ("weights.safetensors", ["data.history_len=2"], "data.history_len: 1 in the checkpoint, 2"),
        ("weights.safetensors", ["data.levels=[850]"], "trained on channels that differ"),
        ("config.yml", [], "is not a file of torch.save"),
    ):
        arguments = [*new_run, f"trainer.resume={small_run / name}", *changes]
        refused = command("train", *arguments)
        assert refused.returncode != 0 and message in refused.stderr, refused.stderr
        checked = command("check", *arguments)
        assert checked.returncode == 2 and message in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_noise_is_added_to_trained_weights(small_run: Path, exported_weights: Path, command) -> None:
    """New noise modules leave the forecast of the weights unchanged, and the messages count the added tensors."""
    start = [small_run / "config.yml", f"trainer.resume={exported_weights}", *FROZEN]
    ensemble = [
        "model.noise=[global, cell, spherical]",
        "trainer.members=2",
        "trainer.valid_members=3",
        "loss.kind=crps",
    ]
    last_validations = {}
    for name, changes in (("deterministic", []), ("ensemble", ensemble)):
        run = [*start, f"save_loc={small_run / name}", *changes]
        checked = command("check", *run)
        assert checked.returncode == 0, checked.stdout
        trained = command("train", *run)
        assert trained.returncode == 0, trained.stderr
        for text in (checked.stdout, trained.stderr):
            assert ("tensors for its noise, which do not change its output at first: decoder.blocks.0" in text) == (
                name == "ensemble"
            )
        rows = [json.loads(row) for row in (small_run / name / "metrics.jsonl").read_text().splitlines()]
        last_validations[name] = [row["valid"] for row in rows if "valid" in row][-1]
    for key, value in last_validations["deterministic"].items():
        if key.startswith("rmse/"):
            assert last_validations["ensemble"][key] == pytest.approx(value, rel=1e-6)
    spreads = [value for key, value in last_validations["ensemble"].items() if key.startswith("spread_skill/")]
    assert spreads and max(spreads) < 1e-4
    # A network without noise cannot load the weights of a network with noise.
    noisy = small_run / "noisy.safetensors"
    run_folder = f"save_loc={small_run / 'ensemble'}"
    assert command("convert", small_run / "config.yml", run_folder, *ensemble, "--export", noisy).returncode == 0
    refused = command("train", small_run / "config.yml", f"save_loc={small_run / 'plain'}", f"trainer.resume={noisy}")
    assert refused.returncode == 1 and "scale_shift.weight" in refused.stderr


def test_run_folder_gives_its_best_weights_at_step_0(small_run: Path, command) -> None:
    config, base = small_run / "config.yml", small_run / "base"
    settings = ["trainer.validate_every=2", "trainer.checkpoint_every=5"]
    assert command("train", config, f"save_loc={base}", *settings, "trainer.max_steps=6").returncode == 0
    # A step with this learning rate damages the weights, so the last checkpoint is not the best one.
    spoiled = command("train", config, f"save_loc={base}", *settings, "trainer.max_steps=7", "trainer.learning_rate=1")
    assert spoiled.returncode == 0, spoiled.stderr
    assert (base / "checkpoints" / "best").resolve() != (base / "checkpoints" / "latest").resolve()
    shorter_period = "data.splits.train=[2000-01-01, 2000-01-12]"
    start = [config, f"save_loc={small_run / 'tuned'}", f"trainer.resume={base}", shorter_period, "model.noise=global"]
    ensemble = ["loss.kind=crps", "trainer.members=2", "trainer.valid_members=2"]
    checked = command("check", *start, *ensemble)
    assert checked.returncode == 0, checked.stdout
    assert f"the run begins with {(base / 'checkpoints' / 'best').resolve()}, step 0" in checked.stdout
    trained = command("train", *start, *ensemble, *FROZEN)
    assert trained.returncode == 0, trained.stderr
    for text in (checked.stdout, trained.stderr):
        assert "tensors for its noise" in text

    # The weights and the statistics are those of the best checkpoint; noise has its initial values, which are 0.
    exports = []
    for name, changes in (("base", []), ("tuned", ["model.noise=global", *ensemble])):
        path = small_run / f"{name}.safetensors"
        assert command("convert", config, f"save_loc={small_run / name}", *changes, "--export", path).returncode == 0
        exports.append(path)
    before, after = load_weights(exports[0]), load_weights(exports[1])
    assert read_statistics(exports[0]) == read_statistics(exports[1])
    for key, value in before.items():
        if not key.endswith((".u", ".v")):
            assert torch.equal(after[key], value), key
    assert all(value.abs().max() < 1e-20 for key, value in after.items() if "scale_shift" in key)

    # It continues from its own checkpoints, and does not need those of the other run any more.
    (base / "checkpoints").rename(small_run / "gone")
    continued = command("train", *start, *ensemble, *FROZEN, "trainer.max_steps=2")
    assert continued.returncode == 0, continued.stderr
    rows = [json.loads(row) for row in (small_run / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [1, 2]


def test_adapters_begin_with_run_folder_but_no_run_begins_with_adapters(small_run: Path, command) -> None:
    config, base = small_run / "config.yml", small_run / "base"
    settings = ["trainer.validate_every=2", "trainer.max_steps=2"]
    assert command("train", config, f"save_loc={base}", *settings).returncode == 0
    adapted = [config, f"save_loc={small_run / 'adapted'}", f"trainer.resume={base}"]
    lora = "trainer.lora={rank: 2, targets: ['*.to_qkv']}"
    trained = command("train", *adapted, lora, *settings)
    assert trained.returncode == 0, trained.stderr
    assert f"training adapters of {(base / 'checkpoints' / 'best').resolve()}" in trained.stderr
    # The run folder of the base has been moved, and trainer.resume gives its new path.
    moved = small_run / "moved"
    base.rename(moved)
    adapted[2] = f"trainer.resume={moved}"
    continued = command("train", *adapted, lora, *settings, "trainer.max_steps=3")
    assert continued.returncode == 0, continued.stderr
    refused = command("train", config, f"save_loc={small_run / 'new'}", f"trainer.resume={small_run / 'adapted'}")
    assert refused.returncode == 1 and "contains only adapters. To train all weights, merge them" in refused.stderr, (
        refused.stderr
    )
    empty = small_run / "nothing"
    empty.mkdir()
    missing = command("train", config, f"save_loc={small_run / 'new'}", f"trainer.resume={empty}")
    assert missing.returncode != 0 and str(empty) in missing.stderr
