"""Tests of AdamW on the local parts of DTensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from credit.parallel.process_info import fake_process_group
from credit.train.adamw import AdamW

BETAS = (0.9, 0.95)


def shard(tensor: torch.Tensor) -> DTensor:
    """Return a tensor whose first half of rows belongs to this rank, the first of two."""
    rows = tensor[: len(tensor) // 2].clone()
    return DTensor.from_local(rows, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def test_a_rank_updates_its_part_as_torch_updates_the_parameter() -> None:
    torch.manual_seed(0)
    value, gradients = torch.randn(6, 3), torch.randn(4, 6, 3)
    reference = nn.Parameter(value.clone())
    expected = torch.optim.AdamW([reference], lr=0.1, betas=BETAS, weight_decay=0.2)
    with fake_process_group(2):
        parameter = nn.Parameter(shard(value))
        optimizer = AdamW([{"params": [parameter], "weight_decay": 0.2}], 0.1, BETAS)
        for number, gradient in enumerate(gradients):
            parameter.grad = shard(gradient)
            # The third step is skipped.
            optimizer.found_inf = torch.tensor(float(number == 2))
            optimizer.step()
            if number != 2:
                reference.grad = gradient
                expected.step()
        torch.testing.assert_close(parameter.to_local(), reference[:3])
        state = optimizer.state[parameter]
        assert isinstance(state["exp_avg"], DTensor) and state["step"] == 3
        torch.testing.assert_close(state["exp_avg_sq"].to_local(), expected.state[reference]["exp_avg_sq"][:3])


def test_a_gradient_with_other_placements_is_refused() -> None:
    with fake_process_group(2):
        parameter = nn.Parameter(shard(torch.ones(4, 3)))
        parameter.grad = DTensor.from_local(torch.ones(4, 3), parameter.device_mesh, [Replicate()], run_check=False)
        optimizer = AdamW([{"params": [parameter]}], 0.1, BETAS)
        with pytest.raises(ValueError, match=r"shape \(4, 3\) has the placements \(Replicate\(\),\)"):
            optimizer.step()


def test_state_can_be_exchanged_with_the_adamw_of_torch() -> None:
    """Both have the same settings, and the number of steps is loaded onto the device of the parameters."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.5)
    optimizer = AdamW([{"params": [parameter]}], 0.1, BETAS)
    optimizer.step()
    copies = [nn.Parameter(parameter.detach().clone()) for _ in range(2)]
    torch_optimizer = torch.optim.AdamW([copies[0]], lr=0.3, fused=True)
    torch_optimizer.load_state_dict(optimizer.state_dict())
    restored_optimizer = AdamW([{"params": [copies[1]]}], 0.3, (0.5, 0.5))
    restored_optimizer.load_state_dict(torch_optimizer.state_dict())
    for copy in copies:
        copy.grad = parameter.grad.clone()
    for any_optimizer in (optimizer, torch_optimizer, restored_optimizer):
        any_optimizer.step()
    assert torch.equal(copies[0], parameter) and torch.equal(copies[1], parameter)

    on_meta = nn.Parameter(torch.ones(3, device="meta"))
    optimizer_on_meta = AdamW([{"params": [on_meta]}], 0.1, BETAS)
    optimizer_on_meta.load_state_dict(optimizer.state_dict())
    assert optimizer_on_meta.state[on_meta]["step"].is_meta


@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_rank_without_rows_takes_a_step(num_rows: int) -> None:
    """If a parameter has one row, the second of two ranks has none."""
    with fake_process_group(2, rank=1):
        mesh = init_device_mesh("cpu", (2,))
        rows = torch.ones(num_rows - 1, 3)
        parameter = nn.Parameter(
            DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(num_rows, 3), stride=(3, 1))
        )
        other = nn.Parameter(torch.ones(2))
        parameter.grad = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=(num_rows, 3), stride=(3, 1))
        other.grad = torch.ones(2)
        optimizer = AdamW([{"params": [parameter, other]}], 0.1, BETAS)
        optimizer.step()
        assert optimizer.state[parameter]["step"] == optimizer.state[other]["step"] == 1
        assert (parameter.to_local() < 1).all() and (other < 1).all()
