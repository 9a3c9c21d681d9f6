"""Checkpoints: everything that continues a run or forecasts, in one folder that is whole or does not count.

``checkpoints/step_00001000/`` holds ``model.safetensors`` (live weights), ``forecast.safetensors`` (the weights that
forecast: the average where there is one), ``optimizer.safetensors``, ``assets.safetensors`` (arrays such as masks and
the forcing's climatology) and ``meta.json`` (position, config, channels, grid, statistics). It is written beside,
flushed and renamed; ``manifest.json``, with the sizes and checksums of the others, comes last. Only tensors and JSON
are stored, so nothing is ever unpickled. ``latest`` and ``best`` are links, moved atomically.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from credit.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
_STEP_FOLDER = re.compile(r"^step_(\d{8,})$")
_MANIFEST = "manifest.json"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], meta: Mapping[str, Any]
) -> Path:
    """Write ``folder/step_XXXXXXXX`` and return it.

    Args:
        folder: the run's ``checkpoints`` folder.
        step: optimizer steps taken.
        tensors: file stem -> named tensors.
        meta: JSON-ready.

    Raises:
        CheckpointError: if it cannot be written; the older checkpoints stay as they are.
    """
    target = folder / f"step_{step:08d}"
    beside = folder / f".{target.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        for stem, named in tensors.items():
            save_file({name: value.detach().cpu().contiguous() for name, value in named.items()},
                      beside / f"{stem}.safetensors")  # fmt: skip
        (beside / "meta.json").write_text(json.dumps({"format": FORMAT, "step": step, **meta}, indent=1))
        _give_usual_modes(beside)
        files = {path.name: {"size": path.stat().st_size, "crc32": _checksum(path)} for path in beside.iterdir()}
        for name in files:
            _flush(beside / name)
        (beside / _MANIFEST).write_text(json.dumps(files, indent=1))
        _flush(beside / _MANIFEST)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise CheckpointError(
            f"{target}: cannot be saved ({error}); older checkpoints are untouched. Free space or "
            "choose another save_loc"
        ) from error
    return target


def point(folder: Path, name: str, target: Path) -> None:
    """Move the link `name` (``latest`` or ``best``) to `target` atomically."""
    beside = folder / f".{name}.part"
    try:
        beside.unlink(missing_ok=True)
        beside.symlink_to(target.name)
        beside.replace(folder / name)
    except OSError as error:
        raise CheckpointError(f"{folder / name}: the link cannot be moved ({error.strerror}); free space") from error


def prune(folder: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints and those that ``latest`` and ``best`` point to."""
    kept = {(folder / name).resolve() for name in ("latest", "best")}
    for path in list_checkpoints(folder)[:-keep_last]:
        if path.resolve() not in kept:
            shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _STEP_FOLDER.match(path.name))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint; damaged ones are skipped with a warning."""
    for path in reversed(list_checkpoints(folder)):
        problem = find_damage(path)
        if problem is None:
            return path
        logger.warning("%s is skipped: %s", path, problem)
    return None


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None where they are as written."""
    try:
        files = json.loads((path / _MANIFEST).read_text())
    except (OSError, ValueError):
        return f"{_MANIFEST} is missing or unreadable, so it was not finished"
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != facts["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {facts['size']}"
        if _checksum(file) != facts["crc32"]:
            return f"{name} does not match its checksum"
    return None


def resolve_checkpoint(folder: Path, which: str) -> Path:
    """Return the checkpoint that `which` names: ``best``, ``latest`` or a path.

    Raises:
        CheckpointError: if it is missing or damaged.
    """
    if which == "latest":
        found = newest_checkpoint(folder)
        if found is None:
            raise CheckpointError(f"{folder}: no whole checkpoint here; train first, or give a path")
        return found
    path = folder / "best" if which == "best" else Path(which)
    if not path.is_dir():
        rule = "train first" if which == "best" else "write best, latest or the path of a step_XXXXXXXX folder"
        raise CheckpointError(f"{path}: no such checkpoint; {rule}")
    problem = find_damage(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}; choose another checkpoint")
    return path.resolve()


def load_meta(path: Path) -> dict[str, Any]:
    """Return the checkpoint's meta.json."""
    meta = json.loads((path / "meta.json").read_text())
    if meta["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {meta['format']}; this version reads format {FORMAT}")
    return meta


def fingerprint(path: Path, stem: str) -> str:
    """Return the checksum of one of the checkpoint's files as eight hexadecimal digits."""
    return f"{json.loads((path / _MANIFEST).read_text())[f'{stem}.safetensors']['crc32']:08x}"


def load_tensors(path: Path, stem: str) -> dict[str, torch.Tensor]:
    """Return the named tensors of one of the checkpoint's files."""
    return load_file(path / f"{stem}.safetensors")


def load_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor], origin: Path) -> None:
    """Load weights into a model of exactly their names and shapes.

    Raises:
        CheckpointError: naming what is missing, left over or of another shape.
    """
    own = model.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    ]
    if missing or extra or shapes:
        parts = [f"{len(items)} {what} ({', '.join(items[:3])}{', ...' if len(items) > 3 else ''})"
                 for what, items in (("missing", missing), ("left over", extra), ("of another shape", sorted(shapes)))
                 if items]  # fmt: skip
        raise CheckpointError(
            f"{origin}: these weights are of another model: {'; '.join(parts)}. Use the config that they were trained "
            "with (it lies beside them in meta.json), or another save_loc for this one"
        )
    model.load_state_dict(state)


def _give_usual_modes(folder: Path) -> None:
    """Let the umask decide who may read; safetensors' files are otherwise for the owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.iterdir():
        path.chmod(0o666 & ~mask)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
