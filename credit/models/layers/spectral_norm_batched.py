"""Spectral norm of many weights with few kernel launches.

On a GPU, launching kernels for each weight takes longer than the computation. So weights of the same shape are stacked
and computed together. Shape suffixes: N weights of the same shape; R rows (outputs) and C columns of a weight; X is R
or C.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from credit.models.kernels.dispatch import is_cpu_path

# A vector is divided by its length, but at least by this number, so that zero vectors stay zero.
EPS = 1e-12


class PlainMatrices:
    """Float32 matrices that are multiplied by vectors one after another, for CPUs, where stacking saves no time."""

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices

    def multiply(self, vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        """Return the product of each matrix (or its transpose, if `transposed`) with the vector of the same index."""
        matrices = self._matrices
        if transposed:
            matrices = [matrix.t() for matrix in matrices]
        return [torch.mv(matrix, vector) for matrix, vector in zip(matrices, vectors, strict=True)]


class StackedMatrices:
    """Float32 matrices that are multiplied by vectors together: matrices of the same shape form one tensor (N, R, C).

    A product with stacked matrices is an elementwise product followed by a sum, because the batched matrix product of
    torch may round its arguments to TF32. A matrix with a unique shape is not stacked.
    """

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self._matrices = matrices
        # Indices of the matrices of each shape, and their stack; None for a shape with a single matrix.
        self._groups = group_by_shape(matrices)
        self._stacks_NRC: list[Tensor | None] = []
        for group in self._groups:
            stack_NRC = None
            if len(group) > 1:
                stack_NRC = torch.stack([matrices[index] for index in group])
            self._stacks_NRC.append(stack_NRC)

    def multiply(self, vectors: Sequence[Tensor], transposed: bool) -> list[Tensor]:
        """Return the product of each matrix (or its transpose, if `transposed`) with the vector of the same index."""
        products: dict[int, Tensor] = {}
        for group, matrices_NRC in zip(self._groups, self._stacks_NRC, strict=True):
            if matrices_NRC is None:
                (index,) = group
                matrix = self._matrices[index]
                if transposed:
                    matrix = matrix.t()
                products[index] = torch.mv(matrix, vectors[index])
                continue
            vectors_NX = torch.stack([vectors[index] for index in group])
            if transposed:
                products_NX = (matrices_NRC * vectors_NX[:, :, None]).sum(1)
            else:
                products_NX = (matrices_NRC * vectors_NX[:, None]).sum(2)
            products |= zip(group, products_NX.unbind(), strict=True)
        return [products[index] for index in range(len(vectors))]


def prepare_matrices(matrices: Sequence[Tensor]) -> StackedMatrices | PlainMatrices:
    """Return an object that multiplies each of the float32 matrices by a vector, in the fastest way for the device."""
    return PlainMatrices(matrices) if is_cpu_path(matrices[0]) else StackedMatrices(matrices)


def normalize_vectors(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Return the vectors, each divided by its 2-norm; zero vectors stay zero."""
    if is_cpu_path(vectors[0]):
        lengths = torch._foreach_norm(vectors)
        torch._foreach_clamp_min_(lengths, EPS)
        return torch._foreach_div(vectors, lengths)
    units: dict[int, Tensor] = {}
    for group in group_by_shape(vectors):
        vectors_NX = torch.stack([vectors[index] for index in group])
        lengths_N1 = torch.linalg.vector_norm(vectors_NX, dim=1, keepdim=True)
        units |= zip(group, (vectors_NX / lengths_N1.clamp(min=EPS)).unbind(), strict=True)
    return [units[index] for index in range(len(vectors))]


