"""Files and folders have the mode that the umask gives, so that a group can read what one of its members made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def group_reads() -> Iterator[None]:
    """The umask of a group that reads, and of others who do not."""
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.slow
def test_all_that_the_commands_write(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], group_reads: None
) -> None:
    config, export = small_run / "config.yml", small_run / "export.safetensors"
    before = set(small_run.rglob("*"))
    store = f"data.store={small_run / 'store.zarr'}"
    job = "--cluster", "slurm", "slurm.walltime=1h", "slurm.ranks_per_node=1"
    for arguments in (
        ("preprocess", config, store, "--report", "preprocess.climatology=true"),
        ("train", config, store, "trainer.max_steps=1", "trainer.validate_every=1", "trainer.preview={every: 1}"),
        ("rollout", config, store),
        ("rollout", config, store, "inference.format=zarr", "inference.folder=zarr"),
        ("verify", config, store),
        ("convert", config, "--export", export),
        ("submit", config, *job, "--dry-run"),
    ):
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
    written = set(small_run.rglob("*")) - before
    assert export in written and len(written) > 50
    modes = {path: path.lstat().st_mode & 0o777 for path in written if not path.is_symlink()}
    wrong = {str(path): oct(mode) for path, mode in modes.items() if mode != (0o750 if path.is_dir() else 0o640)}
    assert not wrong
