"""Whether and from where a run goes on: its folder, its checkpoint, and whether the config is still the same run's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from credit.config import Config, dump_config
from credit.errors import CheckpointError, ConfigError
from credit.parallel.launch import Launch
from credit.train import checkpoint

logger = logging.getLogger(__name__)

# what the weights' function depends on beside their shapes; channels, grid and units are compared elsewhere
_SAME = ("model", "data.timestep", "data.history_len", "data.solar", "data.splits.train")
_FREE = ("model.attn_dropout", "model.ff_dropout")
# what may differ between the parts of one run without making it another
_UNIMPORTANT = ("data.store", "data.sources", "data.cache", "data.num_workers", "data.splits.test", "trainer.resume",
                "trainer.walltime", "trainer.log_every", "trainer.keep_last", "trainer.device", "trainer.tensorboard",
                "trainer.checkpoint_every")  # fmt: skip


def prepare_folder(config: Config) -> Path:
    """Make the run's folder.

    Raises:
        ConfigError: if it cannot be made or written.
    """
    folder = Path(config.save_loc)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f'save_loc: "{folder}" cannot be written ({error.strerror}); choose a folder that is yours'
        ) from error
    return folder


def write_config(config: Config, folder: Path) -> None:
    """Write the resolved config into the run's folder, once it is known to be the run's."""
    beside = folder / ".config.part"
    try:
        beside.write_text(dump_config(config), encoding="utf-8")
        beside.replace(folder / "config.yml")
    except OSError as error:
        raise CheckpointError(f"{folder / 'config.yml'}: cannot be written ({error.strerror})") from error


def find_start(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint to go on from, None to begin anew.

    A path in ``trainer.resume`` is where a run begins; once it has checkpoints of its own, it goes on from those.
    """
    resume = config.trainer.resume
    checkpoints = folder / "checkpoints"
    if resume == "never":
        if checkpoint.list_checkpoints(checkpoints):
            raise ConfigError(
                f"trainer.resume: never, but {checkpoints} has checkpoints that would be lost; use auto to continue "
                "them, another save_loc, or remove them"
            )
        return None
    own = checkpoint.newest_checkpoint(checkpoints)
    if resume == "auto":
        return own
    path = checkpoint.resolve_checkpoint(checkpoints, resume)
    if own is not None and path.parent == checkpoints.resolve() and path != own.resolve():
        raise ConfigError(
            f"trainer.resume: {path} is older than {own}; remove the newer ones to go back, or choose another save_loc "
            "to branch off"
        )
    return own or path


def require_same_batch(config: Config, launch: Launch, samples: int, path: Path) -> None:
    """Refuse to continue with another global batch, which would be another run."""
    batch = config.trainer.train_batch_size * launch.data_ranks
    if batch * config.trainer.grad_accum_every == samples:
        return
    fits = f"grad_accum_every {samples // batch}" if samples % batch == 0 else "another train_batch_size"
    raise ConfigError(
        f"trainer: {path} was trained with {samples} samples a step; train_batch_size "
        f"{config.trainer.train_batch_size} x grad_accum_every {config.trainer.grad_accum_every} x "
        f"{launch.data_ranks} data ranks = {batch * config.trainer.grad_accum_every}; {fits} would keep it"
    )


def require_same_run(config: Config, trained: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue as another function of the same weights, and say what else has changed.

    Args:
        config: the config at hand.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint.
    """
    before, now = _flatten(trained), _flatten(config.model_dump(mode="json"))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [key for key in changed if _is_below(key, _SAME) and not _is_below(key, _FREE)]
    if refused:
        lines = "; ".join(
            f"{key}: {before.get(key)} in the checkpoint, {now.get(key)} in the config" for key in refused
        )
        raise CheckpointError(
            f"{path}: these weights were trained with another config: {lines}. Go back to it, or take another save_loc"
        )
    rest = [key for key in changed if key.startswith(("data.", "loss.", "trainer.", "seed"))]
    noted = [key for key in rest if not _is_below(key, (*_SAME, *_UNIMPORTANT))]
    if noted:
        lines = ", ".join(f"{key} ({before.get(key)} before, {now.get(key)} now)" for key in noted)
        logger.warning("changed since %s was written: %s", path.name, lines)


def _is_below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {k: v for name, item in value.items() for k, v in _flatten(item, f"{key}.{name}" if key else name).items()}
