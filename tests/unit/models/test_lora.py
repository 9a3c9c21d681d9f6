"""LoRA adapters: trained and frozen weights, saved states, and merging, which does not change the function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from credit.errors import ConfigError
from credit.models import lora
from credit.models.kernels.dispatch import force_gpu_path
from credit.models.layers import spectral_norm
from credit.models.wxformer import WXFormer
from credit.parallel.blocks.activation_checkpoint import checkpoint_blocks
from credit.parallel.blocks.marks import strip_wrapper_prefixes

from .small import SETTINGS, build, fields

TARGETS = ["*.to_qkv", "*.contract", "*.convs.0", "decoder.*"]
LAYERS = (lambda: nn.Linear(7, 5), lambda: nn.Conv2d(3, 5, 3), lambda: nn.ConvTranspose2d(3, 5, 2))


def build_adapted_model(**changes: Any) -> nn.Module:
    """Return the small model with nonzero adapters."""
    model = lora.apply_lora(build(**changes), TARGETS, rank=3, alpha=6.0)
    initialise_adapters(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".b"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def initialise_adapters(model: nn.Module, seed: int = 0) -> None:
    state = model.state_dict()
    for name, value in lora.initial_adapters(model, seed):
        state[name].copy_(value)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for number in range(steps):
        spectral_norm.advance_power_iterations(model)
        model.train()(fields(seed=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("make", LAYERS)
def test_adapted_and_merged_weights_equal_the_formula(make: Callable[[], nn.Module]) -> None:
    """Compare the adapted weight and the merged weight with W + alpha / rank * B A, computed with numpy."""
    layer = make()
    weight = layer.weight.detach().numpy().copy()
    model = lora.apply_lora(nn.Sequential(layer), ["0"], rank=2, alpha=3.0)
    adapter = layer.parametrizations.weight[0]
    torch.nn.init.normal_(adapter.a)
    torch.nn.init.normal_(adapter.b)
    expected = weight + (1.5 * adapter.b.detach().numpy() @ adapter.a.detach().numpy()).reshape(weight.shape)
    torch.testing.assert_close(layer.weight.detach(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
    lora.merge_adapters(model)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
    torch.testing.assert_close(layer.weight.detach(), torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_spectral_norm", [True, False])
def test_training_starts_from_the_base_and_leaves_it_alone(use_spectral_norm: bool) -> None:
    base_model = build(use_spectral_norm=use_spectral_norm).eval()
    model = lora.apply_lora(build(use_spectral_norm=use_spectral_norm), TARGETS, rank=3, alpha=6.0)
    initialise_adapters(model)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(fields()), base_model(fields()), rtol=0, atol=1e-6)
    model.train()(fields()).sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in lora.initial_adapters(model, 0)} and with_gradient
    model.zero_grad()

    base = {name: tensor.clone() for name, tensor in lora.base_state_dict(model, set()).items()}
    assert {name: t.shape for name, t in base.items()} == {name: t.shape for name, t in base_model.state_dict().items()}
    saved = {name: tensor.clone() for name, tensor in lora.checkpoint_state_dict(model).items()}
    train(model)
    assert {
        name for name, t in lora.checkpoint_state_dict(model).items() if not torch.equal(t, saved[name])
    } == saved.keys()
    # Base weights stay equal bit for bit. Only u and v of adapted layers change; they are saved with the adapters.
    changed_names = {
        name for name, tensor in lora.base_state_dict(model, set()).items() if not torch.equal(tensor, base[name])
    }
    assert changed_names == {name.replace(".weight.1.", ".weight.0.") for name in saved if name.endswith((".u", ".v"))}


@pytest.mark.parametrize("use_spectral_norm", [True, False])
def test_merged_model_computes_the_same_under_plain_names(use_spectral_norm: bool) -> None:
    model = build_adapted_model(use_spectral_norm=use_spectral_norm)
    train(model, 1)
    with torch.no_grad():
        before = model.eval()(fields())
    base_model = build(use_spectral_norm=use_spectral_norm)
    lora.merge_adapters(model)
    assert list(lora.initial_adapters(model, 0)) == []
    base_model.load_state_dict(model.state_dict(), strict=True)
    with torch.no_grad():
        base, after = build(use_spectral_norm=use_spectral_norm).eval()(fields()), base_model.eval()(fields())
    assert (after - before).abs().max() < 1e-6 * before.abs().max()
    assert (before - base).abs().max() > 1e-3 * before.abs().max(), "the adapters did nothing"


def test_only_vectors_of_adapted_weights_are_iterated() -> None:
    model = build_adapted_model().train()
    frozen = {name: v.clone() for name, v in spectral_norm.find_singular_vectors(model).items() if ".weight.0." in name}
    moving = {name: v.clone() for name, v in spectral_norm.find_singular_vectors(model).items() if ".weight.1." in name}
    assert frozen and moving
    spectral_norm.advance_power_iterations(model)
    model(fields())
    spectral_norm.advance_power_iterations(model, 200)
    for name, vector in spectral_norm.find_singular_vectors(model).items():
        assert torch.equal(vector, frozen[name]) if name in frozen else not torch.equal(vector, moving[name])
    for norm, chain in spectral_norm.find_spectral_norms(model).items():
        if len(chain) == 2:
            matrix = norm.matrix(chain[0](chain.original).detach())
            sigma = torch.dot(norm.u, matrix @ norm.v)
            torch.testing.assert_close(sigma, torch.linalg.svdvals(matrix)[0], rtol=1e-3, atol=0)


class NormalisedPair(nn.Module):
    """A marked block of two spectrally normalised layers of one shape."""

    _fsdp2_shard = True

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (spectral_norm.apply_spectral_norm(nn.Linear(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def compute_gradients_of_two_steps(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of the second of two steps with two forwards each, and the singular vectors after it."""
    for _ in range(2):
        model.zero_grad()
        spectral_norm.advance_power_iterations(model)
        (model(x).square().mean() + model(2 * x).square().mean()).backward()
    gradients = {strip_wrapper_prefixes(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {
        strip_wrapper_prefixes(name): vector for name, vector in spectral_norm.find_singular_vectors(model).items()
    }


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("prepared", [False, True])
def test_checkpointing_does_not_mix_up_the_products_of_adapters(prepared: bool, mode: bool | str) -> None:
    """A power iteration that computes the adapted weight again would shift the results of selective checkpointing.

    There are as many samples as channels, so products have equal shapes, and exchanged results would raise no error.
    """
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), NormalisedPair(), NormalisedPair())
        lora.apply_lora(model, ["*.first", "*.second"], rank=2, alpha=4.0)
        for name, parameter in model.named_parameters():
            if name.endswith((".a", ".b")):
                nn.init.normal_(parameter)
        if prepared:
            for block in model[1:]:
                spectral_norm.install_batched_normalization(block, by_unit=False)
        if checkpointed:
            checkpoint_blocks(model, mode)
        with force_gpu_path() if prepared else contextlib.nullcontext():
            results.append(compute_gradients_of_two_steps(model, torch.randn(6, 4)))
    expected, recomputed = results
    assert recomputed.keys() == expected.keys() and len(expected) == 2 * 2 * 4
    for name, value in expected.items():
        torch.testing.assert_close(recomputed[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_a_checkpoint_holds_the_adapters_and_their_vectors() -> None:
    saved = lora.checkpoint_state_dict(build_adapted_model())
    assert {name.rpartition(".")[2] for name in saved} == {"a", "b", "u", "v"}
    assert lora.checkpoint_state_dict(build()).keys() == build().state_dict().keys()


def test_adapters_start_from_seed_and_path_on_the_meta_device_too() -> None:
    adapters = dict(lora.initial_adapters(lora.apply_lora(build(), TARGETS, rank=3, alpha=6.0), 1))
    with torch.device("meta"):
        empty = lora.apply_lora(WXFormer.from_kwargs(**SETTINGS), TARGETS, rank=3, alpha=6.0)
    assert all(parameter.is_meta for parameter in empty.parameters())
    meta_adapters, other_seed_adapters = dict(lora.initial_adapters(empty, 1)), dict(lora.initial_adapters(empty, 2))
    assert adapters.keys() == meta_adapters.keys()
    for name, value in adapters.items():
        assert torch.equal(value, meta_adapters[name])
        assert torch.equal(value, other_seed_adapters[name]) == name.endswith(".b") and value.any() == name.endswith(
            ".a"
        )


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"trainer.lora.targets: '\*.to_qvk' .* did you mean \"\*.to_qkv\""):
        lora.apply_lora(build(), ["*.to_out", "*.to_qvk"])
    with pytest.raises(ConfigError, match="did you mean"):
        lora.apply_lora(build(), ["stages.0.embed.conv.0"])
    with pytest.raises(ConfigError, match="matches no Linear"):
        lora.apply_lora(build(), ["*.norm"])


def test_layers_of_noise_train_without_adapters() -> None:
    model = lora.apply_lora(build(noise=["global", "cell", "spherical"]), ["*"], rank=2, alpha=4.0)
    noise_names = set()
    for name, parameter in model.named_parameters():
        if "noise" in name or "scale_shift" in name:
            assert parameter.requires_grad and "parametrizations" not in name
            noise_names.add(name)
    assert {"stages.0.noise_embed.weight", "noise.cell_embedding.contract.weight"} < noise_names
    assert noise_names < lora.checkpoint_state_dict(model).keys()
    # The base state for a base without noise has the names of a plain network. With noise it has all names.
    plain_names, noisy_names = (set(build(noise=noise).state_dict()) for noise in ([], ["global", "cell", "spherical"]))
    assert lora.base_state_dict(model, plain_names).keys() == plain_names
    assert lora.base_state_dict(model, noisy_names).keys() == noisy_names
