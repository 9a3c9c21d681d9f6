"""Fields reach the host in order. A device other than the CPU gets its next work before a field is yielded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from credit.parallel.host_copy import prefetch_to_host


# The meta device stands for a device that computes asynchronously.
@pytest.mark.parametrize(("device", "num_begun"), [("cpu", [1, 2, 3]), ("meta", [2, 3, 3])])
def test_next_output_of_a_device_is_requested_before_one_is_yielded(device: str, num_begun: list[int]) -> None:
    requested_numbers: list[int] = []

    def outputs() -> Iterator[torch.Tensor]:
        for number in range(1, 4):
            requested_numbers.append(number)
            yield torch.empty(number, device=device)

    sizes_and_requests = [(len(output), requested_numbers[-1]) for output in prefetch_to_host(outputs())]
    assert sizes_and_requests == list(zip([1, 2, 3], num_begun, strict=True))


def test_no_outputs_give_no_fields() -> None:
    assert list(prefetch_to_host([])) == []
