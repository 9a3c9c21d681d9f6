"""Weights of a network that are matrices, and updates of them with equal singular values (Muon, Jordan et al. 2024).

K. Jordan, Y. Jin, V. Boza, J. You, F. Cesista, L. Newhouse, J. Bernstein 2024: Muon, an optimizer for hidden layers in
neural networks (https://kellerjordan.github.io/posts/muon). Scale of the update: Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.models.data_axes import find_channel_axes
from credit.models.initialise import find_addable_parameters
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# Coefficients of the odd polynomial a x + b x^3 + c x^5 of a Newton-Schulz iteration, and the number of iterations.
# Five of them bring singular values from 0.01 to 1 into 0.68 to 1.14.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# Added to the norm of a matrix, so that a matrix of zeros stays zero.
NORM_EPS = 1e-7
# With this factor, the root mean square of the elements of an update is about that of AdamW, so both use the same
# learning rate and weight decay (arXiv 2502.16982, section 2.2).
UPDATE_RMS = 0.2


def find_matrices(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the parameters that Muon updates, and which of their dimensions counts the outputs of the layer.

    These are the weights of linear layers and convolutions inside the network. Layers that read the input channels or
    write the output channels are left out, as their authors recommend, and so are layers of noise, which begin as
    zeros, and adapters.

    Args:
        model: the model, sharded or not.
    """
    left_out_names = find_channel_axes(model).keys() | find_addable_parameters(model).keys()
    names = {parameter: strip_wrapper_prefixes(name) for name, parameter in model.named_parameters()}
    matrices = {}
    for module in model.modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            continue
        weight = module.weight
        if parametrize.is_parametrized(module, "weight"):
            weight = module.parametrizations.weight.original
        if weight in names and weight.requires_grad and names[weight] not in left_out_names:
            matrices[weight] = 1 if isinstance(module, nn.ConvTranspose2d) else 0
    return matrices


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the singular vectors of the given one, and singular values near 1, in the same dtype.

    Args:
        matrix: (outputs, inputs).
    """
    a, b, c = NEWTON_SCHULZ
    # The products are smaller if there are fewer rows than columns.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + NORM_EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.mT if is_tall else x


def orthogonalize_weight(weight: Tensor, out_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an update of a layer's weight: its matrix has equal singular values, up to the error of the iterations.

    Args:
        weight: weight, or change of it, of a linear layer or convolution.
        out_dim: dimension that counts the outputs. All others together count the inputs.
        dtype: dtype of the iterations; None for that of the weight.

    Returns:
        The update in the shape and dtype of `weight`.
    """
    outputs_first = weight.movedim(out_dim, 0)
    matrix = outputs_first.flatten(1)
    scale = UPDATE_RMS * math.sqrt(max(matrix.shape))
    # The norm is that of the weight's dtype, so that the cast loses no small numbers.
    normed = matrix / (matrix.norm() + NORM_EPS)
    result = scale * orthogonalize(normed.to(dtype or matrix.dtype)).to(matrix.dtype)
    return result.view(outputs_first.shape).movedim(0, out_dim)


def count_matrix_operations(weight: Tensor, out_dim: int) -> float:
    """Return the floating-point operations of `orthogonalize_weight`.

    Args:
        weight: weight of a linear layer or convolution; only its shape is read.
        out_dim: dimension that counts the outputs.
    """
    outputs = weight.shape[out_dim]
    inputs = math.prod(weight.shape) // outputs
    short, long = min(outputs, inputs), max(outputs, inputs)
    return NUM_ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