def group_by_shape(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return a list for each shape, with the indices of the tensors that have this shape."""
    groups: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        groups[tensor.shape].append(index)
    return list(groups.values())


def normalize_matrix(matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return W / (u^T W v) for a float32 matrix W (R, C); its backward pass reads and writes W only a few times.

    Args:
        matrix: the weight as a matrix.
        u: (R,) left singular vector.
        v: (C,) right singular vector.
    """
    return _NormalizeMatrix.apply(matrix, u, v)


class _NormalizeMatrix(torch.autograd.Function):
    """Autograd function that normalises one (R, C) matrix; u and v have no gradients.

    With the autograd of torch, the backward pass would write and read two additional matrices: the product with the
    gradient, and the outer product of u and v.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, matrix_RC: Tensor, u_R: Tensor, v_C: Tensor) -> Tensor:
        reciprocal = torch.dot(u_R, torch.mv(matrix_RC, v_C)).reciprocal()
        ctx.save_for_backward(matrix_RC, u_R, v_C, reciprocal)
        # Multiplying by 1 / sigma is faster than dividing by sigma.
        return matrix_RC * reciprocal

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y_RC: Tensor) -> tuple[Tensor, None, None]:
        # See `_NormalizeBatched` for the formula.
        matrix_RC, u_R, v_C, reciprocal = ctx.saved_tensors
        product = torch.dot(grad_y_RC.flatten(), matrix_RC.flatten())
        grad_matrix_RC = grad_y_RC * reciprocal
        grad_matrix_RC.addr_(u_R * (-product * reciprocal.square()), v_C)
        return grad_matrix_RC, None, None


def normalize_batched(weights: Sequence[Tensor], us: Sequence[Tensor], vs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return W / (u^T W v) for each weight W in `weights`; all weights have the same shape and dtype.

    The results have the dtype of the weights. The function saves W, u, v and 1 / (u^T W v) for the backward pass.

    Args:
        weights: (R, ...) weights; the first dimension is the outputs.
        us: float32 (R,) left singular vector of each weight.
        vs: float32 (C,) right singular vector of each weight; C is the product of all dimensions of a weight except the
            first.
    """
    matrices_NRC = _NormalizeBatched.apply(torch.stack(list(us)), torch.stack(list(vs)), *weights)
    # Convert the stack to one tensor for each weight, with the dtype and shape of the weight.
    return matrices_NRC.to(weights[0].dtype).unflatten(2, weights[0].shape[1:]).unbind()


class _NormalizeBatched(torch.autograd.Function):
    """Autograd function that returns the normalised weights as a float32 (N, R, C) stack; u and v have no gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, u_NR: Tensor, v_NC: Tensor, *weights: Tensor) -> Tensor:
        weights_NRC = _stack_matrices(weights)
        sigma_N = ((weights_NRC * v_NC[:, None]).sum(2) * u_NR).sum(1)
        reciprocal_N11 = sigma_N.reciprocal()[:, None, None]
        ctx.save_for_backward(reciprocal_N11, u_NR, v_NC, *weights)
        return weights_NRC.mul_(reciprocal_N11)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y_NRC: Tensor) -> tuple[Tensor | None, ...]:
        # Let G be the gradient of W / sigma. As d sigma / dW = u v^T, the gradient of W is
        # (G - <G, W> u v^T / sigma) / sigma.
        reciprocal_N11, u_NR, v_NC, *weights = ctx.saved_tensors
        factor_N11 = (grad_y_NRC * _stack_matrices(weights)).sum((1, 2), keepdim=True) * reciprocal_N11.square()
        rows_NR1 = factor_N11 * u_NR[:, :, None]
        columns_N1C = v_NC[:, None]
        grad_weights_NRC = torch.addcmul(grad_y_NRC * reciprocal_N11, rows_NR1, columns_N1C, value=-1)
        # All weights have the same shape and dtype.
        weight = weights[0]
        return None, None, *grad_weights_NRC.unflatten(2, weight.shape[1:]).to(weight.dtype).unbind()


def _stack_matrices(weights: Sequence[Tensor]) -> Tensor:
    """Copy (R, ...) weights into a new float32 tensor (N, R, C), which the caller may overwrite."""
    return torch.stack(list(weights)).flatten(2).float()
