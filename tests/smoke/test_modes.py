"""Files and folders have the mode that the umask gives, so that all members of a group can read them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def group_readable_umask() -> Iterator[None]:
    """Set a umask that gives the group read access and others none."""
    previous_umask = os.umask(0o027)
    yield
    os.umask(previous_umask)


@pytest.mark.slow
def test_all_written_files_have_the_mode_of_the_umask(
    small_run: Path, command: Callable[..., subprocess.CompletedProcess], group_readable_umask: None
) -> None:
    config, export = small_run / "config.yml", small_run / "export.safetensors"
    paths_before = set(small_run.rglob("*"))
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
        result = command(*arguments)
        assert result.returncode == 0, result.stderr
    written = set(small_run.rglob("*")) - paths_before
    assert export in written and len(written) > 50
    modes = {path: path.lstat().st_mode & 0o777 for path in written if not path.is_symlink()}
    wrong_modes = {str(path): oct(mode) for path, mode in modes.items() if mode != (0o750 if path.is_dir() else 0o640)}
    assert not wrong_modes
