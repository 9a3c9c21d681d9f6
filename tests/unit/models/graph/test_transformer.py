"""Attention to neighbourhoods against dense attention with a mask, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit.models.graph.mesh import IcosahedralMesh
from credit.models.graph.neighbourhoods import find_neighbourhoods, find_reachable_nodes
from credit.models.graph.transformer import MeshTransformerLayer, NeighbourhoodAttention
from credit.models.initialise import initialise_

HOPS = [1, 2, 3, 5, 20]


def search_breadth_first(mesh: IcosahedralMesh, hops: int) -> torch.Tensor:
    """Return the bool matrix (N, N) of nodes at most `hops` edges apart, by a search from each node."""
    neighbours: dict[int, list[int]] = {}
    for sender, receiver in mesh.list_level_edges(len(mesh.faces) - 1).tolist():
        neighbours.setdefault(receiver, []).append(sender)
    is_near = torch.eye(len(neighbours), dtype=torch.bool)
    for start in neighbours:
        border = {start}
        for _ in range(hops):
            border = {other for node in border for other in neighbours[node]}
            is_near[start, list(border)] = True
    return is_near


def attend_densely(attention: NeighbourhoodAttention, x_BNC: torch.Tensor, is_near_NN: torch.Tensor) -> torch.Tensor:
    """Return the attention's update, with scores of all pairs of nodes."""
    normed_BNC = F.layer_norm(x_BNC, x_BNC.shape[-1:], attention.norm.weight, attention.norm.bias)
    qkv = (normed_BNC @ attention.to_qkv.weight.T).unflatten(-1, (attention.heads, 3, attention.dim_head))
    q_BNhd, k_BNhd, v_BNhd = qkv.unbind(3)
    scores = torch.einsum("bnhd,bmhd->bhnm", q_BNhd, k_BNhd) / attention.dim_head**0.5
    weights = scores.masked_fill(~is_near_NN, -torch.inf).softmax(dim=-1)
    y_BNC = torch.einsum("bhnm,bmhd->bnhd", weights, v_BNhd).flatten(2)
    return y_BNC @ attention.to_out.weight.T + attention.to_out.bias


@pytest.mark.parametrize("hops", HOPS)
def test_neighbourhoods_are_those_of_a_search(hops: int) -> None:
    mesh = IcosahedralMesh.build(2)
    assert torch.equal(torch.from_numpy(find_reachable_nodes(mesh, hops).toarray()), search_breadth_first(mesh, hops))


@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("batch", [1, 2])
def test_attention_is_dense_attention_with_a_mask(hops: int, batch: int) -> None:
    mesh = IcosahedralMesh.build(2)
    attention = NeighbourhoodAttention(8, 4)
    initialise_(attention, 0)
    attention.double()
    x_BNC = torch.randn(batch, 162, 8, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(batch, 162, 8, dtype=torch.float64)
    y_BNC = attention(x_BNC, find_neighbourhoods(mesh, hops).repeat(batch))
    expected_BNC = attend_densely(attention, x_BNC, search_breadth_first(mesh, hops))
    torch.testing.assert_close(y_BNC, expected_BNC, rtol=0, atol=1e-12)
    inputs = [x_BNC, *attention.parameters()]
    gradients = torch.autograd.grad((y_BNC * factor).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected_BNC * factor).sum(), inputs)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-11)


def test_a_layer_reads_no_further_than_its_hops() -> None:
    mesh = IcosahedralMesh.build(2)
    layer = MeshTransformerLayer(8, 4)
    initialise_(layer, 0)
    x_BNC = torch.randn(1, 162, 8, requires_grad=True)
    y_BNC = layer(x_BNC, find_neighbourhoods(mesh, 3))
    (gradient,) = torch.autograd.grad(y_BNC[0, 40].square().sum(), x_BNC)
    is_read = gradient[0].abs().amax(dim=1) > 0
    assert torch.equal(is_read, search_breadth_first(mesh, 3)[40])


def test_blocks_hold_several_queries() -> None:
    """With one query per block, each key would be gathered once for every query that attends to it."""
    mesh = IcosahedralMesh.build(4)
    blocks = find_neighbourhoods(mesh, 4)
    num_blocks, num_queries, num_keys = blocks.mask_MQK.shape
    assert num_blocks == 162
    assert num_queries < 2 * 2562 / 162
    # A node attends to 61 nodes.
    assert num_keys < 3 * 61
    assert num_keys % 8 == 0
