"""Spectral norm: its value, and the times at which its singular vectors may change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from credit.models.layers import spectral_norm
from credit.models.wxformer import WXFormer
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks

from ..small import build, fields


def copy_vectors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: vector.clone() for name, vector in spectral_norm.find_singular_vectors(model).items()}


def find_changed_vectors(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {
        name
        for name, vector in spectral_norm.find_singular_vectors(model).items()
        if not torch.equal(vector, before[name])
    }


def copy_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}


def assert_gradients_close(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    scale = max(g.abs().max() for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-6 * scale.item(), msg=name)


def randomize_vectors(model: nn.Module) -> None:
    """Replace the singular vectors with random ones, so that one more iteration changes sigma a lot."""
    generator = torch.Generator().manual_seed(3)
    for vector in spectral_norm.find_singular_vectors(model).values():
        vector.copy_(F.normalize(torch.randn(vector.shape, generator=generator), dim=0))


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(7, 5),
    lambda: nn.Conv2d(3, 5, 3),
    lambda: nn.ConvTranspose2d(3, 5, 2),
]


@pytest.mark.parametrize("make", LAYERS)
def test_sigma_is_the_largest_singular_value(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer = make()
    original = layer.weight.detach().clone()
    matrix = (original.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else original).flatten(1)
    model = spectral_norm.apply_spectral_norm(nn.Sequential(layer))
    spectral_norm.advance_power_iterations(model, 300)
    torch.testing.assert_close(layer.weight, original / torch.linalg.svdvals(matrix)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", LAYERS)
def test_training_agrees_with_torch_hook(make: Callable[[], nn.Module]) -> None:
    """Compare vectors and weights over three steps with torch's older spectral_norm, which published weights use."""
    torch.manual_seed(0)
    tested_layer, torch_layer = make(), make()
    torch_layer.load_state_dict(tested_layer.state_dict())
    spectral_norm.apply_spectral_norm(nn.Sequential(tested_layer))
    nn.utils.spectral_norm(torch_layer)
    norm = tested_layer.parametrizations.weight[0]
    norm.u.copy_(torch_layer.weight_u)
    norm.v.copy_(torch_layer.weight_v)
    x = torch.randn(4, 7) if isinstance(tested_layer, nn.Linear) else torch.randn(2, 3, 6, 6)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (tested_layer, torch_layer)]
    for _ in range(3):
        spectral_norm.advance_power_iterations(tested_layer)
        for layer, optimizer in zip((tested_layer, torch_layer), optimizers, strict=True):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(norm.u, torch_layer.weight_u)
        torch.testing.assert_close(norm.v, torch_layer.weight_v)
        torch.testing.assert_close(tested_layer.parametrizations.weight.original, torch_layer.weight_orig)


def test_every_weight_is_normalised_and_vectors_are_float32_buffers() -> None:
    model = build()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))]
    assert len(spectral_norm.find_singular_vectors(model)) == 2 * len(layers)
    assert spectral_norm.find_singular_vectors(model).keys() == dict(model.named_buffers()).keys()
    assert not spectral_norm.find_singular_vectors(build(use_spectral_norm=False))


def test_an_iteration_takes_v_first_then_u() -> None:
    model = build().train()
    randomize_vectors(model)
    expected = {}
    for norm, chain in spectral_norm.find_spectral_norms(model).items():
        matrix = norm.matrix(chain.original.detach())
        v = F.normalize(matrix.t() @ norm.u, dim=0)
        expected[norm] = F.normalize(matrix @ v, dim=0), v
    spectral_norm.advance_power_iterations(model)
    for norm, (u, v) in expected.items():
        torch.testing.assert_close(norm.u, u)
        torch.testing.assert_close(norm.v, v)


def test_forwards_never_iterate() -> None:
    model = build()
    randomize_vectors(model)
    before = copy_vectors(model)
    model.eval()(fields())
    with torch.no_grad():
        model.train()(fields())
    model(model(fields())).sum().backward()
    checkpoint_layers(model)
    model(fields()).sum().backward()
    for vector, old in zip(spectral_norm.find_singular_vectors(model).values(), before.values(), strict=True):
        assert torch.equal(vector, old)


