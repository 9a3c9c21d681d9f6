"""Checkpoints: folders with everything that is needed to continue a run or to make forecasts.

``checkpoints/step_00001000/`` holds:

- ``model``: folder with the live weights, one file per rank;
- ``forecast``: the same for the weights that make forecasts, which are the moving average if there is one;
- ``optimizer``: the same for the state of the optimizer;
- ``assets.safetensors``: arrays such as masks and the climatology of the forcing;
- ``meta.json``: state of the run, config, channels, grid and statistics;
- ``manifest.json``: size and checksum of every other file.

`credit.train.checkpoint.async_writer` writes a checkpoint under a temporary name, the manifest last, flushes it to the
disk and renames it. A folder whose files do not match its manifest is damaged and is not used. Only tensors and JSON
are stored, so nothing is ever unpickled. ``latest`` and ``best`` are links that are moved atomically.

The functions below that read checkpoints are collective if there is a process group, and work without one.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from credit.errors import CheckpointError, ConfigError, CreditError, did_you_mean
from credit.parallel.dtensor import local_shard
from credit.parallel.object_collectives import current_rank, run_on_all_ranks, run_on_rank0
from credit.parallel.state.materialise import take_local_part
from credit.train.checkpoint import sharded
from credit.utils.atomic import atomic_write

logger = logging.getLogger(__name__)

FORMAT = 2
# Format 1, of credit 0.1, has one file in place of each folder of tensors.
_READABLE = (1, FORMAT)
_STEP_FOLDER = re.compile(r"^step_(\d{8,})$")
MANIFEST = "manifest.json"


class NoWholeCheckpointError(CheckpointError):
    """Error of a run of which every checkpoint is damaged; exit code 2, because a person has to look at it."""

    exit_code = 2


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` in the run's ``checkpoints`` folder."""
    return folder / f"step_{step:08d}"


def point(folder: Path, name: str, target: Path) -> None:
    """Move the link `name` (``latest`` or ``best``) to `target` atomically.

    Raises:
        CheckpointError: if the link cannot be moved; it keeps its old target.
    """
    try:
        atomic_write(folder / name, lambda temporary: temporary.symlink_to(target.name))
    except CreditError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class Retention:
    """Rule for the checkpoints that stay, in addition to those that ``latest`` and ``best`` point to.

    Attributes:
        last: number of newest checkpoints that stay.
        every: checkpoints whose step is a multiple of it stay; None for no such rule.
        steps: steps whose checkpoints stay.
    """

    last: int
    every: int | None = None
    steps: tuple[int, ...] = ()


def prune(folder: Path, keep: Retention, dry_run: bool = False) -> list[Path]:
    """Remove the checkpoints that `keep` does not retain, and return their paths.

    Args:
        folder: the run's ``checkpoints`` folder.
        keep: the checkpoints to retain.
        dry_run: return the paths without removing anything.
    """
    linked = {(folder / name).resolve() for name in ("latest", "best")}
    removed = []
    for path in list_checkpoints(folder)[: -keep.last]:
        step = step_of(path)
        is_milestone = keep.every is not None and step % keep.every == 0
        if is_milestone or step in keep.steps or path.resolve() in linked:
            continue
        removed.append(path)
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True)
    return removed


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints after `step`, which a run that was rolled back will write again."""
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            shutil.rmtree(path)
    _remove_dangling_links(folder)


def set_aside(folder: Path) -> None:
    """Rename every checkpoint, so that a new run in the same folder does not take them for its own.

    ``step_00000002`` becomes ``damaged_step_00000002``, with a number appended if that name exists already. The links
    ``latest`` and ``best`` are removed.
    """
    for path in list_checkpoints(folder):
        name = f"damaged_{path.name}"
        number = 1
        while (folder / name).exists():
            number += 1
            name = f"damaged_{path.name}.{number}"
        path.rename(folder / name)
    _remove_dangling_links(folder)


def _remove_dangling_links(folder: Path) -> None:
    for name in ("latest", "best"):
        if not (folder / name).exists():
            (folder / name).unlink(missing_ok=True)


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's folder."""
    return int(_STEP_FOLDER.match(path.name)[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, damaged ones included, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_FOLDER.match(path.name)), key=step_of)


