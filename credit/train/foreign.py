"""Weights that other programs saved: one file, whole tensors, names with or without what wrappers put into them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from credit.errors import CheckpointError

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
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as a torch file or as safetensors ({error})") from error
    state = _find_state(content)
    if state is None:
        raise CheckpointError(f"{path}: holds no state dict, neither under {', '.join(_KEYS)} nor bare")
    plain = _plain_names(state)
    if len(plain) < len(state):
        raise CheckpointError(f"{path}: two tensors have one name without {', '.join((*_INSIDE, _BEFORE))}")
    return plain


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
