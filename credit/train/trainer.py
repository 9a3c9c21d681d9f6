"""The training run: steps, validation, checkpoints, and a clean end whatever ends it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from credit.calendar import Calendar
from credit.config import Config
from credit.data.samples.loader import SampleSchedule, block_of_step
from credit.errors import CreditError
from credit.models.lora import checkpoint_state_dict
from credit.parallel.fsdp2 import reshard
from credit.parallel.host_copy import AsyncHostCopy
from credit.parallel.mesh import DeviceGrid
from credit.parallel.object_collectives import run_on_rank0, together
from credit.parallel.process_info import ProcessInfo
from credit.parallel.reduce import mean_over_ranks
from credit.parallel.watchdog import Watchdog
from credit.train.assets import ModelAssets
from credit.train.checkpoint import checkpoint
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.train_state import TrainState, checkpoint_meta
from credit.train.ema import EMA
from credit.train.monitor.divergence import DivergenceGuard, RollbackRequired
from credit.train.monitor.metrics_log import MetricsLog, Progress, peak_memory_gb, write_failure, write_status
from credit.train.monitor.preview import Preview
from credit.train.monitor.run_files import read_last_metrics, read_status, read_summary
from credit.train.monitor.run_lock import RunLock
from credit.train.monitor.stop_signal import StopSignal
from credit.train.monitor.summary import record, write_run_summary
from credit.train.monitor.usage import UsageMeter
from credit.train.optim import learning_rate, optimizer_tensors
from credit.train.prefetch import DevicePrefetcher
from credit.train.step import StepResult, TrainingStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingComponents:
    """Components of a trainer; built by `credit.train.build`."""

    config: Config
    launch: ProcessInfo
    assets: ModelAssets
    calendar: Calendar
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: EMA | None
    training_step: TrainingStep
    order: SampleSchedule
    total_steps: int
    mesh: DeviceGrid
    # step, whether to stop -> metrics of the weights now in the model, None where it stopped
    validate: Callable[[int, Callable[[], bool]], dict[str, float] | None]
    preview: Preview | None  # of the weights that validation scored
    watchdog: Watchdog
    meter: UsageMeter
    base: dict[str, str] | None  # what adapters adapt, where only they train


class Trainer:
    """Runs training to its end, or to the point where it is asked to stop."""

    def __init__(self, parts: TrainingComponents) -> None:
        self._parts = parts
        self._conf = parts.config.trainer
        self._folder = Path(parts.config.save_loc)
        self._checkpoints = self._folder / "checkpoints"
        self._at = TrainState()
        self._guard = DivergenceGuard(self._conf, self._at)
        self._pending: list[tuple[int, StepResult, float]] = []
        self._store = AsyncCheckpointer(self._checkpoints)
        self._presence: RunLock | None = None
        self._status_before: dict[str, Any] = {}
        self._validate_every = self._conf.validate_every or parts.order.steps_per_epoch
        self._view_every = self._validate_every * (self._conf.preview.every if self._conf.preview else 1)
        self._checkpoint_every = self._conf.checkpoint_every or parts.order.steps_per_epoch

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, saved on any mesh: weights, average, optimizer, position; collective."""
        meta = checkpoint.load_meta(path)
        parts, at = self._parts, self._at
        reshard(parts.model)
        state = checkpoint_state_dict(parts.model)
        checkpoint.load_into(path, "model", state)
        if parts.average is not None:
            average = parts.average.average
            # the vectors that belong to the average are found again whenever it is put in
            rest = {name: tensor.clone() for name, tensor in state.items() if name not in average}
            checkpoint.load_into(path, "forecast", rest | average)
        checkpoint.load_into(path, "optimizer", optimizer_tensors(parts.model, parts.optimizer))
        at.restore(meta["progression"])
        if path.parent.resolve() != self._checkpoints.resolve():
            # what was best elsewhere has no checkpoint here
            at.forget_checkpoints()
            return
        self._store.committed = at.step
        best = checkpoint.step_folder(self._checkpoints, at.best_step)
        if at.best_step and checkpoint.verify_checkpoint(best) is None:
            # a kill between the save and the link would have left the link behind
            self._store.point("best", at.best_step)

    def run(self, stop: StopSignal, presence: RunLock | None) -> str:
        """Train; return ``done`` or, where it was asked to stop, ``requeue``.

        Args:
            stop: requests to end.
            presence: holds the run's folder, on the main process.
        """
        parts, at = self._parts, self._at
        self._presence, first = presence, at.step
        # before the rows beyond the checkpoint are cut: what they took was used
        known = [*read_last_metrics(self._folder), read_summary(self._folder)] if parts.launch.is_main else []
        parts.meter.resume(at.step, at.spent, known)
        log = MetricsLog(self._folder, at.step, parts.launch.is_main, self._conf.tensorboard)
        bar = Progress(at.step, parts.total_steps, parts.launch.is_main)
        self._status_before = run_on_rank0(lambda: read_status(self._folder))
        self._status("running", "")
        try:
            with self._store:
                reason = self._persist(log, bar, stop)
            log.flush()
            if reason is None:
                at.require_best(self._conf.monitor)
            if at.step > first:
                bar.say(write_run_summary(*self._account()))
        except BaseException as error:
            step = self._committed_step()
            write_failure(self._folder, self._status_before, error, step, parts.launch.job_id, every_rank=True)
            try:
                if parts.launch.is_main:
                    bar.say(record(*self._account(), peak_memory_gb(parts.device)))
            except Exception as another:
                # a GPU that has failed may tell nothing, a network that is not ours may raise anything
                logger.warning("no summary of the run: %s: %s", type(another).__name__, another)
            raise
        finally:
            bar.close()
            log.close()
        self._status("requeue" if reason else "done", reason or "")
        return "requeue" if reason else "done"

    def _account(self) -> tuple[Path, UsageMeter, TrainState, str, int, int]:
        """Return what a summary is made of."""
        parts, at = self._parts, self._at
        length = parts.training_step.counted(max(at.step - 1, 0))[-1]
        return self._folder, parts.meter, at, self._conf.monitor, parts.total_steps, length

    def _persist(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Train to the end, going back where the run went astray; return the reason of an early stop."""
        if self._at.saved != self._at.step:
            # what a run that goes astray at once goes back to; a disk that takes nothing shows before the first step
            self._save()
        while True:
            try:
                return self._loop(log, bar, stop)
            except RollbackRequired as astray:
                self._go_back(astray, log, bar)

    def _loop(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Return the reason of an early stop, None at the end of the run."""
        parts, at = self._parts, self._at
        # the run may have been stopped before this validation
        missed = at.step and self._due(at.step, self._validate_every) and at.validated != at.step
        if missed and (reason := self._validate(log, bar, stop)):
            return reason
        if self._is_exhausted():
            return None
        with self._feed(at.step, parts.total_steps) as source:
            return self._take_steps(source, log, bar, stop)

    def _take_steps(self, source: DevicePrefetcher, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Take the steps that are left; return the reason of an early stop, None at the end of the run."""
        parts, at = self._parts, self._at
        began, wish, last = time.perf_counter(), None, None
        while at.step < parts.total_steps:
            self._note(f"step {at.step + 1}")
            rate = learning_rate(at.step, parts.total_steps, self._conf.learning_rate, self._conf.schedule)
            seconds = (time.perf_counter() - began) / max(len(self._pending), 1)
            wish = stop.reason(self._save_seconds() + 2 * seconds)
            result = parts.training_step(source, at.step, rate, wish is not None)
            # on a GPU, the step just queued is not waited for: the one before it tells
            before, last = last, AsyncHostCopy(result.stop)
            told = last if parts.device.type == "cpu" else before
            asked = told is not None and told.get().item() > 0
            self._pending.append((at.step, result, rate))
            at.step += 1
            bar.update()
            due, save = self._due(at.step, self._validate_every), self._due(at.step, self._checkpoint_every)
            reason = self._agree(wish) if asked and at.step < parts.total_steps else None
            if due or save or reason or at.step % self._conf.log_every == 0:
                self._write_rows(log, bar, source, began)
                began = time.perf_counter()
            if due and not reason:
                reason = self._validate(log, bar, stop)
                if self._is_exhausted():
                    self._save()
                    return None
            if save or reason:
                self._save()
            if due or save:
                began = time.perf_counter()
            if reason:
                bar.say(f"stopping at step {at.step}: {reason}; the same command continues")
                return reason
        return None

    def _go_back(self, astray: RollbackRequired, log: MetricsLog, bar: Progress) -> None:
        """Go on from the last checkpoint before the steps that led astray, and leave their samples out; collective.

        Raises:
            CreditError: if the run has gone back for steps that were not finite before, or has nothing to go back to.
        """
        parts, at = self._parts, self._at
        minutes = {time for step in astray.steps for time in parts.order.initial_times(step, at.left_out)}
        times = ", ".join(parts.calendar.format(time) for time in sorted(minutes))
        what = f"step {astray.steps[-1] + 1}: {astray.what}"
        if not astray.finite and at.rollbacks:
            last = astray.steps[-1]
            with self._feed(last, last + 1) as batches:
                mine = parts.training_step.explain(batches, last)
            where = next(filter(None, together(lambda: mine)), None)
            raise CreditError(
                f"{what}, and the run had gone back for this before. Initial times of the batches: {times}. "
                + (f"Not finite at first: {where}. " if where else "Computed once more, the last one is finite. ")
                + "The last checkpoint is untouched; look at the data of these times, or lower trainer.learning_rate"
            )
        self._store.settle()
        start = checkpoint.newest_checkpoint(self._checkpoints, at_most=astray.steps[0])
        if start is None:
            raise CreditError(
                f"{what}, and there is no checkpoint to go back to. Initial times of the batches: {times}"
            )
        blocks = [block_of_step(step, at.left_out) for step in astray.steps]
        history = {
            "left_out": sorted({*at.left_out, *blocks}),
            "rollbacks": at.rollbacks + (not astray.finite),
            "spikes": at.spikes + astray.finite,
        }
        self.load(start)
        vars(at).update(history, streak=[])
        at.saved = at.step
        together(lambda: checkpoint.remove_after(self._checkpoints, at.step) if parts.launch.is_main else None)
        self._store.point("latest", at.step)
        self._pending.clear()
        log.rewind(at.step)
        bar.back_to(at.step)
        logger.warning("%s. Back at step %d; left out from now on: the samples of %s", what, at.step, times)

    def _feed(self, first: int, last: int) -> DevicePrefetcher:
        parts = self._parts
        loader = parts.order.loader(first, last, self._at.left_out)
        return DevicePrefetcher(loader, parts.device, parts.mesh.tensor_peers)

    def _save_seconds(self) -> float:
        """Return what a save takes at most; it may have to wait for one under way."""
        return 2 * self._store.seconds

    def _note(self, what: str) -> None:
        """Show the watchers what begins now."""
        self._parts.watchdog.note(what)
        if self._presence is not None:
            self._presence.note(self._at.step, what)

    def _agree(self, wish: str | None) -> str:
        """Return why the run stops: the first rank's reason that has one; collective."""
        return next(filter(None, together(lambda: wish)), "asked for on another rank")

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._parts.total_steps

    def _is_exhausted(self) -> bool:
        """Whether validation has not become better for ``trainer.patience`` times."""
        return self._conf.patience is not None and self._at.worse >= self._conf.patience

    def _write_rows(self, log: MetricsLog, bar: Progress, source: DevicePrefetcher, began: float) -> None:
        """Fetch the numbers of the steps since `began` from the device in one go and write a row for each."""
        if not self._pending:
            return
        parts = self._parts
        # ranks have equal shares of the batch, and all but loss and energy is equal on them
        told = torch.stack([torch.stack([r.loss, r.grad_norm, r.bad]).float() for _, r, _ in self._pending], dim=1)
        joules = told.new_full((1, len(self._pending)), parts.meter.joules())
        loss, norm, bad, energy = mean_over_ranks(torch.cat([told, joules])).tolist()
        # a GPU has worked off its queue only now
        seconds = time.perf_counter() - began
        parts.meter.add_energy(energy[0] * parts.launch.world)
        lengths = [parts.training_step.counted(step)[-1] for step, _, _ in self._pending]
        shared = parts.meter.add_steps(lengths, seconds, source.take_wait())
        shared["peak_memory_gb"] = peak_memory_gb(parts.device)
        for (step, _, rate), one_loss, one_norm, one_bad in zip(self._pending, loss, norm, bad, strict=True):
            row = {"step": step + 1, "epoch": parts.order.epoch(step, self._at.left_out)}
            log.write({**row, "loss": one_loss, "grad_norm": one_norm, "lr": rate, **shared})
            self._guard.judge(step, one_loss, bool(one_bad))
        bar.show(loss=f"{loss[-1]:.4f}")
        self._pending.clear()
        log.flush()

    def _validate(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Validate the weights that forecast and keep them if they are among the best; return why it stopped early."""
        at, parts = self._at, self._parts
        self._note(f"validation at step {at.step}")

        def asked() -> bool:
            return stop.reason(self._save_seconds()) is not None

        average = parts.average.applied() if parts.average is not None else nullcontext()
        with parts.meter.timed("validation_s"), average:
            metrics = parts.validate(at.step, asked)
            if metrics is not None and parts.preview is not None and self._due(at.step, self._view_every):
                self._note(f"early view at step {at.step}")
                if not parts.preview(at.step, log, asked):
                    metrics = None  # the validation is made up for, and the view with it
        if metrics is None:
            return self._agree(stop.reason(self._save_seconds()))
        at.validated = at.step
        log.write({"step": at.step, "valid": metrics})
        log.flush()
        value = metrics[self._conf.monitor]
        bar.say(f"step {at.step}: valid loss {metrics['loss']:.4f}, {self._conf.monitor} {value:.4f}")
        if math.isfinite(value):
            at.best_saved = sorted([*at.best_saved, [value, at.step]])[: self._conf.keep_best]
        not_finite = [name for name, number in metrics.items() if not math.isfinite(number)]
        if not_finite:
            logger.warning("step %d: not finite in validation: %s", at.step, ", ".join(not_finite))
        if value < at.best:
            at.best, at.best_step, at.worse = value, at.step, 0
            self._save("latest", "best")
        else:
            at.worse += 1
            if [value, at.step] in at.best_saved:
                self._save()
        if self._is_exhausted():
            bar.say(f"stopping early: no better {self._conf.monitor} than {at.best:.4f} of step {at.best_step}")
        return None

    def _save(self, *links: str) -> None:
        """Begin to write a checkpoint of the present step, unless there is one, for `links` to point to; collective."""
        at, parts = self._at, self._parts
        if at.saved == at.step:
            for name in links:
                self._store.point(name, at.step)
            return
        self._note(f"checkpoint of step {at.step}")
        with parts.meter.timed("save_s"):
            self._begin_save(links or ("latest",))
        self._status("running", "")

    def _begin_save(self, links: tuple[str, ...]) -> None:
        at, parts = self._at, self._parts
        together(lambda: self._presence.require() if self._presence is not None else None)
        at.saved = at.step
        reshard(parts.model)
        tensors = {
            "model": checkpoint_state_dict(parts.model),
            "forecast": self._forecast_state(),
            "optimizer": optimizer_tensors(parts.model, parts.optimizer),
        }
        at.spent = parts.meter.state()
        meta = checkpoint_meta(parts.config, parts.assets, at, parts.calendar.name, parts.mesh.data_ranks, parts.base)
        keep = checkpoint.Retention(
            self._conf.keep_last, self._conf.keep_every, tuple(int(step) for _, step in at.best_saved)
        )
        self._store.save(at.step, tensors, parts.assets.tensors(), meta, links, keep)

    def _forecast_state(self) -> dict[str, torch.Tensor]:
        if self._parts.average is None:
            return checkpoint_state_dict(self._parts.model)
        with self._parts.average.applied():
            reshard(self._parts.model)
            return {name: value.clone() for name, value in checkpoint_state_dict(self._parts.model).items()}

    def _committed_step(self) -> int:
        """Return the step that another start would go on from: only what is on the disk counts."""
        return self._at.step if self._store.committed is None else self._store.committed

    def _status(self, state: str, reason: str) -> None:
        if self._parts.launch.is_main:
            write_status(self._folder, state, self._committed_step(), reason, self._parts.launch.job_id)