def newest_checkpoint(folder: Path, at_most: int | None = None) -> Path | None:
    """Collective: return the newest checkpoint that is not damaged, None if there is none.

    Damaged checkpoints are skipped with a warning.

    Args:
        folder: the run's ``checkpoints`` folder.
        at_most: largest step that the checkpoint may have, None for no limit.
    """
    for path in reversed(run_on_rank0(lambda: list_checkpoints(folder))):
        if at_most is not None and step_of(path) > at_most:
            continue
        problem = verify_checkpoint(path)
        if problem is None:
            return path
        if current_rank() == 0:
            logger.warning("%s is skipped: %s", path, problem)
    return None


def require_whole_checkpoint(folder: Path) -> None:
    """Collective: raise if the run has checkpoints; call it if `newest_checkpoint` has found all of them damaged.

    Raises:
        NoWholeCheckpointError: on every rank, naming the damage of the newest.
    """
    paths = run_on_rank0(lambda: list_checkpoints(folder))
    if not paths:
        return
    newest = paths[-1]
    raise NoWholeCheckpointError(
        f"{folder}: every checkpoint is damaged, {len(paths)} in all ({newest.name}: {verify_checkpoint(newest)}); "
        "copy an intact one back to continue from it. To begin again at step 0, set trainer.resume: never, which "
        "renames the damaged ones, or choose another save_loc"
    )


def verify_checkpoint(path: Path) -> str | None:
    """Collective: return a description of the damage to a checkpoint's files, None if they are as written.

    Rank 0 looks for files that do not belong there. Each rank reads its share of the files.
    """

    def verify_share() -> str | None:
        manifest = _read_manifest(path)
        if manifest is None:
            return f"{MANIFEST} is missing or unreadable, so it was not finished"
        if current_rank() == 0:
            present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
            extra_files = sorted(present - manifest.keys() - {MANIFEST})
            if extra_files:
                return f"{extra_files[0]} is not in {MANIFEST}"
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        for name in sorted(manifest)[current_rank() :: num_ranks]:
            size, crc32 = manifest[name]
            problem = _verify_file(path, name, size, crc32)
            if problem is not None:
                return problem
        return None

    for problem in run_on_all_ranks(verify_share):
        if problem is not None:
            return problem
    return None


def _read_manifest(path: Path) -> dict[str, tuple[int, int]] | None:
    """Return file -> (size, checksum), None if the manifest is missing or damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return {name: (entry["size"], entry["crc32"]) for name, entry in manifest.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _verify_file(path: Path, name: str, size: int, crc32: int) -> str | None:
    """Return a description of the damage to one file, None if it has this size and checksum."""
    file = path / name
    if not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes instead of {size}"
    if sharded.checksum(file) != crc32:
        return f"{name} does not match its checksum"
    return None


def resolve_checkpoint(folder: Path, which: str, key: str) -> Path:
    """Collective: return the path of the checkpoint that a user has chosen.

    Args:
        folder: the run's ``checkpoints`` folder.
        which: ``best``, ``latest`` or a path.
        key: key of the config or option that has the value `which`, for messages.

    Raises:
        CheckpointError: on every rank, if the run has no such checkpoint yet, or the checkpoint is damaged.
        ConfigError: on every rank, if the path does not exist.
    """
    if which == "latest":
        newest = newest_checkpoint(folder)
        if newest is None:
            require_whole_checkpoint(folder)
            raise CheckpointError(f"{folder}: no checkpoint here; train first, or give a path")
        return newest
    path = folder / "best" if which == "best" else Path(which)
    if not all(run_on_all_ranks(path.is_dir)):
        if which == "best":
            alternative = ""
            if newest_checkpoint(folder) is not None:
                alternative = ", or use latest: no best one has been saved yet"
            raise CheckpointError(f"{path}: no such checkpoint; train first{alternative}")
        raise no_such_checkpoint(key, which)
    problem = verify_checkpoint(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}; choose another checkpoint")
    return path.resolve()


def no_such_checkpoint(key: str, which: str) -> ConfigError:
    """Return the error of a `key` whose value `which` is not the name or path of a checkpoint."""
    suggestion = "" if os.sep in which else did_you_mean(which, ("best", "latest"))
    return ConfigError(
        f"{key}: {which}: no such checkpoint; write best, latest or the path of a step_XXXXXXXX folder{suggestion}"
    )


def load_meta(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's meta.json.

    Raises:
        CheckpointError: if this version cannot read the format of the checkpoint.
    """
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] not in _READABLE:
        raise CheckpointError(f"{path}: format {meta['format']}; this version reads {_READABLE}")
    return meta


