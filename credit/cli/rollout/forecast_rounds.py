"""Loop of ``credit rollout`` in which a rank makes its forecasts round by round and writes them in the background."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

from credit.cli.rollout.command import build_shared_forecast_function
from credit.cli.rollout.rank_work import BatchRound, RankWork
from credit.config import Config
from credit.forecast.io.async_writer import BackgroundWriter
from credit.forecast.io.forecast_writer import ForecastWriter
from credit.forecast.rollout import iterate_in_inference_mode
from credit.forecast.shared_forecasts import ForecastFunction
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_all_ranks
from credit.parallel.process_info import ProcessInfo
from credit.train.build.forecaster import Forecaster
from credit.utils.progress import ProgressBar


def writes_shared_store(config: Config, mesh: DeviceGrid) -> bool:
    """Return True if several ranks write parts of one forecast into the same zarr store.

    In any other format, one rank writes the whole forecast.
    """
    shares_starts = mesh.degrees.ensemble > 1 or mesh.degrees.domain > 1
    return config.inference.format == "zarr" and shares_starts


def make_forecast_rounds(
    config: Config,
    forecaster: Forecaster,
    work: RankWork,
    writer: ForecastWriter,
    background: BackgroundWriter,
    longest_lead: int,
    process_info: ProcessInfo,
    mesh: DeviceGrid,
) -> None:
    """Collective: make the forecasts of this rank and queue them for writing.

    Ranks that share the members of an ensemble, or divide the fields, write the forecasts in one of two ways. A netCDF
    file is written by one rank, to which the other ranks send the steps to be written. A chunk of a zarr store contains
    one member and one part of the fields. Every rank therefore writes its results, and sends nothing.

    Args:
        config: config of the run.
        forecaster: model, normalization and reader of the fields of this run.
        work: rounds of forecasts of this rank.
        writer: writer of the files.
        background: thread that writes queued steps with `writer`.
        longest_lead: longest lead time in minutes.
        process_info: rank and world size of this process.
        mesh: mesh of the ranks that make forecasts.
    """
    step_minutes = config.data.step_minutes
    every_rank_writes = writes_shared_store(config, mesh)
    forecast_batch = build_shared_forecast_function(
        config, forecaster, background.file_lock, mesh, background.needs_step, sends_outputs=not every_rank_writes
    )
    # Tensor-parallel peers have equal outputs, so only one peer writes.
    is_writing_rank = mesh.tensor_rank == 0 if every_rank_writes else mesh.gets_forecasts
    output_writer = background if is_writing_rank else None
    # Only the main rank shows a progress bar, and only on a terminal.
    hidden = None if process_info.is_main else True
    with ProgressBar(total=work.num_forecasts, desc="forecasting", unit="start", disable=hidden) as bar:
        for batch_round in work.rounds:
            _make_forecasts_of_round(forecast_batch, batch_round, longest_lead, step_minutes, output_writer)
            if every_rank_writes:
                _mark_round_complete(batch_round, writer, background, mesh)
            bar.update(batch_round.num_forecasts)
        # In padding rounds, this rank only takes part in the collectives of ranks that have more batches.
        for batch_round in work.padding_rounds:
            _make_forecasts_of_round(forecast_batch, batch_round, longest_lead, step_minutes, None)


def _mark_round_complete(
    batch_round: BatchRound, writer: ForecastWriter, background: BackgroundWriter, mesh: DeviceGrid
) -> None:
    """Collective over the ranks that make forecasts together: mark the forecasts that this round completes.

    A forecast is marked in the zarr store as complete after all ranks have written their members and their parts of the
    fields.

    Args:
        batch_round: round that all of these ranks have computed.
        writer: writer of the zarr store.
        background: writing thread of this rank.
        mesh: mesh of the ranks that make forecasts.

    Raises:
        CreditError: on all of these ranks, if one rank could not write.
    """
    if not batch_round.completed_times:
        _run_on_forecast_ranks(background.raise_pending_error, mesh)
        return
    # A forecast is complete when all ranks have written their members and parts.
    _run_on_forecast_ranks(background.flush, mesh)

    def mark_times() -> None:
        if mesh.gets_forecasts:
            for initial_minutes in batch_round.completed_times:
                writer.mark_complete(initial_minutes)

    _run_on_forecast_ranks(mark_times, mesh)


def _run_on_forecast_ranks(function: Callable[[], None], mesh: DeviceGrid) -> None:
    """Collective: call a function on all ranks that make forecasts together, and wait for all of them.

    Raises:
        CreditError: on all of these ranks, if the function failed on one rank.
    """
    # No process group contains all of these ranks. First, the ranks with the same part of the fields wait for each
    # other. Then the ranks with different parts wait for each other and exchange errors.
    for group in (mesh.same_fields_group, mesh.domain_group):
        if group is not None:
            function = functools.partial(run_on_all_ranks, function, group)
    function()


def _make_forecasts_of_round(
    forecast_batch: ForecastFunction,
    batch_round: BatchRound,
    longest_lead: int,
    step_minutes: int,
    output_writer: BackgroundWriter | None,
) -> None:
    """Make the forecasts of a round up to the longest lead time and queue the output of each step for writing.

    Args:
        forecast_batch: function that makes the forecasts of a batch, from `build_shared_forecast_function`.
        batch_round: batches of the round, each with the starts of its forecasts.
        longest_lead: longest lead time in minutes.
        step_minutes: time step of the model in minutes.
        output_writer: writer of the outputs; None to discard the outputs.
    """
    output_iterators = []
    for batch in batch_round.batches:
        # Lagged members start before their initial time and need more steps to reach the same lead time.
        longest_lag = max(start.initial_minutes - start.analysis_minutes for start in batch)
        outputs = forecast_batch(batch, (longest_lead + longest_lag) // step_minutes)
        output_iterators.append(iterate_in_inference_mode(outputs))
    # The batches advance together, because each batch is made by a different rank.
    for step, step_outputs in enumerate(itertools.zip_longest(*output_iterators), start=1):
        written_outputs = step_outputs[: batch_round.num_written]
        for batch, output in zip(batch_round.batches, written_outputs, strict=False):
            if output_writer is not None and output is not None:
                output_writer.put(batch, step, output)
