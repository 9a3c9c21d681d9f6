"""Tensor parallelism: split of the linear layers of a block over the ranks that work on the same sample.

A block declares in its attribute ``_tp_plan`` which submodules may be split. The plan is a dict from the path of a
submodule to one of these values:

- ``colwise``: a Linear whose outputs are divided among the ranks. Each rank has only its part of the outputs.
- ``colwise:2``: a fused Linear with 2 equal parts of the outputs, one after the other (gate and up of SwiGLU;
  ``colwise:3`` for q, k, v). Each rank gets its share of every part.
- ``rowwise``: a Linear whose inputs are the outputs of a colwise layer. The products of the ranks are summed.
- ``replicated``: a submodule that is not split, and whose output each rank uses only for the heads of this rank. The
  gradient of the output must be summed over the ranks. Examples are the position bias of attention, and the single k
  and v head of multi-query attention.

A plan lists colwise layers before their partner, which is the rowwise layer whose inputs are their outputs. The module
that contains the layers of attention must have the number of heads in its attribute ``heads``, so that each rank gets
whole heads. The outputs of a fused projection with ``colwise`` (without a number) must be ordered by head. Keys and
values may have fewer heads than queries; their number is computed from the width of a head of the queries.

The split weights are DTensors on the ``tp`` mesh, but the layers compute with this rank's part as a plain tensor. A
parametrized weight (spectral norm, LoRA) keeps its parametrizations: the unparametrized weight (``original``) is split.
The method ``share`` of each parametrization receives functions that sum over the ranks. It returns the tensors of the
parametrization that are split with the weight. A parametrization may have a static method
``merge_all_reduces(model)``, which replaces the separate sums of all weights in a block with a single sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import ParametrizationList

from credit.errors import ConfigError
from credit.parallel.blocks.sharding_units import require_unwrapped
from credit.parallel.dtensor import to_local
from credit.parallel.tensor.collectives import (
    AllReduceBackward,
    AllReduceBothWays,
    AllReduceForward,
    ExchangeFusedRows,
    FusedRowRoutes,
    plan_fused_row_routes,
)
from credit.parallel.tensor.dropout import RankRandomState, has_dropout
from credit.parallel.tensor.plan import PlannedLayer, read_plan, require_splittable
from credit.parallel.tensor.sequence_parallel import (
    GatherTokens,
    ScaleGradient,
    SequenceRanks,
    SumTokens,
    TokenParts,
    require_token_counts,
)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence_ranks: SequenceRanks | None = None) -> list[str]:
    """Collective: split the layers of every ``_tp_plan`` over `mesh`, in place; return the paths of the split layers.

    A group of layers (of an attention or an MLP) is not split if its number of heads or hidden units is not a multiple
    of the number of ranks.

    Args:
        model: model on any device, including the meta device. On a real device, all ranks must have the same values.
        mesh: one-dimensional mesh of the tensor-parallel ranks.
        sequence_ranks: position of the tensor-parallel ranks among the ranks that share the fields, for sequence
            parallelism; None if all tensor-parallel ranks have the same fields.

    Raises:
        ConfigError: if a plan is invalid, no layer can be split, or the weight or forward of a layer does not support
            splitting, for example because two layers share the weight. The model is then unchanged.
    """
    # All checks are done before the first layer is split.
    for path, module in model.named_modules():
        require_unwrapped(path, module)
    groups = []
    for path, module in model.named_modules():
        if getattr(module, "_tp_plan", None):
            groups += read_plan(path, module)
    # Select the groups whose heads or hidden units can be divided evenly; other groups are not split.
    split_groups = []
    split_layers = []
    for group in groups:
        if all(layer.num_units % mesh.size() == 0 for layer in group):
            split_groups.append(group)
            split_layers += [layer for layer in group if layer.kind != "replicated"]
    if not split_layers:
        if groups:
            unit_numbers: set[int] = set()
            for group in groups:
                unit_numbers.update(layer.num_units for layer in group if layer.num_units)
            reason = (
                f"its numbers of heads and hidden units are {sorted(unit_numbers)}; choose a divisor of one of these "
                "numbers"
            )
        else:
            reason = "no block has a _tp_plan; set tensor to 1"
        raise ConfigError(
            f"trainer.parallelism.tensor: {mesh.size()} splits no layer of {type(model).__name__}: {reason}"
        )
    require_splittable(model, split_layers)
    if sequence_ranks is not None:
        require_token_counts((layer.location, layer.module) for layer in split_layers)

    for group in split_groups:
        _split_group(group, mesh, sequence_ranks)
    return [layer.path for layer in split_layers]


def _split_group(group: list[PlannedLayer], mesh: DeviceMesh, sequence_ranks: SequenceRanks | None) -> None:
    """Split the layers of a group in place, so that each rank has a part of the activations between these layers.

    Args:
        group: layers of one plan that are split together; they use the same random state for dropout.
        mesh: one-dimensional mesh of the tensor-parallel ranks.
        sequence_ranks: see `apply_tensor_parallel`.
    """
    parent = group[0].parent
    process_group = mesh.get_group()
    random_state = None
    if has_dropout(parent):
        random_state = RankRandomState(mesh.get_local_rank(), parent)
    # Dropout that is a function of the unit (`credit.models.layers.seeded_dropout`) needs the index of this rank's
    # first head or hidden unit. The maximum is used because keys and values may have fewer heads than queries.
    num_units = max(layer.num_units for layer in group)
    for module in parent.modules():
        if hasattr(module, "first_unit"):
            module.first_unit = mesh.get_local_rank() * num_units // mesh.size()
        if sequence_ranks is not None:
            # Between the layers, each rank has the tokens of all tensor-parallel peers. A norm that is recomputed in
            # the backward pass would have only the tokens of this rank.
            if hasattr(module, "field_ranks"):
                module.field_ranks = sequence_ranks.field_ranks
            if hasattr(module, "saves_memory"):
                module.saves_memory = False
    for layer in group:
        module = layer.module
        tokens = None
        if sequence_ranks is not None and layer.kind != "replicated":
            tokens = sequence_ranks.count_tokens(module)
        if layer.kind == "replicated":
            # Each rank uses the output for the heads of this rank, so each rank has a part of the gradient.
            hook = _sum_gradient_of_output if sequence_ranks is None else _average_gradient_of_output
            module.register_forward_hook(functools.partial(hook, group=process_group))
        elif layer.kind == "rowwise":
            _split_parameters(module, 1, mesh)
            module.forward = functools.partial(_rowwise_forward, module, process_group, random_state, tokens=tokens)
        else:
            _split_parameters(module, 0, mesh)
            routes = None
            if layer.fused_parts > 1:
                routes = plan_fused_row_routes(module.out_features, layer.fused_parts, process_group)
            module.forward = functools.partial(
                _colwise_forward, module, process_group, random_state, routes=routes, tokens=tokens
            )


def _split_parameters(layer: nn.Linear, dim: int, mesh: DeviceMesh) -> None:
    """Replace the weight and bias of a layer in place with DTensors; this rank stores only its part.

    Args:
        layer: layer with a weight (outputs, inputs), which may be parametrized.
        dim: dimension of the weight that is split: 0 splits the outputs and the bias, 1 the inputs.
        mesh: one-dimensional mesh of the tensor-parallel ranks.
    """
    if parametrize.is_parametrized(layer, "weight"):
        chain = layer.parametrizations.weight
        _split_tensor(chain, "original", Shard(dim), mesh)
        # A parametrization depends on the whole weight, so it receives functions that sum over the ranks. It returns
        # the split of its tensors: name -> split dimension, or None for a tensor that is not split.
        all_reduce = functools.partial(AllReduceBothWays.apply, mesh.get_group())
        sum_gradient = functools.partial(AllReduceBackward.apply, mesh.get_group())
        for parametrization in chain:
            for name, tensor_dim in parametrization.share(dim, all_reduce, sum_gradient).items():
                placement = Replicate() if tensor_dim is None else Shard(tensor_dim)
                _split_tensor(parametrization, name, placement, mesh)
    else:
        _split_tensor(layer, "weight", Shard(dim), mesh)
    if layer.bias is not None and dim == 0:
        _split_tensor(layer, "bias", Shard(0), mesh)


def merge_all_reduces(model: nn.Module) -> None:
    """Call ``merge_all_reduces(model)`` of every class of parametrizations in the model that has this method.

    The parametrizations then sum over the ranks once for all weights of a block. Without this call, and in compiled
    blocks, each split weight needs separate sums.
    """
    parametrization_classes = set()
    for module in model.modules():
        if isinstance(module, ParametrizationList):
            parametrization_classes.update(type(parametrization) for parametrization in module)
    # The order must be the same on all ranks, because it determines the order of their collectives.
    for parametrization_class in sorted(parametrization_classes, key=lambda cls: cls.__name__):
        if hasattr(parametrization_class, "merge_all_reduces"):
            parametrization_class.merge_all_reduces(model)


def _split_tensor(module: nn.Module, name: str, placement: Shard | Replicate, mesh: DeviceMesh) -> None:
    """Replace a parameter or buffer in place with a DTensor; this rank stores only its part.

    Args:
        module: module that has the tensor.
        name: name of the tensor in the module.
        placement: ``Shard(dim)`` to split the tensor along a dimension, ``Replicate()`` to keep it whole on every rank.
        mesh: one-dimensional mesh of the tensor-parallel ranks.
    """
    tensor = getattr(module, name)
    part = tensor.detach()
    if isinstance(placement, Shard):
        part = part.chunk(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]
    # The weight of a layer may be a view with a non-contiguous memory layout, which FSDP2 cannot shard.
    part = part.clone(memory_format=torch.contiguous_format)
    split_tensor = DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )
    if isinstance(tensor, nn.Parameter):
        module._parameters[name] = nn.Parameter(split_tensor, requires_grad=tensor.requires_grad)
    else:
        module._buffers[name] = split_tensor


def _colwise_forward(
    layer: nn.Linear,
    group: dist.ProcessGroup,
    random_state: RankRandomState | None,
    x: Tensor,
    product: Callable[..., Any] = F.linear,
    routes: FusedRowRoutes | None = None,
    tokens: TokenParts | None = None,
) -> Any:
    """Collective: compute this rank's outputs of a colwise layer; the backward pass is also a collective.

    Args:
        layer: layer whose weight and bias are DTensors that are split by outputs.
        group: the tensor-parallel ranks.
        random_state: random state for dropout after the layer; None without dropout.
        x: (..., inputs), the same on all ranks; with `tokens`, this rank's tokens.
        product: function of (x, weight, bias) that computes the layer.
        routes: exchange of the rows of a fused weight; None for a weight that is not fused.
        tokens: division of the tokens, which are gathered before the layer (sequence parallelism); None if all ranks
            have the same tokens.

    Returns:
        Result of `product`: (..., outputs / ranks) for a plain linear layer.
    """
    weight = to_local(layer.weight)
    bias = None if layer.bias is None else to_local(layer.bias)
    if routes is not None:
        # Each rank stores consecutive rows, as in checkpoints, but computes with its share of every part. A weight is
        # small compared with activations, so the exchange is fast.
        weight = ExchangeFusedRows.apply(weight, routes)
        if bias is not None:
            bias = ExchangeFusedRows.apply(bias, routes)
    if tokens is None:
        # Each rank's outputs contribute to the gradient of the common input.
        x = AllReduceBackward.apply(group, x)
    else:
        x = GatherTokens.apply(x, tokens)
        weight = _scale_weight_gradient(weight, group)
        bias = None if bias is None else _scale_weight_gradient(bias, group)
    y = product(x, weight, bias)
    if random_state is not None and random_state.is_needed():
        random_state.enter(x.device)
    return y


def _rowwise_forward(
    layer: nn.Linear,
    group: dist.ProcessGroup,
    random_state: RankRandomState | None,
    x: Any,
    product: Callable[..., Tensor] = F.linear,
    tokens: TokenParts | None = None,
) -> Tensor:
    """Collective: compute the outputs of a rowwise layer, for all tokens or (with `tokens`) for this rank's tokens.

    Args:
        layer: layer whose weight is a DTensor that is split along the inputs; every rank has the whole bias.
        group: the tensor-parallel ranks.
        random_state: random state of this rank for dropout; the colwise layer enters it, and this layer leaves it. None
            without dropout.
        x: (..., inputs / ranks) activations of this rank, or a different object that is the first argument of
            `product`.
        product: function of (x, weight, bias) that computes the layer.
        tokens: division of the tokens (sequence parallelism), so that each rank gets the outputs of only its tokens;
            None if all ranks get the outputs of all tokens.

    Returns:
        (..., outputs).
    """
    weight = to_local(layer.weight)
    # After this layer, all ranks have the same activations again, so dropout must drop the same activations on all.
    if random_state is not None:
        random_state.leave(weight.device)
    if tokens is None:
        y = AllReduceForward.apply(product(x, weight, None), group)
    else:
        y = SumTokens.apply(product(x, _scale_weight_gradient(weight, group), None), tokens)
    # The bias is added once, after the sum over the ranks.
    if layer.bias is not None:
        y = y + layer.bias.to(y.dtype)
    return y


def _sum_gradient_of_output(module: nn.Module, args: tuple, output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Forward hook of a replicated module: sum the gradient of its output over the ranks in the backward pass."""
    return AllReduceBackward.apply(group, output)


def _average_gradient_of_output(module: nn.Module, args: tuple, output: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Forward hook of a replicated module under sequence parallelism: average the gradient of its output.

    Raises:
        ConfigError: if an input of the module is a tensor. The module would get the tokens of a single rank, but its
            output is used for the tokens of all ranks.
    """
    if any(isinstance(arg, Tensor) for arg in args):
        raise ConfigError(
            f"trainer.parallelism.sequence_parallel: {type(module).__name__} is a replicated module with tokens as "
            "input, which is not supported; set sequence_parallel to false"
        )
    # The gradient comes from the tokens of all ranks, so it is averaged, see `_scale_weight_gradient`.
    return _scale_weight_gradient(AllReduceBackward.apply(group, output), group)


def _scale_weight_gradient(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `weight` unchanged; in the backward pass, divide its gradient by the number of tensor-parallel ranks.

    The loss of a rank is its part of the loss, multiplied by the number of ranks that share the fields, because FSDP2
    averages gradients over these ranks. FSDP2 does not average the gradients of split weights over the tensor-parallel
    ranks, so this function divides their gradients.
    """
    return ScaleGradient.apply(weight, 1 / dist.get_world_size(group))
