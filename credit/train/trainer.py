"""Training run: optimizer steps, validations, checkpoints, and a clean end in case of an error or a stop."""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from credit.data.samples.loader import find_block_of_step
from credit.errors import CreditError
from credit.models.lora import checkpoint_state_dict
from credit.parallel.fsdp2 import reshard
from credit.parallel.host_copy import AsyncHostCopy
from credit.parallel.object_collectives import reduce_over_ranks, run_on_all_ranks, run_on_rank0
from credit.parallel.reduce import mean_over_ranks
from credit.train.build.components import TrainingComponents
from credit.train.checkpoint import checkpoint, retention
from credit.train.checkpoint.async_writer import AsyncCheckpointer
from credit.train.checkpoint.train_state import TrainState, build_checkpoint_meta
from credit.train.ema import forecast_state_dict
from credit.train.monitor.divergence import DivergenceGuard, RollbackRequired
from credit.train.monitor.metrics_log import MetricsLog, Progress, peak_memory_gb, write_failure, write_status
from credit.train.monitor.nonfinite import describe_nonfinite_cause
from credit.train.monitor.run_files import read_last_metrics, read_status, read_summary
from credit.train.monitor.run_lock import RunLock
from credit.train.monitor.stop_signal import StopSignal
from credit.train.monitor.summary import write_partial_summary, write_run_summary
from credit.train.monitor.usage import UsageMeter
from credit.train.optim import learning_rate, optimizer_tensors
from credit.train.prefetch import DevicePrefetcher
from credit.train.step import StepResult
from credit.utils.profiling.phases import Phase, begin_step, in_phase

logger = logging.getLogger(__name__)


