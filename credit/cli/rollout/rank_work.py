"""Distribution of the forecasts of ``credit rollout`` over ranks: the forecasts and the batches of each rank."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from credit.config.sections.inference import InferenceConfig
from credit.forecast.distribution import group_initial_times, select_part, select_round_robin
from credit.forecast.ensemble.perturbations import lag_minutes
from credit.forecast.rollout import ForecastStart, batch_starts
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_all_ranks
from credit.parallel.process_info import ProcessInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankWork:
    """Forecasts that one rank makes.

    Attributes:
        initial_times: initial times of this rank in minutes.
        incomplete_times: initial times whose forecast is not on disk yet, in minutes.
        batches: forecast starts of each batch that has an incomplete forecast.
        padding_batches: further batches, whose forecasts are discarded. They give all ranks that share weights the same
            number of batches, and so the same collectives.
    """

    initial_times: list[int]
    incomplete_times: list[int]
    batches: list[list[ForecastStart]]
    padding_batches: list[list[ForecastStart]]


def shard_initial_times(
    initial_times: list[int], inference: InferenceConfig, part: str | None, process_info: ProcessInfo, mesh: DeviceGrid
) -> list[list[int]]:
    """Return the groups of initial times that this rank forecasts, each group with the times of one or more batches.

    Args:
        initial_times: all initial times of the run, in minutes.
        inference: the section inference.
        part: ``I/N`` of ``--part``, None or empty for all.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that forecast; tensor-parallel peers forecast the same initial times.

    Raises:
        ConfigError: if `part` is not ``I/N`` with 1 <= I <= N.
    """
    members = 1 if inference.ensemble is None else inference.ensemble.members
    groups = group_initial_times(initial_times, members, inference.batch_size)
    if part:
        groups = select_part(groups, part)
    if mesh.device_mesh is None:
        rank = process_info.rank
        num_ranks = process_info.world
    else:
        rank = mesh.data_rank
        num_ranks = mesh.num_data_ranks
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
    """Collective: return the forecasts that this rank makes.

    Args:
        rank_groups: groups of initial times of this rank in minutes, by `shard_initial_times`.
        padding_time: initial time of the padding batches in minutes.
        inference: the section inference.
        is_complete: function of an initial time in minutes; True if its forecast is complete on disk.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that forecast.
    """
    rank_times = list(itertools.chain.from_iterable(rank_groups))
    incomplete_times = [time for time in rank_times if not is_complete(time)]
    incomplete_times = _sync_incomplete_times(incomplete_times, process_info, mesh)
    # A batch with one incomplete forecast is made as a whole: batches of other sizes would give other last digits.
    batches = []
    for batch in _build_batches(rank_groups, inference):
        if any(start.initial_minutes in incomplete_times for start in batch):
            batches.append(batch)
    num_padding = _find_max_batches(len(batches), mesh) - len(batches)
    padding_batches = _build_padding_batches(padding_time, inference, num_padding)
    return RankWork(rank_times, incomplete_times, batches, padding_batches)


def _build_batches(groups: list[list[int]], inference: InferenceConfig) -> list[list[ForecastStart]]:
    """Return the forecast starts of each batch, group by group.

    Args:
        groups: initial times in minutes of each group.
        inference: the section inference, for the batch size and the ensemble.
    """
    members = 1 if inference.ensemble is None else inference.ensemble.members
    lag = lag_minutes(inference.ensemble)
    batches = []
    for initial_times in groups:
        batches += batch_starts(initial_times, inference.batch_size, members, lag)
    return batches


def _build_padding_batches(
    initial_time: int, inference: InferenceConfig, num_batches: int
) -> list[list[ForecastStart]]:
    """Return batches whose forecasts are discarded, so that an idle rank joins the collectives of the others.

    Args:
        initial_time: initial time of all batches in minutes.
        inference: the section inference, for the batch size and the ensemble.
        num_batches: number of batches.
    """
    # Padding batches use the same lagged members, because these need more steps and so more collectives.
    batches = _build_batches([[initial_time]], inference)
    return list(itertools.islice(itertools.cycle(batches), num_batches))


def _sync_incomplete_times(times: list[int], process_info: ProcessInfo, mesh: DeviceGrid) -> list[int]:
    """Collective: return the incomplete times that the first tensor-parallel peer has found.

    Peers look at the files at different moments and may find different times, but must make the same forecasts.

    Args:
        times: incomplete times that this rank has found, in minutes.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that forecast.
    """
    if mesh.device_mesh is None:
        return times
    return run_on_all_ranks(lambda: times)[process_info.rank - mesh.tensor_rank]


def _find_max_batches(num_batches: int, mesh: DeviceGrid) -> int:
    """Collective: return the largest number of batches of any rank that shares weights with this one."""
    if mesh.device_mesh is None:
        return num_batches
    return max(run_on_all_ranks(lambda: num_batches))
