"""No tensor of a step is left on the host, and no step waits for the GPU; tried on one that is not there.

Values, memory, speed, several GPUs and the kernels themselves need a real one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from credit.cli.plan import build_grid
from credit.parallel.host_copy import AsyncHostCopy, to_device
from credit.parallel.mesh import DeviceGrid
from credit.train import trainer
from credit.train.build import fine_tuning
from credit.train.build import model as build_model
from credit.train.build.dry_run import build_placeholder_assets
from tests.gpu.worker import BUDGETS, FORECASTS, SINGLE, SPLIT, TRAINING, WRONG
from tests.unit.hpc.measured import small_config

CASES = [*TRAINING, SPLIT, *FORECASTS, *BUDGETS, *SINGLE]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the worker's environment needs besides our own."""
    if torch.cuda.is_available():
        return {}
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or torch.version.cuda is not None:
        # built with CUDA and without a GPU, torch refuses every backward pass there
        pytest.skip("needs a GPU, or on Linux a torch without CUDA, and g++")
    root, built = Path(torch.__file__).parent, tmp_path_factory.mktemp("driver") / "no_gpu.so"
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    source = Path(__file__).with_name("no_gpu.cpp")
    subprocess.run([compiler, *options, str(source), "-o", str(built), "-ltorch_cpu", "-lc10"], check=True)
    return {"LD_PRELOAD": str(built)}


@pytest.fixture(scope="module")
def found(driver: dict[str, str], repository: Path) -> dict[str, dict]:
    """What the worker saw."""
    environment = {**os.environ, **driver, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "tests.gpu.worker"]
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_on_the_gpu_and_does_not_wait_for_it(found: dict[str, dict], name: str) -> None:
    assert found[name]["error"] == ""
    assert found[name]["waits"] == []


@pytest.mark.parametrize(("name", "expected"), WRONG.items())
def test_the_check_itself(found: dict[str, dict], name: str, expected: str) -> None:
    assert expected in found[name]["error"] + " ".join(found[name]["waits"])


def test_what_is_sent_to_the_cpu_is_not_copied() -> None:
    array = np.zeros(3, dtype=np.float32)
    sent = to_device(array, torch.device("cpu"))
    assert AsyncHostCopy(sent).get().numpy().ctypes.data == array.ctypes.data


def test_the_gpu_of_a_rank_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current := mock.Mock())
    assert build_model.choose_device("auto", 6) == torch.device("cuda", 2)
    current.assert_called_once_with(torch.device("cuda", 2))
    assert build_model.choose_device("cpu", 6) == torch.device("cpu")
    current.assert_called_once()


def test_deterministic_products_are_possible_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    build_model.use_deterministic_algorithms(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    build_model.use_deterministic_algorithms(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("forecasts", [False, True])
@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_for_products_and_convolutions_or_for_neither(
    on: bool, forecasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (build_model, fine_tuning):
        monkeypatch.setattr(module, "allocate_", lambda *_, **__: None)
    monkeypatch.setattr(fine_tuning.checkpoint, "load_into", lambda *_: None)
    monkeypatch.setattr(fine_tuning, "require_filled", lambda model: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    before = torch.get_float32_matmul_precision()
    config, gpu = small_config(f"trainer.tf32={on}"), torch.device("cuda")
    assets = build_placeholder_assets(config, build_grid("32x64"), {})
    try:
        if forecasts:
            fine_tuning.load_forecast_network(config, None, assets, Path(), gpu, DeviceGrid())
        else:
            build_model.build_parallel_model(config, assets, DeviceGrid(), gpu)
        assert torch.backends.cuda.matmul.allow_tf32 is on
        assert torch.backends.cudnn.allow_tf32 is on
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_step_under_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    class Told:
        def __init__(self, number: int) -> None:
            self._number = number

        def get(self) -> torch.Tensor:
            order.append(f"asked {self._number}")
            return torch.zeros(())

    def step(source: object, number: int, *_: object) -> SimpleNamespace:
        order.append(f"step {number}")
        return SimpleNamespace(num_stop_requests=number)

    monkeypatch.setattr(trainer, "AsyncHostCopy", Told)
    monkeypatch.setattr(trainer, "learning_rate", lambda *_: 1e-3)
    run, stop = mock.MagicMock(), mock.Mock()
    run.state, run._is_due.return_value, run._max_save_seconds.return_value = SimpleNamespace(step=0), False, 0.0
    run.parts.total_steps, run.parts.device, run.parts.training_step = 3, torch.device("cuda"), step
    run._conf.log_every, stop.find_reason.return_value = 10, None
    trainer.Trainer._take_steps(run, mock.Mock(), mock.Mock(), mock.Mock(), stop)
    assert order == ["step 0", "step 1", "asked 0", "step 2", "asked 1"]
