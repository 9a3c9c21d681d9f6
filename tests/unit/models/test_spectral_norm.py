"""Spectral norm: its value, and when its vectors may move."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from credit.models.wxformer import WXFormer, spectral_norm
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks

from .small import build, fields


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: vector.clone() for name, vector in spectral_norm.vectors(model).items()}


def moved(model: nn.Module, before: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, vector in spectral_norm.vectors(model).items() if not torch.equal(vector, before[name])}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in model.named_parameters()}


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    scale = max(g.abs().max() for g in theirs.values())
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6 * scale.item(), msg=name)


def spoil_vectors(model: nn.Module) -> None:
    """Spoil the estimates, so that one more iteration changes sigma a lot."""
    generator = torch.Generator().manual_seed(3)
    for vector in spectral_norm.vectors(model).values():
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
    spectral_norm.settle_(model.modules(), 300)
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
        norm.armed = True
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
    assert len(spectral_norm.vectors(model)) == 2 * len(layers)
    assert spectral_norm.vectors(model).keys() == dict(model.named_buffers()).keys()
    assert not spectral_norm.vectors(build(use_spectral_norm=False))


def test_a_bare_model_iterates_once_a_training_forward() -> None:
    model = build().train()
    for _ in range(2):
        before = snapshot(model)
        once = {}
        for name, norm, chain in spectral_norm.parametrizations(model):
            u, v = norm.u.clone(), torch.empty_like(norm.v)
            spectral_norm.power_iteration_(norm.matrix(chain.original.detach()), u, v)
            once |= {f"{name}.u": u, f"{name}.v": v}
        model(fields())
        after = spectral_norm.vectors(model)
        assert moved(model, before)
        for name, vector in once.items():
            torch.testing.assert_close(after[name], vector, rtol=0, atol=0)


def test_eval_and_no_grad_never_iterate() -> None:
    model = build()
    spoil_vectors(model)
    before = snapshot(model)
    spectral_norm.arm(model)
    model.eval()(fields())
    with torch.no_grad():
        model.train()(fields())
    assert not moved(model, before)


def test_a_trainer_moves_the_vectors_once_per_step() -> None:
    model = build().train()
    spoil_vectors(model)
    spectral_norm.iterate_per_step(model)
    before = snapshot(model)
    model(fields())
    assert not moved(model, before)
    spectral_norm.arm(model)
    model(fields())
    assert moved(model, before) == {name for name, vector in before.items() if vector.numel() > 1}
    before = snapshot(model)
    model(model(fields())).sum().backward()  # later micro-steps and rollout steps
    assert not moved(model, before)


def rollout_gradients(model: WXFormer, prepare: Callable[[WXFormer], None]) -> dict[str, torch.Tensor]:
    """Gradients of a two-step rollout by a trainer's rules, from spoilt vectors."""
    spoil_vectors(model)
    prepare(model)
    spectral_norm.iterate_per_step(model)
    spectral_norm.arm(model)
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
        model(fields()).square().mean().backward()
        results.append(gradients(model))
    assert_close(results[1], results[0])


def test_several_forwards_before_one_backward() -> None:
    """Each forward keeps its own u and v: the sum's gradient is the sum of the gradients taken one by one."""
    together, apart = build().train(), build().train()
    for model in (together, apart):
        spoil_vectors(model)
    (together(fields(seed=1)).square().mean() + together(fields(seed=2)).square().mean()).backward()
    for seed in (1, 2):
        apart(fields(seed=seed)).square().mean().backward()
    assert_close(gradients(together), gradients(apart))


def test_sigma_is_float32_under_autocast_and_for_bfloat16_weights() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    spectral_norm.apply_spectral_norm(nn.Sequential(layer))
    norm = layer.parametrizations.weight[0]
    spectral_norm.iterate_([(norm, layer.parametrizations.weight.original.detach())], 20)
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
        for _, norm, chain in spectral_norm.parametrizations(model):
            matrix = norm.matrix(chain.original.detach())
            errors.append(1 - torch.dot(norm.u, matrix @ norm.v) / torch.linalg.svdvals(matrix)[0])
        return max(errors).item()

    assert worst_error() > 0.5
    spectral_norm.settle_(model.modules())
    assert worst_error() < 0.1
    spectral_norm.settle_(model.modules(), 200)
    assert worst_error() < 1e-3


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_a_compiled_layer_has_one_graph_with_the_iteration_and_one_without() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layer = build().stages[3].layers[0].train()
    layer.compile(backend=counter, fullgraph=True)
    x_BHWC = torch.randn(1, 2, 2, 64)
    for _ in range(3):
        spectral_norm.arm(layer)
        before = snapshot(layer)
        layer(x_BHWC)
        assert moved(layer, before)
        before = snapshot(layer)
        layer(x_BHWC)
        assert not moved(layer, before)
    assert counter.frame_count == 2


def test_weight_chains_are_those_that_have_names() -> None:
    model = checkpoint_blocks(build())
    assert set(spectral_norm.weight_chains(model)) == {(n, c) for _, n, c in spectral_norm.parametrizations(model)}


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
    for name, norm, _ in spectral_norm.parametrizations(layer):
        if "position_bias" not in name:
            norm.share(int("to_out" in name or "contract" in name), sums, sums)
    spectral_norm.SpectralNorm.share_sums(layer)
    return layer, sums


@pytest.mark.parametrize("prepare", [lambda model: None, checkpoint_layers])
def test_a_block_adds_up_for_all_its_weights_at_once(prepare: Callable[[WXFormer], None]) -> None:
    plain, model = build(), build()
    layer, sums = summed(model)
    assert_close(rollout_gradients(model, prepare), rollout_gradients(plain, lambda model: None))
    # two sums for the iterations of eight weights and their sigmas in both forwards; recomputation takes its sigmas
    assert sums.lengths[2:] == [8] * (4 if prepare is checkpoint_layers else 2) and len(sums.lengths[:2]) == 2
    for name, vector in spectral_norm.vectors(model).items():
        name = name.replace("_checkpoint_wrapped_module.", "")
        torch.testing.assert_close(vector, spectral_norm.vectors(plain)[name], msg=name)


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
    assert all(norm.prepared is None for _, norm, _ in spectral_norm.parametrizations(layer))


def sigma_of(layer: nn.Linear) -> torch.Tensor:
    norm = layer.parametrizations.weight[0]
    return torch.dot(norm.u, layer.parametrizations.weight.original @ norm.v)
