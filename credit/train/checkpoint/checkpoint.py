"""Checkpoints: folders with everything that is needed to continue a run or to make forecasts.

``checkpoints/step_00001000/`` holds:

- ``model``: folder with the live weights, one file per host, and an index;
- ``forecast``: the same for the weights that make forecasts, which are the moving average if there is one;
- ``optimizer``: the same for the state of the optimizer (these three sets of tensors are called stems below);
- ``assets.safetensors``: arrays such as masks and the climatology of the forcing;
- ``meta.json``: state of the run, config, channels, grid and statistics;
- ``manifest.json``: size and checksum of every other file.

`credit.train.checkpoint.async_writer` writes a checkpoint under a temporary name, the manifest last, flushes it to the
disk and renames it. A folder whose files do not match its manifest is damaged and is not used. Only tensors and JSON
are stored, so nothing is ever unpickled. ``latest`` and ``best`` are links that are moved atomically.

A whole tensor is the full, unsharded one. Functions marked as collective also work without a process group.
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
from credit.train.checkpoint.sharded.reader import ScannedIndex, read_index, read_into, read_whole
from credit.utils.atomic import atomic_write

logger = logging.getLogger(__name__)

FORMAT = 2
# Format 1, of credit 0.1, has one file in place of each folder of tensors.
_READABLE_FORMATS = (1, FORMAT)
_STEP_FOLDER = re.compile(r"^step_(\d{8,})$")


class NoIntactCheckpointError(CheckpointError):
    """Error for a run whose checkpoints are all damaged; the exit code 2 stops a chain of jobs."""

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
        # A relative link stays valid when the run's folder is moved.
        atomic_write(folder / name, lambda temporary: temporary.symlink_to(target.name))
    except CreditError as error:
        raise CheckpointError(str(error)) from error


def parse_step(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(_STEP_FOLDER.match(path.name)[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a run's ``checkpoints`` folder, damaged ones included, oldest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if _STEP_FOLDER.match(path.name)]
    return sorted(paths, key=parse_step)


def newest_checkpoint(folder: Path, at_most: int | None = None) -> Path | None:
    """Collective: return the newest checkpoint that is not damaged, None if there is none.

    Damaged checkpoints are skipped with a warning.

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
    """Collective: raise an error if the folder has checkpoints, all of which must be damaged.

    Call it only after `newest_checkpoint` has returned None, because then no checkpoint is intact.

    Args:
        folder: the run's ``checkpoints`` folder.

    Raises:
        NoIntactCheckpointError: on every rank, if there are checkpoints; the message has the damage of the newest.
    """
    paths = run_on_rank0(lambda: list_checkpoints(folder))
    if not paths:
        return
    newest = paths[-1]
    raise NoIntactCheckpointError(
        f"{folder}: every checkpoint is damaged, {len(paths)} in all ({newest.name}: {verify_checkpoint(newest)}); "
        "copy an intact one back to continue from it. To begin again at step 0, set trainer.resume: never, which "
        "renames the damaged ones, or choose another save_loc"
    )


def resolve_checkpoint(folder: Path, name_or_path: str, key: str) -> Path:
    """Collective: return the path of the checkpoint that a user has chosen.

    Args:
        folder: the run's ``checkpoints`` folder.
        name_or_path: ``best``, ``latest`` or a path.
        key: key of the config, or option of the command, that has the value `name_or_path`; for messages.

    Raises:
        CheckpointError: on every rank, if the run has no such checkpoint yet, or the checkpoint is damaged.
        ConfigError: on every rank, if the path does not exist.
    """
    if name_or_path == "latest":
        newest = newest_checkpoint(folder)
        if newest is None:
            raise_if_checkpoints_exist(folder)
            raise CheckpointError(f"{folder}: no checkpoint here; train first, or give a path")
        return newest
    is_best = name_or_path == "best"
    path = folder / "best" if is_best else Path(name_or_path)
    # All ranks must see the folder, which a shared file system may show to some of them late.
    if not all(run_on_all_ranks(path.is_dir)):
        if is_best:
            alternative = ""
            if newest_checkpoint(folder) is not None:
                alternative = ", or use latest: no best one has been saved yet"
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


