"""Fields reach the host in their order, and a device that is not the CPU has its next work by then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from credit.parallel.host_copy import prefetch_to_host


# the meta device stands for one that computes by itself
@pytest.mark.parametrize(("device", "made"), [("cpu", [1, 2, 3]), ("meta", [2, 3, 3])])
def test_the_next_is_asked_for_before_one_is_handed_out(device: str, made: list[int]) -> None:
    begun: list[int] = []

    def outputs() -> Iterator[torch.Tensor]:
        for number in range(1, 4):
            begun.append(number)
            yield torch.empty(number, device=device)

    seen = [(len(output), begun[-1]) for output in prefetch_to_host(outputs())]
    assert seen == list(zip([1, 2, 3], made, strict=True))


def test_nothing_comes_of_nothing() -> None:
    assert list(prefetch_to_host([])) == []
