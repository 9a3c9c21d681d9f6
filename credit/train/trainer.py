"""The training run: steps, validation, checkpoints, and a clean end whatever ends it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from credit.config import Config
from credit.data.batch import Batch
from credit.errors import CreditError
from credit.models.lora import saved_state
from credit.parallel.fsdp2 import reshard
from credit.parallel.launch import Launch
from credit.parallel.mesh import RunMesh
from credit.parallel.reduce import mean_over_ranks
from credit.times import Clock, parse_duration
from credit.train import checkpoint
from credit.train.assets import Assets
from credit.train.ema import WeightAverage
from credit.train.log import MetricsLog, Progress, peak_memory_gb, write_status
from credit.train.optim import learning_rate, optimizer_tensors
from credit.train.preempt import StopRequest
from credit.train.step import StepResult, TrainingStep
from credit.train.store import CheckpointStore
from credit.train.verdict import together

logger = logging.getLogger(__name__)


@dataclass
class Progression:
    """Where a run stands; saved with every checkpoint.

    Attributes:
        step: optimizer steps taken.
        best: the best value of ``trainer.monitor`` so far.
        best_step: where it was.
        worse: validations since then.
        bad_steps: non-finite steps in a row.
        saved: step of the newest checkpoint.
        validated: step of the newest validation.
    """

    step: int = 0
    best: float = float("inf")
    best_step: int = 0
    worse: int = 0
    bad_steps: int = 0
    saved: int = -1
    validated: int = -1


@dataclass(frozen=True)
class TrainingParts:
    """What a trainer works with; built by `credit.train.assemble`."""

    config: Config
    launch: Launch
    assets: Assets
    clock: Clock
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: WeightAverage | None
    training_step: TrainingStep
    steps_per_epoch: int
    total_steps: int
    mesh: RunMesh
    batches: Any  # first step -> DataLoader
    validate: Any  # step -> dict of metrics of the weights now in the model
    base: dict[str, str] | None  # what adapters adapt, where only they train


class Trainer:
    """Runs training to its end, or to the point where it is asked to stop."""

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self._conf = parts.config.trainer
        self._folder = Path(parts.config.save_loc)
        self._checkpoints = self._folder / "checkpoints"
        self._at = Progression()
        self._pending: list[tuple[int, StepResult, float]] = []
        self._bad_times: list[str] = []
        self._valid_seconds = 0.0
        self._store = CheckpointStore(self._checkpoints, self._conf.keep_last)
        self._validate_every = self._conf.validate_every or parts.steps_per_epoch
        self._checkpoint_every = self._conf.checkpoint_every or parts.steps_per_epoch

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, saved on any mesh: weights, average, optimizer, position; collective."""
        meta = checkpoint.load_meta(path)
        parts = self._parts
        state = saved_state(parts.model)
        checkpoint.load_into(path, "model", state)
        if parts.average is not None:
            average = parts.average.average
            # the vectors that belong to the average are found again whenever it is put in
            rest = {name: tensor.clone() for name, tensor in state.items() if name not in average}
            checkpoint.load_into(path, "forecast", rest | average)
        checkpoint.load_into(path, "optimizer", optimizer_tensors(parts.model, parts.optimizer))
        self._at = Progression(**meta["progression"])
        if path.parent.resolve() != self._checkpoints.resolve():
            # what was best elsewhere has no checkpoint here
            self._at = Progression(step=self._at.step, validated=self._at.validated)
            return
        best = checkpoint.step_folder(self._checkpoints, self._at.best_step)
        if self._at.best_step and checkpoint.find_damage(best) is None:
            # a kill between the save and the link would have left the link behind
            self._store.point("best", self._at.best_step)

    def run(self) -> str:
        """Train; return ``done`` or, where it was asked to stop, ``requeue``."""
        parts, at = self._parts, self._at
        log = MetricsLog(self._folder, at.step, parts.launch.is_main, self._conf.tensorboard)
        bar = Progress(at.step, parts.total_steps, parts.launch.is_main)
        stop = StopRequest(self._folder, _seconds(self._conf.walltime))
        self._status("running", "")
        try:
            with self._store:
                reason = self._loop(log, bar, stop)
            log.flush()
        except BaseException as error:
            with suppress(CreditError):
                # what went wrong matters more than a disk that is too full to say so
                self._status("failed", next(iter(str(error).splitlines()), type(error).__name__))
            raise
        finally:
            bar.close()
            log.close()
            stop.restore()
        self._status("requeue" if reason else "done", reason or "")
        return "requeue" if reason else "done"

    def _loop(self, log: MetricsLog, bar: Progress, stop: StopRequest) -> str | None:
        """Return the reason of an early stop, None at the end of the run."""
        parts, at = self._parts, self._at
        if at.step and self._due(at.step, self._validate_every) and at.validated != at.step:
            # the run was stopped before this validation
            self._validate(log, bar)
        if self._is_exhausted():
            return None
        source = _TimedBatches(parts.batches(at.step), parts.device)
        began, wish, last = time.perf_counter(), None, None
        while at.step < parts.total_steps:
            rate = learning_rate(at.step, parts.total_steps, self._conf.learning_rate, self._conf.schedule)
            seconds = (time.perf_counter() - began) / max(len(self._pending), 1)
            ahead = 2 * seconds + (self._valid_seconds if self._due(at.step + 1, self._validate_every) else 0)
            # the last save may have to wait for one under way
            wish = wish or stop.reason(2 * self._store.seconds, ahead)
            result = parts.training_step(source, at.step, rate, wish is not None)
            # on a GPU, the step just queued is not waited for: the one before it tells
            before, last = last, result
            told = result if parts.device.type == "cpu" else before
            asked = told is not None and told.stop.item() > 0
            self._pending.append((at.step, result, rate))
            at.step += 1
            bar.update()
            due, save = self._due(at.step, self._validate_every), self._due(at.step, self._checkpoint_every)
            reason = self._agree(wish) if asked and at.step < parts.total_steps else None
            if due or save or reason or at.step % self._conf.log_every == 0:
                self._write_rows(log, bar, source, time.perf_counter() - began)
                began = time.perf_counter()
            if due and not reason:
                self._validate(log, bar)
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

    def _agree(self, wish: str | None) -> str:
        """Return why the run stops: the first rank's reason that has one; collective."""
        return next(filter(None, together(lambda: wish)), "asked for on another rank")

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._parts.total_steps

    def _is_exhausted(self) -> bool:
        """Whether validation has not become better for ``trainer.patience`` times."""
        return self._conf.patience is not None and self._at.worse >= self._conf.patience

    def _write_rows(self, log: MetricsLog, bar: Progress, source: _TimedBatches, seconds: float) -> None:
        """Fetch the pending steps' numbers from the device in one go and write a row for each."""
        if not self._pending:
            return
        parts = self._parts
        # ranks have equal shares of the batch, and all but the loss is equal on them
        loss, norm, bad = mean_over_ranks(
            torch.stack([torch.stack([r.loss, r.grad_norm, r.bad]).float() for _, r, _ in self._pending], dim=1)
        ).tolist()
        samples = len(self._pending) * len(self._pending[0][1].initial) * parts.mesh.data_ranks
        shared = {
            "samples_per_s": samples / seconds,
            "data_wait_frac": source.take_wait() / seconds,
            "peak_memory_gb": peak_memory_gb(parts.device),
        }
        for (step, result, rate), one_loss, one_norm, one_bad in zip(self._pending, loss, norm, bad, strict=True):
            row = {"step": step + 1, "epoch": step // parts.steps_per_epoch}
            row |= {"loss": _finite(one_loss), "grad_norm": _finite(one_norm)}
            log.write({**row, "lr": rate, **shared})
            self._count_bad(bool(one_bad), step + 1, result)
        bar.show(loss=f"{loss[-1]:.4f}")
        self._pending.clear()
        log.flush()

    def _count_bad(self, bad: bool, step: int, result: StepResult) -> None:
        """Stop after too many skipped steps in a row, naming the last one's samples."""
        self._at.bad_steps = self._at.bad_steps + 1 if bad else 0
        if not bad:
            self._bad_times.clear()
            return
        self._bad_times += [self._parts.clock.format(value) for value in result.initial.tolist()]
        logger.warning("step %d: loss or gradient is not finite; the step was skipped", step)
        if self._at.bad_steps >= self._conf.max_bad_steps:
            raise CreditError(
                f"step {step}: loss or gradient was not finite {self._at.bad_steps} times in a row "
                f"(trainer.max_bad_steps); the batches' initial times: {', '.join(self._bad_times)}. The weights and "
                "the last checkpoint are untouched; look at the data of these times, or continue with a lower "
                "trainer.learning_rate"
            )

    def _validate(self, log: MetricsLog, bar: Progress) -> None:
        """Validate the weights that forecast and keep them if they are the best."""
        at, parts = self._at, self._parts
        began = time.perf_counter()
        if parts.average is not None:
            with parts.average.applied():
                metrics = parts.validate(at.step)
        else:
            metrics = parts.validate(at.step)
        at.validated = at.step
        log.write({"step": at.step, "valid": metrics})
        log.flush()
        value = metrics[self._conf.monitor]
        bar.say(f"step {at.step}: valid loss {metrics['loss']:.4f}, {self._conf.monitor} {value:.4f}")
        if value < at.best:
            at.best, at.best_step, at.worse = value, at.step, 0
            self._save("latest", "best")
        else:
            at.worse += 1
        self._valid_seconds = max(self._valid_seconds, time.perf_counter() - began)
        if self._is_exhausted():
            bar.say(f"stopping early: no better {self._conf.monitor} than {at.best:.4f} of step {at.best_step}")

    def _save(self, *links: str) -> None:
        """Begin to write a checkpoint of the present step, unless there is one, for `links` to point to; collective."""
        at, parts = self._at, self._parts
        if at.saved == at.step:
            for name in links:
                self._store.point(name, at.step)
            return
        at.saved = at.step
        reshard(parts.model)
        tensors = {
            "model": saved_state(parts.model),
            "forecast": self._forecast_state(),
            "optimizer": optimizer_tensors(parts.model, parts.optimizer),
        }
        meta = checkpoint_meta(parts.config, parts.assets, at, parts.clock.calendar, parts.mesh.data_ranks, parts.base)
        self._store.save(at.step, tensors, parts.assets.tensors(), meta, links or ("latest",))
        self._status("running", "")

    def _forecast_state(self) -> dict[str, torch.Tensor]:
        if self._parts.average is None:
            return saved_state(self._parts.model)
        with self._parts.average.applied():
            reshard(self._parts.model)
            return {name: value.clone() for name, value in saved_state(self._parts.model).items()}

    def _status(self, state: str, reason: str) -> None:
        if self._parts.launch.is_main:
            # only what is on the disk counts
            step = self._at.step if self._store.committed is None else self._store.committed
            write_status(self._folder, state, step, reason, self._parts.launch.job_id)


def checkpoint_meta(
    config: Config,
    assets: Assets,
    progression: Progression,
    calendar: str,
    data_ranks: int,
    base: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return a checkpoint's meta.json: where the run stands and what its weights need to forecast."""
    return {
        "progression": vars(progression),
        "config": config.model_dump(mode="json"),
        "calendar": calendar,
        "samples_a_step": config.trainer.train_batch_size * config.trainer.grad_accum_every * data_ranks,
        **({"base": base} if base else {}),
        **assets.meta(),
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else parse_duration(duration) * 60.0


class _TimedBatches:
    """Iterates over batches on the device and knows how long it waited for them."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self._batches = iter(loader)
        self._device = device
        self._waited = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        began = time.perf_counter()
        batch = next(self._batches).to(self._device)
        self._waited += time.perf_counter() - began
        return batch

    def take_wait(self) -> float:
        """Return the seconds waited since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited
