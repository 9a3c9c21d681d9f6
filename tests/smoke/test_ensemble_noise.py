"""Noise inside the network through the commands: every kind, and fine-tuning of a network without noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file

from credit.train.checkpoint import checkpoint

ENSEMBLE = ["trainer.members=2", "trainer.valid_members=2", "loss.kind=crps"]
SHORT = ["trainer.max_steps=4", "trainer.validate_every=4", "trainer.checkpoint_every=2"]
FORECASTS = [
    "inference.lead_time=12h",
    "inference.initial_times=[2000-02-09T00:00, 2000-02-11T00:00]",
    "verification.figure_leads=[12h]",
]
KINDS = {
    "dropout": "{kind: dropout, memory: [0h, forecast]}",
    "global": "{kind: global, memory: [0h, 24h]}",
    "cell": "{kind: cell, memory: 12h}",
    "spherical": "{kind: spherical, channels: 4, memory: [6h, 2d]}",
}


def read_forecasts(folder: Path) -> list[np.ndarray]:
    """Return t2m (member, lead, row, column) of each forecast."""
    files = sorted(folder.glob("*.nc"))
    assert len(files) == 2
    return [xr.load_dataset(file)["t2m"].transpose("member", ...).to_numpy() for file in files]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_noise(kind: str, small_run: Path, command) -> None:
    run = [small_run / "config.yml", f"model.noise={KINDS[kind]}", *ENSEMBLE, *SHORT, *FORECASTS]
    forecasts = [*run, "inference.ensemble={members: 3}"]
    checked = command("check", *forecasts)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    trained = command("train", *run)
    assert trained.returncode == 0, trained.stderr
    by_batch_size = {}
    for batch_size in (1, 6):
        folder = f"batches_of_{batch_size}"
        result = command("rollout", *forecasts, f"inference.batch_size={batch_size}", f"inference.folder={folder}")
        assert result.returncode == 0, result.stderr
        by_batch_size[batch_size] = read_forecasts(small_run / "run" / folder)
    for alone, batched in zip(by_batch_size[1], by_batch_size[6], strict=True):
        # Matrix products of different sizes are rounded differently.
        np.testing.assert_allclose(alone, batched, rtol=2e-6)
        assert np.abs(alone[0] - alone[1]).max() > 1e-3 and np.abs(alone[1] - alone[2]).max() > 1e-3
    verified = command("verify", *forecasts, "--online")
    assert verified.returncode == 0, verified.stderr


def test_adapters_with_noise(small_run: Path, command) -> None:
    """Noise modules are trained and saved together with the adapters of a network without noise, and are exported."""
    config = small_run / "config.yml"
    assert command("train", config, *SHORT).returncode == 0
    base = (small_run / "run" / "checkpoints" / "latest").resolve()
    noise = "model.noise=[" + ", ".join([KINDS["global"], KINDS["cell"], KINDS["spherical"]]) + "]"
    lora = 'trainer.lora={rank: 2, alpha: 4, targets: ["*.to_qkv", "*.contract"]}'
    tuned = small_run / "tuned"
    run = [config, f"save_loc={tuned}", f"trainer.resume={base}", lora, noise, *ENSEMBLE, *SHORT, *FORECASTS]

    # Without adapters, a checkpoint continues its own run, which has no noise.
    refused = command("train", config, f"save_loc={small_run / 'other'}", f"trainer.resume={base}", noise, *ENSEMBLE)
    assert refused.returncode == 1
    assert "To change model.noise, start a new run with weights of credit convert --export" in refused.stderr

    # The run is stopped after its first step, and continued.
    checked = command("check", *run)
    assert checked.returncode == 0, checked.stdout
    tuned.mkdir()
    (tuned / "STOP").touch()
    trained = command("train", *run)
    assert trained.returncode == 85, trained.stderr
    for text in (checked.stdout, trained.stderr):
        assert "tensors for its noise, which do not change its output at first" in text
    trained = command("train", *run)
    assert trained.returncode == 0, trained.stderr
    halves = checkpoint.load_tensors((tuned / "checkpoints" / "latest").resolve(), "forecast")
    # A run without the interruption has the same weights.
    uninterrupted_folder = small_run / "whole"
    uninterrupted = command("train", *run, f"save_loc={uninterrupted_folder}")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    expected = checkpoint.load_tensors((uninterrupted_folder / "checkpoints" / "latest").resolve(), "forecast")
    assert halves.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(halves[name], tensor), name
    noise_names = [name for name in halves if "scale_shift" in name or "noise" in name]
    assert noise_names and all(halves[name].any() for name in noise_names)
    assert not any("noise" in name or "scale_shift" in name for name in checkpoint.load_tensors(base, "forecast"))

    merged = small_run / "merged.safetensors"
    exported = command("convert", *run, "--export", merged, "--checkpoint", "latest")
    assert exported.returncode == 0, exported.stderr
    weights = load_file(merged)
    for name in noise_names:
        assert torch.equal(weights[name], halves[name])
    rolled_out = command("rollout", *run, "inference.ensemble={members: 3}")
    assert rolled_out.returncode == 0, rolled_out.stderr
    for t2m in read_forecasts(tuned / "forecasts"):
        assert np.isfinite(t2m).all() and np.abs(t2m[0] - t2m[1]).max() > 1e-4
