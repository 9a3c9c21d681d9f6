"""Draws of noise: variance, memory, and independence of the batch and of the order of members."""

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
    """Return the noise of several steps, (steps, B, K, ...), for a config with one kind of noise."""
    sequence = build_generator(noise).sequence(keys, CPU)
    steps = []
    for condition in itertools.islice(sequence, num_steps):
        (values,) = condition.values()
        steps.append(values)
    return torch.stack(steps)


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


@pytest.mark.parametrize("kind", ["cell", "spherical"])
def test_fields_have_variance_1_and_the_autocorrelation_of_their_memory(kind: str) -> None:
    noise = {"kind": kind, "channels": 4, "memory": ["0h", "24h"]}
    fields_SBKHW = draw_steps(noise, [MemberKey(0, number, 0) for number in range(1000)], 3)
    assert fields_SBKHW.shape == (3, 1000, 4, 8, 16) and fields_SBKHW.dtype == torch.float32
    for step in range(3):
        variance_KHW = fields_SBKHW[step].square().mean(0)
        torch.testing.assert_close(variance_KHW, torch.ones(4, 8, 16), rtol=0, atol=0.25)
        correlation_K = (fields_SBKHW[0] * fields_SBKHW[step]).mean((0, 2, 3))
        with_memory = math.exp(-step * 6 / 24)
        expected_K = torch.tensor([float(step == 0)] * 2 + [with_memory] * 2)
        torch.testing.assert_close(correlation_K, expected_K, rtol=0, atol=0.05)


def test_cells_are_independent_and_spherical_fields_are_correlated_over_their_length() -> None:
    keys = [MemberKey(0, number, 0) for number in range(2000)]
    cell_BKHW = draw_steps("cell", keys, 1)[0]
    assert (cell_BKHW * cell_BKHW.roll(1, -1)).mean().abs() < 0.01
    lengths = [3000.0, 5000.0]
    spherical_BKHW = draw_steps({"kind": "spherical", "channels": 2, "lengths": lengths}, keys, 1)[0]
    # The row nearest to the equator; a cell is 22.5 degrees wide.
    row_BKW = spherical_BKHW[:, :, 3]
    cell_width = 6371 * math.radians(22.5) * math.cos(math.radians(11.25))
    correlation_K = (row_BKW * row_BKW.roll(1, -1)).mean((0, 2))
    expected_K = torch.tensor([math.exp(-((cell_width / length) ** 2) / 2) for length in lengths])
    # The grid resolves wavenumber 5 at most, which lengthens the shorter correlation a little.
    torch.testing.assert_close(correlation_K, expected_K, rtol=0, atol=0.1)


@pytest.mark.parametrize("kind", ["global", "cell", "spherical"])
def test_a_draw_depends_on_every_part_of_its_key_and_on_nothing_else(kind: str) -> None:
    key = MemberKey(1, 720, 2, optimizer_step=7)
    other_keys = [
        MemberKey(0, 720, 2, 7), MemberKey(1, 360, 2, 7), MemberKey(1, 720, 3, 7), MemberKey(1, 720, 2, 8),
        MemberKey(1, 720, 2, None),
    ]  # fmt: skip
    single_draw = draw_steps(kind, [key], 3)
    batch_draws = draw_steps(kind, [*other_keys, key], 3)
    assert torch.equal(batch_draws[:, -1], single_draw[:, 0])
    for number in range(len(other_keys)):
        assert torch.isclose(batch_draws[:, number], single_draw[:, 0]).float().mean() < 0.01
    assert torch.isclose(single_draw[0], single_draw[1]).float().mean() < 0.01


def test_a_model_without_noise_gets_no_condition() -> None:
    assert next(build_generator([]).sequence([MemberKey(0, 0, 0)], CPU)) is None


def test_masks_of_dropout_last_as_long_as_their_memory() -> None:
    memory = ["step", "12h", "forecast", "3h"]
    seeds_SBM = draw_steps({"kind": "dropout", "memory": memory}, [MemberKey(0, 0, 0), MemberKey(0, 0, 1)], 5)
    assert seeds_SBM.dtype == torch.int64 and seeds_SBM.shape == (5, 2, 4)
    # For each memory, the steps (of 6 h) at which the seed changes.
    for number, changes in enumerate([[1, 2, 3, 4], [2, 4], [], [1, 2, 3, 4]]):
        for step in range(1, 5):
            has_changed = seeds_SBM[step, :, number] != seeds_SBM[step - 1, :, number]
            assert has_changed.tolist() == [step in changes] * 2
    assert (seeds_SBM[:, 0] != seeds_SBM[:, 1]).all()


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
        ({"kind": "cell", "channels": 4, "memory": ["0h", "1d", "2d", "3d", "4d"]}, "5 values of memory share 4"),
        ({"kind": "spherical", "channels": 1}, "4 lengths share 1 channels"),
        ({"kind": "spherical", "lengths": [500, 500]}, "must differ"),
        ({"kind": "dropout", "rate": 1.0}, "less than 1"),
    ],
)
def test_wrong_noise(noise: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_generator(noise)
