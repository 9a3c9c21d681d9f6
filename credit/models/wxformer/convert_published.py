"""Conversion of published WXFormer weights to the names and layouts of this package.

The reference is the implementation with which the published weights were trained (miles-credit).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from credit.errors import CheckpointError
from credit.models.wxformer.model import WXFormer

logger = logging.getLogger(__name__)

# Channels of an attention head in all published models.
PUBLISHED_DIM_HEAD = 32
# The following dicts map a name in the reference to the name in this package.
# Blocks of a transformer layer.
_BLOCKS = {"0": "short_attention", "1": "short_feed_forward", "2": "long_attention", "3": "long_feed_forward"}
# Layers of a feed-forward block.
_FEED_FORWARD_LAYERS = {"0": "norm", "1": "expand", "4": "contract"}
# The head of the decoder: one transposed convolution, or the two convolutions of a subpixel head.
_HEAD_LAYERS = {"up_block4": "decoder.head", "up_block4.0": "decoder.head.0", "up_block4.2": "decoder.head.1"}
# Tensors of a layer; in the reference, `g` and `b` are gain and bias of a norm.
_TENSORS = {
    "g": "weight",
    "b": "bias",
    "weight": "weight",
    "bias": "bias",
    "weight_orig": "parametrizations.weight.original",
    "weight_u": "parametrizations.weight.0.u",
    "weight_v": "parametrizations.weight.0.v",
}


def from_published(kwargs: Mapping[str, Any], state: Mapping[str, Tensor]) -> WXFormer:
    """Build a WXFormer with published weights, for use without a config.

    Args:
        kwargs: keyword arguments of `WXFormer.from_kwargs`.
        state: published state dict, see `convert_published_state`.

    Raises:
        ConfigError: if a keyword argument is unknown, or sizes contradict each other.
        CheckpointError: if names or shapes in the state dict differ from the network.
    """
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**kwargs)
    converted = convert_published_state(state, kwargs.get("dim_head"))
    _require_same_names(model, converted)
    model.load_state_dict(converted, assign=True)
    return model


def _require_same_names(model: WXFormer, converted: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a converted state dict has missing tensors, unknown tensors or wrong shapes.

    Args:
        model: the network.
        converted: result of `convert_published_state`.

    Raises:
        CheckpointError: if the state dict and the network differ; the message names the first five tensors that differ.
    """
    expected = model.state_dict()
    missing = sorted(expected.keys() - converted.keys())
    unexpected = sorted(converted.keys() - expected.keys())
    common_names = expected.keys() & converted.keys()
    other_shapes = sorted(name for name in common_names if expected[name].shape != converted[name].shape)
    problems = {"lacks": missing, "has, unlike the network,": unexpected, "has different shapes of": other_shapes}
    for problem, names in problems.items():
        if names:
            raise CheckpointError(f"the published state {problem} {', '.join(names[:5])} ({len(names)} in all)")


def convert_published_state(state: Mapping[str, Tensor], dim_head: int | None = None) -> dict[str, Tensor]:
    """Return a published state dict with the names and layouts of this package.

    The rows of a projection to queries, keys and values are reordered from (q, k, v; head; channel) to (head; q, k, v;
    channel). 1x1 convolutions become linear layers. The function omits `cube_embedding`, which the reference allocates
    but never uses.

    Args:
        state: state dict of the reference, or a checkpoint with this state dict under `model_state_dict`; with or
            without spectral norm, with or without `module.` prefixes.
        dim_head: number of channels per attention head; a state dict does not contain this number. Default: 32, the
            value of all published models, or the number of channels of the first stage if it is smaller.

    Returns:
        A state dict for `WXFormer.load_state_dict`, in the order of `state`. The function does not check for missing
        tensors; loading the result into a network does.

    Raises:
        CheckpointError: if the state dict has keys that the reference does not have, or if it lacks the norm from which
            the default of `dim_head` is derived; the message names these keys.
    """
    state = state.get("model_state_dict", state)
    original_names = {name.removeprefix("module."): name for name in state}
    unused_names = [name for name in original_names if name.startswith("cube_embedding.")]
    if unused_names:
        logger.info("left out %s: the reference allocates but never uses them", ", ".join(unused_names))
    converted: dict[str, Tensor] = {}
    unknown_names: list[str] = []
    for name in original_names:
        if name in unused_names:
            continue
        path, _, tensor_name = name.rpartition(".")
        module = _convert_module_path(path)
        if module is None or tensor_name not in _TENSORS:
            unknown_names.append(name)
            continue
        value = _drop_unit_dims(state[original_names[name]], module, tensor_name)
        # The right singular vector v belongs to the inputs. The order of the inputs does not change.
        if module.endswith("to_qkv") and tensor_name != "weight_v":
            value = _order_by_head(value, dim_head or _find_default_dim_head(state, original_names))
        converted[f"{module}.{_TENSORS[tensor_name]}"] = value
    if unknown_names:
        raise CheckpointError(f"not a published WXFormer state: unknown keys {', '.join(unknown_names)}")
    return converted