def fingerprint(path: Path, stem: str) -> str:
    """Return a checksum over the tensors of one stem as eight hexadecimal digits."""
    checksums = []
    for name, (_, crc32) in (_read_manifest(path) or {}).items():
        # Files are STEM/rank_00000.safetensors, or STEM.safetensors in format 1.
        if name.split("/")[0].split(".")[0] == stem:
            checksums.append((name, crc32))
    return f"{zlib.crc32(json.dumps(sorted(checksums)).encode()):08x}"


def stored_shapes(path: Path, stem: str) -> dict[str, torch.Size]:
    """Return name -> shape of the whole tensors of one stem."""
    if (path / stem).is_dir():
        return sharded.shapes(sharded.read_metadata(path / stem))
    return {name: value.shape for name, value in load_tensors(path, stem).items()}


def load_tensors(path: Path, stem: str) -> dict[str, Tensor]:
    """Return name -> whole tensor of one stem, on the CPU."""
    if (path / stem).is_dir():
        return sharded.read_whole(path / stem)
    return load_file(path / f"{stem}.safetensors")


def load_into(path: Path, stem: str, state: Mapping[str, Tensor]) -> None:
    """Collective: fill tensors in place from a checkpoint, which may have been saved on another mesh.

    Args:
        path: the checkpoint.
        stem: the set of tensors to load, such as ``model``.
        state: name -> tensor to fill, with exactly the names and shapes of that set; plain tensors, or DTensors on any
            mesh.

    Raises:
        CheckpointError: on every rank, naming the tensors that are missing, left over or of another shape.
    """

    # This reads the heads of all files. If each of a thousand ranks did so, they would open a million files.
    metadata = run_on_rank0(lambda: sharded.read_metadata(path / stem) if (path / stem).is_dir() else None)

    def load() -> None:
        if metadata is not None:
            require_same_tensors(state, sharded.shapes(metadata), path)
            sharded.read_into(path / stem, metadata, state)
            return
        stored = load_tensors(path, stem)
        require_same_tensors(state, {name: tensor.shape for name, tensor in stored.items()}, path)
        _fill(state, stored)

    run_on_all_ranks(load)


def load_state(model: torch.nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Load whole tensors, the same on every rank, into a model, sharded or not.

    Args:
        model: model with exactly the names and shapes of `state`.
        state: name -> whole tensor.
        origin: file or checkpoint that the tensors come from, for messages.

    Raises:
        CheckpointError: naming the tensors that are missing, left over or of another shape.
    """
    model_state = model.state_dict()
    require_same_tensors(model_state, {name: value.shape for name, value in state.items()}, origin)
    _fill(model_state, state)


def require_same_tensors(model_state: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], origin: Path) -> None:
    """Raise if stored tensors are not exactly those of the model.

    Args:
        model_state: name -> tensor of the model.
        shapes: name -> shape of the whole stored tensors.
        origin: file or checkpoint that has these tensors, for messages.

    Raises:
        CheckpointError: naming the tensors that are missing, left over or of another shape.
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
    parts = []
    for kind, names in differences.items():
        if names:
            ellipsis = ", ..." if len(names) > 3 else ""
            parts.append(f"{len(names)} {kind} ({', '.join(names[:3])}{ellipsis})")
    if parts:
        raise CheckpointError(
            f"{origin}: these weights are of another model: {'; '.join(parts)}. Use the config that they were trained "
            "with (it lies beside them in meta.json), or another save_loc for this one"
        )


def _fill(state: Mapping[str, Tensor], whole_tensors: Mapping[str, Tensor]) -> None:
    """Copy into each tensor of `state`, in place, this rank's part of the whole tensor of the same name."""
    for name, tensor in state.items():
        local_shard(tensor).copy_(take_local_part(whole_tensors[name], tensor))
