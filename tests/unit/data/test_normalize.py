"""Tests of the normalizer: one scale for each channel, missing values, masks and transforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from credit.channels import ChannelMap
from credit.config.sections.data import TransformConfig
from credit.data.normalize import Normalizer
from credit.data.store.statistics import Statistics

CHANNELS = ChannelMap.build(
    {
        "prognostic": {"vars_3D": ["q"], "vars_2D": []},
        "diagnostic": {"vars_3D": [], "vars_2D": ["tp"]},
        "dynamic_forcing": {"vars_3D": [], "vars_2D": ["sst", "sin_year"]},
        "static": {"vars_3D": [], "vars_2D": ["land"]},
    },
    [850, 250],
    masked_variables=["sst"],
)
NAMES = ("q850", "q250", "tp", "sst", "land")
MEAN, STD = np.array([5e-3, 8e-5, 0.5, 290.0, 0.3]), np.array([4e-3, 1e-4, 1.5, 10.0, 0.4])


@pytest.fixture
def normalizer() -> Normalizer:
    return build_normalizer({})


def build_normalizer(transforms: dict[str, TransformConfig]) -> Normalizer:
    unused = np.zeros(5)
    statistics = Statistics(NAMES, MEAN, STD, unused, unused, unused, 0.1 * STD, unused)
    return Normalizer(CHANNELS, statistics, {"sin_year": (0.0, 1.0), "sst_mask": (0.0, 1.0)}, transforms)


def test_round_trip_in_float32(normalizer: Normalizer) -> None:
    x = torch.from_numpy((MEAN[:3] + STD[:3] * np.array([1.0, -2.0, 0.5]))[None, :, None, None].astype(np.float32))
    encoded = normalizer.encode(x, "output")
    assert encoded.flatten().tolist() == pytest.approx([1.0, -2.0, 0.5], rel=1e-5)
    assert torch.allclose(normalizer.decode(encoded, "output"), x, rtol=1e-6)
    assert normalizer.tendency_scale_C.tolist() == pytest.approx([0.1, 0.1])


def test_missing_values_become_the_mean_and_infinite_values_stay(normalizer: Normalizer) -> None:
    x = torch.tensor([[[[torch.nan, 300.0]], [[1.0, torch.inf]]]])
    encoded = normalizer.encode(x, "dynamic_forcing")
    assert encoded[0, :, 0, 0].tolist() == [0.0, 1.0]
    assert encoded[0, 0, 0, 1].item() == pytest.approx(1.0)
    assert encoded[0, 1, 0, 1].item() == torch.inf


def test_masks_and_encodings_stay_unchanged(normalizer: Normalizer) -> None:
    x = torch.tensor([0.7, 1.0])[None, :, None, None]
    assert normalizer.encode(x, "static")[0, :, 0, 0].tolist() == pytest.approx([1.0, 1.0])


def test_transforms_change_only_the_channels_of_their_variables() -> None:
    normalizer = build_normalizer(
        {"tp": TransformConfig(kind="log1p", unit=0.1), "q": TransformConfig(kind="sqrt", unit=1e-3)}
    )
    x = torch.tensor([4e-3, 9e-5, 12.3], dtype=torch.float32)[None, :, None, None]
    encoded = normalizer.encode(x, "output").flatten().double()
    expected = (np.array([4.0**0.5, 0.09**0.5, np.log(1 + 12.3 / 0.1)]) - MEAN[:3]) / STD[:3]
    assert encoded.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert torch.allclose(normalizer.decode(normalizer.encode(x, "output"), "output"), x, rtol=1e-4)
    assert normalizer.encode(x[:, :2], "prognostic").flatten().tolist() == pytest.approx(
        expected[:2].tolist(), rel=1e-5
    )


def test_decoded_differences_are_in_physical_units() -> None:
    normalizer = build_normalizer({"tp": TransformConfig(kind="log1p", unit=0.1)})
    first, second = (torch.tensor(values)[None, :, None, None] for values in ([4e-3, 9e-5, 12.3], [3e-3, 8e-5, 2.1]))
    difference = [normalizer.decode_differences(normalizer.encode(x, "output"), "output") for x in (first, second)]
    assert torch.allclose(difference[0] - difference[1], first - second, rtol=1e-4)
