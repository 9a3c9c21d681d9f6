"""Optimizer that updates the matrices of a network by Muon, and all other parameters by AdamW.

Muon is momentum whose singular values are made equal, see `credit.models.matrices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from credit.models.matrices import count_matrix_operations, orthogonalize_weights
from credit.parallel.dtensor import local_shard
from credit.parallel.matrix_exchange import MatrixExchange

ADAM_EPS = 1e-8
# Decay of the momentum of the matrices, as its authors recommend.
MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """Muon for groups with the entry ``out_dims``, AdamW for all other groups.

    A group with ``out_dims`` has one entry for each of its parameters, see `credit.models.matrices.find_matrices`. The
    momentum of a matrix may be sharded over ranks in any way; a rank computes some of the matrices whole
    (`MatrixExchange`).

    Args:
        groups: parameter groups with ``params``, ``lr``, ``weight_decay`` and, for matrices, ``out_dims``.
        learning_rate: peak learning rate.
        betas: betas of AdamW.
        dtype: dtype in which matrices are orthogonalised; None for that of the weights. In bfloat16, updates differ
            between meshes by its rounding.

    Attributes:
        grad_scale: number by which gradients are divided; set before each step.
        found_inf: scalar tensor, 1 to leave weights and state unchanged in this step, otherwise 0; set before each
            step.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0, "out_dims": None})
        self._betas = betas
        self._dtype = dtype
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
        groups = [group for group in self.param_groups if group["out_dims"] is not None]
        parameters: list[nn.Parameter] = []
        out_dims: list[int] = []
        for group in groups:
            parameters += group["params"]
            out_dims += group["out_dims"]
        if not parameters:
            return
        if self._exchange is None:
            # Not in the constructor, because a plan of a run builds an optimizer without other ranks.
            costs = []
            for parameter, out_dim in zip(parameters, out_dims, strict=True):
                costs.append(count_matrix_operations(parameter, out_dim))
            self._exchange = MatrixExchange(parameters, costs)

        def orthogonalize(updates: dict[int, Tensor]) -> dict[int, Tensor]:
            return orthogonalize_weights(updates, out_dims, self._dtype)

        directions = iter(self._exchange.apply(orthogonalize, self._advance_momenta(parameters)))
        for group in groups:
            weights = [local_shard(parameter) for parameter in group["params"]]
            before = _flatten(weights)
            step = _flatten([next(directions) for _ in weights]).to(before.device)
            decayed = before * (1.0 - group["lr"] * group["weight_decay"])
            self._write(weights, before, decayed.add_(step, alpha=-group["lr"]))

    def _advance_momenta(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Advance the momentum of matrices, and return Nesterov's combinations of momentum and gradient.

        All tensors are joined into one, since few large kernels take less time on a GPU than many small ones.

        Args:
            parameters: the matrices, all of one dtype and device.

        Returns:
            This rank's part for each matrix, on the device on which ranks communicate.
        """
        momenta = [local_shard(self.state[parameter]["momentum"]) for parameter in parameters]
        gradients = []
        for parameter, momentum in zip(parameters, momenta, strict=True):
            if parameter.grad is None:
                gradients.append(torch.zeros_like(momentum))
            else:
                gradients.append(local_shard(parameter.grad).to(momentum.dtype))
        before = _flatten(momenta)
        gradient = _flatten(gradients)
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale.to(gradient.device)
        advanced = before.lerp(gradient, 1.0 - MOMENTUM)
        update = gradient.lerp(advanced, MOMENTUM)
        self._write(momenta, before, advanced)
        if isinstance(parameters[0], DTensor):
            # With FSDP2's CPU offload, the parts lie in host memory.
            update = update.to(parameters[0].device_mesh.device_type)
        return _split_like(update, momenta)

    def _write(self, tensors: Sequence[Tensor], before: Tensor, after: Tensor) -> None:
        """Write new values into tensors, or keep the old ones in a step that `found_inf` excludes.

        Args:
            tensors: the tensors, which are changed in place.
            before: their values, joined.
            after: their new values, joined.
        """
        if self.found_inf is not None:
            # A condition on the host would wait for the GPU.
            after = torch.where(self.found_inf.to(before.device) > 0, before, after)
        torch._foreach_copy_(list(tensors), _split_like(after, tensors))


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector from `_flatten` in the shapes of the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
