"""Sequence parallelism: tensor-parallel ranks that also divide the fields (Korthikanti et al. 2022, arXiv 2205.05198).

Each rank has the tokens of its part of the fields. Before a layer that is split by outputs, each rank gathers the
tokens of all ranks. After a layer that is split by inputs, each rank receives the sum for the tokens of its part. An
all-gather and a reduce-scatter therefore replace the all-reduce of tensor parallelism. Computations between the split
layers do not change.

Shape suffixes: R tensor-parallel ranks, B batch, T tokens of one sample, C channels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx

from credit.errors import ConfigError
from credit.parallel.dtensor import local_shard

# torch 2.13 has renamed these collectives; earlier releases have only the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class SequenceRanks:
    """Position of the tensor-parallel ranks among the ranks that share the fields.

    Attributes:
        group: the tensor-parallel ranks.
        field_ranks: indices of the tensor-parallel ranks among the ranks that share the fields; they are consecutive.
    """

    group: dist.ProcessGroup
    field_ranks: range

    @classmethod
    def build(cls, group: dist.ProcessGroup, domain_group: dist.ProcessGroup) -> SequenceRanks:
        """Return the position of the tensor-parallel ranks in the group of all ranks that share the fields.

        Args:
            group: the tensor-parallel ranks.
            domain_group: ranks that share the fields, in the order of the parts.

        Raises:
            ConfigError: if the tensor-parallel ranks are not neighbours in `domain_group`.
        """
        num_ranks = dist.get_world_size(group)
        first = dist.get_rank(domain_group) // num_ranks * num_ranks
        field_ranks = range(first, first + num_ranks)
        peers = dist.get_process_group_ranks(group)
        neighbours = dist.get_process_group_ranks(domain_group)[first : first + num_ranks]
        if peers != neighbours:
            raise ConfigError(
                f"sequence parallelism: the tensor-parallel ranks {peers} are not neighbours among the ranks that "
                f"share the fields, {neighbours}; order the domain group by domain, then by tensor-parallel rank"
            )
        return cls(group, field_ranks)

    def count_tokens(self, layer: nn.Module) -> TokenParts:
        """Return the division of a layer's tokens among the tensor-parallel ranks; the layer has a `TokenCountRule`."""
        tokens = layer.tokens_by_rank
        return TokenParts(self.group, dist.get_rank(self.group), tuple(tokens[rank] for rank in self.field_ranks))


@dataclass(frozen=True)
class TokenParts:
    """Division of the tokens of a layer among the tensor-parallel ranks.

    Attributes:
        group: the tensor-parallel ranks.
        rank: index of this rank in the group.
        sizes: number of tokens of one sample on each rank. For a collective, ranks with fewer tokens append tokens of
            zeros.
    """

    group: dist.ProcessGroup
    rank: int
    sizes: tuple[int, ...]

    def gather(self, x: Tensor) -> Tensor:
        """Collective: return the tokens of all ranks, ordered by sample and then by rank.

        Args:
            x: this rank's tokens (B * T, C), or its windows of L tokens (B * windows, L, C).

        Returns:
            The tokens, or windows, of all ranks, with the same dimensions.
        """
        size = self.sizes[self.rank]
        x_BTC = x.reshape(-1, size, x.shape[-1])
        padded_BTC = F.pad(x_BTC, (0, 0, 0, max(self.sizes) - size))
        gathered_RBTC = _all_gather(padded_BTC, self.group)
        # For a batch of one sample and parts of equal size, this operation copies nothing.
        if self._are_equal():
            return gathered_RBTC.transpose(0, 1).reshape(-1, *x.shape[1:])
        parts = [part_BTC[:, :tokens] for part_BTC, tokens in zip(gathered_RBTC, self.sizes, strict=True)]
        return torch.cat(parts, dim=1).view(-1, *x.shape[1:])

    def sum(self, x: Tensor) -> Tensor:
        """Collective: sum values over the ranks, and return the sums of this rank's tokens.

        Args:
            x: summands of this rank for the tokens, or windows, of all ranks, in the order of `gather`.

        Returns:
            (B * T, C), or (B * windows, L, C) for windows of L tokens.
        """
        size = self.sizes[self.rank]
        x_BTC = x.reshape(-1, sum(self.sizes), x.shape[-1])
        batch, _, channels = x_BTC.shape
        if self._are_equal():
            x_RBTC = x_BTC.view(batch, len(self.sizes), size, channels).transpose(0, 1)
        else:
            x_RBTC = x.new_zeros(len(self.sizes), batch, max(self.sizes), channels)
            for padded_BTC, part_BTC in zip(x_RBTC, x_BTC.split(self.sizes, dim=1), strict=True):
                padded_BTC[:, : part_BTC.shape[1]] = part_BTC
        sum_BTC = _reduce_scatter(x_RBTC.contiguous(), self.group)
        return sum_BTC[:, :size].reshape(-1, *x.shape[1:])

    def _are_equal(self) -> bool:
        """Return True if all ranks have the same number of tokens."""
        return len(set(self.sizes)) == 1


