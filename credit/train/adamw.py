"""AdamW optimizer that updates the local shards of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from credit.parallel.dtensor import local_shards

ADAM_EPS = 1e-8


class AdamW(torch.optim.Optimizer):
    """Fused AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101).

    AdamW updates each element of a parameter independently. So the kernel of `torch.optim.AdamW` is called with the
    local shards as plain tensors. With DTensors, torch would have to determine the sharding of every result. In the
    first steps of a small network, this would take longer than the steps themselves.

    Args:
        groups: parameter groups with ``params``, ``lr`` and ``weight_decay``.
        learning_rate: peak learning rate.
        betas: decay rates of the moving averages of the gradient and of its square.

    Attributes:
        grad_scale: divisor of the gradients; the training step sets it before each optimizer step.
        found_inf: scalar tensor: 1 to leave weights and state unchanged in this step, otherwise 0. The training step
            sets it before each optimizer step.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], learning_rate: float, betas: tuple[float, float]) -> None:
        # The settings have the names of `torch.optim.AdamW`, so that both classes can load the same state. With
        # `fused`, torch loads the step counts onto the device of the parameters.
        defaults = {"lr": learning_rate, "betas": betas, "eps": ADAM_EPS, "weight_decay": 0.0, "fused": True}
        super().__init__(groups, defaults)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        # torch would create the state in the first step. Here it is created earlier, so that the checkpoint of step 0
        # contains it.
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self.initial_state(parameter, group)

    def initial_state(self, parameter: nn.Parameter, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the initial optimizer state of a parameter: name -> zeros, sharded like the parameter.

        Args:
            parameter: the parameter.
            group: parameter group of the parameter.
        """
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient.

        Args:
            closure: not used; the interface of torch's optimizers requires this argument.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self.update_group(parameters, group)

    def update_group(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update some parameters of a parameter group.

        Args:
            parameters: at least one parameter, all with gradients.
            group: parameter group of these parameters.

        Raises:
            ValueError: if a gradient is not sharded like its parameter.
        """
        for parameter in parameters:
            if isinstance(parameter, DTensor) and parameter.placements != parameter.grad.placements:
                raise ValueError(
                    f"The gradient of a parameter of shape {tuple(parameter.shape)} has the placements "
                    f"{parameter.grad.placements}, but the parameter has {parameter.placements}"
                )
        states = [self.state[parameter] for parameter in parameters]
        beta1, beta2 = group["betas"]
        # The fused kernel applies `grad_scale` and `found_inf`.
        adamw(
            local_shards(parameters),
            local_shards([parameter.grad for parameter in parameters]),
            local_shards([state["exp_avg"] for state in states]),
            local_shards([state["exp_avg_sq"] for state in states]),
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
            eps=group["eps"],
            maximize=False,
        )
