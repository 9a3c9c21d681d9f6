"""Muon: momentum whose singular values are made equal, for the matrices of a network (Jordan et al. 2024).

K. Jordan, Y. Jin, V. Boza, J. You, F. Cesista, L. Newhouse, J. Bernstein 2024: Muon, an optimizer for hidden layers in
neural networks (https://kellerjordan.github.io/posts/muon). Scale of the update: Liu et al. 2025, arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.optim.adamw import adamw

from credit.models.data_axes import find_channel_axes
from credit.models.initialise import find_addable_parameters
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import local_shard
from credit.parallel.matrix_exchange import MatrixExchange

# Coefficients of the odd polynomial a x + b x^3 + c x^5 of a Newton-Schulz iteration, and the number of iterations.
# Five of them bring singular values from 0.01 to 1 into 0.68 to 1.14.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# With this factor, the root mean square of the elements of an update is about that of AdamW, so both use the same
# learning rate and weight decay (arXiv 2502.16982, section 2.2).
UPDATE_RMS = 0.2
ADAM_EPS = 1e-8
# Decay of the momentum of the matrices, as its authors recommend.
MOMENTUM = 0.95


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
    """Return a matrix with the singular vectors of the given one, and singular values near 1.

    The dtype is kept: in bfloat16, rounding would differ between meshes.

    Args:
        matrix: (outputs, inputs).
    """
    a, b, c = NEWTON_SCHULZ
    # The products are smaller if there are fewer rows than columns.
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        polynomial = b * gram + c * gram @ gram
        x = a * x + polynomial @ x
    return x.mT if is_tall else x


def orthogonalize_weight(weight: Tensor, out_dim: int) -> Tensor:
    """Return an update of a layer's weight: its matrix has equal singular values, up to the error of the iterations.

    Args:
        weight: weight, or change of it, of a linear layer or convolution.
        out_dim: dimension that counts the outputs. All others together count the inputs.
    """
    outputs_first = weight.movedim(out_dim, 0)
    matrix = outputs_first.flatten(1)
    scale = UPDATE_RMS * math.sqrt(max(matrix.shape))
    result = scale * orthogonalize(matrix)
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


class Muon(torch.optim.Optimizer):
    """Muon for groups with the entry ``out_dims``, AdamW for all other groups.

    A group with ``out_dims`` has one entry for each of its parameters, see `find_matrices`. The momentum of a matrix
    may be sharded over ranks in any way; a rank computes some of the matrices whole (`MatrixExchange`).

    Args:
        groups: parameter groups with ``params``, ``lr``, ``weight_decay`` and, for matrices, ``out_dims``.
        learning_rate: peak learning rate.
        betas: betas of AdamW.

    Attributes:
        grad_scale: number by which gradients are divided; set before each step.
        found_inf: scalar tensor, 1 to leave weights and state unchanged in this step, otherwise 0; set before each
            step.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], learning_rate: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0, "out_dims": None})
        self._betas = betas
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        self._exchange: MatrixExchange | None = None
        # torch would create the state in the first step. It is created here, so that the checkpoint of step 0 has it.
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum_state = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if group["out_dims"] is not None:
                    self.state[parameter] = {"momentum": momentum_state}
                    continue
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": momentum_state,
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Collective: update all parameters that have a gradient.

        Args:
            closure: not used; torch's interface has it.
        """
        for group in self.param_groups:
            if group["out_dims"] is None:
                self._update_by_adamw(group)
        self._update_matrices()

    def _update_by_adamw(self, group: dict[str, Any]) -> None:
        """Update a group with torch's fused AdamW, which divides by `grad_scale` and obeys `found_inf`."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = self._betas
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAM_EPS,
            maximize=False,
        )

    def _update_matrices(self) -> None:
        """Collective: update all matrices."""
        parameters: list[nn.Parameter] = []
        out_dims: list[int] = []
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            if group["out_dims"] is not None:
                parameters += group["params"]
                out_dims += group["out_dims"]
                groups += [group] * len(group["params"])
        if not parameters:
            return
        if self._exchange is None:
            # Not in the constructor, because a plan of a run builds an optimizer without other ranks.
            costs = []
            for parameter, out_dim in zip(parameters, out_dims, strict=True):
                costs.append(count_matrix_operations(parameter, out_dim))
            self._exchange = MatrixExchange(parameters, costs)
        updates = [self._advance_momentum(parameter) for parameter in parameters]
        directions = self._exchange.apply(lambda index, whole: orthogonalize_weight(whole, out_dims[index]), updates)
        for parameter, group, direction in zip(parameters, groups, directions, strict=True):
            weight = local_shard(parameter)
            decayed = weight * (1.0 - group["lr"] * group["weight_decay"])
            updated = decayed.add_(direction.to(weight.device), alpha=-group["lr"])
            weight.copy_(self._keep_if_bad(weight, updated))

    def _advance_momentum(self, parameter: nn.Parameter) -> Tensor:
        """Advance the momentum of a matrix, and return this rank's part of Nesterov's combination with the gradient.

        The result is on the device on which ranks communicate.
        """
        momentum = local_shard(self.state[parameter]["momentum"])
        if parameter.grad is None:
            gradient = torch.zeros_like(momentum)
        else:
            gradient = local_shard(parameter.grad).to(momentum.dtype)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(gradient.device)
        advanced = momentum.lerp(gradient, 1.0 - MOMENTUM)
        update = gradient.lerp(advanced, MOMENTUM)
        momentum.copy_(self._keep_if_bad(momentum, advanced))
        if isinstance(parameter, DTensor):
            # With FSDP2's CPU offload, the parts lie in host memory.
            update = update.to(parameter.device_mesh.device_type)
        return update

    def _keep_if_bad(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the old values in a step that `found_inf` excludes, else the new ones, without waiting for a GPU."""
        if self.found_inf is None:
            return new
        return torch.where(self.found_inf.to(old.device) > 0, old, new)
