"""Distribution of initial times over batches, ranks and jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from credit.errors import ConfigError

T = TypeVar("T")


def group_initial_times(initial_times: Sequence[int], members: int, batch_size: int) -> list[list[int]]:
    """Divide initial times into groups; one rank makes all forecasts of a group.

    A group has as many initial times as fit into one batch with all their members. If the members of one initial time
    need several batches, a group is a single initial time. Each rank or job gets whole groups. So the content of each
    batch is the same for any number of ranks and jobs. This matters because the rounding errors of a forecast depend
    on the content of its batch.

    Args:
        initial_times: initial times, in minutes of the run's calendar.
        members: number of ensemble members; 1 for single forecasts.
        batch_size: largest number of forecasts in a batch.

    Returns:
        The groups, which list all initial times in the given order. The last group may be smaller than the others.
    """
    # A group has at least one initial time, even if its members do not fit into a batch.
    times_per_group = max(1, batch_size // members)
    groups = []
    for first in range(0, len(initial_times), times_per_group):
        groups.append(list(initial_times[first : first + times_per_group]))
    return groups


def select_items_of_job(items: Sequence[T], part: str) -> list[T]:
    """Return the items of job I of N jobs: every N-th item, starting with the I-th item.

    Args:
        items: items of all jobs.
        part: ``I/N``, with I from 1 to N, as in the option ``--part``.

    Raises:
        ConfigError: if `part` is not of the form ``I/N``, or I is not between 1 and N.
    """
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", part)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f'--part: "{part}": write I/N with I from 1 to N, for example 2/8')
    job_number = int(match[1])
    num_jobs = int(match[2])
    return select_round_robin(items, job_number - 1, num_jobs)


def select_round_robin(items: Sequence[T], rank: int, num_ranks: int) -> list[T]:
    """Return the items of one rank: every `num_ranks`-th item, starting at index `rank`.

    Each item belongs to exactly one rank, and the numbers of items of two ranks differ by at most one.
    """
    return list(items[rank::num_ranks])
