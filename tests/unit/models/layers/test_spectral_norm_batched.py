"""Weights of equal shape normalised together: the same results as one by one, in fewer operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from credit.models.layers import spectral_norm, spectral_norm_batched
from credit.models.wxformer import WXFormer
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.train.build.model import compile_blocks

from ..small import build, fields
from .test_spectral_norm import assert_gradients_close, compute_rollout_gradients, copy_gradients, copy_vectors

LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(7, 5),
    lambda: nn.Conv2d(3, 5, 3),
    lambda: nn.ConvTranspose2d(3, 5, 2),
]


@contextmanager
def normalise_together(model: nn.Module, by_block: bool = False) -> Iterator[nn.Module]:
    """Normalise the weights of a model together, as on a GPU, and compute everything else as on a CPU."""
    spectral_norm.install_batched_normalization(model, by_block)
    patches = {"is_cpu_path": lambda _: False}
    with mock.patch.multiple(spectral_norm, **patches), mock.patch.multiple(spectral_norm_batched, **patches):
        yield model


class SumOfLayers(nn.Module):
    """Weighted sum of the squared outputs of three layers for one input; the last layer has a frozen weight."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([make(), make(), make()])
        self.layers[2].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((n + 1) * layer(x).square().sum() for n, layer in enumerate(self.layers))


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_agrees_with_torch_hook(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Compare weights and vectors over optimizer steps with torch's older spectral_norm; one layer is frozen."""
    model, torch_model = SumOfLayers(make), SumOfLayers(make)
    spectral_norm.apply_spectral_norm(model)
    for torch_layer, layer in zip(torch_model.layers, model.layers, strict=True):
        norm = layer.parametrizations.weight[0]
        nn.utils.spectral_norm(torch_layer)
        torch_layer.weight_u.copy_(norm.u)
        torch_layer.weight_v.copy_(norm.v)
    torch_model.layers[2].eval()
    for layer in model.layers:
        # FSDP2 passes parameters in the dtype of its mixed precision.
        layer.parametrizations.weight.original.data = layer.parametrizations.weight.original.data.to(dtype)
        layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(4, 7) if isinstance(model.layers[0], nn.Linear) else torch.randn(2, 3, 6, 6)
    optimizers = [
        torch.optim.SGD((p for p in network.parameters() if p.requires_grad), lr=0.01)
        for network in (model, torch_model)
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    with normalise_together(model):
        for _ in range(3 if dtype == torch.float32 else 1):
            spectral_norm.advance_power_iterations(model)
            for network, optimizer, input_dtype in zip(
                (model, torch_model), optimizers, (dtype, torch.float32), strict=True
            ):
                optimizer.zero_grad()
                network(x.to(input_dtype)).backward()
                optimizer.step()
    for layer, torch_layer in zip(model.layers, torch_model.layers, strict=True):
        chain = layer.parametrizations.weight
        assert chain.original.dtype == dtype
        torch.testing.assert_close(chain[0].u, torch_layer.weight_u, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(chain[0].v, torch_layer.weight_v, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(chain.original.float(), torch_layer.weight_orig, rtol=tolerance, atol=tolerance)
        assert (chain.original.grad is None) == (torch_layer.weight_orig.grad is None)


def checkpointed(model: WXFormer) -> bool:
    """Checkpoint the blocks of a model, and return True, because weights are then normalised block by block."""
    checkpoint_blocks(model)
    return True


@pytest.mark.parametrize("prepare", [lambda model: False, lambda model: True, checkpointed])
def test_a_rollout_has_the_same_gradients_and_vectors(prepare: Callable[[WXFormer], bool]) -> None:
    plain, model = build(depth=(1, 1, 3, 1)), build(depth=(1, 1, 3, 1))
    expected = compute_rollout_gradients(plain, lambda model: None)
    with normalise_together(model, by_block=prepare(model)):
        assert_gradients_close(compute_rollout_gradients(model, lambda model: None), expected)
    for vector, expected_vector in zip(copy_vectors(model).values(), copy_vectors(plain).values(), strict=True):
        torch.testing.assert_close(vector, expected_vector)
    assert not spectral_norm._weights_by_norm.get()


def test_a_rollout_with_recomputed_steps_has_the_same_gradients() -> None:
    plain, model = build(), build()
    results = []
    for network in (plain, model):
        spectral_norm.advance_power_iterations(network.train())
        with normalise_together(network) if network is model else mock.MagicMock():
            y = torch.utils.checkpoint.checkpoint(network, fields(), use_reentrant=False)
            torch.utils.checkpoint.checkpoint(network, y, use_reentrant=False).square().mean().backward()
        results.append(copy_gradients(network))
    assert_gradients_close(results[1], results[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # raised by dynamo itself
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_normalise_their_own_weights(checkpointing: bool) -> None:
    torch._dynamo.reset()
    plain, model = build(), build()
    if checkpointing:
        checkpoint_blocks(model)
    compile_blocks(model, backend="aot_eager")
    with normalise_together(model, by_block=checkpointing):
        compiled_gradients = compute_rollout_gradients(model, lambda model: None)
    assert_gradients_close(compiled_gradients, compute_rollout_gradients(plain, lambda model: None))
    torch._dynamo.reset()


class OperationCounter(TorchDispatchMode):
    """Counter of the operations that are not views."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_deep_stage_takes_no_more_operations_than_a_shallow_one() -> None:
    """If weights are normalised one by one, each layer adds 18 weights with 21 operations each."""

    def count_operations(depth: int, norm: bool) -> int:
        model = build(depth=(1, 1, depth, 1), use_spectral_norm=norm).train()
        with normalise_together(model), OperationCounter() as count:
            spectral_norm.advance_power_iterations(model)
            model(fields()).square().mean().backward()
        return count.operations

    shallow, deep = (count_operations(depth, True) - count_operations(depth, False) for depth in (2, 6))
    assert deep < 1.1 * shallow


def test_a_copy_normalises_its_own_weights() -> None:
    model = build()
    with normalise_together(model, by_block=True):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(torch.randn_like(parameter))
            output, twin_output = model(fields()), twin(fields())
    assert torch.isfinite(twin_output).all()
    assert not torch.allclose(output, twin_output)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (1, 5)])
def test_gradient_of_a_matrix_is_that_of_autograd(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix, grad_y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    u, v = (torch.randn(length, generator=generator, dtype=torch.float64) for length in shape)
    matrix.requires_grad_()
    y = matrix / torch.dot(u, torch.mv(matrix, v))
    (expected,) = torch.autograd.grad(y, matrix, grad_y)
    normalized = spectral_norm_batched.normalize_matrix(matrix, u, v)
    (gradient,) = torch.autograd.grad(normalized, matrix, grad_y)
    torch.testing.assert_close(normalized, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
