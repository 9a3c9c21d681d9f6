"""Orthogonalised updates of weight matrices, and choice of the weights that get them (Muon, Jordan et al. 2024).

K. Jordan, Y. Jin, V. Boza, J. You, F. Cesista, L. Newhouse, J. Bernstein 2024: Muon, an optimizer for hidden layers in
neural networks (https://kellerjordan.github.io/posts/muon). Scale of the update: Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.models.data_axes import find_channel_axes
from credit.models.initialise import find_addable_parameters
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# Coefficients of the odd polynomial a x + b x^3 + c x^5 of a Newton-Schulz iteration, and the number of iterations.
# Five iterations map singular values between 0.01 and 1 to values between 0.68 and 1.14.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# Added to the norm of a matrix before the division by it, so that a matrix of zeros stays zero.
NORM_EPS = 1e-7
# With this factor, the root mean square of the elements of an update is about the same as in AdamW. So Muon and AdamW
# can use the same learning rate and weight decay (arXiv 2502.16982, section 2.2).
UPDATE_RMS = 0.2


def find_muon_matrices(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the parameters that Muon updates: the weights of linear layers and convolutions inside the network.

    Layers that read the input channels or write the output channels are excluded, as the authors of Muon recommend.
    Layers that add noise are excluded because their weights start as zeros. LoRA adapters are excluded, too.

    Args:
        model: the model, sharded or not.

    Returns:
        Parameter -> index of its dimension that corresponds to the outputs of the layer.
    """
    excluded_names = find_channel_axes(model).keys() | find_addable_parameters(model).keys()
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in model.named_parameters()}
    matrices = {}
    for module in model.modules():
        # A grouped convolution has a matrix for each group.
        if not isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)) or getattr(module, "groups", 1) > 1:
            continue
        # Reading `module.weight` would compute the parametrization, which fails for a sharded weight.
        if parametrize.is_parametrized(module, "weight"):
            weight = module.parametrizations.weight.original
        else:
            weight = module.weight
        if weight in names and weight.requires_grad and names[weight] not in excluded_names:
            matrices[weight] = 1 if isinstance(module, nn.ConvTranspose2d) else 0
    return matrices


def orthogonalize(matrices: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return matrices with the same singular vectors as `matrices`, but singular values near 1.

    The method is Newton-Schulz iteration.

    Args:
        matrices: (..., rows, columns).
        dtype: dtype of the iterations; None for the dtype of the matrices.

    Returns:
        The same shape and dtype as `matrices`.
    """
    a, b, c = NEWTON_SCHULZ
    # The products x x^T are smaller if there are fewer rows than columns.
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    # Scale before the cast, so that small numbers do not underflow.
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + NORM_EPS)
    x = x.to(dtype or matrices.dtype)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    x = x.to(matrices.dtype)
    return x.mT if is_tall else x


def orthogonalize_updates(
    updates: Mapping[int, Tensor], out_dim: int, dtype: torch.dtype | None = None
) -> dict[int, Tensor]:
    """Return the orthogonalised updates of weights: their singular values are made nearly equal by `orthogonalize`.

    Updates of the same shape are computed together, which launches fewer kernels on a GPU. The orthogonalised update of
    an m x n matrix is multiplied by `UPDATE_RMS` * sqrt(max(m, n)).

    Args:
        updates: index of a weight -> proposed change of this weight of a linear layer or convolution.
        out_dim: index of the dimension that corresponds to the outputs. The product of the sizes of all other
            dimensions is the number of inputs.
        dtype: dtype of the iterations; None for the dtype of the updates.

    Returns:
        Index of a weight -> its update, in the same shape and dtype.
    """
    numbers_by_shape: dict[torch.Size, list[int]] = {}
    for number, update in updates.items():
        numbers_by_shape.setdefault(update.shape, []).append(number)
    results = {}
    for numbers in numbers_by_shape.values():
        outputs_first = torch.stack([updates[number].movedim(out_dim, 0) for number in numbers])
        matrices = outputs_first.flatten(2)
        scale = UPDATE_RMS * math.sqrt(max(matrices.shape[1:]))
        orthogonal = scale * orthogonalize(matrices, dtype)
        for number, result in zip(numbers, orthogonal.view(outputs_first.shape), strict=True):
            results[number] = result.movedim(0, out_dim)
    return results


def count_matrix_operations(weight: Tensor, out_dim: int) -> float:
    """Return the number of floating-point operations of `orthogonalize_updates` for one weight.

    Args:
        weight: weight of a linear layer or convolution; only its shape is read.
        out_dim: index of the dimension that corresponds to the outputs.
    """
    outputs = weight.shape[out_dim]
    inputs = math.prod(weight.shape) // outputs
    short, long = min(outputs, inputs), max(outputs, inputs)
    return NUM_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
