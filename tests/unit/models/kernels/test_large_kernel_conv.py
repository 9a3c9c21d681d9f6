"""Tensors that large-kernel convolutions save for the backward pass; the embedding's tests check their values."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from credit.models.kernels.dispatch import LARGE_KERNEL_CONV, use_plain_formulations
from credit.models.layers.cross_scale_embedding import CrossScaleEmbedding

from .gradients import count_saved_bytes


def test_only_the_field_is_saved_for_the_backward_pass() -> None:
    embed = CrossScaleEmbedding(8, 16, (4, 8, 16, 32), 2)
    x_BCHW = torch.randn(1, 8, 64, 64).contiguous(memory_format=torch.channels_last)
    weight_bytes = sum(conv.weight.nbytes for conv in embed.convs)
    assert count_saved_bytes(lambda: embed(x_BCHW)) - weight_bytes == x_BCHW.nbytes


def test_the_plain_formulation_can_replace_the_kernel() -> None:
    torch.manual_seed(0)
    embed = CrossScaleEmbedding(3, 16, (4, 8, 16), 2)
    x_BCHW = torch.randn(1, 3, 24, 24)
    kernel_BHWC = embed(x_BCHW)
    with use_plain_formulations(LARGE_KERNEL_CONV):
        plain_BHWC = embed(x_BCHW)
    assert not torch.equal(plain_BHWC, kernel_BHWC)
    torch.testing.assert_close(plain_BHWC, kernel_BHWC, rtol=1e-4, atol=1e-5)


class SumCounter(TorchDispatchMode):
    """Counter of the sums over all cells of a field, which only the gradients of biases need."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Call an operation, and count it if it is such a sum."""
        if func is torch.ops.aten.sum.dim_IntList and list(args[1]) == [0, 1, 2]:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_frozen_biases_get_no_gradients() -> None:
    torch.manual_seed(0)
    embed = CrossScaleEmbedding(3, 16, (4, 8, 16), 2)
    x_BCHW = torch.randn(1, 3, 24, 24)
    gradients = []
    num_sums = []
    for are_frozen in (False, True):
        for conv in embed.convs:
            conv.bias.requires_grad_(not are_frozen)
        embed.zero_grad(set_to_none=True)
        with SumCounter() as counter:
            embed(x_BCHW).square().sum().backward()
        gradients.append([conv.weight.grad for conv in embed.convs])
        num_sums.append(counter.count)
    assert all(conv.bias.grad is None for conv in embed.convs)
    assert num_sums[0] > 0 and num_sums[1] == 0
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
