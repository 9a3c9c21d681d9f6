"""Spectral norm: its value, and when its vectors may move."""

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


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: vector.clone() for name, vector in spectral_norm.find_singular_vectors(model).items()}


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {
        name
        for name, vector in spectral_norm.find_singular_vectors(model).items()
        if not torch.equal(vector, before[name])
    }


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    scale = max(g.abs().max() for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6 * scale.item(), msg=name)


def spoil_vectors(model: nn.Module) -> None:
    """Spoil the estimates, so that one more iteration changes sigma a lot."""
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
    """torch's older spectral_norm, the one in published weights: same vectors, weights and gradients over steps."""
    torch.manual_seed(0)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    spectral_norm.apply_spectral_norm(nn.Sequential(ours))
    nn.utils.spectral_norm(theirs)
    norm = ours.parametrizations.weight[0]
    norm.u.copy_(theirs.weight_u)
    norm.v.copy_(theirs.weight_v)
    x = torch.randn(4, 7) if isinstance(ours, nn.Linear) else torch.randn(2, 3, 6, 6)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.05) for layer in (ours, theirs)]
    for _ in range(3):
        spectral_norm.advance_power_iterations(ours)
        for layer, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(norm.u, theirs.weight_u)
        torch.testing.assert_close(norm.v, theirs.weight_v)
        torch.testing.assert_close(ours.parametrizations.weight.original, theirs.weight_orig)


def test_every_weight_is_normalised_and_vectors_are_float32_buffers() -> None:
    model = build()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))]
    assert len(spectral_norm.find_singular_vectors(model)) == 2 * len(layers)
    assert spectral_norm.find_singular_vectors(model).keys() == dict(model.named_buffers()).keys()
    assert not spectral_norm.find_singular_vectors(build(use_spectral_norm=False))


def test_an_iteration_takes_v_first_then_u() -> None:
    model = build().train()
    spoil_vectors(model)
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
    spoil_vectors(model)
    before = snapshot(model)
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
    spoil_vectors(model)
    model.stages[0].requires_grad_(False)
    before = snapshot(model)
    spectral_norm.advance_power_iterations(model)
    trained = {name for name in before if not name.startswith("stages.0.")}
    assert moved(model, before) == {name for name in trained if before[name].numel() > 1}


def test_a_layer_in_two_places_iterates_once() -> None:
    torch.manual_seed(0)
    layer = spectral_norm.apply_spectral_norm(nn.Linear(6, 5))
    alone = copy.deepcopy(layer)
    spectral_norm.advance_power_iterations(nn.Sequential(layer, nn.Sequential(layer)))
    spectral_norm.advance_power_iterations(alone)
    assert torch.equal(layer.parametrizations.weight[0].u, alone.parametrizations.weight[0].u)


def test_modules_have_no_state_but_the_vectors() -> None:
    model = build().train()
    before = {norm: dict(vars(norm)) for norm in spectral_norm.find_spectral_norms(model)}
    model(fields()).sum().backward()
    spectral_norm.advance_power_iterations(model)
    model(fields())
    for norm, attributes in before.items():
        assert set(norm._buffers) == {"u", "v"}
        assert vars(norm) == attributes


def test_vectors_that_move_between_forward_and_backward_are_noticed() -> None:
    model = build().train()
    loss = model(fields()).sum()
    spectral_norm.advance_power_iterations(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def rollout_gradients(model: WXFormer, prepare: Callable[[WXFormer], None]) -> dict[str, torch.Tensor]:
    """Gradients of a two-step rollout by a trainer's rules, from spoilt vectors."""
    spoil_vectors(model)
    prepare(model)
    spectral_norm.advance_power_iterations(model)
    first = model.train()(fields())
    (first.square().mean() + model(first).square().mean()).backward()
    return gradients(model)


def checkpoint_layers(model: WXFormer) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: getattr(module, "_fsdp2_shard", False))


def test_recomputation_gives_the_same_rollout_gradients() -> None:
    plain = rollout_gradients(build(), lambda model: None)
    recomputed = rollout_gradients(build(), checkpoint_layers)
    assert_close(recomputed, plain)


def test_recomputation_of_a_bare_model_gives_the_same_gradients() -> None:
    results = []
    for prepare in (lambda model: None, checkpoint_layers):
        model = build().train()
        spoil_vectors(model)
        prepare(model)
        spectral_norm.advance_power_iterations(model)
        model(fields()).square().mean().backward()
        results.append(gradients(model))
    assert_close(results[1], results[0])


