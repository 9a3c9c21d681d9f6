"""The norm of gradients of several dtypes equals that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.parallel.reduce import reduce_norm_and_flags


def test_gradients_of_several_dtypes() -> None:
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float64, torch.bfloat16, torch.float32, torch.float64)
    gradients = [torch.randn(7, n + 2, generator=generator).to(dtype) for n, dtype in enumerate(dtypes)]
    norm, sums = reduce_norm_and_flags(gradients, [torch.tensor(3.0)])
    expected = nn.utils.get_total_norm([gradient.double() for gradient in gradients])
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert sums.tolist() == [3.0]
