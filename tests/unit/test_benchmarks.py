"""Benchmarks refuse invalid options, and report errors of a config. Measured values are not tested."""

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


def run_benchmark(repository: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {"PYTHONPATH": str(repository), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(repository / "benchmarks" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", REFUSED)
def test_invalid_options_are_refused(arguments: str, repository: Path, tmp_path: Path) -> None:
    network = tmp_path / "credit" / "models" / "wxformer" / "crossformer.py"
    network.parent.mkdir(parents=True)
    network.touch()
    process = run_benchmark(repository, *(str(tmp_path) if word == "WHEEL" else word for word in arguments.split()))
    assert process.returncode == 2 and REFUSED[arguments] in process.stderr, process.stderr
    assert "Traceback" not in process.stderr and not process.stdout


@pytest.mark.slow
def test_missing_config_is_reported(repository: Path) -> None:
    process = run_benchmark(repository, "run.py", "nowhere.yml", "--rounds", "1")
    assert process.returncode and "nowhere.yml" in process.stderr and "Traceback" not in process.stderr, process.stderr


@pytest.mark.slow
def test_parts_of_a_step_are_measured(repository: Path) -> None:
    process = run_benchmark(repository, "train_step.py", "--case", "ours", "float32", "--steps", "1")
    assert not process.returncode, process.stderr
    results = json.loads(process.stdout)
    assert results["forward"].keys() & results["backward"].keys() >= {"embedding", "attention", "feed-forward", "head"}
