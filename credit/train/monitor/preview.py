"""An early view of a run: a few forecasts from the validation period, scored and drawn while training goes on.

It takes nothing from training and leaves nothing behind: no random draw, no gradient, the model's mode as it was.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from credit.calendar import Calendar, parse_duration
from credit.channels import ChannelMap, select_figure_channels
from credit.config import Config
from credit.config.schema_data import DataConfig
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.splits import Split, require_samples
from credit.errors import DataError
from credit.forecast.rollout import forecast, make_starts
from credit.forecast.stepper import Stepper
from credit.metrics import MetricContext
from credit.metrics.rmse import RootMeanSquareError
from credit.parallel.mesh import DeviceGrid
from credit.parallel.reduce import mean_over_ranks
from credit.train.monitor.metrics_log import MetricsLog
from credit.train.monitor.run_files import early_rows
from credit.train.validate import any_rank_stops, evenly_spaced, shard_cases

logger = logging.getLogger(__name__)

# the run's folder; its data; step -> scores of the views so far; channel -> (truth, forecast), (H, W), at the last lead
# time of the first case; initial times; lead time in minutes -> the files that were written
DrawPreview = Callable[
    [
        Path,
        FieldReader,
        Mapping[int, Mapping[str, float | None]],
        Mapping[str, tuple[np.ndarray, np.ndarray]],
        Sequence[int],
        int,
    ],
    list[Path],
]


@dataclass(frozen=True)
class PreviewPlan:
    """What a view forecasts and scores.

    Attributes:
        channels: names of the channels that are scored and drawn.
        initial: initial times in minutes, increasing.
        lead: length of a forecast in minutes.
    """

    channels: list[str]
    initial: list[int]
    lead: int

    def describe(self, calendar: Calendar) -> str:
        """Return the plan in words."""
        first, last = calendar.format(self.initial[0]), calendar.format(self.initial[-1])
        return f"{len(self.initial)} forecasts of {self.lead / 60:g} h, {first} to {last}; {', '.join(self.channels)}"


def plan_preview(
    config: Config, channels: ChannelMap, times: np.ndarray, calendar: Calendar, valid: Split
) -> PreviewPlan:
    """Return what ``trainer.preview`` asks for.

    Args:
        config: with that section.
        channels: of the run.
        times: (N,) minutes that the data have.
        calendar: their calendar.
        valid: the validation period, in which whole forecasts lie.

    Raises:
        ConfigError: if a channel is not predicted.
        DataError: if no forecast fits into the period.
    """
    conf, key, wanted = config.trainer.preview, "verification.figure_channels", config.verification.figure_channels
    if conf.channels is not None:
        key, wanted = "trainer.preview.channels", conf.channels
    shown, lead = select_figure_channels(wanted, channels.output, key), parse_duration(conf.lead_time)
    try:
        found = require_samples(times, valid, calendar, config.data, lead // config.data.step_minutes)
    except DataError as error:
        raise DataError(f"trainer.preview.lead_time: {conf.lead_time}: {error}; or shorten it") from error
    return PreviewPlan(shown, evenly_spaced(found, conf.cases).tolist(), lead)


class Preview:
    """Forecasts with the weights that are in the model, writes their scores and has them drawn.

    Ranks have the same number of forecasts, one at a time, as in validation: those of a sharded model need each other.

    Args:
        plan: what is forecast.
        stepper: runs the network, which is put in eval mode and back.
        frames: initial states, forcing and truth.
        conf: the data section.
        weight_CHW: cell weights by output channel, summing to 1 over each, 0 where it is always missing.
        mesh: of the run's ranks.
        folder: the run's.
        draw: draws; what it raises is a warning.
    """

    def __init__(
        self, plan: PreviewPlan, stepper: Stepper, frames: FrameReader, conf: DataConfig, weight_CHW: torch.Tensor,
        mesh: DeviceGrid, folder: Path, draw: DrawPreview,
    ) -> None:  # fmt: skip
        names = [channel.name for channel in stepper.channels.output]
        self._rows = [names.index(name) for name in plan.channels]
        self._plan, self._stepper, self._frames, self._conf = plan, stepper, frames, conf
        self._weight_CHW = weight_CHW[self._rows]
        self._hidden_CHW = (self._weight_CHW == 0).cpu().numpy()
        self._share = shard_cases(len(plan.initial), 1, mesh.data_rank, mesh.data_ranks)
        self._is_main, self._folder, self._draw = mesh.rank == 0, folder, draw
        self._maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, step: int, log: MetricsLog, stop: Callable[[], bool]) -> bool:
        """Look at the run after optimizer step `step`; False, and nothing written, where a rank wants to stop before.

        Collective.

        Args:
            step: steps taken.
            log: gets a row with the scores, and the figures.
            stop: whether this rank wants to stop; asked before each forecast.
        """
        scores = self.score(stop)
        if scores is None:
            return False
        log.write({"step": step, "early": scores})
        log.flush()
        if self._is_main:
            self._show(step, scores, log)
        return True

    def score(self, stop: Callable[[], bool]) -> dict[str, float | None] | None:
        """Return ``rmse/z500/24h`` and ``persistence/z500/24h`` of every channel and lead time, in the data's units.

        Collective; None where a rank wanted to stop before it was over. A score that is not finite is None.
        """
        model, device = self._stepper.model, self._weight_CHW.device
        was_training, stopped = model.training, False
        num_steps = self._plan.lead // self._conf.step_minutes
        lead_hours = [(number + 1) * self._conf.step_minutes / 60 for number in range(num_steps)]
        errors = RootMeanSquareError(MetricContext(self._stepper.channels, self._weight_CHW, lead_hours))
        model.eval()
        for (case,), counted in zip(self._share.batches, self._share.counted, strict=True):
            stopped = any_rank_stops(stop, device)
            if stopped:
                break
            self._forecast(case, counted > 0, errors)
        model.train(was_training)
        if stopped:
            return None
        scores = {}
        for name, total in (("rmse", errors.forecast_LC), ("persistence", errors.persistence_LC)):
            # tensor-parallel peers have the same cases, so the mean is that over the data ranks
            mean_LC = mean_over_ranks(total) * self._share.ranks / self._share.cases
            for hour, values in zip(lead_hours, mean_LC.sqrt().tolist(), strict=True):
                for channel, value in zip(self._plan.channels, values, strict=True):
                    scores[f"{name}/{channel}/{hour:g}h"] = value if math.isfinite(value) else None
        return scores

    def _forecast(self, case: int, counts: bool, errors: RootMeanSquareError) -> None:
        """Forecast from one initial time, and add its errors where it `counts`."""
        initial, step = self._plan.initial[case], self._conf.step_minutes
        steps, past = self._plan.lead // step, self._conf.history_len
        start = self._truth(initial)
        for number, output in enumerate(
            forecast(self._stepper, self._frames, make_starts([initial]), steps, step, past)
        ):
            if not counts:
                continue
            truth = self._truth(initial + (number + 1) * step)
            errors.add(number, output[:, None, self._rows], start, truth)
            if number == steps - 1 and case == 0 and self._is_main:
                self._keep_maps(truth[0].cpu().numpy(), output[0, self._rows].cpu().numpy())

    def _truth(self, minutes: int) -> torch.Tensor:
        """Return the scored channels (1, C, H, W) at a time, 0 where they are always missing."""
        fields = self._frames.state(minutes)[self._rows]
        return torch.from_numpy(np.where(self._hidden_CHW, 0.0, fields)[None]).to(self._weight_CHW.device)

    def _keep_maps(self, truth_CHW: np.ndarray, forecast_CHW: np.ndarray) -> None:
        truth_CHW, forecast_CHW = (np.where(self._hidden_CHW, np.nan, own) for own in (truth_CHW, forecast_CHW))
        self._maps = dict(zip(self._plan.channels, zip(truth_CHW, forecast_CHW, strict=True), strict=True))

    def _show(self, step: int, scores: Mapping[str, float | None], log: MetricsLog) -> None:
        """Draw the views so far; whatever goes wrong, training goes on."""
        try:
            # a full disk may not have taken the row yet
            history = {**early_rows(self._folder), step: scores}
            reader, plan = self._frames.reader, self._plan
            for path in self._draw(self._folder, reader, history, self._maps, plan.initial, plan.lead):
                log.show(path, step)
        except Exception as error:
            logger.warning("preview at step %d: not drawn (%s)", step, error or repr(error))


def build_preview(
    config: Config, frames: FrameReader, valid: Split, stepper: Stepper, weight_CHW: torch.Tensor, mesh: DeviceGrid,
    draw: DrawPreview,
) -> Preview | None:  # fmt: skip
    """Return the run's preview, None where the config asks for none."""
    if config.trainer.preview is None:
        return None
    reader = frames.reader
    plan = plan_preview(config, reader.channels, reader.times, reader.calendar, valid)
    return Preview(plan, stepper, frames, config.data, weight_CHW, mesh, Path(config.save_loc), draw)
