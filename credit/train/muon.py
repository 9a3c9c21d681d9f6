"""Optimizer that updates the matrices of a network by Muon, and all other parameters by AdamW.

Muon orthogonalises the momentum of each matrix, see `credit.models.matrices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from credit.models.matrices import count_matrix_operations, orthogonalize_updates
from credit.parallel.dtensor import local_shard
from credit.parallel.matrix_exchange import MatrixExchange, count_parts, divide_into_buckets
from credit.train.adamw import AdamW

# Decay of the momentum of the matrices, as its authors recommend.
MOMENTUM = 0.95


class Muon(AdamW):
    """Muon for groups with the entry ``out_dim``, AdamW for all other groups.

    The momentum of a matrix may be sharded over ranks in any way; a rank computes some of the matrices whole
    (`MatrixExchange`).

    Args:
        groups: parameter groups with ``params``, ``lr``, ``weight_decay`` and, for matrices, ``out_dim``, the index
            of the dimension of the outputs (`credit.models.matrices.find_muon_matrices`).
        learning_rate: peak learning rate.
        betas: betas of AdamW.
        dtype: dtype in which matrices are orthogonalised; None for that of the weights. In bfloat16, updates differ
            between meshes by its rounding.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        dtype: torch.dtype | None = None,
    ) -> None:
        # Groups that have the entry keep it.
        super().__init__([{"out_dim": None, **group} for group in groups], learning_rate, betas)
        self._dtype = dtype
        # Identities (`id`) of the matrices of a bucket -> their exchange.
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before the first step, see `AdamW`; a matrix has its momentum only."""
        if group["out_dim"] is None:
            return super().initial_state(parameter, group)
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Collective: update parameters of a group, see `AdamW`."""
        if group["out_dim"] is None:
            super().update_group(parameters, group)
            return
        # A bucket limits the temporary tensors of an update, which are several times as large as its matrices.
        sizes = [parameter.numel() / count_parts(parameter) for parameter in parameters]
        for bucket in divide_into_buckets(sizes):
            self._update_matrices([parameters[index] for index in bucket], group)

    def _update_matrices(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Collective: update matrices of a group together.

        Operations on lists of tensors launch fewer kernels on a GPU than operations on single tensors. In a step that
        `found_inf` excludes, all changes are multiplied by zero, because a condition would wait for the GPU.

        Args:
            parameters: some matrices of the group, all of one dtype and device.
            group: the group.
        """
        out_dim = group["out_dim"]
        momenta = [local_shard(self.state[parameter]["momentum"]) for parameter in parameters]
        weights = [local_shard(parameter) for parameter in parameters]
        device = weights[0].device
        is_good = torch.ones((), dtype=weights[0].dtype, device=device)
        if self.found_inf is not None:
            is_good = 1.0 - self.found_inf.to(is_good)

        # In a step that is excluded, gradients and their scale may be NaN; the gradients then become zeros.
        gradients = [local_shard(parameter.grad).to(weights[0].dtype).reshape(-1) for parameter in parameters]
        joined = torch.cat(gradients)
        if self.grad_scale is not None:
            joined.div_(self.grad_scale.to(is_good))
        joined.nan_to_num_(0.0, 0.0, 0.0).mul_(is_good)
        updates = _split_like(joined, weights)

        # The momentum, and Nesterov's combination of momentum and gradient.
        torch._foreach_mul_(momenta, 1.0 - (1.0 - MOMENTUM) * is_good)
        torch._foreach_add_(momenta, updates, alpha=1.0 - MOMENTUM)
        torch._foreach_mul_(updates, 1.0 - MOMENTUM)
        torch._foreach_add_(updates, momenta, alpha=MOMENTUM)
        if isinstance(parameters[0], DTensor):
            # With FSDP2's CPU offload, weights lie in host memory, but ranks communicate on the device of the mesh.
            updates = [update.to(parameters[0].device_mesh.device_type) for update in updates]

        def orthogonalize_owned(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
            return orthogonalize_updates(matrices, out_dim, self._dtype)

        directions = self._find_exchange(parameters, out_dim).apply(orthogonalize_owned, updates)
        directions = [direction.to(device).contiguous() for direction in directions]
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"] * is_good)
        torch._foreach_mul_(directions, -group["lr"] * is_good)
        torch._foreach_add_(weights, directions)

    def _find_exchange(self, parameters: Sequence[nn.Parameter], out_dim: int) -> MatrixExchange:
        """Collective if it is new: return the exchange of these matrices; it is planned in the first step with them."""
        # A plan of a run builds an optimizer without other ranks, so the constructor cannot do this.
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._exchanges:
            costs = [count_matrix_operations(parameter, out_dim) for parameter in parameters]
            self._exchanges[key] = MatrixExchange(parameters, costs)
        return self._exchanges[key]


def _split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector, one after another, in the shapes of the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
