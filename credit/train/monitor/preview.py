"""Preview of a run: a few forecasts from the validation period, scored and plotted during training.

A preview does not change the training run: it uses no random numbers, leaves no gradients, and restores the mode of the
model.

Shape suffixes: B samples (one in a preview), C channels, L lead times, H latitude rows, W longitude columns.
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
from credit.config.sections.data import DataConfig
from credit.data.reader import FieldReader
from credit.data.samples.frames import FrameReader
from credit.data.splits import Split, require_samples
from credit.errors import DataError
from credit.forecast.rollout import ForecastInputs, build_starts, forecast_batch
from credit.forecast.stepper import Stepper
from credit.metrics import MetricContext
from credit.metrics.rmse import RootMeanSquareError
from credit.parallel.mesh import DeviceGrid
from credit.parallel.reduce import mean_over_ranks
from credit.train.monitor.metrics_log import MetricsLog
from credit.train.monitor.run_files import read_preview_scores
from credit.train.validate import any_rank_stops, select_evenly_spaced, shard_cases

logger = logging.getLogger(__name__)

# Function that plots a preview and returns the files that it has written. Its arguments are: the run folder; the reader
# of the data; step -> scores of the previews so far; channel -> (truth, forecast), both (H, W), at the last lead time
# of the first case; the initial times; the lead time in minutes.
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
    """Forecasts and channels of a preview.

    Attributes:
        channels: names of the channels that are scored and plotted.
        initial_times: initial times in minutes of the data's calendar, increasing.
        lead_minutes: length of each forecast in minutes.
    """

    channels: list[str]
    initial_times: list[int]
    lead_minutes: int

    def describe(self, calendar: Calendar) -> str:
        """Return a one-line description of the plan, with times in `calendar`."""
        first_time = calendar.format(self.initial_times[0])
        last_time = calendar.format(self.initial_times[-1])
        period = f"{first_time} to {last_time}"
        return (
            f"{len(self.initial_times)} forecasts of {self.lead_minutes / 60:g} h, {period}; {', '.join(self.channels)}"
        )


def plan_preview(
    config: Config, channels: ChannelMap, times: np.ndarray, calendar: Calendar, valid: Split
) -> PreviewPlan:
    """Return the forecasts and channels that ``trainer.preview`` requests.

    Args:
        config: the config of the run, which has the section ``trainer.preview``.
        channels: channels of the run.
        times: (N,) times of the data in minutes.
        calendar: calendar of the data.
        valid: validation period, which must contain all times of all forecasts.

    Raises:
        ConfigError: if a channel is not an output of the model.
        DataError: if no forecast fits into the period.
    """
    conf = config.trainer.preview
    if conf.channels is None:
        key = "verification.figure_channels"
        selection = config.verification.figure_channels
    else:
        key = "trainer.preview.channels"
        selection = conf.channels
    channel_names = select_figure_channels(selection, channels.output, key)
    lead = parse_duration(conf.lead_time)
    try:
        initial_times = require_samples(times, valid, calendar, config.data, lead // config.data.step_minutes)
    except DataError as error:
        raise DataError(f"trainer.preview.lead_time: {conf.lead_time}: {error}; or shorten it") from error
    return PreviewPlan(channel_names, select_evenly_spaced(initial_times, conf.cases).tolist(), lead)


class Preview:
    """Object that makes previews: forecasts with the model's current weights, their scores, and plots of the scores.

    All ranks compute the same number of forecasts, one at a time, because the ranks of a sharded model must run the
    model together. A rank without a remaining case repeats a case, and the scores ignore this repetition.

    Args:
        plan: forecasts and channels of each preview.
        stepper: stepper of the network, which is in eval mode during a preview.
        frames: reader of initial states, forcing and truth.
        conf: the data section of the config.
        weight_CHW: weight of each cell for each output channel. The weights of a channel sum to 1; cells that are
            always missing have weight 0.
        mesh: position of this rank in the device mesh.
        folder: the run's folder.
        draw: function that plots a preview, see `DrawPreview`; its errors are logged as warnings.
    """

    def __init__(
        self, plan: PreviewPlan, stepper: Stepper, frames: FrameReader, conf: DataConfig, weight_CHW: torch.Tensor,
        mesh: DeviceGrid, folder: Path, draw: DrawPreview,
    ) -> None:  # fmt: skip
        output_names = [channel.name for channel in stepper.channels.output]
        # Index of each channel of the preview in the output channels.
        self._channel_index = [output_names.index(name) for name in plan.channels]
        self._plan = plan
        self._stepper = stepper
        self._frames = frames
        self._conf = conf
        self._weight_CHW = weight_CHW[self._channel_index]
        self._is_missing_CHW = (self._weight_CHW == 0).cpu().numpy()
        self._share = shard_cases(len(plan.initial_times), 1, mesh.data_rank, mesh.num_data_ranks)
        self._is_main = mesh.rank == 0
        self._folder = folder
        self._draw = draw
        # channel -> (truth, forecast) of the last preview, both (H, W) in the data's units
        self._maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, step: int, log: MetricsLog, stop: Callable[[], bool]) -> bool:
        """Collective: make a preview and return True if it was completed.

        If a rank must stop, the preview is not completed and nothing is written.

        Args:
            step: number of optimizer steps taken.
            log: log that receives a row with the scores, and the figures.
            stop: function that returns True if this rank must stop; it is called before each forecast.
        """
        scores = self.score(stop)
        if scores is None:
            return False
        log.write({"step": step, "early": scores})
        log.flush()
        if self._is_main:
            self._draw_previews(step, scores, log)
        return True

    def score(self, stop: Callable[[], bool]) -> dict[str, float | None] | None:
        """Collective: compute all forecasts and return their scores; return None if a rank had to stop.

        Args:
            stop: function that returns True if this rank must stop; it is called before each forecast.

        Returns:
            Name of a score -> value, for every channel and lead time. ``rmse/z500/24h`` is the root-mean-square error
            of the forecasts and ``persistence/z500/24h`` the root-mean-square error of persistence, in the units of the
            data. A value that is not finite is None.
        """
        model = self._stepper.model
        num_steps = self._plan.lead_minutes // self._conf.step_minutes
        lead_hours = [(number + 1) * self._conf.step_minutes / 60 for number in range(num_steps)]
        errors = RootMeanSquareError(MetricContext(self._stepper.channels, self._weight_CHW, lead_hours))

        # Add the errors of the cases of this rank, with the network in eval mode.
        was_training = model.training
        is_stopped = False
        model.eval()
        for (case,), num_scored in zip(self._share.batches, self._share.scored_counts, strict=True):
            is_stopped = any_rank_stops(stop, self._weight_CHW.device)
            if is_stopped:
                break
            self._add_forecast_errors(case, num_scored > 0, errors)
        model.train(was_training)
        if is_stopped:
            return None

        # Average over the cases of all ranks.
        scores = {}
        for name, square_sum_LC in (("rmse", errors.forecast_LC), ("persistence", errors.persistence_LC)):
            # The ranks of a tensor-parallel group have the same cases, so the mean over all ranks equals the mean over
            # the data-parallel ranks. This mean times the number of data-parallel ranks is the sum over all cases.
            mean_LC = mean_over_ranks(square_sum_LC) * self._share.ranks / self._share.cases
            for hour, values in zip(lead_hours, mean_LC.sqrt().tolist(), strict=True):
                for channel, value in zip(self._plan.channels, values, strict=True):
                    scores[f"{name}/{channel}/{hour:g}h"] = value if math.isfinite(value) else None
        return scores

    def _add_forecast_errors(self, case: int, is_scored: bool, errors: RootMeanSquareError) -> None:
        """Compute the forecast of one case and add its errors to `errors`.

        Args:
            case: index of the initial time.
            is_scored: False if another rank scores this case; this rank then only runs the model and adds no errors.
            errors: sums of errors over the cases.
        """
        initial = self._plan.initial_times[case]
        step_minutes = self._conf.step_minutes
        num_steps = self._plan.lead_minutes // step_minutes
        starts = build_starts([initial])
        initial_1CHW = self._read_truth(initial)
        inputs = ForecastInputs(self._frames, step_minutes, self._conf.history_len)
        self._stepper.begin_iteration()
        outputs = forecast_batch(self._stepper, inputs, starts, num_steps)
        for number, output_BCHW in enumerate(outputs):
            if not is_scored:
                # The ranks of a sharded model must all take this step.
                continue
            truth_1CHW = self._read_truth(initial + (number + 1) * step_minutes)
            # The metric expects ensembles, so the forecast gets a member dimension of length 1.
            forecast_11CHW = output_BCHW[:, None, self._channel_index]
            errors.add(number, forecast_11CHW, initial_1CHW, truth_1CHW)
            is_drawn = number == num_steps - 1 and case == 0
            if is_drawn and self._is_main:
                self._set_maps(truth_1CHW[0].cpu().numpy(), forecast_11CHW[0, 0].cpu().numpy())

    def _read_truth(self, minutes: int) -> torch.Tensor:
        """Return the true fields of the scored channels at a time, (1, C, H, W), with 0 in always missing cells.

        Args:
            minutes: the time in minutes.
        """
        fields_CHW = self._frames.state(minutes)[self._channel_index]
        fields_CHW = np.where(self._is_missing_CHW, 0.0, fields_CHW)
        return torch.from_numpy(fields_CHW[None]).to(self._weight_CHW.device)

    def _set_maps(self, truth_CHW: np.ndarray, forecast_CHW: np.ndarray) -> None:
        """Store the truth and the forecast of the C scored channels for the plots, with NaN in always missing cells."""
        truth_CHW = np.where(self._is_missing_CHW, np.nan, truth_CHW)
        forecast_CHW = np.where(self._is_missing_CHW, np.nan, forecast_CHW)
        pairs = zip(truth_CHW, forecast_CHW, strict=True)
        self._maps = dict(zip(self._plan.channels, pairs, strict=True))

    def _draw_previews(self, step: int, scores: Mapping[str, float | None], log: MetricsLog) -> None:
        """Plot the scores of all previews so far; log a warning on an error, because training must continue."""
        try:
            # The current scores are added, because a full disk may have delayed their row in the file.
            history = {**read_preview_scores(self._folder), step: scores}
            plan = self._plan
            paths = self._draw(
                self._folder, self._frames.reader, history, self._maps, plan.initial_times, plan.lead_minutes
            )
            for path in paths:
                log.add_picture(path, step)
        except Exception as error:
            logger.warning("preview at step %d: not plotted (%s)", step, error or repr(error))


def build_preview(
    config: Config, frames: FrameReader, valid: Split, stepper: Stepper, weight_CHW: torch.Tensor, mesh: DeviceGrid,
    draw: DrawPreview,
) -> Preview | None:  # fmt: skip
    """Return the `Preview` of a run; None if the config has no section ``trainer.preview``.

    Args:
        config: the config of the run.
        frames: reader of initial states, forcing and truth.
        valid: validation period.
        stepper: stepper of the network.
        weight_CHW: weights of the cells of the output channels, see `Preview`.
        mesh: position of this rank in the device mesh.
        draw: function that plots a preview, see `DrawPreview`.

    Raises:
        ConfigError: if a channel is not an output of the model.
        DataError: if no forecast fits into the validation period.
    """
    if config.trainer.preview is None:
        return None
    reader = frames.reader
    plan = plan_preview(config, reader.channels, reader.times, reader.calendar, valid)
    return Preview(plan, stepper, frames, config.data, weight_CHW, mesh, Path(config.save_loc), draw)
