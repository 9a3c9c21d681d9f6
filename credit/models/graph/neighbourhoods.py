"""Neighbourhoods of mesh nodes: the nodes to which each node attends, at most k edges away (GenCast, arXiv 2312.15796).

The nodes are divided into blocks of neighbouring nodes. For each block, the network gathers the keys to which any node
of the block attends, and a mask selects the keys for each node. So a key is gathered once for each block instead of
once for each query, and the attention is a dense matrix product.

Shape suffixes: M blocks, Q queries of a block, K keys of a block, N mesh nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.spatial import cKDTree
from torch import Tensor

from credit.models.graph.edge_index import RowSelection
from credit.models.graph.mesh import IcosahedralMesh

# The number of keys of a block is a multiple of 8, because attention kernels of GPUs copy masks with other row lengths.
_KEY_MULTIPLE = 8


class AttentionBlocks(NamedTuple):
    """Queries and keys of each block of mesh nodes.

    All blocks have the same numbers of queries and keys. Smaller blocks are filled with node 0; the results of these
    filling queries are not used.

    Attributes:
        queries: selection of the M * Q queries of all blocks from the N nodes.
        keys: selection of the M * K keys of all blocks from the N nodes.
        query_of_node: selection of one of the M * Q queries for each of the N nodes, the inverse of `queries`.
        mask_MQK: True where a query attends to a key; a filling query attends to all keys.
    """

    queries: RowSelection
    keys: RowSelection
    query_of_node: RowSelection
    mask_MQK: Tensor

    def repeat(self, batch: int) -> AttentionBlocks:
        """Return the blocks for a batch of `batch` samples; all samples share the mask."""
        return AttentionBlocks(
            self.queries.repeat(batch), self.keys.repeat(batch), self.query_of_node.repeat(batch), self.mask_MQK
        )


def find_neighbourhoods(mesh: IcosahedralMesh, hops: int) -> AttentionBlocks:
    """Return the blocks of mesh nodes with their queries, keys and attention mask.

    Args:
        mesh: the mesh.
        hops: radius of the neighbourhoods: a node attends to all nodes at most `hops` edges of the finest level away.
    """
    num_nodes = len(mesh.nodes_N3)
    is_near_NN = find_reachable_nodes(mesh, hops)
    block_N, num_blocks = _divide_nodes(mesh, hops)

    # The queries are the nodes of each block. Find the position of each node in its block.
    by_block = np.argsort(block_N, kind="stable")
    sizes_M = np.bincount(block_N, minlength=num_blocks)
    position_N = np.empty(num_nodes, dtype=np.int64)
    position_N[by_block] = _concatenate_ranges(sizes_M)
    num_queries = sizes_M.max()

    # The keys of a block are the nodes to which any node of the block attends, in ascending order.
    members_MN = csr_array((np.ones(num_nodes, np.int8), (block_N, np.arange(num_nodes))), (num_blocks, num_nodes))
    keys_MN = csr_array(members_MN.astype(bool) @ is_near_NN)
    keys_MN.sort_indices()
    key_counts_M = np.diff(keys_MN.indptr)
    key_blocks = np.repeat(np.arange(num_blocks), key_counts_M)
    key_nodes = keys_MN.indices.astype(np.int64)
    key_positions = _concatenate_ranges(key_counts_M)
    num_keys = -(-key_counts_M.max() // _KEY_MULTIPLE) * _KEY_MULTIPLE

    # Build the mask. The keys are sorted by block and then by node, so block * num_nodes + node is a sorted list in
    # which each (block, node) pair can be searched.
    pairs = is_near_NN.tocoo()
    queries, keys = pairs.coords
    listed = key_blocks * num_nodes + key_nodes
    key_of_pair = key_positions[np.searchsorted(listed, block_N[queries] * num_nodes + keys)]
    mask_MQK = np.zeros((num_blocks, num_queries, num_keys), dtype=bool)
    mask_MQK[block_N[queries], position_N[queries], key_of_pair] = True
    # A softmax over no keys would be NaN, so filling queries attend to all keys.
    is_filling_MQ = np.arange(num_queries) >= sizes_M[:, None]
    mask_MQK[is_filling_MQ] = True

    query_table_MQ = np.zeros((num_blocks, num_queries), dtype=np.int64)
    query_table_MQ[block_N, position_N] = np.arange(num_nodes)
    key_table_MK = np.zeros((num_blocks, num_keys), dtype=np.int64)
    key_table_MK[key_blocks, key_positions] = key_nodes
    is_key_MK = np.arange(num_keys) < key_counts_M[:, None]
    return AttentionBlocks(
        RowSelection.build(query_table_MQ.ravel(), num_nodes, ~is_filling_MQ.ravel()),
        RowSelection.build(key_table_MK.ravel(), num_nodes, is_key_MK.ravel()),
        RowSelection.build(block_N * num_queries + position_N, num_blocks * num_queries),
        torch.from_numpy(mask_MQK),
    )


def find_reachable_nodes(mesh: IcosahedralMesh, hops: int) -> csr_array:
    """Return a sparse bool matrix (N, N), True where two nodes are at most `hops` edges of the finest level apart."""
    senders, receivers = mesh.list_level_edges(len(mesh.faces) - 1).T
    nodes = np.arange(len(mesh.nodes_N3))
    # Each node is also a neighbour of itself.
    rows = np.concatenate([receivers, nodes])
    columns = np.concatenate([senders, nodes])
    is_neighbour_NN = csr_array((np.ones(len(rows), dtype=bool), (rows, columns)), (len(nodes), len(nodes)))
    is_near_NN = is_neighbour_NN
    for _ in range(hops - 1):
        is_near_NN = is_near_NN @ is_neighbour_NN
    return csr_array(is_near_NN)


def _divide_nodes(mesh: IcosahedralMesh, hops: int) -> tuple[np.ndarray, int]:
    """Divide the nodes into blocks; return the index of the block of each node, (N,), and the number of blocks.

    A block consists of the nodes that are nearest to the same node of a coarse level. The edges of this level are about
    as long as `hops` edges of the finest level. A block then has two to three times as many keys as a single node.
    """
    finest_level = len(mesh.faces) - 1
    coarse_level = max(finest_level - round(float(np.log2(hops))), 0)
    num_blocks = 10 * 4**coarse_level + 2
    # The first nodes of a finer level are the nodes of the coarser level.
    block_N = cKDTree(mesh.nodes_N3[:num_blocks]).query(mesh.nodes_N3)[1]
    return block_N.astype(np.int64), num_blocks


def _concatenate_ranges(sizes: np.ndarray) -> np.ndarray:
    """Return the concatenation of the ranges 0, 1, ..., size - 1 for each of the sizes."""
    starts = np.cumsum(sizes) - sizes
    return np.arange(sizes.sum()) - np.repeat(starts, sizes)