def test_all_vectors_move_and_those_of_frozen_weights_do_not() -> None:
    model = build().train()
    randomize_vectors(model)
    model.stages[0].requires_grad_(False)
    before = copy_vectors(model)
    spectral_norm.advance_power_iterations(model)
    trained = {name for name in before if not name.startswith("stages.0.")}
    assert find_changed_vectors(model, before) == {name for name in trained if before[name].numel() > 1}


def test_a_layer_in_two_places_iterates_once() -> None:
    torch.manual_seed(0)
    layer = spectral_norm.apply_spectral_norm(nn.Linear(6, 5))
    single_layer = copy.deepcopy(layer)
    spectral_norm.advance_power_iterations(nn.Sequential(layer, nn.Sequential(layer)))
    spectral_norm.advance_power_iterations(single_layer)
    assert torch.equal(layer.parametrizations.weight[0].u, single_layer.parametrizations.weight[0].u)


def test_modules_have_no_state_but_the_vectors() -> None:
    model = build().train()
    before = {norm: dict(vars(norm)) for norm in spectral_norm.find_spectral_norms(model)}
    model(fields()).sum().backward()
    spectral_norm.advance_power_iterations(model)
    model(fields())
    for norm, attributes in before.items():
        assert set(norm._buffers) == {"u", "v"}
        assert vars(norm) == attributes


def test_vectors_that_change_between_forward_and_backward_are_an_error() -> None:
    model = build().train()
    loss = model(fields()).sum()
    spectral_norm.advance_power_iterations(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def compute_rollout_gradients(model: WXFormer, prepare: Callable[[WXFormer], None]) -> dict[str, torch.Tensor]:
    """Return the gradients of a two-step rollout, computed in the order of the trainer, from random vectors."""
    randomize_vectors(model)
    prepare(model)
    spectral_norm.advance_power_iterations(model)
    first = model.train()(fields())
    (first.square().mean() + model(first).square().mean()).backward()
    return copy_gradients(model)


def checkpoint_layers(model: WXFormer) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: getattr(module, "_fsdp2_shard", False))


def test_recomputation_gives_the_same_rollout_gradients() -> None:
    plain = compute_rollout_gradients(build(), lambda model: None)
    recomputed = compute_rollout_gradients(build(), checkpoint_layers)
    assert_gradients_close(recomputed, plain)


def test_recomputation_of_a_bare_model_gives_the_same_gradients() -> None:
    results = []
    for prepare in (lambda model: None, checkpoint_layers):
        model = build().train()
        randomize_vectors(model)
        prepare(model)
        spectral_norm.advance_power_iterations(model)
        model(fields()).square().mean().backward()
        results.append(copy_gradients(model))
    assert_gradients_close(results[1], results[0])


def test_several_forwards_before_one_backward() -> None:
    """The gradient of a sum of losses is the sum of their gradients."""
    joint_model, separate_model = build().train(), build().train()
    for model in (joint_model, separate_model):
        randomize_vectors(model)
        spectral_norm.advance_power_iterations(model)
    (joint_model(fields(seed=1)).square().mean() + joint_model(fields(seed=2)).square().mean()).backward()
    for seed in (1, 2):
        separate_model(fields(seed=seed)).square().mean().backward()
    assert_gradients_close(copy_gradients(joint_model), copy_gradients(separate_model))


def test_sigma_is_float32_under_autocast_and_for_bfloat16_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    spectral_norm.apply_spectral_norm(nn.Sequential(layer))
    norm = layer.parametrizations.weight[0]
    spectral_norm.advance_power_iterations(layer, 20)
    weight = layer.weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer.weight, weight)
    rounded = layer.parametrizations.weight.original.detach().bfloat16()
    normalised = norm(rounded)
    assert normalised.dtype == torch.bfloat16
    sigma = torch.dot(norm.u, rounded.float() @ norm.v)
    assert sigma.dtype == torch.float32
    assert torch.equal(normalised, (rounded.float() * sigma.reciprocal()).bfloat16())


