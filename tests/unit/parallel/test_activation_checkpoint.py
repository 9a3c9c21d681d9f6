"""Checkpointed blocks run again in the backward pass and give the same gradients, also with spectral norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from credit.errors import ConfigError
from credit.models.kernels.dispatch import force_gpu_path
from credit.models.layers import spectral_norm
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from tests.unit.models.small import build, fields


def compute_rollout_gradients(mode: bool | str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a two-step rollout, and the number of calls of the first block."""
    model = build(seed=3).train()
    calls = []
    block = next(module for module in model.modules() if getattr(module, "_fsdp2_shard", False))
    forward = block.forward
    block.forward = lambda *arguments: (calls.append(1), forward(*arguments))[1]
    if mode:
        checkpoint_blocks(model, mode)
        checkpoint_blocks(model, mode)  # wrapped blocks are not wrapped again
    spectral_norm.advance_power_iterations(model)
    model(model(fields())).square().mean().backward()
    return {strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters()}, len(calls)


@pytest.mark.parametrize("mode", [True, "selective"])
def test_same_gradients_more_forwards(mode: bool | str) -> None:
    plain_gradients, calls = compute_rollout_gradients(False)
    recomputed_gradients, more_calls = compute_rollout_gradients(mode)
    assert plain_gradients.keys() == recomputed_gradients.keys()
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(recomputed_gradients[name], gradient, rtol=1e-5, atol=1e-7)
    assert more_calls == calls + 2, "each of the two steps recomputes the block once"


def test_nothing_is_computed_three_times() -> None:
    """Blocks that recompute something by themselves to save memory stop doing so once they are checkpointed."""

    def count_operations() -> int:
        # The kernels are small, because large ones need fewer operations on the CPU path.
        model = checkpoint_blocks(build(seed=3, cross_embed_kernel_sizes=[[2, 4]] * 4).train())
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            model(fields()).square().mean().backward()
        return counter.get_total_flops()

    with force_gpu_path():  # on this path, blocks recompute nothing by themselves
        expected_operations = count_operations()
    assert count_operations() == expected_operations


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm_of_torch_does_not_iterate_again(norm, mode: bool | str) -> None:
    """Over two steps of two forwards and one backward pass, gradients and vectors equal those without checkpointing."""
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), norm(nn.Linear(8, 8))))
        model[1]._fsdp2_shard = True
        if checkpointed:
            checkpoint_blocks(model, mode)
        x = torch.randn(5, 3)
        for _ in range(2):
            (model(x).square().mean() + model(2 * x).square().mean()).backward()
        values = {strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters()}
        results.append(values | {strip_wrapper_prefixes(name): buffer for name, buffer in model.named_buffers()})
    assert results[0].keys() == results[1].keys() and len(results[0]) == 10
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_a_normalised_layer_that_a_block_calls_twice(norm) -> None:
    """Each call iterates, so each call has its own vectors. Gradients equal those without checkpointing."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._fsdp2_shard = True
            self.layer = norm(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x).tanh())

    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), Twice(), Twice())
        if checkpointed:
            checkpoint_blocks(model)
        model(torch.randn(5, 3)).square().mean().backward()
        values = {strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters()}
        results.append(values | {strip_wrapper_prefixes(name): buffer for name, buffer in model.named_buffers()})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7, msg=name)


class Coder(nn.Module):
    """A marked block with two entry points, no forward, and layers that torch normalises."""

    _fsdp2_shard = True
    _fsdp2_forward_methods = ("encode", "decode")

    def __init__(self, norm: Callable[[nn.Linear], nn.Linear]) -> None:
        super().__init__()
        self.down, self.up = norm(nn.Linear(8, 32)), norm(nn.Linear(32, 8))
        self.calls = 0

    def encode(self, x: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"code": nn.functional.gelu(self.down(x) * scale)}

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.up(nn.functional.gelu(code)).sin()


def compute_round_trip_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the loss of two rounds through the entry points of a model's two coders."""
    for coder in (*model[1:], *model[1:]):
        x = x + coder.decode(coder.encode(model[0](x), scale=2.0)["code"])
    return x.square().mean()


# torch 2.14 announces that these hooks will also see the tensors that a selective checkpoint keeps.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("norm", [lambda layer: layer, nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_custom_entry_points_are_computed_again(norm: Callable, mode: bool | str) -> None:
    """Gradients and vectors equal those without checkpointing; each call runs twice and saves fewer values."""
    results, calls, saved_sizes = [], [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Coder(norm), Coder(norm))
        if checkpointed:
            checkpoint_blocks(model, mode)
        x, sizes = torch.randn(64, 8), []

        def record_size(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(record_size, lambda tensor: tensor):
                loss = compute_round_trip_loss(model, x)
            loss.backward()
        values = {strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters()}
        results.append(values | {strip_wrapper_prefixes(name): buffer for name, buffer in model.named_buffers()})
        calls.append(model[1].calls)
        saved_sizes.append(sum(sizes))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert calls == [8, 16], "two rounds of two entries in two steps"
    assert saved_sizes[1] < saved_sizes[0] / 2


def test_an_entry_point_that_is_not_there_is_refused() -> None:
    model = nn.Sequential(Coder(lambda layer: layer))
    model[0]._fsdp2_forward_methods = ("encode", "encoded")
    with pytest.raises(ConfigError, match=r"Coder._fsdp2_forward_methods: 'encoded' is not a method of the class"):
        checkpoint_blocks(model)


@pytest.mark.parametrize("mode", ["selectiv", "false", 2, [True]])
def test_another_mode_is_refused(mode) -> None:
    with pytest.raises(ConfigError, match="trainer.activation_checkpoint: .* is not one of true, false, selective"):
        checkpoint_blocks(build(), mode)


def test_a_model_without_blocks() -> None:
    with pytest.raises(ConfigError, match="marks no block"):
        checkpoint_blocks(nn.Linear(1, 1))