def _find_default_dim_head(state: Mapping[str, Tensor], original_names: Mapping[str, str]) -> int:
    """Return the default number of channels per attention head: 32, or the channels of the first stage if fewer.

    Args:
        state: published state dict.
        original_names: name without the prefix ``module.`` -> name in `state`.

    Raises:
        CheckpointError: if `state` lacks the norm whose size is the number of channels of the first stage.
    """
    # Gain of the norm of the first attention block in the first stage.
    norm = "layers.0.1.layers.0.0.norm.g"
    if norm not in original_names:
        raise CheckpointError(f"not a complete published WXFormer state: {norm} is missing")
    return min(PUBLISHED_DIM_HEAD, state[original_names[norm]].numel())


def _convert_module_path(path: str) -> str | None:
    """Convert the path of a module in the reference to its path in this package; None if the path is unknown."""
    # Embedding of a stage. Newer states have the convolution at index 1 of a sequence of layers.
    if match := re.fullmatch(r"layers\.(\d+)\.0\.convs\.(\d+)(?:\.1)?", path):
        stage, conv = match.groups()
        return f"stages.{stage}.embed.convs.{conv}"
    # Feed-forward of a transformer layer.
    if match := re.fullmatch(r"layers\.(\d+)\.1\.layers\.(\d+)\.([13])\.layers\.([014])", path):
        stage, layer, block, index = match.groups()
        return f"stages.{stage}.layers.{layer}.{_BLOCKS[block]}.{_FEED_FORWARD_LAYERS[index]}"
    # Attention of a transformer layer.
    if match := re.fullmatch(r"layers\.(\d+)\.1\.layers\.(\d+)\.([02])\.(norm|to_qkv|to_out|dpb\.layers\.\d+)", path):
        stage, layer, block, name = match.groups()
        return f"stages.{stage}.layers.{layer}.{_BLOCKS[block]}.{name.replace('dpb', 'position_bias')}"
    # Block of the decoder.
    if match := re.fullmatch(r"up_block([123])\.(conv|sharp|b\.[0134])", path):
        number, name = match.groups()
        name = name.replace("conv", "up").replace("b.", "refine.")
        # The reference numbers the blocks from 1.
        return f"decoder.blocks.{int(number) - 1}.{name}"
    return _HEAD_LAYERS.get(path)


def _drop_unit_dims(value: Tensor, module: str, tensor_name: str) -> Tensor:
    """Drop dimensions of length 1 from the gain and bias (1, dim, 1, 1) of norms, and from 1x1 convolutions.

    Args:
        value: tensor of the published state dict.
        module: path in this package of the module that contains the tensor.
        tensor_name: name of the tensor in its module in the reference; ``g`` and ``b`` are gain and bias of a norm.
    """
    if tensor_name in ("g", "b"):
        return value.flatten()
    # The weight of a linear layer has four dimensions in the reference; its bias and singular vectors have one.
    is_linear = re.search(r"\.(to_qkv|to_out|expand|contract)$", module) is not None
    if is_linear and value.dim() == 4:
        return value.flatten(1)
    return value


def _order_by_head(rows: Tensor, dim_head: int) -> Tensor:
    """Reorder the first dimension from (q, k, v; head; channel) to (head; q, k, v; channel of the head)."""
    return rows.unflatten(0, (3, -1, dim_head)).transpose(0, 1).flatten(0, 2)
