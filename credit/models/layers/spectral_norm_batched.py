"""Spectral norm of several weights of one shape together, by one pass of kernels for all of them.

For GPUs: one by one, the work on most weights takes less time than to launch its 21 kernels a training step. Products
are sums of elementwise ones, as matrix products there may round their arguments (TF32). Shape suffixes: N weights, R
rows (outputs), C columns of each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

EPS = 1e-12


def normalize_(vectors: list[Tensor]) -> None:
    """Scale each vector to length 1, in place."""
    lengths = torch._foreach_norm(vectors)
    torch._foreach_clamp_min_(lengths, EPS)
    torch._foreach_div_(vectors, lengths)


def batched_products(matrices: Sequence[Tensor], vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
    """Return the product of each float32 matrix (R, C), or of its transpose, with its vector."""
    indices_by_shape: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        indices_by_shape[matrix.shape].append(index)
    products: dict[int, Tensor] = {}
    for indices in indices_by_shape.values():
        matrices_NRC = torch.stack([matrices[index] for index in indices])
        vectors_NX = torch.stack([vectors[index] for index in indices])
        if transposed:
            products_NX = (matrices_NRC * vectors_NX[:, :, None]).sum(1)
        else:
            products_NX = (matrices_NRC * vectors_NX[:, None]).sum(2)
        products |= zip(indices, products_NX.unbind(), strict=True)
    return [products[index] for index in range(len(matrices))]


def normalize_batched(weights: Sequence[Tensor], us: Sequence[Tensor], vs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return W / (u^T W v) for weights W (R, ...), in their dtype; the backward pass keeps little beside W.

    Args:
        weights: the first dimension counts outputs.
        us: float32 (R,).
        vs: float32 (C,), C the product of the weights' other dimensions.
    """
    matrices_NRC = _Normalise.apply(torch.stack(list(us)), torch.stack(list(vs)), *weights)
    return matrices_NRC.to(weights[0].dtype).unflatten(2, weights[0].shape[1:]).unbind()


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, u_NR: Tensor, v_NC: Tensor, *weights: Tensor) -> Tensor:
        weights_NRC = _stacked(weights)
        sigma_N = ((weights_NRC * v_NC[:, None]).sum(2) * u_NR).sum(1)
        reciprocal_N11 = sigma_N.reciprocal()[:, None, None]
        ctx.save_for_backward(reciprocal_N11, u_NR, v_NC, *weights)
        return weights_NRC.mul_(reciprocal_N11)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient_NRC: Tensor) -> tuple[Tensor | None, ...]:
        # d(W / sigma) / dW of G is (G - <G, W> u v^T / sigma) / sigma, as d sigma / dW = u v^T
        reciprocal_N11, u_NR, v_NC, *weights = ctx.saved_tensors
        along_N11 = (gradient_NRC * _stacked(weights)).sum((1, 2), keepdim=True) * reciprocal_N11.square()
        rows_NR1, columns_N1C = along_N11 * u_NR[:, :, None], v_NC[:, None]
        of_weights_NRC = torch.addcmul(gradient_NRC * reciprocal_N11, rows_NR1, columns_N1C, value=-1)
        first = weights[0]
        return None, None, *of_weights_NRC.unflatten(2, first.shape[1:]).to(first.dtype).unbind()


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(weights)).flatten(2).float()
