"""Divisions of fields among ranks, and the cells that layers read."""

from __future__ import annotations

import pytest
from torch import nn

from credit.parallel.domain.division import divide_axis, divide_field, imbalance, list_shapes
from credit.parallel.domain.rules import NeighbourRule, Reach


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("size", "multiple"), [(24, 4), (12, 4), (3, 3), (31, 1), (10, 5)])
def test_parts_have_every_cell_once_and_cut_no_window(size: int, multiple: int, num_parts: int) -> None:
    division = divide_axis(size, num_parts, multiple)
    cells = [cell for part in division.owned for cell in part]
    assert cells == list(range(size))
    lengths = [len(part) for part in division.owned]
    # No part is larger than necessary, and none is empty if there are windows for all.
    assert max(lengths) == -(-size // multiple // num_parts) * multiple
    assert min(lengths) > 0 or size // multiple < num_parts
    # The memory plan describes the first rank, so the first part must be the largest.
    assert lengths[0] == max(lengths)
    for owned, held in zip(division.owned, division.held, strict=True):
        assert owned.start % multiple == 0 and held.start % multiple == 0
        if owned:
            assert held == owned
        else:
            # An empty part computes one window of a neighbour, so that no tensor is empty.
            assert len(held) == multiple and 0 <= held.start < size


@pytest.mark.parametrize("size", [181, 721, 640, 33])
def test_parts_of_a_grid_are_equal_but_the_last(size: int) -> None:
    lengths = [len(part) for part in divide_axis(size, 4).owned]
    assert len(set(lengths[:-1])) == 1 and 0 < lengths[-1] <= lengths[0]


def test_ranks_number_the_parts_row_by_row() -> None:
    division = divide_field((8, 6), (2, 3))
    assert division.shape == (8, 6) and division.num_ranks == 6
    assert division.owned(0).slices == (slice(0, 4), slice(0, 2))
    assert division.owned(4).slices == (slice(4, 8), slice(2, 4))
    assert division.owned(5).shape == (4, 2)


def test_imbalance_is_that_of_the_largest_part() -> None:
    even = divide_field((8, 8), (2, 1))
    uneven = divide_field((12, 8), (2, 1), multiple=4)
    assert imbalance([even], [1.0]) == 1.0
    # One of the two ranks has two of the three windows.
    assert imbalance([uneven], [5.0]) == pytest.approx(4 / 3)
    assert imbalance([even, uneven], [1.0, 1.0]) == pytest.approx((1 + 4 / 3) / 2)


def test_shapes_are_all_pairs_of_divisors() -> None:
    assert list_shapes(6) == [(1, 6), (2, 3), (3, 2), (6, 1)]


@pytest.mark.parametrize(
    ("reach", "output", "expected"),
    [
        (Reach(1, 1), range(4, 8), range(3, 9)),
        # Beyond the end of the axis the layer reads zeros.
        (Reach(1, 1), range(0, 8), range(-1, 9)),
        (Reach(3, 4, stride=2), range(4, 8), range(5, 20)),
        # Odd bounds of an up-sampling: cells 3 to 6 of the output lie above cells 1 to 3.
        (Reach(0, 0, factor=2), range(3, 7), range(1, 4)),
        (Reach(1, 1, factor=2), range(3, 7), range(0, 5)),
    ],
)
def test_input_of_a_range_of_output_cells(reach: Reach, output: range, expected: range) -> None:
    assert reach.input_range(output) == expected


def test_a_layer_that_pads_in_an_unknown_way_is_refused() -> None:
    """The layer would pad with its own values instead of cells of other ranks."""
    division = divide_field((8, 8), (1, 1))
    rule = NeighbourRule(division, division, Reach(1, 1))
    with pytest.raises(TypeError, match="does not support the padding of Conv2d"):
        rule.remove_padding(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))
    with pytest.raises(TypeError, match="does not support the padding of Sequential"):
        rule.remove_padding(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1)))
