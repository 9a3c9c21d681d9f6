"""Parts of the initial times for job arrays."""

from __future__ import annotations

import pytest

from credit.errors import ConfigError
from credit.forecast.initial_times import deal, group, take_part


@pytest.mark.parametrize("count", [0, 1, 5, 24, 97])
@pytest.mark.parametrize("parts", [1, 2, 7, 30])
def test_parts_are_an_exact_partition(count: int, parts: int) -> None:
    times = [60 * 24 * n for n in range(count)]
    taken = [take_part(times, f"{k}/{parts}") for k in range(1, parts + 1)]
    assert sorted(sum(taken, [])) == times
    lengths = [len(part) for part in taken]
    assert max(lengths) - min(lengths) <= 1
    assert all(part == sorted(part) for part in taken)


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", "1/3 ", ""])
def test_what_is_no_part(part: str) -> None:
    with pytest.raises(ConfigError, match="write I/N with I from 1 to N"):
        take_part([1, 2, 3], part)


@pytest.mark.parametrize(("members", "batch_size", "sizes"), [(1, 3, [3, 3, 1]), (2, 5, [2, 2, 2, 1]), (9, 4, [1] * 7)])
def test_groups_fill_batches_whatever_shares_them(members: int, batch_size: int, sizes: list[int]) -> None:
    groups = group(range(7), members, batch_size)
    assert [len(own) for own in groups] == sizes and sum(groups, []) == list(range(7))
    assert sorted(sum((deal(groups, rank, 3) for rank in range(3)), [])) == groups
