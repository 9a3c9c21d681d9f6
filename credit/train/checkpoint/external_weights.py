"""Reader of files of weights that other programs saved.

Such a file contains complete tensors. Wrappers such as DDP or torch.compile may have added prefixes to their names.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping
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
from credit.models.initialise import initial_values_of_addable
from credit.parallel.object_collectives import run_on_all_ranks, run_on_rank0
from credit.parallel.state.replicas import broadcast_to_replicas, is_first_replica
from credit.train.build.assets import ModelAssets, read_trained_periods
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.config_changes import list_extendable_keys, require_same_network_function
from credit.train.checkpoint.trained_fields import (
    adapt_assets,
    adapt_weights,
    describe_adaptation,
    require_same_fields,
)

logger = logging.getLogger(__name__)

# Keys under which training programs save the weights.
_STATE_KEYS = ("model_state_dict", "model", "state_dict")
# Prefixes that FSDP1, torch.compile and activation checkpointing insert anywhere into a name.
_WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")
# Prefix that DDP and DataParallel add to every name.
_PARALLEL_PREFIX = "module."
# Prefix of the tensors in an exported file that are assets, such as static fields, and not weights.
ASSET_PREFIX = "assets/"
# Key in the metadata of an exported file: checksum of the weights in the checkpoint.
WEIGHTS_CHECKSUM = "weights_checksum"
# Largest number of added tensors that a message lists.
_MAX_NAMES_SHOWN = 4


def read_state_file(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file of safetensors or `torch.save`: name of the model's tensor -> tensor on the CPU.

    The state dict is the complete content of the file, or is stored under the key ``model_state_dict``, ``model`` or
    ``state_dict``. Only tensors and plain containers are unpickled.

    The tensors are memory-mapped, so a rank reads only the parts of the tensors that it uses. Files of torch before 1.6
    are an exception.

    Raises:
        CheckpointError: if the file cannot be read or does not contain a state dict.
    """
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = _load_torch_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is not a safetensors file, or is damaged ({error}); copy it again") from error
    state = _find_state_dict(content)
    if state is None:
        raise CheckpointError(
            f"{path}: does not contain a state dict, neither as its complete content nor under {', '.join(_STATE_KEYS)}"
        )
    plain_state = _remove_wrapper_prefixes(state)
    if len(plain_state) < len(state):
        prefixes = ", ".join((*_WRAPPER_PREFIXES, _PARALLEL_PREFIX))
        raise CheckpointError(f"{path}: two tensors have the same name without {prefixes}")
    return {name: value for name, value in plain_state.items() if not name.startswith(ASSET_PREFIX)}


