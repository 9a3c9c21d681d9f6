"""Conversion of published FuXi weights to the names and layouts of this package.

The reference is FuXi of miles-credit 2026.2.0, whose transformer stage is the Swin-V2 stage of timm.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from credit.errors import CheckpointError

logger = logging.getLogger(__name__)

# The following dicts map a name in the reference implementation to the name in this package.
# Layers outside the transformer blocks.
_LAYERS = {
    "cube_embedding.proj": "embedding.project",
    "cube_embedding.norm": "embedding.norm",
    "u_transformer.down.conv": "down.conv",
    "u_transformer.up.conv": "up.conv",
    "fc": "head",
}
# Layers of a transformer block.
_BLOCK_LAYERS = {
    "attn": "attention",
    "attn.qkv": "attention.to_qkv",
    "attn.proj": "attention.to_out",
    "attn.cpb_mlp.0": "attention.position_bias.expand",
    "attn.cpb_mlp.2": "attention.position_bias.contract",
    "norm1": "attention_norm",
    "mlp.fc1": "feed_forward.expand",
    "mlp.fc2": "feed_forward.contract",
    "norm2": "feed_forward_norm",
}
# Tensors of a layer with spectral norm.
_TENSORS = {
    "weight": "weight",
    "bias": "bias",
    "weight_orig": "parametrizations.weight.original",
    "weight_u": "parametrizations.weight.0.u",
    "weight_v": "parametrizations.weight.0.v",
}
# Constants that some versions of timm store.
_CONSTANTS = ("attn_mask", "k_bias", "relative_coords_table", "relative_position_index")


def convert_published_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a published state dict with the names and layouts of this package.

    The reference is the published implementation. Three parts differ from this package:

    - The rows of a projection to queries, keys and values are reordered from (q, k, v; head; channel) to (head; q, k,
      v; channel).
    - The keys have no bias in the reference; here their bias is zero.
    - The convolution of the cube embedding becomes a linear layer over the cells of a patch.

    With spectral norm, the reference normalises every linear layer and two-dimensional convolution, except the
    projection to queries, keys and values. So only the original weight of this projection is converted.

    Args:
        state: state dict of the reference, or a checkpoint with this state dict under `model_state_dict`; with or
            without spectral norm, with or without `module.` prefixes.

    Returns:
        State dict for `Swin.load_state_dict`.

    Raises:
        CheckpointError: if the state dict has keys that the reference does not have, or lacks a tensor of attention;
            the message names the keys.
    """
    state = state.get("model_state_dict", state)
    plain_state = {name.removeprefix("module."): value for name, value in state.items()}
    converted: dict[str, Tensor] = {}
    unknown_names: list[str] = []
    for name, value in plain_state.items():
        path, _, tensor_name = name.rpartition(".")
        module = _convert_module_path(path)
        if tensor_name in _CONSTANTS:
            logger.info("left out %s, a constant", name)
        elif module is None:
            unknown_names.append(name)
        elif module.endswith(".attention.to_qkv"):
            # The singular vectors of this projection are left out, because the reference does not use them.
            if tensor_name in ("weight", "weight_orig"):
                heads = _find_tensor(plain_state, path.removesuffix("qkv") + "logit_scale").numel()
                converted[f"{module}.weight"] = _order_by_head(value, heads)
        elif module.endswith(".attention"):
            _convert_attention_tensor(plain_state, name, module, converted, unknown_names)
        elif tensor_name not in _TENSORS:
            unknown_names.append(name)
        else:
            # The weight of the cube convolution is (dim, channels, frames, rows, columns).
            if module == "embedding.project" and tensor_name == "weight":
                value = value.flatten(1)
            converted[f"{module}.{_TENSORS[tensor_name]}"] = value
    if unknown_names:
        raise CheckpointError(f"not a published FuXi state: unknown keys {', '.join(unknown_names)}")
    return converted


def _convert_attention_tensor(
    state: Mapping[str, Tensor], name: str, module: str, converted: dict[str, Tensor], unknown_names: list[str]
) -> None:
    """Convert one tensor of the attention of a block (logit scale, query bias or value bias) and add it to `converted`.

    Args:
        state: published state dict.
        name: name of the tensor in `state`.
        module: path of the attention module in this package.
        converted: converted state dict, which the function extends.
        unknown_names: list of unknown names, which the function extends if `name` is unknown.
    """
    path, _, tensor_name = name.rpartition(".")
    if tensor_name == "logit_scale":
        converted[f"{module}.logit_scale.logarithm"] = state[name].flatten()
    elif tensor_name == "q_bias":
        q_bias = state[name]
        # The bias of the values is converted together with the bias of the queries, so `v_bias` is ignored below.
        v_bias = _find_tensor(state, f"{path}.v_bias")
        heads = _find_tensor(state, f"{path}.logit_scale").numel()
        bias = torch.cat((q_bias, torch.zeros_like(q_bias), v_bias))
        converted[f"{module}.to_qkv.bias"] = _order_by_head(bias, heads)
    elif tensor_name != "v_bias":
        unknown_names.append(name)


def _convert_module_path(path: str) -> str | None:
    """Convert the path of a module in the reference to its path in this package; None if the path is unknown."""
    # Residual branch of the down-sampling or up-sampling.
    if match := re.fullmatch(r"u_transformer\.(down|up)\.b\.(\d+)", path):
        block, index = match.groups()
        return f"{block}.refine.{index}"
    # Layer of a transformer block.
    match = re.fullmatch(r"u_transformer\.layer\.blocks\.(\d+)\.(.+)", path)
    if match is not None and match[2] in _BLOCK_LAYERS:
        return f"blocks.{match[1]}.{_BLOCK_LAYERS[match[2]]}"
    return _LAYERS.get(path)


def _find_tensor(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of the published state dict.

    Raises:
        CheckpointError: if the tensor is missing.
    """
    if name not in state:
        raise CheckpointError(f"not a complete published FuXi state: {name} is missing")
    return state[name]


def _order_by_head(rows: Tensor, heads: int) -> Tensor:
    """Reorder the first dimension from (q, k, v; head; channel) to (head; q, k, v; channel of the head)."""
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
