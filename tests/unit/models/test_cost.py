"""What a training step of the 1 degree starter costs: no more operations or memory than it did, on any machine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.wxformer import INPUTS, OUTPUTS, STARTER, build_ours

# GFLOP of a step, MB kept for its backward pass, the loss's two fields among them; lower them when less is needed
COST = {torch.float32: (160.3, 384.1), torch.bfloat16: (166.6, 337.3)}
TOLERANCE = 1.01


@pytest.mark.parametrize("dtype", COST, ids=str)
def test_a_training_step_costs_no_more_than_it_did(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = build_ours()
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    # tensors on the CPU by their kind, without values
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        _put_on_cpu(model)
        x = torch.empty(1, INPUTS, 1, STARTER["image_height"], STARTER["image_width"])
        own = {p.untyped_storage()._cdata for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                y = model(x)
            loss = F.mse_loss(y.float(), torch.empty(1, OUTPUTS, *x.shape[2:]))
        megabytes = sum(storage.nbytes() for place, storage in kept.items() if place not in own) / 1e6
        loss.backward()
    flops, memory = COST[dtype]
    assert counter.get_total_flops() / 1e9 <= TOLERANCE * flops
    assert megabytes <= TOLERANCE * memory


def _put_on_cpu(model: nn.Module) -> None:
    """Replace every parameter and buffer by one on the CPU."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
