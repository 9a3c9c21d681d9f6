"""Checkpoints: everything that continues a run or forecasts, in one folder that is whole or does not count.

``checkpoints/step_00001000/`` holds the folders ``model`` (live weights), ``forecast`` (the weights that forecast: the
average where there is one) and ``optimizer`` with the parts of each rank, ``assets.safetensors`` (arrays such as masks
and the forcing's climatology) and ``meta.json`` (position, config, channels, grid, statistics). It is written beside,
flushed and renamed; ``manifest.json``, with the sizes and checksums of the others, comes last. Only tensors and JSON
are stored, so nothing is ever unpickled. ``latest`` and ``best`` are links, moved atomically.

`credit.train.checkpoint.async_writer` writes them. What reads them here is collective where there is a process group,
and works without.
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
from credit.parallel.object_collectives import rank_of, run_on_rank0, together
from credit.parallel.state.materialise import part_of
from credit.train.checkpoint import sharded
from credit.utils.atomic import atomic_write

logger = logging.getLogger(__name__)

FORMAT = 2
# format 1, of credit 0.1, has a file in place of each folder of tensors
_READABLE = (1, FORMAT)
_STEP_FOLDER = re.compile(r"^step_(\d{8,})$")
MANIFEST = "manifest.json"


class NoWholeCheckpointError(CheckpointError):
    """A run of which every checkpoint is damaged, which somebody has to look at; exit code 2."""

    exit_code = 2


def step_folder(folder: Path, step: int) -> Path:
    """Return where the checkpoint of `step` lies in the run's ``checkpoints`` folder."""
    return folder / f"step_{step:08d}"


def point(folder: Path, name: str, target: Path) -> None:
    """Move the link `name` (``latest`` or ``best``) to `target` atomically.

    Raises:
        CheckpointError: if it cannot be moved; it points to where it did.
    """
    try:
        atomic_write(folder / name, lambda beside: beside.symlink_to(target.name))
    except CreditError as error:
        raise CheckpointError(str(error)) from error


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay, beside those that ``latest`` and ``best`` point to.

    Attributes:
        last: the newest so many.
        every: those whose step is a multiple of it, None for none.
        steps: those of these steps.
    """

    last: int
    every: int | None = None
    steps: tuple[int, ...] = ()


def prune(folder: Path, keep: Retention, dry_run: bool = False) -> list[Path]:
    """Remove the checkpoints that need not be kept, unless `dry_run`, and return them."""
    linked = {(folder / name).resolve() for name in ("latest", "best")}
    removed = []
    for path in list_checkpoints(folder)[: -keep.last]:
        step = step_of(path)
        milestone = keep.every is not None and step % keep.every == 0
        if milestone or step in keep.steps or path.resolve() in linked:
            continue
        removed.append(path)
        if not dry_run:
            shutil.rmtree(path, ignore_errors=True)
    return removed


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints that lie beyond `step`: the run has gone back and will pass them again."""
    for path in list_checkpoints(folder):
        if step_of(path) > step:
            shutil.rmtree(path)
    _remove_dangling_links(folder)


def set_aside(folder: Path) -> None:
    """Rename every checkpoint, so that a new run in the same folder counts none of them as its own.

    ``step_00000002`` becomes ``damaged_step_00000002``, with a number where that is there already. The links ``latest``
    and ``best`` are removed.
    """
    for path in list_checkpoints(folder):
        name, number = f"damaged_{path.name}", 1
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
    """Return the checkpoint folders, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _STEP_FOLDER.match(path.name)), key=step_of)


def newest_checkpoint(folder: Path, at_most: int | None = None) -> Path | None:
    """Collective: return the newest whole checkpoint, of step `at_most` at the latest; damaged ones are skipped with a
    warning."""
    for path in reversed(run_on_rank0(lambda: list_checkpoints(folder))):
        if at_most is not None and step_of(path) > at_most:
            continue
        problem = verify_checkpoint(path)
        if problem is None:
            return path
        if rank_of() == 0:
            logger.warning("%s is skipped: %s", path, problem)
    return None


def require_whole_checkpoint(folder: Path) -> None:
    """Collective: stop where the run has checkpoints of which `newest_checkpoint` has found none to be whole.

    Raises:
        NoWholeCheckpointError: on every rank, naming what is wrong with the newest.
    """
    paths = run_on_rank0(lambda: list_checkpoints(folder))
    if not paths:
        return
    newest = paths[-1]
    raise NoWholeCheckpointError(
        f"{folder}: every checkpoint is damaged, {len(paths)} in all ({newest.name}: {verify_checkpoint(newest)}); "
        "copy a whole one back to go on from it. To begin again at step 0, set trainer.resume: never, which renames "
        "the damaged ones, or choose another save_loc"
    )


def verify_checkpoint(path: Path) -> str | None:
    """Collective: return what is wrong with a checkpoint's files, None where they are as written.

    Rank 0 looks for those that do not belong there, and each rank reads its share of the files.
    """

    def look() -> str | None:
        files = _read_manifest(path)
        if files is None:
            return f"{MANIFEST} is missing or unreadable, so it was not finished"
        if rank_of() == 0:
            present = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
            for name in sorted(present - files.keys() - {MANIFEST}):
                return f"{name} is not in {MANIFEST}"
        mine = sorted(files)[rank_of() :: dist.get_world_size() if dist.is_initialized() else 1]
        return next(filter(None, (_compare(path, name, *files[name]) for name in mine)), None)

    return next(filter(None, together(look)), None)


def _read_manifest(path: Path) -> dict[str, tuple[int, int]] | None:
    """Return each file's size and checksum, None if the manifest is not what was written."""
    try:
        content = json.loads((path / MANIFEST).read_text())
        return {name: (facts["size"], facts["crc32"]) for name, facts in content.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _compare(path: Path, name: str, size: int, crc32: int) -> str | None:
    file = path / name
    if not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return f"{name} does not match its checksum" if sharded.checksum(file) != crc32 else None


def resolve_checkpoint(folder: Path, which: str, key: str) -> Path:
    """Collective: return the checkpoint that `which`, the value of `key`, names: ``best``, ``latest`` or a path.

    Raises:
        CheckpointError: on every rank, if the run has none yet, or it is damaged.
        ConfigError: on every rank, if the path is not there.
    """
    if which == "latest":
        found = newest_checkpoint(folder)
        if found is None:
            require_whole_checkpoint(folder)
            raise CheckpointError(f"{folder}: no checkpoint here; train first, or give a path")
        return found
    path = folder / "best" if which == "best" else Path(which)
    if not all(together(path.is_dir)):
        if which == "best":
            others = "" if newest_checkpoint(folder) is None else ", or use latest: no best one has been saved yet"
            raise CheckpointError(f"{path}: no such checkpoint; train first{others}")
        raise no_such_checkpoint(key, which)
    problem = verify_checkpoint(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}; choose another checkpoint")
    return path.resolve()


def no_such_checkpoint(key: str, which: str) -> ConfigError:
    """Return the error of a `key` whose value, `which`, names no checkpoint."""
    slip = "" if os.sep in which else did_you_mean(which, ("best", "latest"))
    return ConfigError(
        f"{key}: {which}: no such checkpoint; write best, latest or the path of a step_XXXXXXXX folder{slip}"
    )


def load_meta(path: Path) -> dict[str, Any]:
    """Return the checkpoint's meta.json."""
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] not in _READABLE:
        raise CheckpointError(f"{path}: format {meta['format']}; this version reads {_READABLE}")
    return meta


