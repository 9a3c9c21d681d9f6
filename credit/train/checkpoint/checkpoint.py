"""Checkpoints: folders that contain all data to continue a run or to make forecasts.

``checkpoints/step_00001000/`` contains:

- ``model``: folder with the current weights, one file per host, and an index;
- ``forecast``: folder with the weights for forecasts, which are the moving average if the run has a moving average;
- ``optimizer``: folder with the state of the optimizer;
- ``assets.safetensors``: arrays such as masks and the climatology of the forcing;
- ``meta.json``: state of the run, config, channels, grid and statistics;
- ``manifest.json``: size and checksum of every other file.

``model``, ``forecast`` and ``optimizer`` are called stems: sets of tensors, each with a separate folder.

`credit.train.checkpoint.async_writer` writes a checkpoint under a temporary name, with the manifest as the last file.
It then flushes the folder to the disk and renames it. A folder whose files do not match its manifest is damaged and is
not used. Only tensors and JSON are stored, so nothing is ever unpickled. ``latest`` and ``best`` are links that are
moved atomically.

A complete tensor is the full, unsharded tensor. Functions marked as collective also work without a process group.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from credit.errors import CheckpointError, ConfigError, CreditError, did_you_mean
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import current_rank, run_on_all_ranks, run_on_rank0
from credit.parallel.state.materialise import take_local_part
from credit.parallel.state.replicas import broadcast_to_replicas, is_first_replica
from credit.train.checkpoint.manifest import read_manifest, verify_checkpoint
from credit.train.checkpoint.sharded.index import StemIndex
from credit.train.checkpoint.sharded.reader import ScannedIndex, read_complete_tensors, read_index, read_into
from credit.utils.atomic import atomic_write

logger = logging.getLogger(__name__)

FORMAT = 2
# Format 1, of credit 0.1, has a single file instead of each folder of tensors.
_READABLE_FORMATS = (1, FORMAT)
_STEP_FOLDER = re.compile(r"^step_(\d{8,})$")


class NoIntactCheckpointError(CheckpointError):
    """Error that is raised if all checkpoints of a run are damaged; its exit code 2 stops a chain of jobs."""

    exit_code = 2


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in the run's ``checkpoints`` folder."""
    return folder / f"step_{step:08d}"


def move_link(folder: Path, name: str, target: Path) -> None:
    """Move the link `name` to the checkpoint `target` atomically.

    Args:
        folder: the run's ``checkpoints`` folder.
        name: ``latest`` or ``best``.
        target: a checkpoint in `folder`.

    Raises:
        CheckpointError: if the link cannot be moved; it keeps its old target.
    """
    try:
        # A relative link stays valid if the run folder is moved.
        atomic_write(folder / name, lambda temporary: temporary.symlink_to(target.name))
    except CreditError as error:
        raise CheckpointError(str(error)) from error