class Trainer:
    """Training run, which takes optimizer steps until its end or a request to stop. Its construction is collective.

    Args:
        parts: components of the run, such as model, data and optimizer.

    Attributes:
        parts: components of the run.
        state: state of the run that checkpoints save in addition to tensors, such as the number of steps taken.
    """

    def __init__(self, parts: TrainingComponents) -> None:
        self.parts = parts
        self._conf = parts.config.trainer
        self._folder = Path(parts.config.save_loc)
        self._checkpoint_folder = self._folder / "checkpoints"
        self.state = TrainState()
        self._guard = DivergenceGuard(self._conf, self.state)
        # (step, result on the device, learning rate) of each step since rows were last written.
        self._unlogged_steps: list[tuple[int, StepResult, float]] = []
        self._checkpointer = AsyncCheckpointer(self._checkpoint_folder)
        self._run_lock: RunLock | None = None
        self._status_before: dict[str, Any] = {}
        self._validate_every = self._conf.validate_every or parts.sample_schedule.steps_per_epoch
        self._preview_every = self._validate_every * (self._conf.preview.every if self._conf.preview else 1)
        self._checkpoint_every = self._conf.checkpoint_every or parts.sample_schedule.steps_per_epoch

    def load(self, path: Path) -> None:
        """Collective: load weights, moving average, optimizer and state of the run from a checkpoint of any mesh."""
        meta = run_on_rank0(lambda: checkpoint.load_meta(path))
        parts, state = self.parts, self.state
        reshard(parts.model)
        model_tensors = checkpoint_state_dict(parts.model)
        checkpoint.load_into(path, "model", model_tensors)
        if parts.average is not None:
            average = parts.average.average
            # The singular vectors for the averaged weights are recomputed whenever the average is applied.
            other_tensors = {name: tensor.clone() for name, tensor in model_tensors.items() if name not in average}
            checkpoint.load_into(path, "forecast", other_tensors | average)
        checkpoint.load_into(path, "optimizer", optimizer_tensors(parts.model, parts.optimizer))
        state.restore(meta["progression"])
        if path.parent.resolve() != self._checkpoint_folder.resolve():
            # The checkpoint belongs to a different run, whose best checkpoints are not in this folder.
            state.forget_checkpoints()
            return
        self._checkpointer.committed_step = state.step
        best = checkpoint.step_folder(self._checkpoint_folder, state.best_step)
        if state.best_step and checkpoint.verify_checkpoint(best) is None:
            # After a kill between the save and the update of the link, the link points to an older checkpoint.
            self._checkpointer.move_link("best", state.best_step)

    def run(self, stop: StopSignal, run_lock: RunLock | None) -> str:
        """Collective: train; return ``done``, or ``requeue`` if the run stopped early because of a request.

        Args:
            stop: collector of the requests to stop.
            run_lock: lock of the run folder on the main process; None on all other ranks.
        """
        parts, state = self.parts, self.state
        self._run_lock = run_lock
        first_step = state.step
        # The usage includes the time of steps after the checkpoint, so their rows are read before they are removed.
        earlier_records = []
        if parts.process_info.is_main:
            earlier_records = [*read_last_metrics(self._folder), read_summary(self._folder)]
        parts.meter.resume(state.step, state.usage, earlier_records)
        log = MetricsLog.from_config(parts.config, state.step, parts.process_info.is_main)
        bar = Progress(state.step, parts.total_steps, parts.process_info.is_main)
        self._status_before = run_on_rank0(lambda: read_status(self._folder))
        self._write_run_status("running", "")
        try:
            with self._checkpointer:
                reason = self._train_with_rollbacks(log, bar, stop)
            log.flush()
            if reason is None:
                state.require_finite_best(self._conf.monitor)
            # A run without a new step still needs a summary if it was killed after its last checkpoint.
            if state.step > first_step or run_on_rank0(lambda: not read_summary(self._folder)):
                bar.print_line(write_run_summary(*self._summary_arguments()))
            self._write_run_status("requeue" if reason else "done", reason or "")
        except BaseException as error:
            step = self._committed_step()
            if parts.watchdog.may_report_failure():
                write_failure(
                    self._folder, self._status_before, error, step, parts.process_info.job_id, every_rank=True
                )
            try:
                if parts.process_info.is_main:
                    bar.print_line(write_partial_summary(*self._summary_arguments(), peak_memory_gb(parts.device)))
            except Exception as summary_error:
                # A failed GPU may not respond, and the network of a plugin may raise any exception.
                logger.warning("no summary of the run: %s: %s", type(summary_error).__name__, summary_error)
            raise
        finally:
            bar.close()
            log.close()
        return "requeue" if reason else "done"

    def _summary_arguments(self) -> tuple[Path, UsageMeter, TrainState, str, int, int]:
        """Return the arguments of `write_run_summary`."""
        parts, state = self.parts, self.state
        length = parts.training_step.list_loss_steps(max(state.step - 1, 0))[-1]
        return self._folder, parts.meter, state, self._conf.monitor, parts.total_steps, length

    def _train_with_rollbacks(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Collective: train, with rollbacks if the run diverges; return the reason of an early stop, else None."""
        if self.state.saved != self.state.step:
            # If the run diverges at once, it rolls back to this checkpoint. The save also detects a full disk.
            self._save()
        while True:
            try:
                return self._train_once(log, bar, stop)
            except RollbackRequired as divergence:
                self._roll_back(divergence, log, bar)

    def _train_once(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Collective: train; return the reason of an early stop, else None. Raise RollbackRequired on divergence."""
        parts, state = self.parts, self.state
        # A resumed run first repeats the validation that the stop has interrupted.
        if state.step and self._is_due(state.step, self._validate_every) and state.validated != state.step:
            reason = self._validate(log, bar, stop)
            if reason:
                return reason
        if self._has_lost_patience():
            return None
        with self._open_batches(state.step, parts.total_steps) as source:
            return self._take_steps(source, log, bar, stop)

    def _take_steps(self, source: DevicePrefetcher, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Collective: take the remaining steps; return the reason of an early stop, None at the end of the run."""
        parts, state = self.parts, self.state
        start_time = time.perf_counter()
        newest_count = None
        while state.step < parts.total_steps:
            begin_step(state.step)
            self._record_activity(f"step {state.step + 1}")
            rate = learning_rate(state.step, parts.total_steps, self._conf.learning_rate, self._conf.schedule)
            seconds_per_step = (time.perf_counter() - start_time) / max(len(self._unlogged_steps), 1)
            stop_reason = stop.find_reason(self._max_save_seconds() + 2 * seconds_per_step)
            result = parts.training_step(source, state.step, rate, stop_reason is not None)
            # On a GPU, the host does not wait for the step that was just queued, and reads the count of the previous
            # step. Every rank reads the same count, so all ranks stop after the same step.
            previous_count, newest_count = newest_count, AsyncHostCopy(result.num_stop_requests)
            stop_count = newest_count if parts.device.type == "cpu" else previous_count
            is_stop_requested = stop_count is not None and stop_count.get().item() > 0
            self._unlogged_steps.append((state.step, result, rate))
            state.step += 1
            bar.update()
            must_validate = self._is_due(state.step, self._validate_every)
            must_save = self._is_due(state.step, self._checkpoint_every)
            reason = None
            if is_stop_requested and state.step < parts.total_steps:
                reason = self._agree_on_reason(stop_reason)
            if must_validate or must_save or reason or state.step % self._conf.log_every == 0:
                self._write_rows(log, bar, source, start_time)
                start_time = time.perf_counter()
            if must_validate and not reason:
                reason = self._validate(log, bar, stop)
                if self._has_lost_patience():
                    self._save()
                    return None
            if must_save or reason:
                self._save()
            # The step time does not include validations and saves.
            if must_validate or must_save:
                start_time = time.perf_counter()
            if reason:
                bar.print_line(f"stopping at step {state.step}: {reason}; the same command continues the run")
                return reason
        return None

    def _roll_back(self, divergence: RollbackRequired, log: MetricsLog, bar: Progress) -> None:
        """Collective: continue from the last checkpoint before the steps that diverged, and skip their samples.

        Raises:
            CreditError: if the run has rolled back for non-finite steps before, or has no checkpoint to return to.
        """
        parts, state = self.parts, self.state
        initial_times: set[int] = set()
        for step in divergence.steps:
            initial_times.update(parts.sample_schedule.list_initial_times(step, state.skipped_blocks))
        times = ", ".join(parts.calendar.format(minutes) for minutes in sorted(initial_times))
        problem = f"step {divergence.steps[-1] + 1}: {divergence.problem}"
        # If steps are not finite again after a rollback, skipping samples does not remove the cause.
        if not divergence.is_finite and state.rollbacks:
            cause = self._find_nonfinite_cause(divergence.steps[-1])
            raise CreditError(
                f"{problem}, and the run has already rolled back once. Initial times of the batches: {times}. "
                f"{cause}. The last checkpoint is intact; check the data of these times, or lower trainer.learning_rate"
            )
        self._checkpointer.wait_and_warn()
        start = checkpoint.find_newest_checkpoint(self._checkpoint_folder, at_most=divergence.steps[0])
        if start is None:
            raise CreditError(f"{problem}, and there is no earlier checkpoint. Initial times of the batches: {times}")
        # Loading the checkpoint resets the complete state, so the history of rollbacks is set again after loading.
        diverged_blocks = [find_block_of_step(step, state.skipped_blocks) for step in divergence.steps]
        skipped_blocks = sorted({*state.skipped_blocks, *diverged_blocks})
        rollbacks = state.rollbacks + (not divergence.is_finite)
        spikes = state.spikes + divergence.is_finite
        self.load(start)
        state.skipped_blocks, state.rollbacks, state.spikes = skipped_blocks, rollbacks, spikes
        state.nonfinite_steps = []
        state.saved = state.step

        def remove_later_checkpoints() -> None:
            if parts.process_info.is_main:
                retention.remove_checkpoints_after(self._checkpoint_folder, state.step)

        run_on_all_ranks(remove_later_checkpoints)
        self._checkpointer.move_link("latest", state.step)
        self._unlogged_steps.clear()
        log.rewind(state.step)
        bar.rewind(state.step)
        logger.warning("%s. The run continues from step %d and skips the samples of %s", problem, state.step, times)

    def _find_nonfinite_cause(self, step: int) -> str:
        """Collective: recompute a step and return a sentence that names its first tensor that is not finite."""
        with self._open_batches(step, step + 1) as batches:
            return describe_nonfinite_cause(self.parts.training_step.describe_first_nonfinite(batches, step))

    def _open_batches(self, first: int, last: int) -> DevicePrefetcher:
        """Return the prefetcher of the batches of optimizer steps `first` (included) to `last` (excluded)."""
        parts = self.parts
        loader = parts.sample_schedule.build_loader(first, last, self.state.skipped_blocks)
        return DevicePrefetcher(loader, parts.device, parts.mesh.same_fields_group)

    def _max_save_seconds(self) -> float:
        """Return an upper bound on the seconds of a save: the save may have to wait for the previous save."""
        return 2 * self._checkpointer.longest_save_seconds

    @in_phase(Phase.LOGGING)
    def _record_activity(self, activity: str) -> None:
        """Record the activity that begins now for the watchdog and in heartbeat.json."""
        self.parts.watchdog.record_activity(activity)
        if self._run_lock is not None:
            self._run_lock.update(self.state.step, activity)

    def _agree_on_reason(self, reason: str | None) -> str:
        """Collective: return the reason of the lowest rank with a reason to stop; `reason` is this rank's or None."""
        return reduce_over_ranks(lambda: reason, lambda low, high: low or high) or "requested on another rank"

    def _is_due(self, step: int, every: int) -> bool:
        """Return True if `step` is a multiple of `every`, or the last step of the run."""
        return step % every == 0 or step == self.parts.total_steps

    def _has_lost_patience(self) -> bool:
        """Return True if the last ``trainer.patience`` validations had no improvement; False if the key is not set."""
        return self._conf.patience is not None and self.state.validations_since_best >= self._conf.patience

    @in_phase(Phase.LOGGING)
    def _write_rows(self, log: MetricsLog, bar: Progress, source: DevicePrefetcher, start_time: float) -> None:
        """Collective: copy the results of the steps since `start_time` from the device, and write a row per step."""
        if not self._unlogged_steps:
            return
        parts = self.parts
        columns = []
        for _, result, _ in self._unlogged_steps:
            columns.append(torch.stack([result.loss, result.grad_norm, result.skipped]).float())
        results = torch.stack(columns, dim=1)
        # Ranks have equal shares of the batch. All values except loss and energy are equal on all ranks.
        joules = results.new_full((1, len(self._unlogged_steps)), parts.meter.pop_joules())
        losses, norms, bad_flags, energy = mean_over_ranks(torch.cat([results, joules])).tolist()
        # At this point, a GPU has finished all queued steps.
        seconds = time.perf_counter() - start_time
        parts.meter.add_energy(energy[0] * parts.process_info.world)
        lengths = [parts.training_step.list_loss_steps(step)[-1] for step, _, _ in self._unlogged_steps]
        shared = parts.meter.add_steps(lengths, seconds, source.pop_wait_seconds())
        shared["peak_memory_gb"] = peak_memory_gb(parts.device)
        for (step, _, rate), loss, norm, is_bad in zip(self._unlogged_steps, losses, norms, bad_flags, strict=True):
            row = {"step": step + 1, "epoch": parts.sample_schedule.find_epoch(step, self.state.skipped_blocks)}
            log.write({**row, "loss": loss, "grad_norm": norm, "lr": rate, **shared})
            self._guard.check_step(step, loss, bool(is_bad))
        bar.show_values(loss=f"{losses[-1]:.4f}")
        self._unlogged_steps.clear()
        log.flush()

    @in_phase(Phase.VALIDATION)
    def _validate(self, log: MetricsLog, bar: Progress, stop: StopSignal) -> str | None:
        """Collective: validate the weights, and save the best ones; return the reason of an early stop, else None."""
        state, parts = self.state, self.parts
        self._record_activity(f"validation at step {state.step}")

        def is_stop_requested() -> bool:
            return stop.find_reason(self._max_save_seconds()) is not None

        average = parts.average.applied() if parts.average is not None else nullcontext()
        with parts.meter.timed("validation_s"), average:
            metrics = parts.validate(state.step, is_stop_requested)
            is_preview_due = parts.preview is not None and self._is_due(state.step, self._preview_every)
            if metrics is not None and is_preview_due:
                self._record_activity(f"preview at step {state.step}")
                if not parts.preview(state.step, log, is_stop_requested):
                    # The resumed run repeats the validation together with the preview.
                    metrics = None
        if metrics is None:
            return self._agree_on_reason(stop.find_reason(self._max_save_seconds()))
        state.validated = state.step
        log.write({"step": state.step, "valid": metrics})
        log.flush()
        monitor = self._conf.monitor
        value = metrics[monitor]
        bar.print_line(f"step {state.step}: valid loss {metrics['loss']:.4f}, {monitor} {value:.4f}")
        if math.isfinite(value):
            state.best_saved = sorted([*state.best_saved, [value, state.step]])[: self._conf.keep_best]
        not_finite = [name for name, metric in metrics.items() if not math.isfinite(metric)]
        if not_finite:
            logger.warning("step %d: not finite in validation: %s", state.step, ", ".join(not_finite))
        if value < state.best:
            state.best, state.best_step = value, state.step
            state.validations_since_best = 0
            self._save("latest", "best")
        else:
            state.validations_since_best += 1
            if [value, state.step] in state.best_saved:
                self._save()
        if self._has_lost_patience():
            bar.print_line(f"stopping early: the best {monitor} is still {state.best:.4f} of step {state.best_step}")
        return None

    @in_phase(Phase.CHECKPOINT)
    def _save(self, *links: str) -> None:
        """Collective: start to save a checkpoint of the current step, unless it exists, and point `links` to it."""
        state, parts = self.state, self.parts
        if state.saved == state.step:
            for name in links:
                self._checkpointer.move_link(name, state.step)
            return
        self._record_activity(f"checkpoint of step {state.step}")
        with parts.meter.timed("save_s"):
            self._begin_save(links or ("latest",))
        self._write_run_status("running", "")

    def _begin_save(self, links: tuple[str, ...]) -> None:
        """Collective: copy the state of the run, and start to write the copy as the checkpoint of the current step."""
        state, parts = self.state, self.parts
        run_on_all_ranks(lambda: self._run_lock.require_ownership() if self._run_lock is not None else None)
        state.saved = state.step
        reshard(parts.model)
        tensors = {
            "model": checkpoint_state_dict(parts.model),
            "forecast": forecast_state_dict(parts.model, parts.average),
            "optimizer": optimizer_tensors(parts.model, parts.optimizer),
        }
        state.usage = parts.meter.to_dict()
        meta = build_checkpoint_meta(
            parts.config, parts.assets, state, parts.calendar.name, parts.mesh.num_sample_ranks, parts.base
        )
        best_steps = tuple(int(step) for _, step in state.best_saved)
        keep = retention.Retention(self._conf.keep_last, self._conf.keep_every, best_steps)
        self._checkpointer.save(state.step, tensors, parts.assets.to_tensors(), meta, links, keep)

    def _committed_step(self) -> int:
        """Return the step of the newest checkpoint on disk, from which a restart would continue."""
        return self.state.step if self._checkpointer.committed_step is None else self._checkpointer.committed_step

    def _write_run_status(self, state: str, reason: str) -> None:
        """Write the file STATUS on the main process; see `write_status` for the parameters."""
        if self.parts.process_info.is_main:
            write_status(self._folder, state, self._committed_step(), reason, self.parts.process_info.job_id)
