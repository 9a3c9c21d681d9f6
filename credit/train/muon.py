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

# Decay rate of the momentum of the matrices, recommended by the authors of Muon.
MOMENTUM = 0.95


class Muon(AdamW):
    """Optimizer that uses Muon for parameter groups with the entry ``out_dim``, and AdamW for all other groups.

    The momentum of a matrix may be sharded over ranks in any way. For the update, each rank gathers some of the
    matrices completely (`MatrixExchange`).

    Args:
        groups: parameter groups with ``params``, ``lr``, ``weight_decay`` and, for matrices, ``out_dim``. The entry
            ``out_dim`` is the index of the output dimension (`credit.models.matrices.find_muon_matrices`).
        learning_rate: peak learning rate.
        betas: betas of AdamW.
        dtype: dtype in which matrices are orthogonalised; None for the dtype of the weights. With bfloat16, updates on
            different meshes differ by the rounding of bfloat16.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        dtype: torch.dtype | None = None,
    ) -> None:
        # Groups without the entry ``out_dim`` get None.
        super().__init__([{"out_dim": None, **group} for group in groups], learning_rate, betas)
        self._dtype = dtype
        # Identities (`id`) of the matrices of a bucket -> exchange of these matrices.
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the initial optimizer state of a parameter: the momentum of a matrix, else the state of `AdamW`."""
        if group["out_dim"] is None:
            return super().initial_state(parameter, group)
        return {"momentum": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def update_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Collective: update some parameters of a parameter group, see `AdamW`."""
        if group["out_dim"] is None:
            super().update_group(parameters, group)
            return
        # The temporary tensors of an update are several times as large as its matrices, so matrices are updated in
        # buckets of limited size.
        sizes = [parameter.numel() / count_parts(parameter) for parameter in parameters]
        for bucket in divide_into_buckets(sizes):
            self._update_matrices([parameters[index] for index in bucket], group)

    def _update_matrices(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Collective: update some matrices of a parameter group together.

        Operations on lists of tensors launch fewer GPU kernels than operations on single tensors. If `found_inf` is 1,
        all changes are multiplied by zero, because a Python condition would have to wait for the GPU.

        Args:
            parameters: some matrices of the group, all with the same dtype and device.
            group: parameter group of the matrices.
        """
        out_dim = group["out_dim"]
        momenta = [local_shard(self.state[parameter]["momentum"]) for parameter in parameters]
        weights = [local_shard(parameter) for parameter in parameters]
        device = weights[0].device
        is_good = torch.ones((), dtype=weights[0].dtype, device=device)
        if self.found_inf is not None:
            is_good = 1.0 - self.found_inf.to(is_good)

        # In a skipped step, gradients and their scale may be NaN; the gradients then become zeros.
        gradients = [local_shard(parameter.grad).to(weights[0].dtype).reshape(-1) for parameter in parameters]
        joined = torch.cat(gradients)
        if self.grad_scale is not None:
            joined.div_(self.grad_scale.to(is_good))
        joined.nan_to_num_(0.0, 0.0, 0.0).mul_(is_good)
        updates = _split_like(joined, weights)

        # Update the momentum, and combine it with the gradient (Nesterov momentum).
        torch._foreach_mul_(momenta, 1.0 - (1.0 - MOMENTUM) * is_good)
        torch._foreach_add_(momenta, updates, alpha=1.0 - MOMENTUM)
        torch._foreach_mul_(updates, 1.0 - MOMENTUM)
        torch._foreach_add_(updates, momenta, alpha=MOMENTUM)
        if isinstance(parameters[0], DTensor):
            # With FSDP2's CPU offload, weights are in host memory, but ranks communicate on the device of the mesh.
            updates = [update.to(parameters[0].device_mesh.device_type) for update in updates]

        def orthogonalize_owned(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
            return orthogonalize_updates(matrices, out_dim, self._dtype)

        directions = self._find_exchange(parameters, out_dim).apply(orthogonalize_owned, updates)
        directions = [direction.to(device).contiguous() for direction in directions]
        torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"] * is_good)
        torch._foreach_mul_(directions, -group["lr"] * is_good)
        torch._foreach_add_(weights, directions)

    def _find_exchange(self, parameters: Sequence[nn.Parameter], out_dim: int) -> MatrixExchange:
        """Return the `MatrixExchange` of some matrices; the first call for these matrices is collective."""
        # The exchange is not built in the constructor, because `credit plan` builds an optimizer without other ranks.
        key = tuple(id(parameter) for parameter in parameters)
        if key not in self._exchanges:
            costs = [count_matrix_operations(parameter, out_dim) for parameter in parameters]
            self._exchanges[key] = MatrixExchange(parameters, costs)
        return self._exchanges[key]


def _split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector into consecutive parts, and return the parts in the shapes of `tensors`."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
