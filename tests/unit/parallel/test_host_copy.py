"""Fields reach the host in their order, and a device that is not the CPU has its next work by then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from credit.parallel.host_copy import prefetch_to_host


# the meta device stands for one that computes by itself
@pytest.mark.parametrize(("device", "num_begun"), [("cpu", [1, 2, 3]), ("meta", [2, 3, 3])])
def test_the_next_is_asked_for_before_one_is_handed_out(device: str, num_begun: list[int]) -> None:
    begun_numbers: list[int] = []

    def outputs() -> Iterator[torch.Tensor]:
        for number in range(1, 4):
            begun_numbers.append(number)
            yield torch.empty(number, device=device)

    sizes_and_begun = [(len(output), begun_numbers[-1]) for output in prefetch_to_host(outputs())]
    assert sizes_and_begun == list(zip([1, 2, 3], num_begun, strict=True))


def test_nothing_comes_of_nothing() -> None:
    assert list(prefetch_to_host([])) == []