def fingerprint(path: Path, stem: str) -> str:
    """Return a checksum over one stem's tensors as eight hexadecimal digits."""
    files = _read_manifest(path) or {}
    own = sorted((name, crc32) for name, (_, crc32) in files.items() if name.split("/")[0].split(".")[0] == stem)
    return f"{zlib.crc32(json.dumps(own).encode()):08x}"


def stored_shapes(path: Path, stem: str) -> dict[str, torch.Size]:
    """Return the names and whole shapes of one stem's tensors."""
    if (path / stem).is_dir():
        return sharded.shapes(sharded.read_metadata(path / stem))
    return {name: value.shape for name, value in load_tensors(path, stem).items()}


def load_tensors(path: Path, stem: str) -> dict[str, Tensor]:
    """Return one stem's whole tensors on the CPU."""
    return sharded.read_whole(path / stem) if (path / stem).is_dir() else load_file(path / f"{stem}.safetensors")


def load_into(path: Path, stem: str, state: Mapping[str, Tensor]) -> None:
    """Collective: fill `state`, plain tensors or DTensors on any mesh, from a checkpoint saved on any other; in place.

    Args:
        path: the checkpoint.
        stem: which of its sets of tensors.
        state: exactly that set's names and shapes.

    Raises:
        CheckpointError: on every rank, naming what is missing, left over or of another shape.
    """

    # the heads of all files: a thousand ranks would open a million
    metadata = run_on_rank0(lambda: sharded.read_metadata(path / stem) if (path / stem).is_dir() else None)

    def load() -> None:
        whole = load_tensors(path, stem) if metadata is None else {}
        found = sharded.shapes(metadata) if metadata is not None else {name: v.shape for name, v in whole.items()}
        require_same_tensors(state, found, path)
        if metadata is not None:
            sharded.read_into(path / stem, metadata, state)
        else:
            _fill(state, whole)

    together(load)


def load_state(model: torch.nn.Module, state: Mapping[str, Tensor], origin: Path) -> None:
    """Load whole tensors, the same on every rank, into a model of exactly their names and shapes, sharded or not.

    Raises:
        CheckpointError: naming what is missing, left over or of another shape.
    """
    own = model.state_dict()
    require_same_tensors(own, {name: value.shape for name, value in state.items()}, origin)
    _fill(own, state)


def require_same_tensors(own: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], origin: Path) -> None:
    """Refuse tensors that are not exactly the model's.

    Raises:
        CheckpointError: naming what is missing, left over or of another shape.
    """
    missing, extra = sorted(own.keys() - shapes.keys()), sorted(shapes.keys() - own.keys())
    other = [
        f"{name} {tuple(shapes[name])} instead of {tuple(own[name].shape)}"
        for name in sorted(own.keys() & shapes.keys())
        if own[name].shape != shapes[name]
    ]
    if missing or extra or other:
        parts = [f"{len(items)} {what} ({', '.join(items[:3])}{', ...' if len(items) > 3 else ''})"
                 for what, items in (("missing", missing), ("left over", extra), ("of another shape", other))
                 if items]  # fmt: skip
        raise CheckpointError(
            f"{origin}: these weights are of another model: {'; '.join(parts)}. Use the config that they were trained "
            "with (it lies beside them in meta.json), or another save_loc for this one"
        )


def _fill(state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    for name, tensor in state.items():
        local_shard(tensor).copy_(part_of(whole[name], tensor))
