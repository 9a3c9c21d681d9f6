"""Agreement with stored results of the network that the published weights were trained with.

Tolerances: 1e-5 of the output's standard deviation, 1e-6 relative for the loss, and for each gradient norm 1e-4
relative plus 1e-7 of the total norm. Some true gradients are zero, and their stored norms are rounding errors.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from credit.models.layers.spectral_norm import advance_power_iterations
from credit.models.wxformer import from_published
from credit.models.wxformer.convert_published import convert_published_state

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
NAMES = ("wxformer_pixelshuffle_mirror", "wxformer_transposed_earth")


class Case:
    """A pair of golden files, and this package's model with the stored weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.settings = json.loads((GOLDEN / f"{name}.json").read_text())
        with np.load(GOLDEN / f"{name}.npz") as stored:
            self.stored = {key: torch.from_numpy(np.asarray(stored[key])) for key in stored.files}
        self.model = from_published(self.settings["wxformer"], self.group("state::"))

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): value for key, value in self.stored.items() if key.startswith(prefix)}


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def assert_same_field(output: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(output, reference, rtol=0, atol=1e-5 * reference.std().item())


def test_eval_output(case: Case) -> None:
    with torch.no_grad():
        assert_same_field(case.model.eval()(case.stored["x"]), case.stored["y_eval"])


def test_training_output_loss_and_gradients(case: Case) -> None:
    advance_power_iterations(case.model)
    y = case.model.train()(case.stored["x"])
    assert_same_field(y, case.stored["y_train"])
    loss = F.mse_loss(y, case.stored["target"])
    torch.testing.assert_close(loss, case.stored["loss_train"].view(()), rtol=1e-6, atol=0)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in case.model.named_parameters()}
    total_norm = case.stored["grad_norm_total"].item()
    assert torch.nn.utils.get_total_norm(gradients.values()).item() == pytest.approx(total_norm, rel=1e-5)
    published_norms = {
        name: norm for name, norm in case.group("gradnorm::").items() if not name.startswith("cube_embedding")
    }
    # The conversion may reorder rows, which does not change a norm, so only the names must be converted. For each name,
    # the conversion of a state with ones in this tensor and zeros elsewhere shows the converted name.
    state = case.group("state::")
    expected_norms = {}
    for name, norm in published_norms.items():
        marked = {key: torch.full_like(value, float(key == name)) for key, value in state.items()}
        (converted_name,) = [key for key, value in convert_published_state(marked).items() if value.any()]
        expected_norms[converted_name] = norm.item()
    assert expected_norms.keys() == gradients.keys()
    for name, norm in expected_norms.items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-7 * total_norm), name


def test_parameter_count(case: Case) -> None:
    num_unused = sum(v.numel() for name, v in case.group("state::").items() if name.startswith("cube_embedding."))
    num_parameters = sum(parameter.numel() for parameter in case.model.parameters())
    assert num_unused > 0
    assert num_parameters == case.settings["parameters_in_reference"] - num_unused
