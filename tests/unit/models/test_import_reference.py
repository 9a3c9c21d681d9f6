"""Import of published state dicts: variants of names, order of rows by head, unused and unknown keys."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from credit.errors import CheckpointError
from credit.models.wxformer.convert_published import convert_published_state

from .test_golden import GOLDEN


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / "wxformer_transposed_earth.npz") as stored:
        return {k.removeprefix("state::"): torch.from_numpy(stored[k]) for k in stored.files if k.startswith("state::")}


def test_prefixes_and_newer_embedding_names_give_the_same_weights(state: dict[str, torch.Tensor]) -> None:
    newer_state = {
        "module."
        + (key.replace(".weight", ".1.weight").replace(".bias", ".1.bias") if ".convs." in key else key): value
        for key, value in state.items()
    }
    assert any(".convs.0.1.weight_orig" in key for key in newer_state)
    expected = convert_published_state(state)
    converted = convert_published_state({"model_state_dict": newer_state, "epoch": torch.tensor(3)})
    assert converted.keys() == expected.keys()
    assert all(torch.equal(converted[key], expected[key]) for key in expected)


def test_rows_and_left_vector_are_ordered_by_head(state: dict[str, torch.Tensor]) -> None:
    reference_prefix = "layers.1.1.layers.0.0.to_qkv.weight_"
    prefix = "stages.1.layers.0.short_attention.to_qkv.parametrizations."
    imported = convert_published_state(state)
    heads, dim_head = 2, 8
    for reference_name, name in (("orig", "weight.original"), ("u", "weight.0.u")):
        q_k_v = state[reference_prefix + reference_name].flatten(1 if reference_name == "orig" else 0).chunk(3)
        expected = [part[h * dim_head : (h + 1) * dim_head] for h in range(heads) for part in q_k_v]
        torch.testing.assert_close(imported[prefix + name], torch.cat(expected), rtol=0, atol=0)
    assert torch.equal(imported[prefix + "weight.0.v"], state[reference_prefix + "v"])


def test_unused_parameters_are_logged_and_unknown_ones_refused(
    state: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="credit.models"):
        convert_published_state(state)
    assert "cube_embedding.proj.weight" in caplog.text
    incomplete_state = {key: value for key, value in state.items() if not key.startswith("layers.0.1.layers.0.0.norm")}
    with pytest.raises(CheckpointError, match=r"layers\.0\.1\.layers\.0\.0\.norm\.g is missing"):
        convert_published_state(incomplete_state)
    with pytest.raises(CheckpointError, match=r"layers\.0\.1\.layers\.0\.0\.to_k\.weight, film\.weight"):
        convert_published_state(
            {**state, "layers.0.1.layers.0.0.to_k.weight": torch.ones(1), "film.weight": torch.ones(1)}
        )


def test_tensors_keep_their_order(state: dict[str, torch.Tensor]) -> None:
    """The order does not depend on the hash of the names, which differs between processes."""
    converted = list(convert_published_state(state))
    reversed_names = list(convert_published_state(dict(reversed(state.items()))))
    assert reversed_names == converted[::-1]
