"""Start of a run: preparation of the run folder, and selection of the initial checkpoint or weights."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from credit.config import Config, dump_config
from credit.config.batch_division import divide_global_batch
from credit.data.reader import FieldReader
from credit.errors import ConfigError
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0
from credit.parallel.process_info import ProcessInfo
from credit.train.build.assets import ModelAssets
from credit.train.checkpoint import checkpoint, retention
from credit.train.checkpoint.config_changes import list_extendable_keys, require_same_network_function, require_same_run
from credit.train.checkpoint.trained_fields import adapt_assets, require_same_fields
from credit.train.monitor.metrics_log import write_status
from credit.train.monitor.run_files import read_status
from credit.utils.atomic import atomic_write_text

logger = logging.getLogger(__name__)

# Values of trainer.resume that are never paths, even if the current folder contains a file with this name.
_RESUME_MODES = ("auto", "never", "best", "latest")


def create_run_folder(folder: Path) -> None:
    """Create the run's folder, ``save_loc``, if it does not exist.

    Raises:
        ConfigError: if the folder cannot be created, or this process cannot write to the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The name is random, because ranks on several hosts write at the same time and may have the same process id.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f'save_loc: "{folder}" cannot be written ({error.strerror}); choose a folder that you may write to'
        ) from error


def write_config(config: Config, folder: Path) -> None:
    """Write the resolved config into the run's folder as ``config.yml``.

    Raises:
        CreditError: if the file cannot be written.
    """
    atomic_write_text(folder / "config.yml", dump_config(config))


def choose_checkpoint(config: Config, folder: Path) -> Path | None:
    """Collective: return the checkpoint to start from; None for a run that starts without a checkpoint.

    A run with checkpoints in its folder continues from the newest one, even if a path in ``trainer.resume`` no longer
    exists. For a new run, ``trainer.resume`` may contain one of three paths:

    - a checkpoint: this checkpoint is returned;
    - the folder of a different run: the best checkpoint of that run is returned (`starts_from_run_folder`);
    - a file of weights: None is returned, and `find_weights_file` returns the file.

    Args:
        config: the config of the run.
        folder: the folder of the run, ``save_loc``.

    Raises:
        NoIntactCheckpointError: if all checkpoints of the run are damaged, unless ``trainer.resume`` is never.
        ConfigError: if the checkpoint in ``trainer.resume`` does not exist or is older than the newest checkpoint of
            the run, or if ``trainer.resume`` is never although the run has an undamaged checkpoint.
    """
    resume = config.trainer.resume
    checkpoints = folder / "checkpoints"
    newest = checkpoint.find_newest_checkpoint(checkpoints)
    if resume == "never":
        if newest is not None:
            raise ConfigError(
                f"trainer.resume: never, but {checkpoints} has checkpoints that would be lost; use auto to continue "
                "from them, choose a different save_loc, or remove them"
            )
        return None
    if newest is None:
        checkpoint.raise_if_checkpoints_exist(checkpoints)
    if resume == "auto":
        return newest
    if resume not in _RESUME_MODES:

        def inspect_path() -> tuple[bool, bool, bool, bool]:
            is_in_this_run = Path(resume).resolve().parent == checkpoints.resolve()
            return is_in_this_run, os.path.exists(resume), os.path.isfile(resume), _is_run_folder(resume)

        # Only rank 0 inspects the path, because on a shared file system other ranks may detect changes late.
        is_in_this_run, exists, is_file, is_run_folder = run_on_rank0(inspect_path)
        if newest is not None and not is_in_this_run:
            # The run has its own checkpoints, so weights of a different run or program are no longer used.
            if not exists:
                logger.warning(
                    "trainer.resume: %s does not exist; the run continues from its own %s", resume, newest.name
                )
            return newest
        if is_file:
            # `find_weights_file` returns the file.
            return None
        if is_run_folder:
            return _choose_best_of_run(Path(resume))
    path = checkpoint.resolve_checkpoint(checkpoints, resume, "trainer.resume")
    if newest is not None and path.parent == checkpoints.resolve() and path != newest.resolve():
        raise ConfigError(
            f"trainer.resume: {path} is older than {newest}; remove the newer checkpoints to continue from this one, "
            "or choose a different save_loc for a second run"
        )
    return newest or path


