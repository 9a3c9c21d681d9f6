"""Seeded dropout: rate, independence of batch and parts, and the layers that have it."""

from __future__ import annotations

import pytest
import torch

from credit.errors import ConfigError
from credit.models.layers.seeded_dropout import SeededDropout
from credit.models.layers.window_attention import to_windows
from credit.models.wxformer import WXFormer
from tests.parallel.training import cases

SEEDS_BM = torch.randint(2**62, (3, 2), generator=torch.Generator().manual_seed(0))


def test_rate_and_independence() -> None:
    x = torch.ones(3, 20, 30, 64)
    masks = [SeededDropout(0.1, number).drop_channels(x, SEEDS_BM) for number in range(3)]
    for mask in masks:
        dropped = mask == 0
        torch.testing.assert_close(dropped.float().mean((1, 2, 3)), torch.full((3,), 0.1), rtol=0, atol=0.005)
        torch.testing.assert_close(mask[~dropped], torch.full_like(mask[~dropped], 1 / 0.9), rtol=1e-4, atol=0)
        # Neighbouring channels, cells and rows are independent, and so are samples.
        for dim in (1, 2, 3):
            both = (dropped & dropped.roll(1, dim)).float().mean()
            torch.testing.assert_close(both, torch.tensor(0.01), rtol=0, atol=0.002)
        assert (dropped[0] & dropped[1]).float().mean() < 0.015
    # Masks of different layers are independent, also for layers with the same memory.
    assert ((masks[0] == 0) & (masks[2] == 0)).float().mean() < 0.015


@pytest.mark.parametrize("num_units", [8, 10])
def test_a_mask_does_not_depend_on_the_batch_or_on_the_part_of_a_rank(num_units: int) -> None:
    x = torch.rand(3, 4, 6, num_units)
    dropout = SeededDropout(0.3, 5)
    full_output = dropout.drop_channels(x, SEEDS_BM)
    assert torch.equal(dropout.drop_channels(x[1:2], SEEDS_BM[1:2]), full_output[1:2])
    half = num_units // 2
    parts = []
    for rank in range(2):
        dropout.first_unit = rank * half
        parts.append(dropout.drop_channels(x[..., rank * half : (rank + 1) * half], SEEDS_BM))
    assert torch.equal(torch.cat(parts, dim=-1), full_output)


def test_attention_weights() -> None:
    heads, window = 4, 3
    weights_NhLL = torch.rand(len(to_windows(torch.zeros(3, 6, 9, 1), window, strided=False)), heads, 9, 9)
    dropout = SeededDropout(0.25, 1)
    full_output = dropout.drop_attention_weights(weights_NhLL, SEEDS_BM, heads)
    assert abs((full_output == 0).float().mean() - 0.25) < 0.02
    windows = len(weights_NhLL) // 3
    single_sample = dropout.drop_attention_weights(weights_NhLL[windows : 2 * windows], SEEDS_BM[1:2], heads)
    assert torch.equal(single_sample, full_output[windows : 2 * windows])
    dropout.first_unit = 2
    assert torch.equal(dropout.drop_attention_weights(weights_NhLL[:, 2:], SEEDS_BM, heads), full_output[:, 2:])


def test_a_seed_of_zero_drops_nothing() -> None:
    x = torch.rand(2, 4, 6, 8)
    seeds_BM = torch.tensor([[0], [5]])
    dropped = SeededDropout(0.5, 0).drop_channels(x, seeds_BM)
    assert torch.equal(dropped[0], x[0]) and not torch.equal(dropped[1], x[1])


@pytest.mark.parametrize(
    ("rate", "dropout", "expected"),
    [(None, 0.0, {"feed_forward": 0.1}), (0.2, 0.0, {"feed_forward": 0.2}),
     (None, 0.3, {"attention": 0.3, "feed_forward": 0.3}), (0.2, 0.3, {"attention": 0.3, "feed_forward": 0.2})],
)  # fmt: skip
def test_rates_of_a_network(rate: float | None, dropout: float, expected: dict[str, float]) -> None:
    noise = {"kind": "dropout", "memory": ["step", "forecast"]}
    if rate is not None:
        noise["rate"] = rate
    settings = {**cases.settings(cases.Case(dropout=dropout)), "noise": noise}
    model = WXFormer.from_kwargs(**settings)
    rates = {}
    for name, module in model.named_modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0
        if isinstance(module, SeededDropout):
            rates[next(part for part in ("attention", "feed_forward") if part in name)] = module.rate
    assert rates == expected
    # Also in eval mode, the output depends on the seeds. Without seeds, it equals that of the plain network.
    x = torch.randn(2, 4, 1, cases.ROWS, cases.COLUMNS)
    model.to(torch.float64).to(torch.float32)
    plain = WXFormer.from_kwargs(**cases.settings(cases.Case()))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(x), plain.eval()(x))
        first, second = (model(x, {"dropout": SEEDS_BM[rows]}) for rows in ([0, 1], [0, 2]))
    torch.testing.assert_close(first[0], second[0])
    assert (first[1] - second[1]).abs().max() > 1e-3


def test_too_many_memories() -> None:
    noise = {"kind": "dropout", "memory": [f"{hours}h" for hours in range(6, 60, 6)]}
    with pytest.raises(ConfigError, match="9 values of memory share 8 layers with dropout"):
        WXFormer.from_kwargs(**{**cases.settings(cases.Case()), "noise": noise})
