"""Steps of one call of ``credit realtime``: choose the cycle, fetch, check, forecast and score.

The folder ``save_loc/realtime`` contains:

- ``STATUS``: cycle and state of the last call;
- ``cycles.jsonl``: a line for each finished cycle;
- ``scores.jsonl``: scores of earlier forecasts;
- ``analyses/``: a file for each analysis, on the grid of the analysis;
- ``records/``: records of analyses that are being fetched;
- ``grid.nc``: grid of the model;
- ``lock``: lock file, so that only one call runs at a time.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from credit.calendar import Calendar, parse_duration
from credit.config import Config
from credit.data.formats.grib.messages import import_eccodes
from credit.errors import CycleError, DataError
from credit.realtime.analysis import AnalysisContent, has_analysis, write_analysis, write_grid
from credit.realtime.clock import Clock
from credit.realtime.cycles import list_candidate_cycles
from credit.realtime.fetch.fetcher import AnalysisFile, RecordFetcher
from credit.realtime.fetch.records import list_analysis_offsets, list_record_requests, require_realtime_section
from credit.realtime.fetch.transport import HttpClient
from credit.realtime.initial_state import (
    CheckpointMetadata,
    build_forecast_config,
    describe_unusual_fields,
    load_checkpoint_metadata,
    open_initial_state,
)
from credit.realtime.scoring import has_forecast, score_earlier_forecasts
from credit.realtime.status import StatusFiles
from credit.utils.file_lock import file_lock

logger = logging.getLogger(__name__)

# Function that makes the forecasts of a config in the same way as `credit rollout`.
MakeForecasts = Callable[[Config], None]

_ANALYSIS_PREFIX = "analysis_"


@dataclass(frozen=True)
class Outcome:
    """Result of a call of ``credit realtime``.

    Attributes:
        cycle: cycle whose forecast exists now, in minutes since 1900.
        expected_cycle: newest expected cycle, in minutes since 1900.
        reason: reason why an earlier cycle was used; empty if `cycle` is the expected cycle.
        is_new: True if this call made the forecast, False if the forecast existed before the call.
    """

    cycle: int
    expected_cycle: int
    reason: str
    is_new: bool


class RealtimeWorkflow:
    """Workflow that fetches the newest analysis, makes a forecast from it, and scores earlier forecasts.

    Args:
        config: config of the run.
        make_forecasts: function that makes and writes the forecasts of a config.
        clock: clock with the deadline until which the workflow waits for a late cycle.

    Raises:
        ConfigError: if the section ``realtime`` is missing, or a variable cannot be in an analysis.
        DataError: if ecCodes is not installed.
    """

    def __init__(self, config: Config, make_forecasts: MakeForecasts, clock: Clock) -> None:
        self._config = config
        self._realtime = require_realtime_section(config)
        self._requests = list_record_requests(config)
        self._offsets = list_analysis_offsets(config)
        import_eccodes()
        self._make_forecasts = make_forecasts
        self._clock = clock
        self._folder = Path(config.save_loc) / "realtime"
        self._forecast_folder = Path(config.save_loc) / config.inference.folder
        self._status = StatusFiles(self._folder, clock)

    def run(self, cycle: int | None = None) -> Outcome:
        """Make the forecast of the newest cycle unless it exists; first wait until no other call is running.

        Args:
            cycle: cycle to use, in minutes since 1900; None for the newest cycle.

        Raises:
            CycleError: if no cycle is usable; STATUS contains the reason.
            CreditError: if the forecast cannot be made; STATUS contains the reason.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with file_lock(self._folder / "lock", wait=False) as is_locked:
            if is_locked:
                return self._run_locked(cycle)
        logger.info("another call is running in %s; waiting for its end", self._folder)
        with file_lock(self._folder / "lock"):
            return self._run_locked(cycle)

    def _run_locked(self, cycle: int | None) -> Outcome:
        """Make the forecast while this process holds the lock; for arguments and errors see `run`."""
        if cycle is None:
            candidates = self._list_candidate_cycles()
        else:
            candidates = [cycle]
        expected_cycle = candidates[0]
        reasons: list[str] = []
        for candidate in candidates:
            if self._is_finished(candidate):
                return self._write_final_status(candidate, expected_cycle, reasons, is_new=False)
            try:
                self._make_forecast(candidate)
            except CycleError as error:
                logger.warning("%s", error)
                reasons.append(str(error))
                # The call does not wait for earlier cycles. Without a deadline, failed requests are still repeated.
                self._clock.deadline = None
            except BaseException as error:
                self._status.write("failed", candidate, str(error) or type(error).__name__)
                raise
            else:
                return self._write_final_status(candidate, expected_cycle, reasons, is_new=True)
        self._status.write("failed", expected_cycle, reasons[0])
        raise CycleError(f"no usable cycle: {reasons[0]}")

    def _is_finished(self, cycle: int) -> bool:
        """Return True if a cycle is finished, and its forecast is still in the forecast folder."""
        if not self._status.is_finished(cycle, self._config.inference.folder):
            return False
        return has_forecast(self._forecast_folder, cycle)

    def _list_candidate_cycles(self) -> list[int]:
        """Return the cycles that may be used, the expected cycle first; for errors see `list_candidate_cycles`."""
        now = self._clock.minutes()
        deadline = now
        if self._clock.deadline is not None:
            deadline = now + max(0, int(self._clock.deadline - self._clock.seconds()) // 60)
        try:
            return list_candidate_cycles(self._realtime, now, deadline)
        except CycleError as error:
            self._status.write("failed", None, str(error))
            raise

    def _write_final_status(self, cycle: int, expected_cycle: int, reasons: Sequence[str], is_new: bool) -> Outcome:
        """Write the final state to STATUS and return the outcome."""
        reason = reasons[0] if reasons else ""
        self._status.write("done" if cycle == expected_cycle else "earlier_cycle", cycle, reason)
        return Outcome(cycle, expected_cycle, reason, is_new)

    def _make_forecast(self, cycle: int) -> None:
        """Fetch the analyses of a cycle, make its forecast and score earlier forecasts.

        If the cycle is not yet usable, wait for it until the deadline of the clock; without a deadline, do not wait.

        Raises:
            CycleError: if the cycle is not usable.
            CreditError: if the forecast cannot be made.
        """
        started = self._clock.seconds()
        model = load_checkpoint_metadata(self._config)
        client = HttpClient(self._realtime.retries, self._realtime.timeout, self._clock)
        while True:
            self._status.write("fetching", cycle)
            try:
                paths = [self._provide_analysis(cycle - offset, model, client) for offset in reversed(self._offsets)]
                forecast_config = self._check_initial_state(cycle, model, paths)
                break
            except CycleError as error:
                if self._clock.deadline is None:
                    raise
                # The last attempt is made at the deadline.
                seconds = min(
                    60 * parse_duration(self._realtime.poll_every), self._clock.deadline - self._clock.seconds()
                )
                if seconds <= 0:
                    raise
                logger.info("%s; next attempt in %.0f s", error, seconds)
                self._status.write("waiting", cycle, str(error))
                self._clock.sleep(seconds)
        self._status.write("forecasting", cycle)
        self._make_forecasts(forecast_config)
        self._status.write("scoring", cycle)
        facts = {"bytes_fetched": client.bytes_received, **self._score_earlier_forecasts(cycle, model, forecast_config)}
        facts["seconds"] = round(self._clock.seconds() - started, 1)
        self._status.add_finished_cycle(cycle, self._config.inference.folder, facts)
        self._delete_old_analyses(cycle)

    def _provide_analysis(self, minutes: int, model: CheckpointMetadata, client: HttpClient) -> Path:
        """Return the path of an analysis file; fetch the analysis if the file does not exist.

        Args:
            minutes: time of the analysis in minutes since 1900.
            model: checkpoint of the forecast.
            client: HTTP client.

        Raises:
            CycleError: if the analysis is incomplete or damaged.
        """
        name = Calendar().datetime(minutes).strftime("%Y%m%dT%H")
        path = self._folder / "analyses" / f"{_ANALYSIS_PREFIX}{name}.nc"
        file = AnalysisFile.from_config(self._realtime, minutes)
        content = AnalysisContent(minutes, file.url, self._requests, model.assets.attributes)
        if has_analysis(path, content):
            return path
        # The folder depends on the content, so that records of a different address or config are not mixed.
        records_folder = self._folder / "records" / f"{name}_{content.digest()}"
        fetcher = RecordFetcher(file, self._requests, records_folder, client)
        fetcher.fetch()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_analysis(path, content, fetcher.read)
        except DataError as error:
            # The records are not usable, so they are deleted before the next attempt.
            shutil.rmtree(records_folder)
            raise CycleError(file.describe("records", str(error))) from error
        shutil.rmtree(records_folder)
        return path

    def _check_initial_state(self, cycle: int, model: CheckpointMetadata, paths: Sequence[Path]) -> Config:
        """Compare the initial state of a forecast with the training data, and return the config of the forecast.

        Raises:
            CycleError: if a field is missing or implausible, or differs strongly from the training data.
            CheckpointError: if the channels of the checkpoint differ from those of the config.
        """
        grid_path = self._folder / "grid.nc"
        write_grid(grid_path, model.assets.grid)
        forecast_config = build_forecast_config(self._config, paths, grid_path, cycle)
        try:
            frames = open_initial_state(model, forecast_config)
            problems = [describe_unusual_fields(model, frames, cycle - offset) for offset in self._offsets]
        except DataError as error:
            self._delete_analyses(paths)
            file = AnalysisFile.from_config(self._realtime, cycle)
            raise CycleError(file.describe("fields", str(error))) from error
        for offset, problem in zip(self._offsets, problems, strict=True):
            if not problem:
                continue
            file = AnalysisFile.from_config(self._realtime, cycle - offset)
            message = file.describe(problem, "differs from the training data")
            if self._realtime.on_shift == "fail":
                self._delete_analyses(paths)
                raise CycleError(message)
            logger.warning("%s", message)
        return forecast_config

    def _score_earlier_forecasts(
        self, cycle: int, model: CheckpointMetadata, forecast_config: Config
    ) -> dict[str, Any]:
        """Score earlier forecasts, and return their number; if scoring fails, also return the reason.

        The new forecast has already been made, so a failure of scoring is a warning and not an error.
        """
        save_loc = Path(self._config.save_loc)
        analysis_CHW = open_initial_state(model, forecast_config).prognostic(cycle)
        try:
            num_scored = score_earlier_forecasts(
                save_loc, self._config.inference.folder, model.assets, analysis_CHW, cycle
            )
        except DataError as error:
            logger.warning("the forecast of %s was made, but scoring failed: %s", Calendar().format(cycle), error)
            return {"forecasts_scored": 0, "scoring_error": str(error)}
        return {"forecasts_scored": num_scored}

    def _delete_analyses(self, paths: Sequence[Path]) -> None:
        """Delete the analysis files `paths`, which are not usable, so that the next attempt fetches them again."""
        for path in paths:
            path.unlink(missing_ok=True)

    def _delete_old_analyses(self, cycle: int) -> None:
        """Delete analyses, and records of incomplete analyses, that are older than ``realtime.keep_analyses``."""
        oldest = Calendar().datetime(cycle - parse_duration(self._realtime.keep_analyses)).strftime("%Y%m%dT%H")
        for path in (self._folder / "analyses").glob(f"{_ANALYSIS_PREFIX}*.nc"):
            if path.stem.removeprefix(_ANALYSIS_PREFIX) < oldest:
                path.unlink()
        for path in (self._folder / "records").glob("*"):
            if path.name < oldest:
                shutil.rmtree(path)