def test_several_forwards_before_one_backward() -> None:
    """The sum's gradient is the sum of the gradients taken one by one."""
    together, apart = build().train(), build().train()
    for model in (together, apart):
        spoil_vectors(model)
        spectral_norm.advance_power_iterations(model)
    (together(fields(seed=1)).square().mean() + together(fields(seed=2)).square().mean()).backward()
    for seed in (1, 2):
        apart(fields(seed=seed)).square().mean().backward()
    assert_close(gradients(together), gradients(apart))


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


def test_settling_recovers_after_the_weights_were_replaced() -> None:
    model = build()
    with torch.no_grad():
        for parameter, source in zip(model.parameters(), build(seed=5).parameters(), strict=True):
            parameter.copy_(source)

    def worst_error() -> float:
        errors = []
        for norm, chain in spectral_norm.find_spectral_norms(model).items():
            matrix = norm.matrix(chain.original.detach())
            errors.append(1 - torch.dot(norm.u, matrix @ norm.v) / torch.linalg.svdvals(matrix)[0])
        return max(errors).item()

    assert worst_error() > 0.5
    spectral_norm.advance_power_iterations(model, spectral_norm.INITIAL_ITERATIONS)
    assert worst_error() < 0.1
    spectral_norm.advance_power_iterations(model, 200)
    assert worst_error() < 1e-3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_a_compiled_layer_has_one_graph_whatever_the_vectors() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layer = build().stages[3].layers[0].train()
    layer.compile(backend=counter, fullgraph=True)
    x_BHWC = torch.randn(1, 2, 2, 64)
    for _ in range(3):
        before = snapshot(layer)
        spectral_norm.advance_power_iterations(layer)
        assert moved(layer, before)
        layer(x_BHWC)
        layer(x_BHWC)
    assert counter.frame_count == 1


def test_normalized_weights_are_those_that_have_names() -> None:
    model = checkpoint_blocks(build())
    named = {module for _, module in model.named_modules() if isinstance(module, spectral_norm.SpectralNorm)}
    assert spectral_norm.find_spectral_norms(model).keys() == named


class Sums:
    """Adds up over ranks of which there is one, and counts."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        self.lengths.append(part.numel())
        return part.clone()


def summed(model: WXFormer) -> tuple[nn.Module, Sums]:
    """Let the linear layers of the model's last transformer layer be split over one rank, by rows and by columns."""
    layer, sums = model.stages[3].layers[0], Sums()
    for name, norm in layer.named_modules():
        if isinstance(norm, spectral_norm.SpectralNorm) and "position_bias" not in name:
            norm.share(int("to_out" in name or "contract" in name), sums, sums)
    spectral_norm.SpectralNorm.merge_all_reduces(layer)
    return layer, sums


@pytest.mark.parametrize("prepare", [lambda model: None, checkpoint_layers])
def test_a_block_adds_up_for_all_its_weights_at_once(prepare: Callable[[WXFormer], None]) -> None:
    plain, model = build(), build()
    layer, sums = summed(model)
    assert_close(rollout_gradients(model, prepare), rollout_gradients(plain, lambda model: None))
    # the sigmas of eight weights in both forwards and, with checkpointing, in both recomputations
    assert sums.lengths == [8] * (4 if prepare is checkpoint_layers else 2)
    for name, vector in spectral_norm.find_singular_vectors(model).items():
        name = name.replace("_checkpoint_wrapped_module.", "")
        torch.testing.assert_close(vector, spectral_norm.find_singular_vectors(plain)[name], msg=name)


def test_what_was_added_up_for_a_forward_is_gone_after_it() -> None:
    model = build().eval()
    layer, sums = summed(model)
    x_BHWC = torch.randn(1, 2, 2, 64)
    layer(x_BHWC)
    linear = layer.long_feed_forward.expand
    with torch.no_grad():
        linear.parametrizations.weight.original.mul_(2)
    torch.testing.assert_close(linear.weight, linear.parametrizations.weight.original / sigma_of(linear))
    assert sums.lengths == [8, 1]
    with pytest.raises(RuntimeError):
        layer(x_BHWC[..., 1:])
    assert not spectral_norm._weights_by_norm.get()


def sigma_of(layer: nn.Linear) -> torch.Tensor:
    norm = layer.parametrizations.weight[0]
    return torch.dot(norm.u, layer.parametrizations.weight.original @ norm.v)
