"""Weights that other programs saved: one file, whole tensors, names with or without what wrappers put into them."""

from __future__ import annotations

import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from credit.channels import ChannelMap
from credit.config import Config
from credit.data.reader import FieldReader
from credit.data.store.statistics import Statistics
from credit.errors import CheckpointError
from credit.grid import LatLonGrid
from credit.parallel.object_collectives import run_on_rank0, together
from credit.train.assets import ModelAssets, read_seen, require_same_fields
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.resume import require_same_function

logger = logging.getLogger(__name__)

# where training programs keep the weights in what they save
_KEYS = ("model_state_dict", "model", "state_dict")
# FSDP1, torch.compile and activation checkpointing write these anywhere into a name; DDP and DataParallel its beginning
_INSIDE = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_BEFORE = "module."


def read_state_file(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a safetensors or torch-saved file, by plain names; only tensors are unpickled.

    The state dict is the file's content or lies in it under ``model_state_dict``, ``model`` or ``state_dict``.

    Raises:
        CheckpointError: if the file cannot be read or holds no state dict.
    """
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load_torch_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no safetensors file, or a damaged one ({error}); copy it again") from error
    state = _find_state(content)
    if state is None:
        raise CheckpointError(f"{path}: holds no state dict, neither under {', '.join(_KEYS)} nor bare")
    plain = _plain_names(state)
    if len(plain) < len(state):
        raise CheckpointError(f"{path}: two tensors have one name without {', '.join((*_INSIDE, _BEFORE))}")
    return plain


def _load_torch_file(path: Path) -> Any:
    """Return what `torch.save` wrote, tensors and plain containers only.

    torch's own messages recommend to unpickle everything, which would run code from the file. Whatever an unpickler
    makes of bytes that are no pickle is an error of any kind.

    Raises:
        CheckpointError: if it holds something else, or is no such file.
        OSError: if the file cannot be opened.
    """
    path.open("rb").close()  # what cannot be opened is no fault of its content
    try:
        with warnings.catch_warnings():
            # of the protocol of a pickle that is refused anyway
            warnings.simplefilter("ignore", UserWarning)
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        is_archive = zipfile.is_zipfile(path)
        objects = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and (objects or is_archive):
            kind = f" ({objects[1]})" if objects else ""
            raise CheckpointError(
                f"{path}: holds Python objects beside tensors{kind}, which are not loaded because they can run code; "
                "save the state dict alone where the file comes from: torch.save(model.state_dict(), FILE)"
            ) from error
        raise CheckpointError(
            f"{path}: is no file of torch.save, or a damaged one; copy it again, or give a state dict that was saved "
            "with torch.save or safetensors"
        ) from error


@torch.no_grad()
def load_weights(model: nn.Module, path: Path) -> None:
    """Collective: fill a model, sharded or not, with the weights in a file; every rank reads it.

    Raises:
        CheckpointError: on every rank, if any cannot read it, or the weights are of another model.
    """
    together(lambda: checkpoint.load_state(model, read_state_file(path), path))


def assets_for_weights(config: Config, assets: ModelAssets, reader: FieldReader, path: Path) -> ModelAssets:
    """Collective: return the assets of a run that begins with the weights in a file.

    A file that ``credit convert --export`` wrote says with which statistics they were trained; those are kept. Others
    do not tell.

    Args:
        config: of the run.
        assets: fitted to the run's data.
        reader: of the data.
        path: the file.

    Raises:
        CheckpointError, DataError: if the file says that its weights compute with other channels, or as another model.
    """
    meta = run_on_rank0(lambda: _exported_meta(path))
    if meta is None:
        logger.warning("%s does not tell the statistics that its weights were trained with; those of this run's "
                       "training period are taken", path)  # fmt: skip
        return assets
    require_same_function(config, meta["config"], path)
    trained = replace(
        assets,
        channels=ChannelMap.from_dict(meta["channels"]),
        grid=LatLonGrid.from_dict(meta["grid"]),
        statistics=Statistics.from_dict(meta["statistics"]),
        attributes=meta["attributes"],
        seen=read_seen(meta),
    )
    require_same_fields(trained, reader, path)
    return trained


def _exported_meta(path: Path) -> dict[str, Any] | None:
    """Return what our own export says beside its weights, None for another file."""
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "pt") as file:
            return json.loads((file.metadata() or {}).get("credit", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error


def _plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict by the names of the model itself."""
    plain = dict(state)
    for wrapper in _INSIDE:
        plain = {name.replace(wrapper, ""): value for name, value in plain.items()}
    if plain and all(name.startswith(_BEFORE) for name in plain):
        plain = {name.removeprefix(_BEFORE): value for name, value in plain.items()}
    return plain


def _find_state(content: Any) -> Mapping[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    for key in _KEYS:
        if isinstance(content.get(key), Mapping):
            return _find_state(content[key])
    is_state = content and all(isinstance(value, Tensor) for value in content.values())
    return content if is_state else None
