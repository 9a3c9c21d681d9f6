"""Whether and from where a run goes on: its folder, its checkpoint, and whether the config is still the same run's."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from credit.config import Config, build_config, dump_config
from credit.data.reader import FieldReader
from credit.errors import CheckpointError, ConfigError
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.process_info import ProcessInfo
from credit.train.assets import ModelAssets, require_same_fields
from credit.train.checkpoint import checkpoint
from credit.train.monitor.metrics_log import write_status
from credit.train.monitor.run_files import read_status
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# of trainer.resume: these are no files, whatever lies in the working folder
_NAMED = ("auto", "never", "best", "latest")
# what the weights' function depends on beside their shapes; channels, grid and units are compared elsewhere
_FUNCTION = ("model", "data.timestep", "data.history_len", "data.solar", "data.transforms")
# what one run keeps beside it
_SAME = (*_FUNCTION, "data.splits.train", "trainer.lora")
_FREE = ("model.attn_dropout", "model.ff_dropout")
# what may differ between the parts of one run without making it another
_UNIMPORTANT = ("data.store", "data.sources", "data.cache", "data.cache_folder", "data.num_workers",
                "data.splits.test", "trainer.resume", "trainer.walltime", "trainer.log_every", "trainer.keep_last",
                "trainer.device", "trainer.tensorboard", "trainer.checkpoint_every", "trainer.preview")  # fmt: skip


def prepare_folder(folder: Path) -> None:
    """Make the run's folder, ``save_loc``.

    Raises:
        ConfigError: if it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # ranks of several hosts, which may have one process number, try at once
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f'save_loc: "{folder}" cannot be written ({error.strerror}); choose a folder that is yours'
        ) from error


def write_config(config: Config, folder: Path) -> None:
    """Write the resolved config into the run's folder, once it is known to be the run's."""
    atomic_write_text(folder / "config.yml", dump_config(config))


def find_checkpoint(config: Config, folder: Path) -> Path | None:
    """Return the checkpoint to go on from, None to begin anew.

    A path in ``trainer.resume`` is where a run begins, that of a file in `find_initial_weights`; once it has
    checkpoints of its own, it goes on from those, also if what it began with is gone. Collective.

    Raises:
        NoWholeCheckpointError: if the run has checkpoints and all of them are damaged, unless ``trainer.resume`` is
            never.
        ConfigError: if ``trainer.resume`` names what is not there or older than the run's own, or is never where there
            is a whole checkpoint.
    """
    resume = config.trainer.resume
    checkpoints = folder / "checkpoints"
    own = checkpoint.newest_checkpoint(checkpoints)
    if resume == "never":
        if own is not None:
            raise ConfigError(
                f"trainer.resume: never, but {checkpoints} has checkpoints that would be lost; use auto to continue "
                "them, another save_loc, or remove them"
            )
        return None
    if own is None:
        checkpoint.require_whole_checkpoint(checkpoints)
    if resume == "auto":
        return own
    if resume not in _NAMED:
        elsewhere = Path(resume).resolve().parent != checkpoints.resolve()
        is_file, is_gone = run_on_rank0(lambda: (os.path.isfile(resume), elsewhere and not os.path.exists(resume)))
        if is_gone and own is not None:
            logger.warning("trainer.resume: %s is not there; the run goes on from its own %s", resume, own.name)
        if is_file or (is_gone and own is not None):
            return own
    path = checkpoint.resolve_checkpoint(checkpoints, resume, "trainer.resume")
    if own is not None and path.parent == checkpoints.resolve() and path != own.resolve():
        raise ConfigError(
            f"trainer.resume: {path} is older than {own}; remove the newer ones to go back, or choose another save_loc "
            "to branch off"
        )
    return own or path


def choose_start(config: Config, launch: ProcessInfo) -> Path | None:
    """Collective: return the checkpoint that training goes on from, None to begin anew; see `find_checkpoint`.

    Where every checkpoint is damaged, STATUS says that the run has failed, as the next job of a chain would find the
    same. With ``trainer.resume: never`` they are renamed: the new run must not take them for its newest.
    """
    folder = Path(config.save_loc)
    try:
        origin = find_checkpoint(config, folder)
    except checkpoint.NoWholeCheckpointError as error:
        if launch.is_main:
            write_status(folder, "failed", read_status(folder).get("step", 0), str(error), launch.job_id)
        raise
    if config.trainer.resume == "never":
        run_on_rank0(lambda: checkpoint.set_aside(folder / "checkpoints"))
    return origin


