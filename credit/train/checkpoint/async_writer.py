"""The store of a run's checkpoints: saves them while training goes on."""

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
from credit.parallel.object_collectives import rank_of, together
from credit.train.checkpoint import sharded
from credit.train.checkpoint.checkpoint import FORMAT, MANIFEST, Retention, point, prune, step_folder

logger = logging.getLogger(__name__)


class AsyncCheckpointer:
    """Saves a run's checkpoints, one at a time, while training goes on; collective where there is a process group.

    Training waits for the copy to host memory alone. A thread writes the copy and agrees with the other ranks' threads
    over a group of its own, as the training's group would deadlock. If it fails, the older checkpoints are untouched,
    nothing half-written is left, and the run goes on with a warning: a full disk may have room again at the next save.
    Only a failure of the last save of all is an error.

    Args:
        folder: the run's ``checkpoints`` folder.

    Attributes:
        committed: step of the newest checkpoint that this store has completed, None before the first.
        seconds: the longest time from the call of `save` to the completed checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.committed: int | None = None
        self.seconds = 0.0
        self._folder = folder
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._is_main = rank_of() == 0
        self._writer = sharded.ShardWriter(self._group)
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
        """Collective: copy everything and write ``step_XXXXXXXX`` in the background; wait for the previous save first.

        Args:
            step: optimizer steps taken.
            tensors: stem -> named tensors, the same names on every rank: DTensors, of which each part is written once,
                or plain tensors that are equal on all ranks. They may change as soon as this returns.
            assets: plain tensors that never change, the same on every rank.
            meta: JSON-ready.
            links: which of ``latest`` and ``best`` to move to it once it is complete.
            keep: which checkpoints to keep then, None for all.
            synchronous: return when it is complete.

        Returns:
            The folder that it will have.

        Raises:
            CheckpointError: if this save failed and is synchronous.
        """
        self.settle()
        began = time.perf_counter()
        text = json.dumps({"format": FORMAT, "step": step, **meta}, indent=1)
        copied = self._writer.copy(tensors)
        self._job = self._thread.submit(self._write, began, step, copied, assets, text, links, keep)
        if synchronous:
            self.wait()
        return step_folder(self._folder, step)

    def point(self, name: str, step: int) -> None:
        """Collective: move the link `name` to the checkpoint of `step`, if it is there, after the save under way."""
        self.settle()
        target = step_folder(self._folder, step)
        together(lambda: point(self._folder, name, target) if self._is_main and target.is_dir() else None)

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one.

        Raises:
            CheckpointError: on every rank, if it failed; once.
        """
        if self._job is not None:
            try:
                self._job.result()
            finally:
                if self._job.done():
                    self._job = None

    def settle(self) -> None:
        """Collective: wait for the save that is under way; if it failed, say so and go on."""
        try:
            self.wait()
        except CheckpointError as failure:
            if self._is_main:
                logger.warning("%s. The run goes on and tries again at its next checkpoint", failure)

    def __enter__(self) -> AsyncCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the save that is under way; a failure of it does not hide an error that ends the run."""
        try:
            self.wait()
        except CheckpointError as failure:
            if error is None:
                raise
            logger.error("%s", failure)
        finally:
            self._thread.shutdown()

    def _write(
        self,
        began: float,
        step: int,
        copied: sharded.StagedShards,
        assets: Mapping[str, Tensor],
        meta: str,
        links: Sequence[str],
        keep: Retention | None,
    ) -> None:
        """Collective over the threads of all ranks: write what was copied, complete it, and remove what is too old."""
        target = step_folder(self._folder, step)
        beside = self._folder / f".{target.name}.part"
        try:
            together(lambda: _make_empty(beside) if self._is_main else None, self._group)
            files = self._writer.write(beside, copied)
            together(lambda: _complete(beside, target, files, assets, meta) if self._is_main else None, self._group)
        except CheckpointError as error:
            if self._is_main:
                shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(
                f"{target}: cannot be saved ({error}); older checkpoints are untouched. Free space"
            ) from error
        self.committed = step
        self.seconds = max(self.seconds, time.perf_counter() - began)
        together(lambda: self._tidy(target, links, keep) if self._is_main else None, self._group)

    def _tidy(self, target: Path, links: Sequence[str], keep: Retention | None) -> None:
        for name in links:
            point(self._folder, name, target)
        if keep is not None:
            prune(self._folder, keep)


def _make_empty(beside: Path) -> None:
    """Make the folder that is written to, and remove those that a killed run has left."""
    for left in beside.parent.glob(".step_*.part"):
        shutil.rmtree(left)
    beside.mkdir(parents=True)


def _complete(
    beside: Path, target: Path, files: Mapping[str, Mapping[str, int]], assets: Mapping[str, Tensor], meta: str
) -> None:
    """Write what is not sharded and the manifest, and rename the folder."""
    save_file({name: value.contiguous() for name, value in assets.items()}, beside / "assets.safetensors")
    (beside / "meta.json").write_text(meta)
    files = {**files, **{name: sharded.seal(beside / name) for name in ("assets.safetensors", "meta.json")}}
    (beside / MANIFEST).write_text(json.dumps(files, indent=1))
    sharded.flush(beside / MANIFEST)
    for folder in (*(path for path in beside.iterdir() if path.is_dir()), beside):
        sharded.flush(folder)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    sharded.flush(target.parent)
