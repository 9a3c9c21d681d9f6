"""Window attention compared with a plain computation, cell by cell."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from credit.models.inference import prepare_for_inference
from credit.models.layers.window_attention import DynamicPositionBias, WindowAttention


def attend_cell_by_cell(attention: WindowAttention, x_BHWC: torch.Tensor) -> torch.Tensor:
    """Return the output of the layer; one cell at a time attends to the cells of its window."""
    _, H, W, C = x_BHWC.shape
    w, d = attention.window, attention.dim_head
    normed = attention.norm(x_BHWC)
    q_k_v = (normed @ attention.to_qkv.weight.T).view(*x_BHWC.shape[:3], C // d, 3, d)
    bias = attention.position_bias()
    rows, columns = (H // w, W // w) if attention.strided else (w, w)

    def find_window_and_position(r: int, c: int) -> tuple[tuple[int, int], int]:
        if attention.strided:
            return (r % rows, c % columns), (r // rows) * w + c // columns
        return (r // w, c // w), (r % w) * w + c % w

    cells = [(r, c) for r in range(H) for c in range(W)]
    result = torch.empty_like(x_BHWC)
    for r, c in cells:
        window, i = find_window_and_position(r, c)
        window_cells = [cell for cell in cells if find_window_and_position(*cell)[0] == window]
        positions = [find_window_and_position(*cell)[1] for cell in window_cells]
        keys = torch.stack([q_k_v[:, row, column, :, 1] for row, column in window_cells], dim=2)  # B, heads, cells, d
        values = torch.stack([q_k_v[:, row, column, :, 2] for row, column in window_cells], dim=2)
        scores = (keys * q_k_v[:, r, c, :, 0].unsqueeze(2)).sum(-1) * d**-0.5 + bias[i, positions]
        result[:, r, c] = (scores.softmax(-1).unsqueeze(-1) * values).sum(2).flatten(1)
    return result @ attention.to_out.weight.T + attention.to_out.bias


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("strided", [False, True])
def test_windows_heads_and_bias(strided: bool, window: int) -> None:
    torch.manual_seed(0)
    attention = WindowAttention(12, 4, window, strided=strided, dropout=0.0, bias_index="published").eval()
    x_BHWC = torch.randn(2, 4, 6, 12)
    with torch.no_grad():
        torch.testing.assert_close(attention(x_BHWC), attend_cell_by_cell(attention, x_BHWC), rtol=1e-5, atol=1e-6)


def test_a_window_of_one_cell_has_the_gradients_of_the_plain_computation() -> None:
    torch.manual_seed(0)
    attention = WindowAttention(12, 4, 1, strided=True, dropout=0.0, bias_index="published")
    x_BHWC = torch.randn(1, 4, 6, 12)
    names, parameters = zip(*attention.named_parameters(), strict=True)
    gradients, expected = (
        torch.autograd.grad(attend(x_BHWC).square().sum(), parameters)
        for attend in (attention, partial(attend_cell_by_cell, attention))
    )
    for name, gradient, expected_gradient in zip(names, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-5, msg=name)
        assert not gradient.any() or "position_bias" not in name


@pytest.mark.parametrize("window", [1, 2, 3])
def test_exact_index_evaluates_the_network_at_the_offset(window: int) -> None:
    torch.manual_seed(0)
    bias = DynamicPositionBias(8, window, "exact")
    with torch.no_grad():
        table = bias()
        for i in range(window**2):
            for j in range(window**2):
                offset = torch.tensor([i // window - j // window, i % window - j % window], dtype=torch.float32)
                torch.testing.assert_close(table[i, j], bias.layers(offset)[0])


@pytest.mark.parametrize("window", [1, 2, 3])
def test_published_index_follows_its_formula_and_differs_from_the_exact_one(window: int) -> None:
    torch.manual_seed(0)
    published, exact = (DynamicPositionBias(8, window, index) for index in ("published", "exact"))
    exact.load_state_dict(published.state_dict())
    w = window
    with torch.no_grad():
        grid = torch.tensor([[a, b] for a in range(-w, w + 1) for b in range(-w, w + 1)], dtype=torch.float32)
        values = published.layers(grid)[:, 0]
        table = published()
        for i in range(w * w):
            for j in range(w * w):
                dr, dc = i // w - j // w, i % w - j % w
                torch.testing.assert_close(table[i, j], values[(dr + w - 1) * (2 * w - 1) + dc + w - 1])
        assert not torch.allclose(table, exact())


def test_inference_computes_the_bias_once() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(DynamicPositionBias(8, 3, "exact"))
    expected = model[0]()
    prepare_for_inference(model)
    assert torch.equal(model[0](), expected) and model[0]() is model[0]()
    assert "cached_bias" not in model[0].state_dict()


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    attention = WindowAttention(8, 4, 2, strided=False, dropout=0.5, bias_index="published")
    x_BHWC = torch.randn(1, 4, 4, 8)
    assert not torch.equal(attention(x_BHWC), attention(x_BHWC))
    attention.eval()
    assert torch.equal(attention(x_BHWC), attention(x_BHWC))


def test_position_bias_is_not_rounded_under_autocast() -> None:
    torch.manual_seed(0)
    bias = DynamicPositionBias(8, 3, "published")
    expected = bias()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias(), expected)


def test_dropped_weights_average_to_the_exact_result() -> None:
    torch.manual_seed(0)
    attention = WindowAttention(16, 8, 4, strided=False, dropout=0.3, bias_index="exact")
    x_BHWC = torch.randn(1, 32, 32, 16)
    exact = attention.eval()(x_BHWC)
    attention.train()
    dropped = torch.stack([attention(x_BHWC) for _ in range(100)])
    assert not torch.equal(dropped[0], dropped[1])
    assert (dropped.mean(0) - exact).std() < 0.1 * exact.std()


def test_a_window_that_does_not_fit_is_refused() -> None:
    attention = WindowAttention(8, 4, 4)
    with pytest.raises(ValueError, match="a window of 4 x 4 cells does not divide a grid of 8 x 6 cells"):
        attention(torch.randn(1, 8, 6, 8))
