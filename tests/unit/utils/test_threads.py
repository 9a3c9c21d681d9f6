"""Thread map: it processes each item once, raises an error of any thread, and starts no item after an error."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from credit.utils.threads import thread_map

CELLS = 1 << 20  # Enough work to use all threads.


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> int:
    previous_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(previous_threads)


@pytest.mark.parametrize("items", [0, 1, 40])
def test_each_item_is_processed_once(items: int, threads: int) -> None:
    processed_items, thread_ids = [], set()

    def process_item(number: int) -> None:
        time.sleep(0.001)
        processed_items.append(number)
        thread_ids.add(threading.get_ident())

    thread_map(process_item, items, CELLS)
    assert sorted(processed_items) == list(range(items))
    assert len(thread_ids) <= min(threads, items)
    if items == 40:
        assert len(thread_ids) == threads


def test_little_work_uses_the_calling_thread(threads: int) -> None:
    thread_ids = []
    thread_map(lambda number: thread_ids.append(threading.get_ident()), 40, 1)
    assert set(thread_ids) == {threading.get_ident()}


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_error_is_raised_and_stops_other_items(in_main_thread: bool, threads: int) -> None:
    """The error is raised in the calling thread or, if there are several, in another thread."""
    main_thread, processed_items = threading.get_ident(), []

    def process_item(number: int) -> None:
        time.sleep(0.001)
        if number >= 3 and (threading.get_ident() == main_thread) == (in_main_thread or threads == 1):
            raise ValueError(f"item {number}")
        processed_items.append(number)

    with pytest.raises(ValueError, match="^item "):
        thread_map(process_item, 1000, CELLS)
    assert len(processed_items) < 50