def starts_from_run_folder(config: Config, origin: Path | None) -> bool:
    """Collective: return True if a new run starts with the best weights of the run folder in ``trainer.resume``.

    Such a run starts at step 0.

    Args:
        config: the config of the run.
        origin: the checkpoint from `choose_checkpoint`.
    """
    resume = config.trainer.resume
    if origin is None or resume in _RESUME_MODES:
        return False
    # A run with a checkpoint in its folder is not a new run.
    return not _is_in_run(origin, config) and run_on_rank0(lambda: _is_run_folder(resume))


def _is_in_run(path: Path, config: Config) -> bool:
    """Return True if a checkpoint is in the run folder of this config."""
    return path.resolve().parent == (Path(config.save_loc) / "checkpoints").resolve()


def _choose_best_of_run(folder: Path) -> Path:
    """Collective: return the best checkpoint of the run in `folder`.

    Raises:
        ConfigError: if the run has not saved a best checkpoint.
        CheckpointError: if the best checkpoint is damaged.
    """
    checkpoints = folder / "checkpoints"
    if not run_on_rank0((checkpoints / "best").exists):
        newest = checkpoint.find_newest_checkpoint(checkpoints)
        advice = f"set trainer.resume to {newest}" if newest is not None else "train it first"
        raise ConfigError(f"trainer.resume: {folder} has no best checkpoint, which a validation saves; {advice}")
    return checkpoint.resolve_checkpoint(checkpoints, "best", "trainer.resume")


def _is_run_folder(path: str) -> bool:
    """Return True if a path is the folder of a run with checkpoints."""
    return os.path.isdir(os.path.join(path, "checkpoints"))


def prepare_start(config: Config, process_info: ProcessInfo) -> Path | None:
    """Collective: prepare the run folder for training, and return the checkpoint to start from; None without one.

    `choose_checkpoint` selects the checkpoint. If every checkpoint is damaged, STATUS becomes ``failed``, because the
    next job of a chain would fail in the same way. With ``trainer.resume: never``, damaged checkpoints are renamed, so
    that the new run does not use them.

    Args:
        config: the config of the run.
        process_info: rank and job of this process.

    Raises:
        NoIntactCheckpointError: if all checkpoints of the run are damaged, unless ``trainer.resume`` is never.
        ConfigError: if ``trainer.resume`` contradicts the checkpoints that exist, see `choose_checkpoint`.
    """
    folder = Path(config.save_loc)
    try:
        origin = choose_checkpoint(config, folder)
    except checkpoint.NoIntactCheckpointError as error:
        if process_info.is_main:
            write_status(folder, "failed", read_status(folder).get("step", 0), str(error), process_info.job_id)
        raise
    if config.trainer.resume == "never":
        # All checkpoints are damaged, because `choose_checkpoint` rejects `never` if there is an undamaged checkpoint.
        run_on_rank0(lambda: retention.rename_damaged_checkpoints(folder / "checkpoints"))
    return origin


def find_weights_file(config: Config, origin: Path | None) -> Path | None:
    """Return the file of weights that a new run starts with; None if the run does not start with a file.

    Args:
        config: the config of the run.
        origin: checkpoint from `choose_checkpoint`; None for a new run if ``trainer.resume`` is a file.
    """
    resume = config.trainer.resume
    if origin is None and resume not in _RESUME_MODES:
        return Path(resume)
    return None


