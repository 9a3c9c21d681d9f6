"""LoRA adapters through the commands: fine-tuning, continuing, forecasts, export, and a base that was moved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from safetensors.torch import load_file

from credit.cli.main import main
from credit.train.checkpoint import checkpoint

LORA = 'trainer.lora={rank: 2, alpha: 4, targets: ["*.to_qkv", "*.contract"]}'
SHORT = ("trainer.max_steps=4", "trainer.validate_every=2", "trainer.checkpoint_every=2", "trainer.log_every=1")


def read_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def latest_checkpoint(folder: Path) -> Path:
    return (folder / "checkpoints" / "latest").resolve()


def fine_tune(config: Path, folder: Path, base: Path, *overrides: str) -> int:
    return main(["train", str(config), f"save_loc={folder}", f"trainer.resume={base}", LORA, *SHORT, *overrides])


def test_fine_tuning(small_run: Path, capsys: pytest.CaptureFixture) -> None:
    config, base_run, run = small_run / "config.yml", small_run / "run", small_run / "tuned"
    assert main(["train", str(config), *SHORT]) == 0
    base = latest_checkpoint(base_run)

    # A run of four steps equals a run that is stopped and continued.
    assert fine_tune(config, run, base) == 0
    halves = small_run / "halves"
    halves.mkdir()
    (halves / "STOP").touch()
    assert fine_tune(config, halves, base) == 85
    assert fine_tune(config, halves, base) == 0
    assert read_losses(halves) == read_losses(run) and len(read_losses(run)) == 4
    adapter_weights, halves_weights = (
        checkpoint.load_tensors(latest_checkpoint(folder), "forecast") for folder in (run, halves)
    )
    assert all(torch.equal(adapter_weights[name], halves_weights[name]) for name in adapter_weights | halves_weights)
    size = sum(
        file.stat().st_size for file in latest_checkpoint(run).rglob("*.safetensors") if "assets" not in file.name
    )
    assert size < 0.3 * sum(file.stat().st_size for file in base.rglob("*.safetensors"))

    # The exported weights are the base plus alpha / rank * B A, with alpha / rank = 2.
    out = small_run / "merged.safetensors"
    assert main(["convert", str(config), f"save_loc={run}", "--export", str(out), "--checkpoint", "latest"]) == 0
    merged = {name: value for name, value in load_file(out).items() if not name.startswith("assets/")}
    base_weights = checkpoint.load_tensors(base, "forecast")
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in base_weights.items()}
    num_merged = 0
    for name, tensor in merged.items():
        path = name.removesuffix("original")
        if path + "0.b" in adapter_weights:
            expected = (
                base_weights[name]
                + 2.0 * (adapter_weights[path + "0.b"].double() @ adapter_weights[path + "0.a"].double()).float()
            )
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
            assert not torch.equal(tensor, base_weights[name])
            num_merged += 1
        elif not name.endswith((".u", ".v")):
            assert torch.equal(tensor, base_weights[name])
    assert num_merged == 4 * 4

    # Forecasts run with the adapters. If the base was moved, trainer.resume must give its new path.
    rollout = ["rollout", str(config), f"save_loc={run}", "inference.lead_time=12h", "inference.initial_times.every=5d"]
    assert main(rollout) == 0
    files = sorted((run / "forecasts").glob("*.nc"))
    assert files and all(np.isfinite(xr.load_dataset(file)["t2m"]).all() for file in files)
    moved = small_run / "elsewhere" / base.name
    moved.parent.mkdir()
    base.rename(moved)
    capsys.readouterr()
    assert main(rollout) == 1
    assert f"adapters of {base}" in capsys.readouterr().err
    assert main([*rollout, f"trainer.resume={moved}"]) == 0
    # A different checkpoint at the old path of the base is refused.
    (base_run / "checkpoints" / "step_00000002").rename(base)
    assert main(rollout) == 1
    assert "its weights have changed since" in capsys.readouterr().err


def test_invalid_fine_tuning_is_refused(small_run: Path, capsys: pytest.CaptureFixture) -> None:
    config, run = small_run / "config.yml", small_run / "run"
    short = (*SHORT, "trainer.max_steps=2")
    assert main(["train", str(config), LORA, *short]) == 2
    assert "set trainer.resume to the folder" in capsys.readouterr().err
    assert main(["train", str(config), *short]) == 0
    assert main(["train", str(config), LORA, *short]) == 2
    assert "set a different save_loc" in capsys.readouterr().err
    tuned = small_run / "tuned"
    assert (
        fine_tune(config, tuned, latest_checkpoint(run), "trainer.max_steps=2", "trainer.lora.targets=['*.to_qvk']")
        == 2
    )
    assert 'did you mean "*.to_qkv"' in capsys.readouterr().err
    assert fine_tune(config, tuned, latest_checkpoint(run), "trainer.fsdp2_mp_policy={param_dtype: bfloat16}") == 2
    assert "cannot be combined" in capsys.readouterr().err
    assert fine_tune(config, tuned, latest_checkpoint(run), "model.depth=[1,1,2,1]") == 1
    assert "model.depth" in capsys.readouterr().err
    assert fine_tune(config, tuned, latest_checkpoint(run), "trainer.max_steps=2") == 0
    assert fine_tune(config, tuned, latest_checkpoint(run), "trainer.lora.alpha=5") == 1
    assert "trainer.lora.alpha: 4.0 in the checkpoint, 5.0 in the config" in capsys.readouterr().err
    assert main(["train", str(config), f"save_loc={tuned}", *short]) == 1
    assert "trainer.lora.rank: 2 in the checkpoint, None in the config" in capsys.readouterr().err
