"""Models moved from the meta device to memory: all tensors have values, or an error names those without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from credit.errors import ConfigError
from credit.models.initialise import initial_values
from credit.models.wxformer import WXFormer
from credit.parallel.state.materialise import allocate_, fill_, require_filled
from tests.unit.models.small import SETTINGS, build


def test_weights_equal_those_of_a_model_built_in_memory() -> None:
    with torch.device("meta"):
        model = WXFormer.from_kwargs(**SETTINGS)
    allocate_(model, torch.device("cpu"))
    with pytest.raises(ConfigError, match="without values"):
        require_filled(model)
    fill_(model, initial_values(model, seed=4))
    require_filled(model)
    for name, value in build(seed=4).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_buffer_without_values_is_named() -> None:
    class Plugin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.arange(3), persistent=False)

    with torch.device("meta"):
        model = Plugin()
    allocate_(model, torch.device("cpu"))
    fill_(model, initial_values(model, seed=0))
    with pytest.raises(ConfigError, match="Plugin leaves table without values"):
        require_filled(model)
