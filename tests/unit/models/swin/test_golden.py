"""Agreement with stored results of the network that published FuXi weights were trained with.

`tests/data/make_fuxi_golden.py` wrote the results.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from credit.errors import CheckpointError
from credit.models.swin import Swin
from credit.models.swin.convert_published import convert_published_state

GOLDEN = Path(__file__).parents[3] / "data" / "golden"
NAMES = ("fuxi_plain", "fuxi_spectral_norm", "fuxi_interpolated")
# The golden files store weights as integers in this unit.
UNIT = 1 / 128


class Case:
    """A pair of golden files, and this package's model with the stored weights."""

    def __init__(self, name: str) -> None:
        self.settings = json.loads((GOLDEN / f"{name}.json").read_text())
        with np.load(GOLDEN / f"{name}.npz") as stored:
            self.stored = {key: torch.from_numpy(np.asarray(stored[key])) for key in stored.files}
        self.state = {}
        for key, value in self.group("state::").items():
            self.state[key] = value * UNIT if value.dtype == torch.int16 else value
        self.model = Swin.from_kwargs(**self.settings["swin"])
        self.model.load_state_dict(convert_published_state(self.state))

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.stored.items() if key.startswith(prefix)}


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_output_and_gradients(case: Case) -> None:
    y_BCTHW = case.model.eval()(case.stored["x"].float())
    y_reference = case.stored["y"]
    torch.testing.assert_close(y_BCTHW, y_reference, rtol=0, atol=1e-5 * y_reference.std().item())
    loss = y_BCTHW.square().mean()
    torch.testing.assert_close(loss, case.stored["loss"], rtol=1e-5, atol=0)
    loss.backward()
    # A gradient has the layout of its weight, so the conversion of weights converts it as well. It needs the number of
    # heads, which it reads from the logit scales.
    gradients = case.group("gradient::")
    converted = convert_published_state(gradients)
    total_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    parameters = dict(case.model.named_parameters())
    for name, parameter in parameters.items():
        if name not in converted:
            # With spectral norm, the published code does not train the projection to queries, keys and values.
            assert case.settings["swin"]["use_spectral_norm"]
            assert name.endswith("to_qkv.weight")
            continue
        gradient = parameter.grad
        if name.endswith("to_qkv.bias"):
            # The published projection has no bias for the keys.
            heads = case.model.blocks[0].attention.heads
            gradient = gradient.clone()
            gradient.view(heads, 3, -1)[:, 1] = 0
        difference = (gradient - converted[name]).norm().item()
        assert difference <= 1e-5 * converted[name].norm().item() + 1e-6 * total_norm, name


def test_parameter_count(case: Case) -> None:
    num_key_biases = case.settings["fuxi"]["depth"] * case.settings["fuxi"]["dim"]
    num_parameters = sum(parameter.numel() for parameter in case.model.parameters())
    assert num_parameters == case.settings["parameters_in_reference"] + num_key_biases


def test_names_that_are_unknown_or_missing() -> None:
    state = Case("fuxi_plain").state
    with pytest.raises(CheckpointError, match="unknown keys u_transformer.noise_inject.style.weight"):
        convert_published_state({**state, "u_transformer.noise_inject.style.weight": torch.zeros(1)})
    del state["u_transformer.layer.blocks.1.attn.logit_scale"]
    with pytest.raises(CheckpointError, match="u_transformer.layer.blocks.1.attn.logit_scale is missing"):
        convert_published_state(state)


def test_prefixes_and_constants_of_other_versions() -> None:
    state = Case("fuxi_plain").state
    constants = {
        "u_transformer.layer.blocks.1.attn_mask": torch.zeros(1),
        "u_transformer.layer.blocks.1.attn.relative_coords_table": torch.zeros(1),
    }
    wrapped = {"model_state_dict": {f"module.{key}": value for key, value in {**state, **constants}.items()}}
    assert convert_published_state(wrapped).keys() == convert_published_state(state).keys()
