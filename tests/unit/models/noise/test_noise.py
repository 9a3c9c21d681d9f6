"""Tests of the draws of noise: variance, memory, and independence of batch and order."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from credit.models.base import ModelSpec
from credit.models.noise.base import MemberKey, NoiseGenerator
from credit.models.wxformer.section import WXFormerSection

SPEC = ModelSpec.from_sizes(image_height=8, image_width=16, in_channels=3, out_channels=3)
CPU = torch.device("cpu")


def build_generator(noise: object) -> NoiseGenerator:
    return NoiseGenerator(SPEC, WXFormerSection.model_validate({"type": "wxformer", "noise": noise}))


def draw_steps(noise: object, keys: list[MemberKey], num_steps: int) -> Tensor:
    """Return the global noise (steps, B, K)."""
    sequence = build_generator(noise).sequence(keys, CPU)
    return torch.stack([condition["global"] for condition in itertools.islice(sequence, num_steps)])


def test_memory_gives_each_part_its_autocorrelation() -> None:
    noise = {"kind": "global", "channels": 4, "memory": ["0h", "24h", "5d", "forecast"]}
    keys = [MemberKey(0, number, 0) for number in range(4000)]
    z_SBK = draw_steps(noise, keys, 5)
    assert z_SBK.dtype == torch.float32
    for step in range(5):
        correlation_K = (z_SBK[0] * z_SBK[step]).mean(0)
        expected_K = [float(step == 0), math.exp(-step * 6 / 24), math.exp(-step * 6 / 120), 1.0]
        torch.testing.assert_close(correlation_K, torch.tensor(expected_K), rtol=0, atol=0.08)
        torch.testing.assert_close(z_SBK[step].var(0), torch.ones(4), rtol=0, atol=0.08)
    assert torch.equal(z_SBK[4, :, 3], z_SBK[0, :, 3])


def test_a_draw_depends_on_every_part_of_its_key_and_on_nothing_else() -> None:
    key = MemberKey(1, 720, 2, optimizer_step=7)
    others = [
        MemberKey(0, 720, 2, 7), MemberKey(1, 360, 2, 7), MemberKey(1, 720, 3, 7), MemberKey(1, 720, 2, 8),
        MemberKey(1, 720, 2, None),
    ]  # fmt: skip
    alone = draw_steps("global", [key], 3)
    together = draw_steps("global", [*others, key], 3)
    assert torch.equal(together[:, -1], alone[:, 0])
    for number in range(len(others)):
        assert not torch.isclose(together[:, number], alone[:, 0]).any()
    assert not torch.isclose(alone[0], alone[1]).any()


def test_a_model_without_noise_gets_no_condition() -> None:
    assert next(build_generator([]).sequence([MemberKey(0, 0, 0)], CPU)) is None


@pytest.mark.parametrize(
    ("memory", "minutes"), [("24h", [1440.0]), (0, [0.0]), (["0min", "forecast"], [0.0, math.inf])]
)
def test_spellings_of_memory(memory: object, minutes: list[float]) -> None:
    section = WXFormerSection.model_validate({"type": "wxformer", "noise": {"kind": "global", "memory": memory}})
    assert section.noise[0].memory_minutes() == minutes


@pytest.mark.parametrize(
    ("noise", "message"),
    [
        ("globl", "globl"),
        (["global", {"kind": "global", "memory": ["24h"]}], "model.noise: global is listed twice"),
        ({"kind": "global", "memory": []}, "memory"),
        ({"kind": "global", "channels": 2, "memory": ["0h", "24h", "5d"]}, "3 values of memory share 2 channels"),
        ({"kind": "global", "memory": ["soon"]}, "soon"),
        ({"kind": "global", "chanels": 3}, "chanels"),
    ],
)
def test_wrong_noise(noise: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_generator(noise)
