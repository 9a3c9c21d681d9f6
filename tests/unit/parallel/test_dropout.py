"""Random state of a tensor-parallel rank between a colwise and a rowwise layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.parallel.tensor.dropout import RankRandomState


def test_the_generator_of_the_given_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generators on the CPU stand for those of two GPUs, the first of which is the current device."""
    generators = (torch.Generator(), torch.Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    common_states = [generator.get_state() for generator in generators]
    random_state = RankRandomState(1, nn.Dropout())
    device = torch.device("cuda", 1)
    random_state.enter(device)
    assert torch.equal(generators[0].get_state(), common_states[0])
    assert not torch.equal(generators[1].get_state(), common_states[1])
    random_state.leave(device)
    assert torch.equal(generators[1].get_state(), common_states[1])


def test_ranks_draw_different_numbers_inside_and_equal_ones_after() -> None:
    numbers_inside = []
    numbers_after = []
    for rank in (0, 1, 1):
        torch.manual_seed(0)
        random_state = RankRandomState(rank, nn.Dropout())
        random_state.enter(torch.device("cpu"))
        numbers_inside.append(torch.rand(()).item())
        random_state.leave(torch.device("cpu"))
        numbers_after.append(torch.rand(()).item())
    assert numbers_inside[0] != numbers_inside[1] == numbers_inside[2]
    assert len(set(numbers_after)) == 1
