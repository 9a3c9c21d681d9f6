"""Benchmarks refuse at once what would measure nothing; what they measure is not for tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REFUSED = {
    "wxformer.py --rounds 0": "'0' must be a whole number, 1 or more",
    "wxformer.py --threads -1": "'-1' must be a whole number",
    "wxformer.py --reference /nowhere": "/nowhere holds no credit/models/wxformer/crossformer.py; pip download",
    "wxformer.py --model published --reference WHEEL": "with --model starter only",
    "kernels.py --rounds 0": "'0' must be a whole number",
    "kernels.py --kernels none": "invalid choice: 'none'",
    "train_step.py --steps 0": "'0' must be a whole number",
    "train_step.py --reference /nowhere": "pip download --no-deps miles-credit",
    "train_step.py --figure /nowhere/a.png": "there is no folder /nowhere",
    "rollout.py --steps none": "'none' must be a whole number",
    "memory.py": "its meshes are for 4 ranks, and 1 were started",
    "scaling.py": "start it with torchrun --standalone --nproc-per-node=4",
    "run.py config.yml --rounds 0": "'0' must be a whole number",
}


def run(repository: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(repository / "benchmarks" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", REFUSED)
def test_what_measures_nothing_is_refused(arguments: str, repository: Path, tmp_path: Path) -> None:
    network = tmp_path / "credit" / "models" / "wxformer" / "crossformer.py"
    network.parent.mkdir(parents=True)
    network.touch()
    done = run(repository, *(str(tmp_path) if word == "WHEEL" else word for word in arguments.split()))
    assert done.returncode == 2 and REFUSED[arguments] in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


@pytest.mark.slow
def test_the_command_says_what_is_wrong_with_its_config(repository: Path) -> None:
    done = run(repository, "run.py", "nowhere.yml", "--rounds", "1")
    assert done.returncode and "nowhere.yml" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_a_step_is_measured_part_by_part(repository: Path) -> None:
    done = run(repository, "train_step.py", "--case", "ours", "float32", "--steps", "1")
    assert not done.returncode, done.stderr
    results = json.loads(done.stdout)
    assert results["forward"].keys() & results["backward"].keys() >= {"embedding", "attention", "feed-forward", "head"}