def parse_step(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(_STEP_FOLDER.match(path.name)[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints in a run's ``checkpoints`` folder, including damaged ones, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _STEP_FOLDER.match(path.name)]
    return sorted(paths, key=parse_step)


def find_newest_checkpoint(folder: Path, at_most: int | None = None) -> Path | None:
    """Collective: return the newest checkpoint that is not damaged; None if there is no undamaged checkpoint.

    A warning is logged for each damaged checkpoint that is skipped.

    Args:
        folder: the run's ``checkpoints`` folder.
        at_most: largest step that the checkpoint may have, None for no limit.
    """
    for path in reversed(run_on_rank0(lambda: list_checkpoints(folder))):
        if at_most is not None and parse_step(path) > at_most:
            continue
        problem = verify_checkpoint(path)
        if problem is None:
            return path
        if current_rank() == 0:
            logger.warning("%s is skipped: %s", path, problem)
    return None


def raise_if_checkpoints_exist(folder: Path) -> None:
    """Collective: raise an error if the folder contains checkpoints, all of which are damaged.

    Call this function only after `find_newest_checkpoint` has returned None, because then all checkpoints are damaged.

    Args:
        folder: the run's ``checkpoints`` folder.

    Raises:
        NoIntactCheckpointError: on every rank, if there are checkpoints; the message describes the damage of the newest
            checkpoint.
    """
    paths = run_on_rank0(lambda: list_checkpoints(folder))
    if not paths:
        return
    newest = paths[-1]
    raise NoIntactCheckpointError(
        f"{folder}: every checkpoint is damaged, {len(paths)} in total ({newest.name}: {verify_checkpoint(newest)}); "
        "to continue, copy an undamaged checkpoint back. To begin again at step 0, set trainer.resume: never, which "
        "renames the damaged checkpoints, or choose a different save_loc"
    )


def resolve_checkpoint(folder: Path, name_or_path: str, key: str) -> Path:
    """Collective: return the path of the checkpoint that a user has chosen.

    Args:
        folder: the run's ``checkpoints`` folder.
        name_or_path: ``best``, ``latest`` or a path.
        key: config key or command option with the value `name_or_path`, for messages.

    Raises:
        CheckpointError: on every rank, if the run has no such checkpoint yet, or the checkpoint is damaged.
        ConfigError: on every rank, if the path does not exist.
    """
    if name_or_path == "latest":
        newest = find_newest_checkpoint(folder)
        if newest is None:
            raise_if_checkpoints_exist(folder)
            raise CheckpointError(f"{folder}: there is no checkpoint; train first, or give a path")
        return newest
    is_best = name_or_path == "best"
    path = folder / "best" if is_best else Path(name_or_path)
    # All ranks must find the folder; on a shared file system, it may appear late on some ranks.
    if not all(run_on_all_ranks(path.is_dir)):
        if is_best:
            alternative = ""
            if find_newest_checkpoint(folder) is not None:
                alternative = ", or use latest: no best checkpoint has been saved yet"
            raise CheckpointError(f"{path}: no such checkpoint; train first{alternative}")
        raise build_missing_checkpoint_error(key, name_or_path)
    problem = verify_checkpoint(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}; choose another checkpoint")
    return path.resolve()


def build_missing_checkpoint_error(key: str, name_or_path: str) -> ConfigError:
    """Return the error for a config key or option `key` whose value is not the name or path of a checkpoint."""
    suggestion = ""
    if os.sep not in name_or_path:
        suggestion = did_you_mean(name_or_path, ("best", "latest"))
    return ConfigError(
        f"{key}: {name_or_path}: no such checkpoint; write best, latest or the path of a step_XXXXXXXX folder"
        f"{suggestion}"
    )


def load_meta(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's meta.json.

    Raises:
        CheckpointError: if this version cannot read the format of the checkpoint.
    """
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] not in _READABLE_FORMATS:
        raise CheckpointError(f"{path}: format {meta['format']}; this version reads {_READABLE_FORMATS}")
    return meta


def read_weights_checksum(path: Path, stem: str) -> str:
    """Return a checksum of the files of a stem as eight hexadecimal digits.

    The checksum is computed from the file checksums in the manifest, so the files themselves are not read. Without
    a readable manifest, the function returns the checksum of an empty list of files.

    Args:
        path: folder of the checkpoint.
        stem: set of tensors, such as ``forecast``.
    """
    checksums = []
    manifest = read_manifest(path) or {}
    for name, (_, crc32) in manifest.items():
        # Files are STEM/rank_00000.safetensors, or STEM.safetensors in format 1.
        stem_of_file = name.split("/")[0].split(".")[0]
        if stem_of_file == stem:
            checksums.append((name, crc32))
    text = json.dumps(sorted(checksums))
    return f"{zlib.crc32(text.encode()):08x}"


def read_stored_shapes(path: Path, stem: str) -> dict[str, torch.Size]:
    """Return the shapes of the complete tensors of a stem, such as ``model``, in a checkpoint: name -> shape."""
    if (path / stem).is_dir():
        return read_index(path / stem).shapes()
    return {name: value.shape for name, value in load_tensors(path, stem).items()}


def load_tensors(path: Path, stem: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a stem or of the assets from a checkpoint: name -> complete tensor on the CPU.

    Args:
        path: the checkpoint.
        stem: the stem, such as ``model``, or ``assets``.
        names: names of the tensors that are read; None for all. Names that are not stored are ignored.
    """
    if (path / stem).is_dir():
        return read_complete_tensors(path / stem, names)
    tensors = load_file(path / f"{stem}.safetensors")
    if names is None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name in names}


def load_into(path: Path, stem: str, state: Mapping[str, Tensor], skipped_names: Collection[str] = ()) -> None:
    """Collective: fill tensors in place from a checkpoint, which may have been saved on a different mesh.

    Args:
        path: the checkpoint.
        stem: the set of tensors to load, such as ``model``.
        state: name -> tensor to fill, with exactly the names and shapes of the stored set; plain tensors, or DTensors
            on any mesh.
        skipped_names: names of stored tensors that are not loaded; `state` must not contain these names.

    Raises:
        CheckpointError: on every rank, if names or shapes differ; the message names the tensors that are missing,
            unexpected or have a different shape.
    """

    def read_stem_index() -> StemIndex | ScannedIndex | None:
        # In format 1, the stem is a single file without an index.
        if not (path / stem).is_dir():
            return None
        return read_index(path / stem)

    # Only rank 0 reads the index, because reads by a thousand ranks would slow down the file system.
    index = run_on_rank0(read_stem_index)

    def load() -> None:
        if index is not None:
            stored_shapes = index.shapes()
        else:
            stored_tensors = load_tensors(path, stem)
            stored_shapes = {name: tensor.shape for name, tensor in stored_tensors.items()}
        loaded_shapes = {name: shape for name, shape in stored_shapes.items() if name not in skipped_names}
        require_same_tensors(state, loaded_shapes, path)
        read_tensors = {name: tensor for name, tensor in state.items() if is_first_replica(tensor)}
        if index is not None:
            read_into(path / stem, index, read_tensors)
            return
        fill_local_parts(read_tensors, stored_tensors)

    run_on_all_ranks(load)
    broadcast_to_replicas(state.values())


def copy_complete_tensors(model: torch.nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Copy complete tensors into a model, which may be sharded, without communication.

    Args:
        model: model with exactly the names and shapes of `state`.
        state: name -> complete tensor, equal on every rank.
        origin: file or checkpoint of the tensors, for messages.

    Raises:
        CheckpointError: if names or shapes differ; the message names the tensors, see `require_same_tensors`.
    """
    model_state = model.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    require_same_tensors(model_state, shapes, origin)
    fill_local_parts(model_state, state)


def require_same_tensors(model_state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], origin: Path) -> None:
    """Raise CheckpointError unless stored tensors have exactly the names and shapes of the model's tensors.

    Args:
        model_state: name -> tensor of the model.
        shapes: name -> shape of the complete stored tensor.
        origin: file or checkpoint of the stored tensors, for messages.

    Raises:
        CheckpointError: if names or shapes differ; the message names the tensors that are missing, unexpected or have a
            different shape.
    """
    other_shapes = []
    for name in sorted(model_state.keys() & shapes.keys()):
        model_shape = model_state[name].shape
        if model_shape != shapes[name]:
            other_shapes.append(f"{name} {tuple(shapes[name])} instead of {tuple(model_shape)}")
    differences = {
        "missing": sorted(model_state.keys() - shapes.keys()),
        "unexpected": sorted(shapes.keys() - model_state.keys()),
        "of a different shape": other_shapes,
    }
    # The message names the first three tensors of each kind of difference.
    descriptions = []
    for kind, names in differences.items():
        if names:
            ellipsis = ", ..." if len(names) > 3 else ""
            descriptions.append(f"{len(names)} {kind} ({', '.join(names[:3])}{ellipsis})")
    if descriptions:
        raise CheckpointError(
            f"{origin}: these weights are of a different model: {'; '.join(descriptions)}. Use the config that the "
            "weights were trained with (meta.json of the checkpoint contains it), or a different save_loc"
        )


def fill_local_parts(state: Mapping[str, Tensor], whole_tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of each complete tensor into the tensor of the same name in `state`, in place."""
    for name, tensor in state.items():
        local_shard(tensor).copy_(take_local_part(whole_tensors[name], tensor))