def load_run_state(
    config: Config,
    reader: FieldReader,
    mesh: DeviceGrid,
    origin: Path,
    is_continuation: bool,
    fit_run_assets: Callable[[], ModelAssets],
) -> tuple[Config, ModelAssets]:
    """Collective: return the config and the assets of a run that starts from a checkpoint.

    Args:
        config: the config of the run.
        reader: the reader of the run's data.
        mesh: position of this rank in the device mesh.
        origin: the checkpoint.
        is_continuation: True if this run continues the run of the checkpoint, with the same global batch size; False if
            this is a new run that only starts with the weights.
        fit_run_assets: function that computes assets from the run's data; it may be collective and may take hours. It
            is called after all comparisons, and only for a new run with ``trainer.resume_changes``.

    Raises:
        CheckpointError: if the checkpoint was trained with different channels or a different config of the model.
        DataError: if the grid or the units of a variable differ from the checkpoint.
        ConfigError: if the global batch of the checkpoint cannot be divided by the number of ranks, or if
            ``trainer.resume_changes`` is set although the run of the checkpoint is continued.
    """
    # Statistics and static fields come from the checkpoint, because the weights were trained with them.
    meta, stored_assets = run_on_rank0(
        lambda: (checkpoint.load_meta(origin), checkpoint.load_tensors(origin, "assets"))
    )
    assets = ModelAssets.from_stored(meta, stored_assets)
    if not is_continuation:
        changes = config.trainer.resume_changes
        require_same_fields(assets, reader, origin, changes=changes)
        extendable_keys = list_extendable_keys(config, assets.channels)
        require_same_network_function(config, meta["config"], origin, extendable_keys=extendable_keys)
        if changes:
            _warn_without_changes(changes, assets, reader, origin)
            assets = adapt_assets(assets, fit_run_assets())
        return config, assets
    if config.trainer.resume_changes and not _is_in_run(origin, config):
        raise ConfigError(
            f"trainer.resume_changes: {config.trainer.resume_changes}: {origin} is a checkpoint, so its run would "
            "continue with its optimizer state; set trainer.resume to the folder of the run to start a new run with "
            "its best weights"
        )
    require_same_fields(assets, reader, origin)
    require_same_run(config, meta["config"], origin)
    return keep_global_batch(config, mesh.num_sample_ranks, meta["samples_a_step"], origin), assets


def _warn_without_changes(changes: Sequence[str], trained: ModelAssets, reader: FieldReader, origin: Path) -> None:
    """Log a warning for each entry of ``trainer.resume_changes`` that has no effect.

    An entry, ``channels`` or ``grid``, has no effect if the run and its initial checkpoint do not differ in it.
    """
    differences = {
        "channels": trained.channels.describe_mismatch(reader.channels),
        "grid": trained.grid.describe_mismatch(reader.grid),
    }
    for change in changes:
        if differences[change] is None:
            logger.warning("trainer.resume_changes: %s do not differ from %s; the entry has no effect", change, origin)


def keep_global_batch(config: Config, num_sample_ranks: int, samples: int, path: Path) -> Config:
    """Return a config with the global batch size of a checkpoint.

    Args:
        config: the config of the run.
        num_sample_ranks: number of ranks, or groups of ranks, with different samples.
        samples: number of samples per optimizer step in the checkpoint.
        path: the checkpoint, for messages.

    Returns:
        `config` itself if its global batch size is `samples`, else a copy with ``trainer.global_batch_size``.

    Raises:
        ConfigError: if the samples cannot be divided equally among the ranks.
    """
    conf = config.trainer
    configured_samples = conf.global_batch_size or conf.train_batch_size * conf.grad_accum_every * num_sample_ranks
    if configured_samples == samples:
        return config
    # The size in the checkpoint replaces both keys of the config that set it.
    trainer = conf.model_copy(update={"global_batch_size": samples, "grad_accum_every": 1})
    config = config.model_copy(update={"trainer": trainer})
    try:
        divided = divide_global_batch(config, num_sample_ranks).trainer
    except ConfigError as error:
        raise ConfigError(f"{path} was trained with {samples} samples per step: {error}") from error
    logger.warning(
        "trainer.train_batch_size is %d instead of %d and trainer.grad_accum_every is %d instead of %d, to keep %s's "
        "%d samples per step on %d ranks with different samples",
        divided.train_batch_size, conf.train_batch_size, divided.grad_accum_every, conf.grad_accum_every, path.name,
        samples, num_sample_ranks,
    )  # fmt: skip
    return config
