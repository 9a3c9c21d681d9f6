"""MLPs of the graph network: a hidden layer with SiLU, and a layer norm of the result (GraphCast, arXiv 2212.12794).

Shape suffixes: B batch, E edges, S senders, R receivers, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credit.models.graph.edge_index import EdgeIndex
from credit.models.layers.norm import NO_CONDITION_DIMS, NO_CONDITIONS, ConditionDims, Conditions, LayerNorm


class ScaledLinear(nn.Linear):
    """Linear layer with uniformly distributed initial weights in [-scale, scale] and an initial bias of zero.

    Args:
        in_features: number of inputs.
        out_features: number of outputs.
        scale: bound of the initial values.
        bias: True for a layer with a bias.
    """

    def __init__(self, in_features: int, out_features: int, scale: float, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.scale = scale

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial value of one tensor on the CPU; see `credit.models.initialise.initial_values`.

        Args:
            key: ``weight`` or ``bias``.
            shape: shape of the complete (unsharded) tensor.
            generator: random generator on the CPU.
        """
        if key == "bias":
            return torch.zeros(shape, device="cpu")
        return torch.empty(shape, device="cpu").uniform_(-self.scale, self.scale, generator=generator)


class MLP(nn.Module):
    """MLP over the concatenation of several inputs along their channels.

    The first layer is a sum of linear layers, one for each input. This sum equals a linear layer over the
    concatenation. So an input that is the same for all samples, or for many edges, is multiplied only once.

    Args:
        in_dims: number of channels of each input.
        dim: number of hidden channels.
        out_dim: number of channels of the output.
        condition_dims: lengths of the conditions that the norm depends on.
        has_norm: True to normalise the output over its channels.
        output_scale: factor on the initial values of the last layer.
    """

    def __init__(
        self,
        in_dims: Sequence[int],
        dim: int,
        out_dim: int,
        condition_dims: ConditionDims = NO_CONDITION_DIMS,
        has_norm: bool = True,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        # As in GraphCast, the variance of the weights is 1 / (number of concatenated inputs).
        bound = (3.0 / sum(in_dims)) ** 0.5
        self.expand = nn.ModuleList()
        for number, in_dim in enumerate(in_dims):
            self.expand.append(ScaledLinear(in_dim, dim, bound, bias=number == 0))
        self.contract = ScaledLinear(dim, out_dim, output_scale * (3.0 / dim) ** 0.5)
        self.norm = LayerNorm(out_dim, condition_dims) if has_norm else None

    def forward(self, *inputs: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the output of the MLP (..., out_dim) for the concatenated inputs.

        Args:
            *inputs: (..., in_dim) tensors whose other dimensions are equal or 1.
            conditions: vectors of each sample, such as noise, that the norm depends on.
        """
        hidden = self.expand[0](inputs[0])
        for layer, x in zip(self.expand[1:], inputs[1:], strict=True):
            hidden = hidden + layer(x)
        return self.compute_from_hidden(hidden, conditions)

    def compute_from_hidden(self, hidden: Tensor, conditions: Conditions = NO_CONDITIONS) -> Tensor:
        """Return the output of the MLP (..., out_dim), computed from the result of its first layer.

        Args:
            hidden: (..., dim) result of the first layer, before the activation.
            conditions: vectors of each sample that the norm depends on.
        """
        y = self.contract(F.silu(hidden))
        return y if self.norm is None else self.norm(y, conditions)


class EdgeMLP(MLP):
    """MLP over the concatenation (edge, sender, receiver) for each edge.

    The first layer multiplies the nodes by its weights, and then copies the products to the edges. A layer over the
    concatenation has the same result, but takes nearly three times as many operations, because each node has several
    edges.

    Args:
        dim: number of channels of edges, nodes, hidden layer and output.
        condition_dims: lengths of the conditions that the norm depends on.
    """

    def __init__(self, dim: int, condition_dims: ConditionDims = NO_CONDITION_DIMS) -> None:
        super().__init__((dim, dim, dim), dim, dim, condition_dims)

    def forward(
        self,
        edges_BEC: Tensor,
        senders_BSC: Tensor,
        receivers_BRC: Tensor,
        index: EdgeIndex,
        conditions: Conditions = NO_CONDITIONS,
    ) -> Tensor:
        """Return the messages (B, E, C).

        Args:
            edges_BEC: edges; (1, E, C) if they are the same for all samples.
            senders_BSC: nodes that send.
            receivers_BRC: nodes that receive.
            index: sender and receiver of each edge, for all samples of the batch.
            conditions: vectors of each sample that the norm depends on.
        """
        on_edges, on_senders, on_receivers = self.expand
        hidden_BEC = index.senders.gather(on_senders(senders_BSC))
        hidden_BEC = hidden_BEC + index.receivers.gather(on_receivers(receivers_BRC))
        return self.compute_from_hidden(hidden_BEC + on_edges(edges_BEC), conditions)
