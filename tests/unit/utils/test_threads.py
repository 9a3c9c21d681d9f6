"""Work shared among threads: each item once, errors from any of them, nothing begun after one."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from credit.utils.threads import thread_map

CELLS = 1 << 20  # enough for a thread each


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("items", [0, 1, 40])
def test_each_item_is_done_once(items: int, threads: int) -> None:
    done, thread_ids = [], set()

    def process_item(number: int) -> None:
        time.sleep(0.001)
        done.append(number)
        thread_ids.add(threading.get_ident())

    thread_map(process_item, items, CELLS)
    assert sorted(done) == list(range(items))
    assert len(thread_ids) <= min(threads, items)
    if items == 40:
        assert len(thread_ids) == threads


def test_few_cells_are_not_shared(threads: int) -> None:
    thread_ids = []
    thread_map(lambda number: thread_ids.append(threading.get_ident()), 40, 1)
    assert set(thread_ids) == {threading.get_ident()}


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_an_error_is_raised_and_nothing_else_begun(in_main_thread: bool, threads: int) -> None:
    """In the thread that asks, or in another where there is one."""
    main, done = threading.get_ident(), []

    def process_item(number: int) -> None:
        time.sleep(0.001)
        if number >= 3 and (threading.get_ident() == main) == (in_main_thread or threads == 1):
            raise ValueError(f"item {number}")
        done.append(number)

    with pytest.raises(ValueError, match="^item "):
        thread_map(process_item, 1000, CELLS)
    assert len(done) < 50
