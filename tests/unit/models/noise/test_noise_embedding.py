"""Layers of noise: zeros stay zeros, variance is kept, and neither spectral norm nor weight decay applies."""

from __future__ import annotations

import torch

from credit.config.sections.trainer import TrainerConfig
from credit.models.layers.spectral_norm import SpectralNorm
from credit.models.noise.noise_embedding import CellNoiseEmbedding, NoiseFieldEmbedding, average_noise
from credit.models.wxformer import WXFormer
from credit.train.optim import build_optimizer
from tests.parallel.training import cases


def test_embedding_of_zeros_is_zero() -> None:
    torch.manual_seed(0)
    embedding = CellNoiseEmbedding(4)
    noise_BHWK = torch.randn(2, 6, 8, 4)
    assert embedding(noise_BHWK).std() > 0.5
    assert not embedding(torch.zeros_like(noise_BHWK)).any()


def test_averages_keep_the_variance() -> None:
    torch.manual_seed(0)
    coarse_BKHW = average_noise(torch.randn(20, 4, 33, 64), 2)
    assert coarse_BKHW.shape == (20, 4, 16, 32)
    torch.testing.assert_close(coarse_BKHW.var(), torch.tensor(1.0), rtol=0, atol=0.03)


def test_new_field_embeddings_start_at_zero() -> None:
    embedding = NoiseFieldEmbedding(3, 8, 2)
    value = embedding.initial_value("weight", embedding.weight.shape, torch.Generator())
    assert value.shape == (8, 3, 2, 2) and not value.any()


def test_layers_of_noise_have_neither_spectral_norm_nor_weight_decay() -> None:
    model = WXFormer.from_kwargs(**cases.settings(cases.Case(members=2)))
    optimizer = build_optimizer(model, TrainerConfig(max_steps=1, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] > 0 for group in optimizer.param_groups for p in group["params"]}
    noise_parameters = []
    for name, parameter in model.named_parameters():
        if "noise" in name or "scale_shift" in name:
            noise_parameters.append(name)
            assert not decays[id(parameter)], name
    assert "noise.cell_embedding.expand.weight" in noise_parameters
    assert "stages.0.noise_embed.weight" in noise_parameters
    normalized = [name for name, module in model.named_modules() if isinstance(module, SpectralNorm)]
    assert normalized and not any("noise" in name or "scale_shift" in name for name in normalized)
