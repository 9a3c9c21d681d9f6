"""Message passing against a loop over single edges, in float64, and gathers against torch's indexing."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from credit.models.graph.edge_index import EdgeIndex, RowSelection, sort_edges
from credit.models.graph.layers import MessagePassingLayer
from credit.models.graph.mlp import MLP
from credit.models.initialise import initialise_

NUM_NODES = 7
# Node 6 receives nothing, node 0 sends nothing; nodes 1 and 2 have several edges.
EDGES_E2 = np.array([[1, 0], [2, 0], [3, 0], [1, 2], [4, 2], [2, 1], [5, 4], [6, 5], [3, 3], [1, 5]])


def build_layer(dim: int = 6) -> MessagePassingLayer:
    layer = MessagePassingLayer(dim)
    initialise_(layer, 0)
    return layer.double()


def apply_concatenated_mlp(mlp: MLP, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the MLP for one row, as a function of the concatenation of its inputs."""
    weight = torch.cat([layer.weight for layer in mlp.expand], dim=1)
    hidden = F.silu(weight @ x + mlp.expand[0].bias)
    y = mlp.contract.weight @ hidden + mlp.contract.bias
    centred = y - y.mean()
    return centred / (centred.square().mean() + mlp.norm.eps).sqrt() * mlp.norm.weight + mlp.norm.bias


def loop_over_edges(
    layer: MessagePassingLayer, nodes_NC: torch.Tensor, edges_EC: torch.Tensor, edges_E2: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's nodes and edges of one sample, computed edge by edge and node by node."""
    sums = [torch.zeros(nodes_NC.shape[1], dtype=nodes_NC.dtype) for _ in nodes_NC]
    new_edges = []
    for edge, (sender, receiver) in zip(edges_EC, edges_E2, strict=True):
        message = apply_concatenated_mlp(layer.message, torch.cat([edge, nodes_NC[sender], nodes_NC[receiver]]))
        sums[receiver] = sums[receiver] + message
        new_edges.append(edge + message)
    new_nodes = []
    for node, total in zip(nodes_NC, sums, strict=True):
        new_nodes.append(node + apply_concatenated_mlp(layer.update, torch.cat([node, total])))
    return torch.stack(new_nodes), torch.stack(new_edges)


def test_a_layer_is_a_loop_over_edges() -> None:
    layer = build_layer()
    edges_E2 = sort_edges(EDGES_E2)
    index = EdgeIndex.build(edges_E2, NUM_NODES, NUM_NODES).repeat(2)
    generator = torch.Generator().manual_seed(1)
    nodes = torch.randn(2, NUM_NODES, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    edges = torch.randn(2, len(edges_E2), 6, dtype=torch.float64, generator=generator, requires_grad=True)
    outputs = layer(nodes, edges, index)
    samples = [loop_over_edges(layer, nodes[b], edges[b], edges_E2) for b in range(2)]
    expected = [torch.stack(tensors) for tensors in zip(*samples, strict=True)]
    inputs = [nodes, edges, *layer.parameters()]
    # Weighted sums, so that the gradients of all outputs differ.
    factors = [torch.randn(output.shape, dtype=torch.float64, generator=generator) for output in outputs]
    gradients = []
    for tensors in (outputs, expected):
        total = sum((tensor * factor).sum() for tensor, factor in zip(tensors, factors, strict=True))
        gradients.append(torch.autograd.grad(total, inputs))
    for output, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, other, rtol=0, atol=1e-12)
    for gradient, other in zip(*gradients, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, other, rtol=0, atol=1e-11)


def test_edges_that_all_samples_share() -> None:
    layer = build_layer()
    edges_E2 = sort_edges(EDGES_E2)
    index = EdgeIndex.build(edges_E2, NUM_NODES, NUM_NODES).repeat(3)
    nodes = torch.randn(3, NUM_NODES, 6, dtype=torch.float64)
    edges = torch.randn(1, len(edges_E2), 6, dtype=torch.float64)
    shared = layer(nodes, edges, index)
    copied = layer(nodes, edges.expand(3, -1, -1).contiguous(), index)
    for output, other in zip(shared, copied, strict=True):
        torch.testing.assert_close(output, other, rtol=0, atol=1e-12)


def test_gather_and_sum_are_adjoint() -> None:
    rows = np.array([3, 0, 3, 2, 0, 3])
    selection = RowSelection.build(rows, 5).repeat(2)
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    assert torch.equal(selection.gather(x), x[:, rows])
    expected = torch.zeros(2, 5, 4, dtype=torch.float64).index_add(1, torch.from_numpy(rows), y)
    torch.testing.assert_close(selection.sum_by_row(y), expected, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(selection.gather, (x,))
    assert torch.autograd.gradcheck(selection.sum_by_row, (y,))


def test_rows_without_effect_get_no_gradient() -> None:
    is_used = np.array([True, False, True, False])
    selection = RowSelection.build(np.array([0, 0, 1, 1]), 2, is_used).repeat(2)
    x = torch.randn(2, 2, 3, requires_grad=True)
    y = selection.gather(x)
    assert torch.equal(y, x[:, [0, 0, 1, 1]])
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, torch.ones(2, 2, 3))
