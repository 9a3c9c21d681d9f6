"""All tensors of a step are on the GPU, and the host does not wait for it. Fake tensors replace a real GPU.

Values, memory, speed, several GPUs and kernels can only be tested with a real GPU.
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
from tests.gpu.worker import BUDGETS, FAULTY_OPERATIONS, FORECASTS, HOST_COPIES, SPLIT, TRAINING
from tests.unit.hpc.measured import small_config

CASES = [*TRAINING, SPLIT, *FORECASTS, *BUDGETS, *HOST_COPIES]


@pytest.fixture(scope="module")
def gpu_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables that let the worker use fake tensors of a GPU on this machine."""
    if torch.cuda.is_available():
        return {}
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or torch.version.cuda is not None:
        # A torch with CUDA refuses every backward pass of GPU tensors on a machine without a GPU.
        pytest.skip("needs a GPU, or on Linux a torch without CUDA, and g++")
    root, library = Path(torch.__file__).parent, tmp_path_factory.mktemp("driver") / "no_gpu.so"
    options = ["-shared", "-fPIC", "-std=c++20", f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{root}/lib"]
    source = Path(__file__).with_name("no_gpu.cpp")
    subprocess.run([compiler, *options, str(source), "-o", str(library), "-ltorch_cpu", "-lc10"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.fixture(scope="module")
def worker_results(gpu_environment: dict[str, str], repository: Path) -> dict[str, dict]:
    """Output of the worker: waits of the host and the error of each case."""
    environment = {**os.environ, **gpu_environment, "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "tests.gpu.worker"]
    process = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_on_the_gpu_and_does_not_wait_for_it(worker_results: dict[str, dict], name: str) -> None:
    assert worker_results[name]["error"] == ""
    assert worker_results[name]["waits"] == []


@pytest.mark.parametrize(("name", "expected"), FAULTY_OPERATIONS.items())
def test_watch_reports_faulty_operations(worker_results: dict[str, dict], name: str, expected: str) -> None:
    assert expected in worker_results[name]["error"] + " ".join(worker_results[name]["waits"])


def test_host_copy_of_cpu_tensor_shares_memory() -> None:
    array = np.zeros(3, dtype=np.float32)
    tensor = to_device(array, torch.device("cpu"))
    assert AsyncHostCopy(tensor).get().numpy().ctypes.data == array.ctypes.data


def test_gpu_of_rank_becomes_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", set_device := mock.Mock())
    assert build_model.choose_device("auto", 6) == torch.device("cuda", 2)
    set_device.assert_called_once_with(torch.device("cuda", 2))
    assert build_model.choose_device("cpu", 6) == torch.device("cpu")
    set_device.assert_called_once()


def test_deterministic_algorithms_set_cublas_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    build_model.use_deterministic_algorithms(False)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    build_model.use_deterministic_algorithms(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize("forecasts", [False, True])
@pytest.mark.parametrize("on", [True, False])
def test_tf32_is_set_for_products_and_convolutions(on: bool, forecasts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (build_model, fine_tuning):
        monkeypatch.setattr(module, "allocate_", lambda *_, **__: None)
    monkeypatch.setattr(fine_tuning.checkpoint, "load_into", lambda *_: None)
    monkeypatch.setattr(fine_tuning, "require_filled", lambda model: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    previous_precision = torch.get_float32_matmul_precision()
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
        torch.set_float32_matmul_precision(previous_precision)


def test_trainer_does_not_wait_for_the_newest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class RecordedCopy:
        def __init__(self, number: int) -> None:
            self._number = number

        def get(self) -> torch.Tensor:
            events.append(f"asked {self._number}")
            return torch.zeros(())

    def step(source: object, number: int, *_: object) -> SimpleNamespace:
        events.append(f"step {number}")
        return SimpleNamespace(num_stop_requests=number)

    monkeypatch.setattr(trainer, "AsyncHostCopy", RecordedCopy)
    monkeypatch.setattr(trainer, "learning_rate", lambda *_: 1e-3)
    run, stop = mock.MagicMock(), mock.Mock()
    run.state, run._is_due.return_value, run._max_save_seconds.return_value = SimpleNamespace(step=0), False, 0.0
    run.parts.total_steps, run.parts.device, run.parts.training_step = 3, torch.device("cuda"), step
    run._conf.log_every, stop.find_reason.return_value = 10, None
    trainer.Trainer._take_steps(run, mock.Mock(), mock.Mock(), mock.Mock(), stop)
    assert events == ["step 0", "step 1", "asked 0", "step 2", "asked 1"]