def test_iterations_converge_after_the_weights_were_replaced() -> None:
    model = build()
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), build(seed=5).parameters(), strict=True):
            parameter.copy_(source)

    def compute_worst_error() -> float:
        errors = []
        for norm, chain in spectral_norm.find_spectral_norms(model).items():
            matrix = norm.matrix(chain.original.detach())
            errors.append(1 - torch.dot(norm.u, matrix @ norm.v) / torch.linalg.svdvals(matrix)[0])
        return max(errors).item()

    assert compute_worst_error() > 0.5
    spectral_norm.advance_power_iterations(model, spectral_norm.INITIAL_ITERATIONS)
    assert compute_worst_error() < 0.1
    spectral_norm.advance_power_iterations(model, 200)
    assert compute_worst_error() < 1e-3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # raised by dynamo itself
def test_a_compiled_layer_is_not_recompiled_when_vectors_change() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layer = build().stages[3].layers[0].train()
    layer.compile(backend=counter, fullgraph=True)
    x_BHWC = torch.randn(1, 2, 2, 64)
    for _ in range(3):
        before = copy_vectors(layer)
        spectral_norm.advance_power_iterations(layer)
        assert find_changed_vectors(layer, before)
        layer(x_BHWC)
        layer(x_BHWC)
    assert counter.frame_count == 1


def test_all_spectral_norms_of_a_model_are_found() -> None:
    model = checkpoint_blocks(build())
    norms = {module for _, module in model.named_modules() if isinstance(module, spectral_norm.SpectralNorm)}
    assert spectral_norm.find_spectral_norms(model).keys() == norms


class RecordedAllReduce:
    """All-reduce over a single rank that records the numbers of summed elements."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        self.lengths.append(part.numel())
        return part.clone()


def split_last_layer(model: WXFormer) -> tuple[nn.Module, RecordedAllReduce]:
    """Declare the linear layers of the last transformer layer as split over one rank; return it and its all-reduce."""
    layer, all_reduce = model.stages[3].layers[0], RecordedAllReduce()
    for name, norm in layer.named_modules():
        if isinstance(norm, spectral_norm.SpectralNorm) and "position_bias" not in name:
            norm.share(int("to_out" in name or "contract" in name), all_reduce, all_reduce)
    spectral_norm.SpectralNorm.merge_all_reduces(layer)
    return layer, all_reduce


@pytest.mark.parametrize("prepare", [lambda model: None, checkpoint_layers])
def test_a_block_reduces_the_sigmas_of_all_its_weights_at_once(prepare: Callable[[WXFormer], None]) -> None:
    plain, model = build(), build()
    layer, all_reduce = split_last_layer(model)
    assert_gradients_close(
        compute_rollout_gradients(model, prepare), compute_rollout_gradients(plain, lambda model: None)
    )
    # Each all-reduce sums the sigmas of eight weights. There is one in each of two forwards and, with checkpointing,
    # one in each of two recomputations.
    assert all_reduce.lengths == [8] * (4 if prepare is checkpoint_layers else 2)
    for name, vector in spectral_norm.find_singular_vectors(model).items():
        name = name.replace("_checkpoint_wrapped_module.", "")
        torch.testing.assert_close(vector, spectral_norm.find_singular_vectors(plain)[name], msg=name)


def test_reduced_sigmas_are_discarded_after_a_forward() -> None:
    model = build().eval()
    layer, all_reduce = split_last_layer(model)
    x_BHWC = torch.randn(1, 2, 2, 64)
    layer(x_BHWC)
    linear = layer.long_feed_forward.expand
    with torch.no_grad():
        linear.parametrizations.weight.original.mul_(2)
    torch.testing.assert_close(linear.weight, linear.parametrizations.weight.original / compute_sigma(linear))
    assert all_reduce.lengths == [8, 1]
    with pytest.raises(RuntimeError):
        layer(x_BHWC[..., 1:])
    assert not spectral_norm._weights_by_norm.get()


def compute_sigma(layer: nn.Linear) -> torch.Tensor:
    norm = layer.parametrizations.weight[0]
    return torch.dot(norm.u, layer.parametrizations.weight.original @ norm.v)
