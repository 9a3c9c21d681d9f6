"""Writer of a run's checkpoints that saves them in a thread while training continues."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from credit.errors import CheckpointError
from credit.parallel.object_collectives import LostRanksError, current_rank, run_on_all_ranks
from credit.train.checkpoint.checkpoint import FORMAT, move_link, step_folder
from credit.train.checkpoint.manifest import MANIFEST
from credit.train.checkpoint.retention import Retention, hide_checkpoint, prune_checkpoints
from credit.train.checkpoint.sharded.files import fsync_and_checksum
from credit.train.checkpoint.sharded.writer import ShardWriter, StagedShards
from credit.utils.atomic import flush_to_disk
from credit.utils.profiling.phases import Phase, in_phase

logger = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Writer of a run's checkpoints that saves one checkpoint at a time while training continues.

    The construction is collective if there is a process group. Training waits only for the copy to host memory. A
    thread writes the copy and communicates with the threads of the other ranks. The threads have a separate process
    group, because sharing the process group of the training steps could deadlock.

    If a save fails, the older checkpoints are untouched and no incomplete files remain. The run continues with a
    warning, because a full disk may have free space at the next save. A failure of the last save is an error. The loss
    of another rank's thread, or a write that takes longer than gloo's timeout of 30 minutes, is also an error, because
    the process group cannot save any later checkpoint.

    Args:
        folder: the run's ``checkpoints`` folder.

    Attributes:
        committed_step: step of the newest checkpoint that this writer has completed; None before the first checkpoint.
        longest_save_seconds: longest time from the call of `save` to the complete checkpoint, in seconds.
    """

    def __init__(self, folder: Path) -> None:
        self.committed_step: int | None = None
        self.longest_save_seconds = 0.0
        self._folder = folder
        # The backend is gloo, because the threads exchange Python objects, for which no GPU is needed.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._is_main = current_rank() == 0
        self._writer = ShardWriter(self._group)
        # With a single thread, the saves and their collectives have the same order on all ranks.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._job: Future[None] | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        assets: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        links: Sequence[str] = ("latest",),
        keep: Retention | None = None,
        synchronous: bool = False,
    ) -> Path:
        """Collective: wait for the previous save, copy all tensors, and write the checkpoint of `step` in a thread.

        Args:
            step: number of optimizer steps taken.
            tensors: stem (a set of tensors, see `credit.train.checkpoint.checkpoint`) -> name -> tensor, with the same
                names on every rank. A tensor is a DTensor, or a plain tensor that is equal on all ranks. Each shard of
                a DTensor is written once. The tensors may change after this method returns.
            assets: name -> plain tensor that never changes, the same on every rank.
            meta: contents of meta.json, as values that JSON can express.
            links: names of the links that are moved to the complete checkpoint: ``latest``, ``best`` or both.
            keep: rule for the older checkpoints that are kept; None to keep all checkpoints.
            synchronous: True to return only when the checkpoint is complete.

        Returns:
            The folder of the checkpoint, ``step_XXXXXXXX``, which does not exist until the checkpoint is complete.

        Raises:
            CheckpointError: on every rank, if this save fails and is synchronous, or if the ranks of a mesh are not
                evenly spaced.
            LostRanksError: if the connection between the threads of the ranks was lost in the previous save.
        """
        # There is a single buffer in host memory. The previous save must be complete before the buffer is overwritten.
        self.wait_and_warn()
        start_time = time.perf_counter()
        # `meta` is encoded here and not in the thread, because the state in it may change after this method returns.
        meta_text = json.dumps({"format": FORMAT, "step": step, **meta}, indent=1)
        staged = self._writer.copy_to_host(tensors)
        self._job = self._thread.submit(self._write, start_time, step, staged, assets, meta_text, links, keep)
        if synchronous:
            self.wait()
        return step_folder(self._folder, step)

    def move_link(self, name: str, step: int) -> None:
        """Collective: wait for the save in progress, then move the link `name` to the checkpoint of `step`.

        The link is not changed if the checkpoint does not exist.

        Args:
            name: ``latest`` or ``best``.
            step: number of optimizer steps of the checkpoint.

        Raises:
            CheckpointError: on every rank, if the link cannot be moved.
        """
        self.wait_and_warn()
        target = step_folder(self._folder, step)

        def move_on_rank0() -> None:
            if self._is_main and target.is_dir():
                move_link(self._folder, name, target)

        run_on_all_ranks(move_on_rank0)

    def wait(self) -> None:
        """Collective: wait for the save in progress, if there is one.

        Raises:
            CheckpointError: on every rank, if the save failed. A second call does not raise the same error again.
        """
        if self._job is not None:
            try:
                self._job.result()
            finally:
                # A signal may interrupt the wait. The save is then still in progress, and a later call waits for it.
                if self._job.done():
                    self._job = None

    def wait_and_warn(self) -> None:
        """Collective: wait for the save in progress; if it failed, log a warning.

        Raises:
            LostRanksError: if the connection between the threads of the ranks is lost, so that all later saves would
                fail.
        """
        try:
            self.wait()
        except LostRanksError:
            raise
        except CheckpointError as save_error:
            if self._is_main:
                logger.warning("%s. The run continues and tries again at its next checkpoint", save_error)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Collective: wait for the save in progress; raise its error unless another error already ends the run."""
        try:
            self.wait()
        except CheckpointError as save_error:
            if error is None:
                raise
            logger.error("%s", save_error)
        finally:
            self._thread.shutdown()

    @in_phase(Phase.CHECKPOINT)
    def _write(
        self,
        start_time: float,
        step: int,
        staged: StagedShards,
        assets: Mapping[str, Tensor],
        meta_text: str,
        links: Sequence[str],
        keep: Retention | None,
    ) -> None:
        """Collective over the threads of all ranks: write the staged shards and remove the oldest checkpoints.

        Everything is written into a hidden folder, which gets its final name when it is complete.

        Args:
            start_time: `time.perf_counter` when the save began.
            step: number of optimizer steps taken.
            staged: copies of this rank's parts of the tensors.
            assets: see `save`.
            meta_text: contents of meta.json.
            links: see `save`.
            keep: see `save`.

        Raises:
            CheckpointError: on every rank, if a rank cannot write.
        """
        target = step_folder(self._folder, step)
        temporary = self._folder / f".{target.name}.part"

        def finalize_on_main() -> None:
            if self._is_main:
                _finalize_checkpoint(temporary, target, manifest, assets, meta_text)

        def move_links_and_prune() -> None:
            if not self._is_main:
                return
            for name in links:
                move_link(self._folder, name, target)
            if keep is not None:
                prune_checkpoints(self._folder, keep)

        try:
            run_on_all_ranks(lambda: _create_empty_folder(temporary) if self._is_main else None, self._group)
            manifest = self._writer.write(temporary, staged)
            run_on_all_ranks(finalize_on_main, self._group)
        except CheckpointError as error:
            if self._is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise _build_save_error(target, error) from error
        self.committed_step = step
        self.longest_save_seconds = max(self.longest_save_seconds, time.perf_counter() - start_time)
        # The checkpoint is now complete. A failure to move a link or to remove an old checkpoint must not undo it.
        run_on_all_ranks(move_links_and_prune, self._group)


def _build_save_error(target: Path, error: CheckpointError) -> CheckpointError:
    """Return the error of a failed save; a `LostRanksError` stays a `LostRanksError`, because later saves fail, too."""
    message = f"{target}: cannot be saved ({error}); older checkpoints are untouched."
    if isinstance(error, LostRanksError):
        return LostRanksError(f"{message} Start the run again; it continues from the newest one")
    return CheckpointError(f"{message} Free space on the disk")


def _create_empty_folder(temporary: Path) -> None:
    """Create the empty folder `temporary`, and remove the temporary folders of killed runs."""
    for leftover in temporary.parent.glob(".step_*.part"):
        # The command `credit checkpoint` may remove the same folder at this moment.
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)


def _finalize_checkpoint(
    temporary: Path,
    target: Path,
    shard_files: Mapping[str, Mapping[str, int]],
    assets: Mapping[str, Tensor],
    meta_text: str,
) -> None:
    """Write the files that are not sharded, then the manifest, and rename the folder to its final name.

    Args:
        temporary: folder that contains the shards.
        target: final path of the folder; an older checkpoint with this name is replaced.
        shard_files: entries of the manifest for the shards: path below the folder -> size and checksum.
        assets: name -> plain tensor, for assets.safetensors.
        meta_text: contents of meta.json.
    """
    # safetensors requires contiguous tensors.
    contiguous_assets = {name: value.contiguous() for name, value in assets.items()}
    save_file(contiguous_assets, temporary / "assets.safetensors")
    (temporary / "meta.json").write_text(meta_text)
    manifest = dict(shard_files)
    for name in ("assets.safetensors", "meta.json"):
        manifest[name] = fsync_and_checksum(temporary / name)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    # The contents must be on the disk before the rename. Otherwise a power failure could leave an empty checkpoint.
    flush_to_disk(temporary / MANIFEST)
    for path in temporary.iterdir():
        if path.is_dir():
            flush_to_disk(path)
    flush_to_disk(temporary)
    # A damaged checkpoint may have this name. It is renamed first, and its files are removed after the rename.
    replaced = hide_checkpoint(target) if target.exists() else None
    temporary.rename(target)
    flush_to_disk(target.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