def weights_fingerprint(path: Path, stem: str) -> str:
    """Return a checksum over the tensors of one stem as eight hexadecimal digits; only the manifest is read.

    All checkpoints without a readable manifest have the same checksum, which is that of an empty list of files.

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
    """Return the shapes of one stem of a checkpoint: name -> shape of the whole tensor."""
    if (path / stem).is_dir():
        return read_index(path / stem).shapes()
    return {name: value.shape for name, value in load_tensors(path, stem).items()}


def load_tensors(path: Path, stem: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return tensors of one stem, or of ``assets``, of a checkpoint: name -> whole tensor on the CPU.

    Args:
        path: the checkpoint.
        stem: the set of tensors, such as ``model``.
        names: names of the tensors that are read; None for all. Names that are not stored are left out.
    """
    if (path / stem).is_dir():
        return read_whole(path / stem, names)
    tensors = load_file(path / f"{stem}.safetensors")
    if names is None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name in names}


def load_into(path: Path, stem: str, state: Mapping[str, Tensor], skipped_names: Collection[str] = ()) -> None:
    """Collective: fill tensors in place from a checkpoint, which may have been saved on another mesh.

    Args:
        path: the checkpoint.
        stem: the set of tensors to load, such as ``model``.
        state: name -> tensor to fill, with exactly the names and shapes of the stored set; plain tensors, or DTensors
            on any mesh.
        skipped_names: names of stored tensors that are not loaded and that `state` lacks.

    Raises:
        CheckpointError: on every rank, if names or shapes differ; the message names the tensors that are missing, left
            over or of another shape.
    """

    def read_stem_index() -> StemIndex | ScannedIndex | None:
        # In format 1 the stem is a single file.
        if not (path / stem).is_dir():
            return None
        return read_index(path / stem)

    # A thousand ranks would slow the file system down if each of them read the index.
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
        fill_parts(read_tensors, stored_tensors)

    run_on_all_ranks(load)
    broadcast_to_replicas(state.values())


def load_state(model: torch.nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Copy whole tensors, which are equal on every rank, into a model, sharded or not; no rank communicates.

    Args:
        model: model with exactly the names and shapes of `state`.
        state: name -> whole tensor.
        origin: file or checkpoint that the tensors come from, for messages.

    Raises:
        CheckpointError: if names or shapes differ; the message names the tensors, see `require_same_tensors`.
    """
    model_state = model.state_dict()
    shapes = {name: value.shape for name, value in state.items()}
    require_same_tensors(model_state, shapes, origin)
    fill_parts(model_state, state)


def require_same_tensors(model_state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], origin: Path) -> None:
    """Require that stored tensors have exactly the names and shapes of the model's tensors.

    Args:
        model_state: name -> tensor of the model.
        shapes: name -> shape of the whole stored tensors.
        origin: file or checkpoint that has these tensors, for messages.

    Raises:
        CheckpointError: if names or shapes differ; the message names the tensors that are missing, left over or of
            another shape.
    """
    other_shapes = []
    for name in sorted(model_state.keys() & shapes.keys()):
        model_shape = model_state[name].shape
        if model_shape != shapes[name]:
            other_shapes.append(f"{name} {tuple(shapes[name])} instead of {tuple(model_shape)}")
    differences = {
        "missing": sorted(model_state.keys() - shapes.keys()),
        "left over": sorted(shapes.keys() - model_state.keys()),
        "of another shape": other_shapes,
    }
    # The message names the first three tensors of each kind of difference.
    descriptions = []
    for kind, names in differences.items():
        if names:
            ellipsis = ", ..." if len(names) > 3 else ""
            descriptions.append(f"{len(names)} {kind} ({', '.join(names[:3])}{ellipsis})")
    if descriptions:
        raise CheckpointError(
            f"{origin}: these weights are of another model: {'; '.join(descriptions)}. Use the config that they were "
            "trained with (it lies beside them in meta.json), or another save_loc for this one"
        )


def fill_parts(state: Mapping[str, Tensor], whole_tensors: Mapping[str, Tensor]) -> None:
    """Copy into each tensor of `state`, in place, this rank's part of the whole tensor of the same name."""
    for name, tensor in state.items():
        local_shard(tensor).copy_(take_local_part(whole_tensors[name], tensor))
