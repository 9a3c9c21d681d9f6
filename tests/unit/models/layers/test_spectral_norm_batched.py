"""Weights of one shape normalised together: the same as one by one, in fewer operations."""

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
from .test_spectral_norm import assert_close, gradients, rollout_gradients, snapshot

LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(7, 5),
    lambda: nn.Conv2d(3, 5, 3),
    lambda: nn.ConvTranspose2d(3, 5, 2),
]


@contextmanager
def together(model: nn.Module, by_block: bool = False) -> Iterator[nn.Module]:
    """Let the model's weights be normalised as on a GPU, and all else be done as on a CPU."""
    spectral_norm.install_batched_normalization(model, by_block)
    patches = {"is_cpu_path": lambda _: False}
    with mock.patch.multiple(spectral_norm, **patches), mock.patch.multiple(spectral_norm_batched, **patches):
        yield model


class Sum(nn.Module):
    """Adds up what three layers make of one input; the last has a frozen weight."""

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
    """torch's older spectral_norm: the same weights, vectors and gradients over steps; a frozen layer's stay."""
    ours, theirs = Sum(make), Sum(make)
    spectral_norm.apply_spectral_norm(ours)
    for layer, ours_layer in zip(theirs.layers, ours.layers, strict=True):
        norm = ours_layer.parametrizations.weight[0]
        nn.utils.spectral_norm(layer)
        layer.weight_u.copy_(norm.u)
        layer.weight_v.copy_(norm.v)
    theirs.layers[2].eval()
    for layer in ours.layers:
        # as FSDP2 hands it over
        layer.parametrizations.weight.original.data = layer.parametrizations.weight.original.data.to(dtype)
        layer.bias.data = layer.bias.data.to(dtype)
    x = torch.randn(4, 7) if isinstance(ours.layers[0], nn.Linear) else torch.randn(2, 3, 6, 6)
    optimizers = [
        torch.optim.SGD((p for p in each.parameters() if p.requires_grad), lr=0.01) for each in (ours, theirs)
    ]
    wide = 1e-5 if dtype == torch.float32 else 0.03
    with together(ours):
        for _ in range(3 if dtype == torch.float32 else 1):
            spectral_norm.advance_power_iterations(ours)
            for each, optimizer, kind in zip((ours, theirs), optimizers, (dtype, torch.float32), strict=True):
                optimizer.zero_grad()
                each(x.to(kind)).backward()
                optimizer.step()
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        chain = mine.parametrizations.weight
        assert chain.original.dtype == dtype
        torch.testing.assert_close(chain[0].u, other.weight_u, rtol=wide, atol=wide)
        torch.testing.assert_close(chain[0].v, other.weight_v, rtol=wide, atol=wide)
        torch.testing.assert_close(chain.original.float(), other.weight_orig, rtol=wide, atol=wide)
        assert (chain.original.grad is None) == (other.weight_orig.grad is None)


def checkpointed(model: WXFormer) -> bool:
    checkpoint_blocks(model)
    return True


@pytest.mark.parametrize("prepare", [lambda model: False, lambda model: True, checkpointed])
def test_a_rollout_has_the_same_gradients_and_vectors(prepare: Callable[[WXFormer], bool]) -> None:
    plain, model = build(depth=(1, 1, 3, 1)), build(depth=(1, 1, 3, 1))
    expected = rollout_gradients(plain, lambda model: None)
    with together(model, by_block=prepare(model)):
        assert_close(rollout_gradients(model, lambda model: None), expected)
    for ours, theirs in zip(snapshot(model).values(), snapshot(plain).values(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not spectral_norm._weights_by_norm.get()


def test_a_rollout_that_is_computed_again_has_the_same_gradients() -> None:
    plain, model = build(), build()
    found = []
    for each in (plain, model):
        spectral_norm.advance_power_iterations(each.train())
        with together(each) if each is model else mock.MagicMock():
            again = torch.utils.checkpoint.checkpoint(each, fields(), use_reentrant=False)
            torch.utils.checkpoint.checkpoint(each, again, use_reentrant=False).square().mean().backward()
        found.append(gradients(each))
    assert_close(found[1], found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_normalise_their_own_weights(checkpointing: bool) -> None:
    torch._dynamo.reset()
    plain, model = build(), build()
    if checkpointing:
        checkpoint_blocks(model)
    compile_blocks(model, backend="aot_eager")
    with together(model, by_block=checkpointing):
        ours = rollout_gradients(model, lambda model: None)
    assert_close(ours, rollout_gradients(plain, lambda model: None))
    torch._dynamo.reset()


class Count(TorchDispatchMode):
    """Counts operations that are not views."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_deep_stage_takes_no_more_operations_than_a_shallow_one() -> None:
    """One by one, a layer more has 18 weights with 21 operations each."""

    def operations(depth: int, norm: bool) -> int:
        model = build(depth=(1, 1, depth, 1), use_spectral_norm=norm).train()
        with together(model), Count() as count:
            spectral_norm.advance_power_iterations(model)
            model(fields()).square().mean().backward()
        return count.operations

    shallow, deep = (operations(depth, True) - operations(depth, False) for depth in (2, 6))
    assert deep < 1.1 * shallow


def test_a_copy_normalises_its_own_weights() -> None:
    model = build()
    with together(model, by_block=True):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(torch.randn_like(parameter))
            ours, theirs = model(fields()), twin(fields())
    assert torch.isfinite(theirs).all()
    assert not torch.allclose(ours, theirs)


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
