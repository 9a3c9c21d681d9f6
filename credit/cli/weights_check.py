"""Comparison of the weights with which forecasts were made and the checkpoints of a run, for ``credit verify``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from credit.config import Config


@dataclass(frozen=True)
class WeightsCheck:
    """Result of comparing the weights with which forecasts were made and the checkpoints of a run.

    Attributes:
        notice: message if the forecasts were not made with the weights that the config names; otherwise None.
        belong_to_run: True if a checkpoint of the run contains the weights, or if the weights cannot be compared;
            otherwise False.
    """

    notice: str | None = None
    belong_to_run: bool = True


def check_weights(config: Config, attributes: Mapping[str, object]) -> WeightsCheck:
    """Compare the fingerprint of the weights in the forecasts' attributes with the run's checkpoints.

    Args:
        config: config of the run that is expected to have made the forecasts.
        attributes: global attributes of the forecasts. The attribute `weights` is the fingerprint of the weights.

    Returns:
        The result; it has no notice if the forecasts have no fingerprint or the run has no checkpoints.
    """
    from credit.train.checkpoint import checkpoint

    weights = attributes.get("weights")
    folder = Path(config.save_loc) / "checkpoints"
    # Fingerprints of the weights in the checkpoints of this run.
    run_weights = {checkpoint.read_weights_checksum(path, "forecast") for path in checkpoint.list_checkpoints(folder)}
    if weights is None or not run_weights:
        return WeightsCheck()
    # No notice is needed if the forecasts were made with the weights that the config names, possibly of a different
    # run.
    name = config.inference.checkpoint
    if name in ("best", "latest"):
        named_checkpoint = folder / name
    else:
        named_checkpoint = Path(name)
    if named_checkpoint.is_dir() and checkpoint.read_weights_checksum(named_checkpoint, "forecast") == weights:
        return WeightsCheck(belong_to_run=weights in run_weights)
    description = (
        f"The forecasts were made with the weights {weights}, step {attributes.get('checkpoint_step')} of "
        f"{attributes.get('experiment')}"
    )
    # The forecasts belong to this run, but the link `best` or `latest` or the config has changed since then.
    if weights in run_weights:
        state = "does not exist"
        if named_checkpoint.is_dir():
            state = f"is {named_checkpoint.resolve().name}"
        return WeightsCheck(
            f"{description}; inference.checkpoint, {name}, now {state}; credit rollout uses that checkpoint."
        )
    return WeightsCheck(
        f"{description}. No checkpoint in {folder} contains these weights; they belong to a different run, or "
        "their checkpoint was deleted.",
        belong_to_run=False,
    )
