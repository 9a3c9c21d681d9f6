"""Preparation of a network for inference: outputs stay equal bit for bit, and need fewer operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.models.inference import prepare_for_inference
from credit.models.kernels.dispatch import force_gpu_path
from credit.models.layers import spectral_norm

from .layers.test_spectral_norm_batched import OperationCounter
from .small import build

DTYPES = [None, torch.bfloat16]


@pytest.mark.parametrize("decoder", ["pixel_shuffle", "transposed"])
@pytest.mark.parametrize("out_channels", [3, 24])  # with 24 channels, the head's kernels are merged
@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_network_gives_the_same_values_without_spectral_norm(
    decoder: str, out_channels: int, dtype: torch.dtype | None
) -> None:
    model = build(out_channels=out_channels, decoder=decoder).eval()
    x = torch.randn(1, *model.spec.in_shape)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        expected, num_parameters = model(x), sum(p.numel() for p in model.parameters())
        with force_gpu_path():
            expected_on_gpu_path = model(x)
        assert prepare_for_inference(model, dtype) is model
        assert torch.equal(model(x), expected)
        with force_gpu_path():
            assert torch.equal(model(x), expected_on_gpu_path)
    assert not spectral_norm.find_spectral_norms(model)
    assert sum(p.numel() for p in model.parameters()) == num_parameters
    assert {"to_qkv.weight", "decoder.head.0.weight" if decoder == "pixel_shuffle" else "to_out.weight"} <= {
        name.removeprefix("stages.0.layers.0.short_attention.") for name in model.state_dict()
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_network_needs_fewer_operations(dtype: torch.dtype | None) -> None:
    counts = []
    for prepare in (lambda model: model, lambda model: prepare_for_inference(model, dtype)):
        model = prepare(build(depth=(2, 2, 2, 2)).eval())
        x = torch.randn(1, *model.spec.in_shape)
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None),
            OperationCounter() as count,
        ):
            model(x)
        counts.append(count.operations)
    assert counts[1] < 0.5 * counts[0]


def test_weights_are_not_cast_without_a_declaration_of_the_network() -> None:
    model = prepare_for_inference(nn.Sequential(nn.Linear(2, 2)), torch.bfloat16)
    assert model[0].weight.dtype == torch.float32
