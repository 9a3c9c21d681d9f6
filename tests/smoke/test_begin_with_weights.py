"""A run begins with a file of weights: our own export, or what DDP saved of the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

# one step that changes nothing
STILL = ["trainer.max_steps=1", "trainer.learning_rate=1.0e-30", "trainer.weight_decay=0", "trainer.validate_every=1",
         "trainer.use_ema=false"]  # fmt: skip


def statistics(file: Path) -> dict:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["credit"])["statistics"]


@pytest.fixture
def exported(small_run: Path, command) -> Path:
    """The weights of a short run, and the same as DDP saves them."""
    config, file = small_run / "config.yml", small_run / "weights.safetensors"
    assert command("train", config, "trainer.max_steps=10").returncode == 0
    assert command("convert", config, "--export", file).returncode == 0
    torch.save({"model": {f"module.{k}": v for k, v in load_file(file).items()}}, small_run / "ddp.pt")
    return file


def load_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the weights in an exported file, without its fields."""
    return {name: value for name, value in load_file(file).items() if not name.startswith("assets/")}


def test_the_weights_are_those_of_the_file(small_run: Path, exported: Path, command) -> None:
    config, again = small_run / "config.yml", small_run / "again.safetensors"
    # another training period has other statistics; an export says which are its weights' own
    shorter = "data.splits.train=[2000-01-01, 2000-01-12]"
    before, before_it = load_weights(exported), statistics(exported)
    for name, keeps in (("weights.safetensors", True), ("ddp.pt", False)):
        save_loc = f"save_loc={small_run / Path(name).stem}"
        started = [config, save_loc, shorter, f"trainer.resume={small_run / name}"]
        checked = command("check", *started)
        assert checked.returncode == 0 and f"the run begins with the weights in {small_run / name}" in checked.stdout
        trained = command("train", *started, *STILL)
        assert trained.returncode == 0, trained.stderr
        assert ("does not contain the statistics" in trained.stderr) != keeps
        assert command("convert", config, save_loc, "--export", again).returncode == 0
        after = load_weights(again)
        assert before.keys() == after.keys()
        for key, value in before.items():
            # an iteration of the step moves spectral norm's vectors
            if not key.endswith((".u", ".v")):
                assert torch.equal(after[key], value), key
        assert (statistics(again) == before_it) == keeps
        # it goes on from its own checkpoints, and needs the file no more
        (small_run / name).rename(small_run / f"gone.{name}")
        assert command("train", *started, *STILL, "trainer.max_steps=2").returncode == 0
        rows = (small_run / Path(name).stem / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows]
        assert sorted(set(steps)) == [1, 2]


def test_weights_of_another_model_are_refused(small_run: Path, exported: Path, command) -> None:
    new = [small_run / "config.yml", f"save_loc={small_run / 'new'}"]
    for name, changes, words in (
        ("ddp.pt", ["model.dim=[16, 32, 64, 128]"], "these weights are of a different model"),
        ("weights.safetensors", ["data.history_len=2"], "data.history_len: 1 in the checkpoint, 2"),
        ("weights.safetensors", ["data.levels=[850]"], "trained on channels that differ"),
        ("config.yml", [], "is not a file of torch.save"),
    ):
        started = [*new, f"trainer.resume={small_run / name}", *changes]
        refused = command("train", *started)
        assert refused.returncode != 0 and words in refused.stderr, refused.stderr
        checked = command("check", *started)
        assert checked.returncode == 2 and words in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_noise_is_added_to_trained_weights(small_run: Path, exported: Path, command) -> None:
    """A new ensemble is the deterministic forecast of the weights; the messages count what is added."""
    start = [small_run / "config.yml", f"trainer.resume={exported}", *STILL]
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
    # A network without noise cannot take the weights of one with noise.
    noisy = small_run / "noisy.safetensors"
    run_folder = f"save_loc={small_run / 'ensemble'}"
    assert command("convert", small_run / "config.yml", run_folder, *ensemble, "--export", noisy).returncode == 0
    refused = command("train", small_run / "config.yml", f"save_loc={small_run / 'plain'}", f"trainer.resume={noisy}")
    assert refused.returncode == 1 and "scale_shift.weight" in refused.stderr


def test_run_folder_gives_its_best_weights_at_step_0(small_run: Path, command) -> None:
    config, base = small_run / "config.yml", small_run / "base"
    settings = ["trainer.validate_every=2", "trainer.checkpoint_every=5"]
    assert command("train", config, f"save_loc={base}", *settings, "trainer.max_steps=6").returncode == 0
    # A step of this length spoils the weights, so the last checkpoint is not the best one.
    spoiled = command("train", config, f"save_loc={base}", *settings, "trainer.max_steps=7", "trainer.learning_rate=1")
    assert spoiled.returncode == 0, spoiled.stderr
    assert (base / "checkpoints" / "best").resolve() != (base / "checkpoints" / "latest").resolve()
    shorter = "data.splits.train=[2000-01-01, 2000-01-12]"
    start = [config, f"save_loc={small_run / 'tuned'}", f"trainer.resume={base}", shorter, "model.noise=global"]
    ensemble = ["loss.kind=crps", "trainer.members=2", "trainer.valid_members=2"]
    checked = command("check", *start, *ensemble)
    assert checked.returncode == 0, checked.stdout
    assert f"the run begins with {(base / 'checkpoints' / 'best').resolve()}, step 0" in checked.stdout
    trained = command("train", *start, *ensemble, *STILL)
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
    assert statistics(exports[0]) == statistics(exports[1])
    for key, value in before.items():
        if not key.endswith((".u", ".v")):
            assert torch.equal(after[key], value), key
    assert all(value.abs().max() < 1e-20 for key, value in after.items() if "scale_shift" in key)

    # It continues from its own checkpoints, and does not need those of the other run any more.
    (base / "checkpoints").rename(small_run / "gone")
    again = command("train", *start, *ensemble, *STILL, "trainer.max_steps=2")
    assert again.returncode == 0, again.stderr
    rows = [json.loads(row) for row in (small_run / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert sorted({row["step"] for row in rows}) == [1, 2]


def test_adapters_start_from_a_run_folder_and_are_no_run_to_start_from(small_run: Path, command) -> None:
    config, base = small_run / "config.yml", small_run / "base"
    settings = ["trainer.validate_every=2", "trainer.max_steps=2"]
    assert command("train", config, f"save_loc={base}", *settings).returncode == 0
    adapted = [config, f"save_loc={small_run / 'adapted'}", f"trainer.resume={base}"]
    lora = "trainer.lora={rank: 2, targets: ['*.to_qkv']}"
    trained = command("train", *adapted, lora, *settings)
    assert trained.returncode == 0, trained.stderr
    assert f"training adapters of {(base / 'checkpoints' / 'best').resolve()}" in trained.stderr
    # The base is found where the folder of its run has been moved to.
    moved = small_run / "moved"
    base.rename(moved)
    adapted[2] = f"trainer.resume={moved}"
    again = command("train", *adapted, lora, *settings, "trainer.max_steps=3")
    assert again.returncode == 0, again.stderr
    refused = command("train", config, f"save_loc={small_run / 'new'}", f"trainer.resume={small_run / 'adapted'}")
    assert refused.returncode == 1 and "contains only adapters. To train all weights, merge them" in refused.stderr, (
        refused.stderr
    )
    empty = small_run / "nothing"
    empty.mkdir()
    missing = command("train", config, f"save_loc={small_run / 'new'}", f"trainer.resume={empty}")
    assert missing.returncode != 0 and str(empty) in missing.stderr