class GatherTokens(torch.autograd.Function):
    """Collective that gathers the tokens of all ranks.

    The backward pass sums the gradient of each token over the ranks.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        return parts.gather(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.sum(gradient), None


class SumTokens(torch.autograd.Function):
    """Collective that sums each token over the ranks.

    The backward pass gathers the gradients of the tokens of all ranks.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, parts: TokenParts) -> Tensor:
        ctx.parts = parts
        return parts.sum(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.parts.gather(gradient), None


class ScaleGradient(torch.autograd.Function):
    """Identity in the forward pass, multiplication of the gradient by a number in the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class GradientAverage:
    """Average over the tensor-parallel ranks for gradients of weights that are not split.

    In a block with split layers, norms and the biases of rowwise layers get only the gradient of this rank's tokens.
    One all-reduce averages their gradients at the end of each backward pass in which FSDP2 reduces gradients. Sharding
    units without split layers do not need this average, because FSDP2 averages their gradients over the tensor-parallel
    ranks as well.

    Args:
        group: the tensor-parallel ranks.
        device: device of the collective; gradients may be in host memory (FSDP2's CPU offload).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        # Parameters with a gradient that was reduced in the current backward pass, and the number of this pass.
        self._reduced: list[nn.Parameter] = []
        self._backward_pass = -1

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Register hooks that average the gradients of some parameters in every later backward pass.

        Args:
            parameters: unsplit weights in blocks with split layers, sharded by FSDP2. All ranks pass the same
                parameters in the same order.
        """
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: nn.Parameter) -> None:
        """Record a parameter whose gradient FSDP2 has just reduced."""
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass != self._backward_pass:
            # An earlier pass that ended with an error may have left parameters in the list.
            self._reduced.clear()
            self._backward_pass = backward_pass
            # The callback runs at the end of the backward pass, after FSDP2's callback, which was registered earlier.
            Variable._execution_engine.queue_callback(self._average)
        self._reduced.append(parameter)

    @torch.no_grad()
    def _average(self) -> None:
        """Collective: average the gradients in place; gradients of earlier micro-steps are averages already."""
        gradients = [local_shard(parameter.grad) for parameter in self._reduced]
        self._reduced.clear()
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same_dtype in by_dtype.values():
            flat = torch.cat([gradient.flatten() for gradient in same_dtype]).to(self._device)
            dist.all_reduce(flat, group=self._group)
            flat /= dist.get_world_size(self._group)
            for gradient, average in zip(same_dtype, flat.split([g.numel() for g in same_dtype]), strict=True):
                gradient.copy_(average.view_as(gradient))


def require_token_counts(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Require that the network declares, for each split layer, the number of tokens on each rank.

    Args:
        layers: (description, module) of each split layer.

    Raises:
        ConfigError: if a layer has no declaration; the message names the layer.
    """
    for location, layer in layers:
        if not hasattr(layer, "tokens_by_rank"):
            raise ConfigError(
                f"{location}: the model does not declare the number of tokens of each rank at this layer, so it does "
                "not support sequence parallelism; set trainer.parallelism.sequence_parallel to false, or return a "
                "TokenCountRule from plan_domain of the model"
            )


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: gather a tensor from each rank, and return the stacked tensors (R, *shape)."""
    x = x.contiguous()
    num_ranks = dist.get_world_size(group)
    # Functional collectives return a new tensor, which torch.compile can trace.
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, group)).view(num_ranks, *x.shape)
    gathered = x.new_empty(num_ranks, *x.shape)
    _all_gather_single(gathered.flatten(0, 1), x, group=group)
    return gathered


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective: sum a contiguous tensor (R, *shape) over the ranks, and return this rank's element (*shape)."""
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.reduce_scatter_tensor(x.flatten(0, 1), "sum", 0, group))
    result = x.new_empty(x.shape[1:])
    _reduce_scatter_single(result, x.flatten(0, 1), group=group)
    return result
