"""Data that layers give to domain parallelism: cells of padding, taps of interpolation, cell numbers for dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from credit.models.layers.padding import SpherePadding
from credit.models.layers.resize import BilinearResize, find_interpolation
from credit.models.layers.seeded_dropout import CellNumbering, SeededDropout

PADDINGS = {
    "earth": SpherePadding("earth", (3, 2), (2, 5)),
    "rows on the poles": SpherePadding("earth", (3, 4), (0, 0), skip=1),
    "a row on one pole": SpherePadding("earth", (3, 4), (1, 2), skip=(1, 0)),
    "mirror": SpherePadding("mirror", (2, 3), (4, 1), skip=1),
    "columns alone": SpherePadding("earth", (0, 0), (2, 2)),
}


@pytest.mark.parametrize("name", PADDINGS)
@pytest.mark.parametrize(
    "part", [(range(0, 14), range(0, 16)), (range(0, 4), range(1, 9)), (range(7, 11), range(3, 4))]
)
def test_cells_of_a_part_of_the_padded_field(name: str, part: tuple[range, range]) -> None:
    padding = PADDINGS[name]
    field = torch.arange(9 * 8).view(1, 1, 9, 8)
    padded = padding.pad(field)[0, 0]
    rows = range(part[0].start, min(part[0].stop, padded.shape[0]))
    columns = range(part[1].start, min(part[1].stop, padded.shape[1]))
    blocks = padding.find_cells(rows, columns, (9, 8))
    cells = [field[0, 0][list(block_rows)][:, list(block_columns)] for block_rows, block_columns in blocks]
    assert torch.equal(torch.cat(cells), padded[rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize(("input_size", "output_size"), [(16, 31), (31, 16), (90, 181), (7, 7)])
def test_taps_are_those_of_torch(input_size: int, output_size: int) -> None:
    x = torch.randn(1, 1, input_size, 5, dtype=torch.float64)
    expected = F.interpolate(x, size=(output_size, 5), mode="bilinear", align_corners=False)
    for outputs in (range(output_size), range(output_size // 3, output_size // 2)):
        taps = find_interpolation(outputs, input_size, output_size)
        inputs = taps.input_range()
        result = taps.apply(x[:, :, inputs.start : inputs.stop], 2, inputs.start)
        torch.testing.assert_close(result, expected[:, :, outputs.start : outputs.stop], rtol=0, atol=1e-12)


def test_a_field_of_the_right_size_is_returned_as_it_is() -> None:
    x = torch.randn(1, 2, 4, 6)
    assert BilinearResize((4, 6))(x) is x


def test_masks_of_a_part_are_those_of_the_whole_field() -> None:
    dropout = SeededDropout(0.4, number=1)
    seeds = torch.tensor([[11], [12]])
    x = torch.ones(2, 6, 8, 4)
    whole_output = dropout.drop_channels(x.flatten(0, 2), seeds).view_as(x)
    dropout.numberings = (CellNumbering(range(2, 5), range(4, 8), width=8),)
    dropout.field_ranks = range(1)
    part = dropout.drop_channels(x[:, 2:5, 4:8].flatten(0, 2), seeds).view(2, 3, 4, 4)
    assert torch.equal(part, whole_output[:, 2:5, 4:8])
    assert 0.2 < (part == 0).float().mean() < 0.6