def find_initial_weights(config: Config, origin: Path | None) -> Path | None:
    """Return the file of weights alone with which a new run begins, None where there is none.

    Args:
        config: of the run.
        origin: what `find_checkpoint` has found: no checkpoint, where ``trainer.resume`` is a file.
    """
    resume = config.trainer.resume
    return Path(resume) if origin is None and resume not in _NAMED else None


def load_run_state(
    config: Config, reader: FieldReader, mesh: DeviceGrid, origin: Path, goes_on: bool
) -> tuple[Config, ModelAssets]:
    """Return the config and the assets of a run that begins from a checkpoint, or goes on from it (`goes_on`).

    Raises:
        CheckpointError: if the checkpoint was trained on other fields or as another function.
        ConfigError: if the run cannot go on with its global batch.
    """
    meta = checkpoint.load_meta(origin)
    assets = ModelAssets.load(meta, checkpoint.load_tensors(origin, "assets"))
    require_same_fields(assets, reader, origin)
    if not goes_on:
        require_same_function(config, meta["config"], origin)
        return config, assets
    require_same_run(config, meta["config"], origin)
    return keep_global_batch(config, mesh.data_ranks, meta["samples_a_step"], origin), assets


def keep_global_batch(config: Config, data_ranks: int, samples: int, path: Path) -> Config:
    """Return the config with the ``grad_accum_every`` that keeps the checkpoint's samples a step on these ranks.

    Raises:
        ConfigError: if none does, as another global batch would be another run.
    """
    conf = config.trainer
    batch = conf.train_batch_size * data_ranks
    if batch * conf.grad_accum_every == samples:
        return config
    if samples % batch:
        fits = [n for n in range(1, samples // data_ranks + 1) if samples % (n * data_ranks) == 0]
        raise ConfigError(
            f"trainer: {path} was trained with {samples} samples a step; train_batch_size {conf.train_batch_size} x "
            f"{data_ranks} data ranks = {batch} does not divide that; "
            + (f"train_batch_size {' or '.join(map(str, fits))} does" if fits else "another number of ranks may")
        )
    accumulation = samples // batch
    logger.warning("trainer.grad_accum_every is %d instead of %d, to keep %s's %d samples a step on %d data ranks",
                   accumulation, conf.grad_accum_every, path.name, samples, data_ranks)  # fmt: skip
    trainer = conf.model_copy(update={"grad_accum_every": accumulation})
    return config.model_copy(update={"trainer": trainer})


def require_same_run(config: Config, trained: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue as another function of the same weights, and say what else has changed.

    Args:
        config: the config at hand.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint.
    """
    require_same_function(config, trained, path, _SAME)
    rest = [(key, *values) for key, *values in _changes(config, trained)
            if key.startswith(("data.", "loss.", "trainer.", "seed"))]  # fmt: skip
    noted = [f"{key} ({before} before, {now} now)" for key, before, now in rest
             if not _is_below(key, (*_SAME, *_UNIMPORTANT))]  # fmt: skip
    if noted:
        logger.warning("changed since %s was written: %s", path.name, ", ".join(noted))


def require_same_function(
    config: Config, trained: Mapping[str, Any], path: Path, same: tuple[str, ...] = _FUNCTION
) -> None:
    """Refuse to use weights in another function than the one that they were trained in.

    Args:
        config: the config at hand.
        trained: the config in the checkpoint, as plain values.
        path: the checkpoint.
        same: keys below which nothing may have changed.
    """
    refused = [f"{key}: {before} in the checkpoint, {now} in the config"
               for key, before, now in _changes(config, trained)
               if _is_below(key, same) and not _is_below(key, _FREE)]  # fmt: skip
    if refused:
        raise CheckpointError(
            f"{path}: these weights were trained with another config: {'; '.join(refused)}. Go back to it, or take "
            "another save_loc"
        )


def _changes(config: Config, trained: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the checkpoint, value now) of what differs."""
    with suppress(ConfigError):  # what an earlier version wrote: as it is read now, with new keys at their defaults
        trained = build_config(trained).model_dump(mode="json")
    before, now = _flatten(trained), _flatten(config.model_dump(mode="json"))
    keys = sorted(before.keys() | now.keys())
    return [(key, before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)]


def _is_below(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _flatten(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {k: v for name, item in value.items() for k, v in _flatten(item, f"{key}.{name}" if key else name).items()}
