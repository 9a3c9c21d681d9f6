"""Losses in spherical harmonics through the commands: training, and invalid options."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCALES = "scales: [3000km, 1500km, 0km]"
LOSSES = {
    "spectral_crps": "{kind: spectral_crps, alpha: 0.9}",
    "multiscale_crps": f"{{kind: multiscale_crps, {SCALES}, scale_weights: [1, 0.5, 0.5]}}",
    "sum": f"{{kind: sum, weights: {{t2m: 2}}, terms: [{{kind: crps}}, {{kind: spectral_crps, weight: 0.5}}, "
    f"{{kind: multiscale_crps, weight: 0.5, {SCALES}}}]}}",
    "amse": "{kind: amse}",
}
ENSEMBLE = ("trainer.members=2", "trainer.valid_members=2", "model.noise={kind: global}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_training_lowers_the_loss_and_continues(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], kind: str
) -> None:
    """Commands check and plan accept the loss, it falls in a few steps, and the saved config continues the run."""
    config = small_run / "config.yml"
    options = [f"loss={LOSSES[kind]}", *(() if kind == "amse" else ENSEMBLE)]
    steps = ("trainer.log_every=1", "trainer.validate_every=12", "trainer.checkpoint_every=12")
    result = command("check", config, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    result = command("plan", config, *options, "--world-size", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    result = command("train", config, *options, *steps, "trainer.max_steps=12")
    assert result.returncode == 0, result.stderr
    # In the config of the run folder, every key of every term is written out.
    result = command("train", small_run / "run" / "config.yml", "trainer.max_steps=14")
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (small_run / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "grad_norm" in row}
    assert sorted(losses) == list(range(1, 15))
    assert all(math.isfinite(loss) and loss > 0 for loss in losses.values())
    first, last = (sum(losses[step] for step in steps) / 3 for steps in ((1, 2, 3), (10, 11, 12)))
    assert last < 0.97 * first
    assert losses[14] < first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("loss={kind: spectral_crps}",), "loss.kind: spectral_crps compares the members"),
        (("loss={kind: amse, latitude_weights: false}",), "loss.latitude_weights: false does not fit"),
        ((f"loss={{kind: multiscale_crps, {SCALES}, alpha: 2}}", *ENSEMBLE), "loss.alpha"),
        (("loss={kind: multiscale_crps, scales: [800km, 400km]}", *ENSEMBLE), "must descend and end with 0km"),
        (("loss={kind: multiscale_crps, scales: [800km, 300km, 0km]}", *ENSEMBLE), "300km is too short"),
        (("loss={kind: amse}", *ENSEMBLE), "loss.kind amse would train all members to be equal"),
    ],
)
def test_invalid_loss_options_are_refused(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], options: tuple[str, ...], message: str
) -> None:
    result = command("train", small_run / "config.yml", *options)
    assert result.returncode == 2
    assert message in result.stdout + result.stderr
