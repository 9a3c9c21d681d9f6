"""Distribution of the forecasts and batches of ``credit rollout`` over the ranks."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from credit.config.sections.inference import InferenceConfig
from credit.forecast.distribution import group_initial_times, select_items_of_job, select_round_robin
from credit.forecast.ensemble.perturbations import compute_member_lag
from credit.forecast.rollout import ForecastStart, build_start_batches
from credit.forecast.shared_forecasts import build_padding_batches
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import reduce_over_ranks
from credit.parallel.process_info import ProcessInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchRound:
    """A round: batches of forecasts that the ranks of an ensemble group make at the same time, one batch on each rank.

    An ensemble group consists of the ranks that share the members of one initial time
    (``inference.parallelism.ensemble``).

    Attributes:
        batches: forecast starts of each batch, one batch for each rank of the group.
        num_written: number of batches that are written. The remaining batches only fill the round, and their forecasts
            are discarded.
        completed_times: initial times to write, in minutes, for which this round makes the last member.
    """

    batches: list[list[ForecastStart]]
    num_written: int
    completed_times: list[int]

    @property
    def num_forecasts(self) -> int:
        """Number of forecasts that are written."""
        return sum(map(len, self.batches[: self.num_written]))


@dataclass(frozen=True)
class RankWork:
    """Forecasts that one rank makes.

    Attributes:
        initial_times: initial times of this rank in minutes.
        incomplete_times: initial times of this rank for which the forecast on disk is not complete, in minutes.
        rounds: rounds of batches to write; each batch contains at least one incomplete forecast.
        padding_rounds: additional rounds with forecasts that are discarded. They give all ranks that share weights the
            same number of batches, so that these ranks call the same collectives.
    """

    initial_times: list[int]
    incomplete_times: list[int]
    rounds: list[BatchRound]
    padding_rounds: list[BatchRound]

    @property
    def num_forecasts(self) -> int:
        """Number of forecasts that are written."""
        return sum(batch_round.num_forecasts for batch_round in self.rounds)


def shard_initial_times(
    initial_times: list[int], inference: InferenceConfig, part: str | None, process_info: ProcessInfo, mesh: DeviceGrid
) -> list[list[int]]:
    """Return the groups of initial times from which this rank makes forecasts.

    A group contains the initial times of one or more whole batches.

    Args:
        initial_times: all initial times of the run, in minutes.
        inference: the section ``inference``.
        part: value ``I/N`` of ``--part``; None or empty for all initial times.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that make forecasts. Tensor-parallel peers and the ranks of an ensemble or domain group
            get the same initial times.

    Raises:
        ConfigError: if `part` is not ``I/N`` with 1 <= I <= N.
    """
    members = 1 if inference.ensemble is None else inference.ensemble.members
    groups = group_initial_times(initial_times, members, inference.batch_size)
    if part:
        groups = select_items_of_job(groups, part)
    if mesh.degrees.world == 1:
        rank = process_info.rank
        num_ranks = process_info.world
    else:
        rank = mesh.sample_rank
        num_ranks = mesh.num_sample_ranks
    if process_info.is_main and len(groups) < num_ranks:
        logger.warning(
            "inference.batch_size: it makes only %d batches of initial times, so %d of %d ranks are idle; lower it",
            len(groups), num_ranks - len(groups), num_ranks,
        )  # fmt: skip
    return select_round_robin(groups, rank, num_ranks)


def plan_rank_work(
    rank_groups: list[list[int]],
    padding_time: int,
    inference: InferenceConfig,
    is_complete: Callable[[int], bool],
    process_info: ProcessInfo,
    mesh: DeviceGrid,
) -> RankWork:
    """Collective: return the forecasts and rounds that this rank makes.

    Args:
        rank_groups: groups of initial times of this rank in minutes, from `shard_initial_times`.
        padding_time: initial time of the padding batches in minutes.
        inference: the section ``inference``.
        is_complete: function of an initial time in minutes; True if its forecast is complete on disk.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that forecast.
    """
    rank_times = list(itertools.chain.from_iterable(rank_groups))
    # Only the list of the writing rank is used, so the other ranks need not read the files and analyses.
    incomplete_times = rank_times
    if mesh.degrees.world == 1 or mesh.gets_forecasts:
        incomplete_times = [time for time in rank_times if not is_complete(time)]
    incomplete_times = _sync_incomplete_times(incomplete_times, process_info, mesh)
    # A batch with one incomplete forecast is repeated completely, because the last digits depend on the batch size.
    batches = []
    for batch in _build_batches(rank_groups, inference):
        if any(start.initial_minutes in incomplete_times for start in batch):
            batches.append(batch)
    rounds = _build_rounds(batches, mesh.degrees.ensemble, incomplete_times)
    num_padding = _find_max_rounds(len(rounds), mesh) - len(rounds)
    padding_rounds = _build_padding_rounds(padding_time, inference, num_padding, mesh.degrees.ensemble)
    return RankWork(rank_times, incomplete_times, rounds, padding_rounds)


def _build_rounds(
    batches: list[list[ForecastStart]], num_ranks: int, incomplete_times: Sequence[int]
) -> list[BatchRound]:
    """Divide batches into rounds of `num_ranks` batches, one for each rank of an ensemble group.

    If the last round has fewer batches, it is filled up with batches that are not written.

    Args:
        batches: forecast starts of each batch.
        num_ranks: number of ranks of an ensemble group.
        incomplete_times: initial times to write, in minutes.
    """
    # Initial time -> index of the round with its last member; later batches overwrite the values of earlier batches.
    last_rounds = {}
    for number, batch in enumerate(batches):
        for start in batch:
            last_rounds[start.initial_minutes] = number // num_ranks
    rounds = []
    for first in range(0, len(batches), num_ranks):
        round_batches = batches[first : first + num_ranks]
        round_number = first // num_ranks
        completed_times = [time for time in incomplete_times if last_rounds[time] == round_number]
        padding = build_padding_batches(round_batches, num_ranks)
        rounds.append(BatchRound(round_batches + padding, len(round_batches), completed_times))
    return rounds


def _build_batches(groups: list[list[int]], inference: InferenceConfig) -> list[list[ForecastStart]]:
    """Return the forecast starts of each batch, group by group.

    Args:
        groups: initial times in minutes of each group.
        inference: the section ``inference``, with the batch size and the members.
    """
    members = 1 if inference.ensemble is None else inference.ensemble.members
    lag = compute_member_lag(inference.ensemble)
    batches = []
    for initial_times in groups:
        batches += build_start_batches(initial_times, inference.batch_size, members, lag)
    return batches


def _build_padding_rounds(
    initial_time: int, inference: InferenceConfig, num_rounds: int, num_ranks: int
) -> list[BatchRound]:
    """Return rounds with discarded forecasts, so that an idle rank calls the same collectives as the other ranks.

    Args:
        initial_time: initial time of all batches in minutes.
        inference: the section ``inference``, which gives the batch size and the members.
        num_rounds: number of rounds to return.
        num_ranks: number of ranks of an ensemble group.
    """
    # Padding batches also contain the lagged members, because these need more steps and therefore more collectives.
    batches = _build_batches([[initial_time]], inference)
    rounds = _build_rounds(batches, num_ranks, incomplete_times=[])
    return list(itertools.islice(itertools.cycle(rounds), num_rounds))


def _sync_incomplete_times(times: list[int], process_info: ProcessInfo, mesh: DeviceGrid) -> list[int]:
    """Collective: return the incomplete initial times that the writing rank has found.

    Ranks that share forecasts inspect the files at different moments and may find different incomplete times. These
    ranks must make the same forecasts, so all of them use the list of the writing rank.

    Args:
        times: incomplete times that this rank has found, in minutes; ignored unless this rank writes.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that forecast.
    """
    if mesh.degrees.world == 1:
        return times
    ranks_per_start = mesh.degrees.ranks_per_sample
    writing_rank = process_info.rank // ranks_per_start * ranks_per_start
    group = range(writing_rank, writing_rank + ranks_per_start)
    return reduce_over_ranks(lambda: times, lambda first_times, _: first_times, group)


def _find_max_rounds(num_rounds: int, mesh: DeviceGrid) -> int:
    """Collective: return the largest number of rounds of any rank.

    Ranks that share weights need the same number of rounds. All other ranks also use this number, because the ranks
    wait for each other at the end of the command. A long wait would exceed the timeout of the process group.
    """
    if mesh.degrees.world == 1:
        return num_rounds
    return reduce_over_ranks(lambda: num_rounds, max)