def _load_torch_file(path: Path) -> Any:
    """Return the content of a file of `torch.save`; the file may contain only tensors and plain containers.

    Raises:
        CheckpointError: if the file contains other objects, or was not written by `torch.save`.
        OSError: if the file cannot be opened.
    """
    # If the file cannot be opened, this line raises OSError. Every error of the code below means wrong content.
    path.open("rb").close()
    try:
        with warnings.catch_warnings():
            # torch warns about the protocol of a pickle even if it then rejects the pickle.
            warnings.simplefilter("ignore", UserWarning)
            # A file of torch before 1.6 is not an archive and cannot be mapped into memory.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        # Bytes that are not a pickle may raise any exception. The messages of torch are not shown, because they
        # recommend to unpickle all objects, which would run code from the file.
        is_archive = zipfile.is_zipfile(path)
        # The message of torch names the first class that is not allowed.
        class_match = re.search(r"GLOBAL ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and (class_match or is_archive):
            kind = f" ({class_match[1]})" if class_match else ""
            raise CheckpointError(
                f"{path}: contains Python objects in addition to tensors{kind}. They are not loaded, because they can "
                "run code; save only the state dict in the program that wrote the file: "
                "torch.save(model.state_dict(), FILE)"
            ) from error
        raise CheckpointError(
            f"{path}: is not a file of torch.save, or is damaged; copy it again, or use a state dict that was saved "
            "with torch.save or safetensors"
        ) from error


@torch.no_grad()
def load_weights_file(model: nn.Module, path: Path, seed: int) -> None:
    """Collective: fill a model, which may be sharded, with the weights in a file.

    Each rank reads its part of the tensors. If several ranks have the same part, one of them reads the part and sends
    it to the others.

    Noise modules of the model may have parameters that are missing in the file (``may_be_added``). They get initial
    values that do not change the output of the model. If the file contains the channels and the grid of its weights,
    the channels and the grid of the model may differ, see `adapt_weights`.

    Args:
        model: the model, whose parameters have allocated memory.
        path: torch or safetensors file that `read_state_file` can read.
        seed: the seed of the initial values of noise parameters.

    Raises:
        CheckpointError: on every rank, if any rank cannot read the file, or the weights are of a different model.
    """

    model_state = model.state_dict()

    def load() -> None:
        state = read_state_file(path)
        meta = read_exported_meta(path)
        if meta is not None:
            state |= adapt_weights(model, state, meta)
            adaptation = describe_adaptation(model, meta)
            if adaptation:
                logger.info("%s: %s", path, adaptation)
        added_values = initialise_missing_noise(model, state.keys(), seed)
        if added_values:
            logger.info("%s: %s", path, describe_added_tensors(state.keys(), added_values.keys()))
        whole_tensors = {**state, **added_values}
        shapes = {name: value.shape for name, value in whole_tensors.items()}
        checkpoint.require_same_tensors(model_state, shapes, path)
        read_tensors = {name: tensor for name, tensor in model_state.items() if is_first_replica(tensor)}
        checkpoint.fill_local_parts(read_tensors, whole_tensors)

    run_on_all_ranks(load)
    broadcast_to_replicas(model_state.values())


def initialise_missing_noise(model: nn.Module, stored_names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return the initial values of the model's noise parameters that are missing among the stored tensors.

    With these values, the output of the model is the same as without the noise.

    Args:
        model: the model, on any device.
        stored_names: the names of the stored tensors.
        seed: the seed of the initial values.

    Returns:
        Name of an added tensor -> its initial value, a complete (unsharded) tensor.
    """
    added_values = {}
    for name, value in initial_values_of_addable(model, seed):
        if name not in stored_names:
            added_values[name] = value
    return added_values


def describe_added_tensors(stored_names: Collection[str], added_names: Collection[str]) -> str:
    """Return a message with the number of loaded tensors, and the names of the tensors that the model adds."""
    shown_names = sorted(added_names)
    if len(shown_names) > _MAX_NAMES_SHOWN:
        shown_names = [*shown_names[:_MAX_NAMES_SHOWN], "..."]
    return (
        f"{len(stored_names)} tensors are loaded; the model adds {len(added_names)} tensors for its noise, which do "
        f"not change its output at first: {', '.join(shown_names)}"
    )


def adapt_assets_to_weights(config: Config, assets: ModelAssets, reader: FieldReader, path: Path) -> ModelAssets:
    """Collective: return the assets of a run that starts with the weights in a file.

    A file from ``credit convert --export`` contains the statistics that its weights were trained with, and the run uses
    these statistics. Other files contain no statistics, so the run uses the statistics of its data and logs a warning.

    Args:
        config: the config of the run.
        assets: the assets that were computed from the run's data.
        reader: the reader of the run's data.
        path: the file of weights.

    Raises:
        CheckpointError: if the weights were trained with a different config of the model or different channels.
        DataError: if the weights were trained on a different grid, or with different units of a variable.
    """
    meta = run_on_rank0(lambda: read_exported_meta(path))
    changes = config.trainer.resume_changes
    if meta is None and changes:
        raise CheckpointError(
            f"trainer.resume_changes: {changes}: {path} contains no metadata of channels and grid; set trainer.resume "
            "to a file of credit convert --export or to the folder of a run"
        )
    if meta is None:
        logger.warning("%s does not contain the statistics that its weights were trained with; this run uses the "
                       "statistics of its training period", path)  # fmt: skip
        return assets
    channels = ChannelMap.from_dict(meta["channels"])
    require_same_network_function(config, meta["config"], path, extendable_keys=list_extendable_keys(config, channels))
    # The assets that the weights depend on come from the file; static fields come from the run's data.
    fitted_names = [channel.name for channel in assets.channels.group("static")]
    static_names = [channel.name for channel in channels.group("static") if channel.name in fitted_names]
    trained = replace(
        assets,
        channels=channels,
        grid=LatLonGrid.from_dict(meta["grid"]),
        static_CHW=assets.static_CHW[[fitted_names.index(name) for name in static_names]],
        statistics=Statistics.from_dict(meta["statistics"]),
        attributes=meta["attributes"],
        trained_periods=read_trained_periods(meta),
    )
    require_same_fields(trained, reader, path, changes=changes)
    return adapt_assets(trained, assets) if changes else trained


def read_exported_meta(path: Path) -> dict[str, Any] | None:
    """Return the meta.json in a file from ``credit convert --export``; None for any other file.

    Raises:
        CheckpointError: if a safetensors file cannot be read.
    """
    if path.suffix != ".safetensors":
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        return json.loads(metadata.get("credit", "null"))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error


def read_exported_assets(path: Path) -> tuple[dict[str, Tensor], str]:
    """Return the asset tensors in a file from ``credit convert --export``, and the checksum of its weights.

    The asset tensors are the output of `ModelAssets.to_tensors`. For any other file, the dict and the checksum are
    empty.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    if path.suffix != ".safetensors":
        return {}, ""
    assets = {}
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(ASSET_PREFIX):
                    assets[name.removeprefix(ASSET_PREFIX)] = file.get_tensor(name)
            checksum = (file.metadata() or {}).get(WEIGHTS_CHECKSUM, "")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors ({error})") from error
    return assets, checksum


def _remove_wrapper_prefixes(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict without the prefixes that wrappers such as DDP or torch.compile add to names.

    If two names become equal, only one of the two tensors is kept.
    """
    plain_state = dict(state)
    for prefix in _WRAPPER_PREFIXES:
        plain_state = {name.replace(prefix, ""): value for name, value in plain_state.items()}
    # A model may contain a module with this name. DDP has added the prefix only if every name begins with it.
    if plain_state and all(name.startswith(_PARALLEL_PREFIX) for name in plain_state):
        plain_state = {name.removeprefix(_PARALLEL_PREFIX): value for name, value in plain_state.items()}
    return plain_state


def _find_state_dict(content: Any) -> Mapping[str, Tensor] | None:
    """Return the state dict in the content of a file; None if the content has no state dict."""
    if not isinstance(content, Mapping):
        return None
    # Some programs nest these keys, as in {"model": {"state_dict": ...}}.
    for key in _STATE_KEYS:
        if isinstance(content.get(key), Mapping):
            return _find_state_dict(content[key])
    if content and all(isinstance(value, Tensor) for value in content.values()):
        return content
    return None
