"""Optimizer that updates the matrices of a network by Muon, and all other parameters by AdamW.

Muon orthogonalises the momentum of each matrix, see `credit.models.matrices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from credit.models.matrices import count_matrix_operations, orthogonalize_updates
from credit.parallel.dtensor import local_shard
from credit.parallel.matrix_exchange import MatrixExchange

ADAM_EPS = 1e-8
# Decay of the momentum of the matrices, as its authors recommend.
MOMENTUM = 0.95
# Largest number of elements of the matrices that are updated together, over the number of ranks. The temporary tensors
# of an update have about five times as many elements on a rank.
BUCKET_ELEMENTS = 2**26


class Muon(torch.optim.Optimizer):
    """Muon for groups with the entry ``out_dim``, AdamW for all other groups.

    The momentum of a matrix may be sharded over ranks in any way; a rank computes some of the matrices whole
    (`MatrixExchange`).

    Args:
        groups: parameter groups with ``params``, ``lr``, ``weight_decay`` and, for matrices, ``out_dim``, the dimension
            that counts the outputs (`credit.models.matrices.find_matrices`).
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
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0, "out_dim": None})
        self._betas = betas
        self._dtype = dtype
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        # Identities (`id`) of the matrices of a bucket -> their exchange.
        self._exchanges: dict[tuple[int, ...], MatrixExchange] = {}
        # torch would create the state in the first step. It is created here, so that the checkpoint of step 0 has it.
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if group["out_dim"] is not None:
                    self.state[parameter] = {"momentum": momentum}
                    continue
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": momentum,
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Collective: update all parameters that have a gradient.

        Args:
            closure: not used; torch's interface has it.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["out_dim"] is None:
                self._update_by_adamw(parameters, group)
            else:
                for bucket in _divide_into_buckets(parameters):
                    self._update_matrices(bucket, group)

    def _update_by_adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters of a group with torch's fused AdamW, which itself obeys `grad_scale` and `found_inf`."""
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


def _divide_into_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters in lists whose parts on a rank have at most `BUCKET_ELEMENTS` elements, or one parameter.

    The division depends on the whole sizes and the number of parts, so it is the same on each rank.
    """
    buckets: list[list[nn.Parameter]] = []
    num_elements = 0.0
    for parameter in parameters:
        num_parts = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        size = parameter.numel() / num_parts
        if not buckets or num_elements + size > BUCKET_ELEMENTS:
            buckets.append([])
            num_elements = 0.0
        buckets[-1].append(parameter)
        num_elements += size
    return buckets


def _split_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector, one after another, in the shapes of the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
