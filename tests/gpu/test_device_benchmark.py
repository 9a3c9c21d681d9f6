"""`benchmarks/device` without a GPU: all parts run, calls of `torch.cuda` are valid, and time limits keep results.

With the CPU as the device, all parts run with real values. The fixture `fake_cuda` runs the code for GPUs as well: the
tensors stay on the CPU, and mocks with the signatures of torch replace functions of `torch.cuda`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.device import accelerator as accelerator_module
from benchmarks.device.__main__ import Supervisor, parse_arguments
from benchmarks.device.accelerator import Accelerator, CpuAccelerator, CudaAccelerator
from benchmarks.device.context import Context
from benchmarks.device.parts import PARTS
from benchmarks.device.parts.kernels import _replace_choice
from benchmarks.device.report import PartResult, Results, append_record, read_records
from benchmarks.device.worker import FATAL_STATUS, measure_parts
from credit.models.kernels import attention
from credit.models.kernels.dispatch import ATTENTION, KERNELS, force_gpu_path
from credit.train.build import model as build_model

PYTHON = sys.executable
FOLDER = Path(accelerator_module.__file__).parent
# Parts that run in the process of the test. The parts `suite` and `reference` start other processes.
IN_PROCESS = [part.name for part in PARTS if part.name not in ("suite", "reference")]
# Functions and classes of torch.cuda that need a GPU.
GPU_ONLY_NAMES = (
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "current_stream",
    "Stream",
    "CUDAGraph",
)


def build_options(parts: list[str], words: tuple[str, ...] = ()) -> dict:
    return {
        "parts": parts,
        "device": "cpu",
        "fast": True,
        "minutes": 99,
        "words": words,
        "run": None,
        "reference": None,
    }


def read_results(folder: Path) -> Results:
    results = Results({})
    for record in read_records(folder, 0)[0]:
        results.add(record)
    return results


class FakeEvent(SimpleNamespace):
    """Event of torch's profiler."""

    def name(self) -> str:
        return self.text

    def device_type(self) -> DeviceType:
        return self.kind

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length

    def is_user_annotation(self) -> bool:
        return self.text.startswith("Optimizer")


# Two kernels that overlap by half, a copy after a pause, an annotation, and calls of the host.
EVENTS = [
    FakeEvent(text="gemm", kind=DeviceType.CUDA, start=1000, length=1000),
    FakeEvent(text="add", kind=DeviceType.CUDA, start=1500, length=1000),
    FakeEvent(text="Memcpy DtoD", kind=DeviceType.CUDA, start=4000, length=500),
    FakeEvent(text="Optimizer.step", kind=DeviceType.CUDA, start=1000, length=9000),
    FakeEvent(text="cudaLaunchKernel", kind=DeviceType.CPU, start=10, length=5),
    FakeEvent(text="cudaLaunchKernelExC", kind=DeviceType.CPU, start=20, length=5),
    FakeEvent(text="cudaDeviceSynchronize", kind=DeviceType.CPU, start=30, length=5),
]


@contextmanager
def fake_profile(activities: list[ProfilerActivity]) -> Iterator[SimpleNamespace]:
    assert activities == [ProfilerActivity.CUDA]
    yield SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: EVENTS)))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """Accelerator for the GPU code with tensors on the CPU; mocks replace the functions that need a GPU."""
    for name in GPU_ONLY_NAMES:
        monkeypatch.setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name)))
    values = {
        "get_device_properties": SimpleNamespace(multi_processor_count=132, major=9, minor=0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "mem_get_info": (70 * 2**30, 79 * 2**30),
        "max_memory_allocated": 2 * 10**9,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name), return_value=value))
    for name in ("stream", "graph"):
        stand_in = mock.create_autospec(getattr(torch.cuda, name))
        stand_in.return_value.__enter__ = lambda self: self
        stand_in.return_value.__exit__ = lambda self, *error: None
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(accelerator_module, "profile", fake_profile)
    return CudaAccelerator(torch.device("cpu"))


def require_no_error(results: Results, parts: list[str]) -> None:
    assert list(results.parts) == parts
    for name, result in results.parts.items():
        assert result.status == "done", f"{name}: {result.error}"
        assert result.rows, name
        assert [row["error"] for row in result.rows if "error" in row] == [], name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
def test_every_part_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compilation takes long and is tested elsewhere.
    monkeypatch.setattr(build_model, "compile_blocks", lambda model, mode: None)
    assert measure_parts(CpuAccelerator(), build_options(IN_PROCESS), tmp_path) == 0
    results = read_results(tmp_path)
    require_no_error(results, IN_PROCESS)
    checks = [row for row in results.parts["equality"].rows if "ok" in row]
    assert len(checks) == 5 and all(row["ok"] for row in checks), checks
    # The formulation for GPUs rounds differently, so a difference above 0 shows that both were computed.
    assert any(row.get("gradient", 0) > 0 for row in checks)
    mlp = results.parts["kernels"].rows[0]
    assert mlp["case"] == "training bfloat16, mlp" and mlp["chosen"] == "kernel" and mlp["gradient"] < 1e-2
    step = results.parts["steps"].rows[0]
    assert step["kernels"] > 100 and step["MFU"] > 0 and step["peak GB"] is None
    assert results.parts["memory"].rows[0]["plan GB"] > 0.005


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_gpu_code_runs_with_mocked_cuda(
    fake_cuda: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_model, "compile_blocks", lambda model, mode: None)
    parts = ["machine", "steps", "kernels", "graphs", "memory"]
    # One case of each part; all cases run on the CPU in the test before.
    assert measure_parts(fake_cuda, build_options(parts, ("quickstart", "training bfloat16, mlp")), tmp_path) == 0
    results = read_results(tmp_path)
    require_no_error(results, parts)
    step = results.parts["steps"].rows[0]
    assert (step["kernels"], step["launches"], step["peak GB"]) == (2, 2, 2.0)
    memory = results.parts["memory"].rows[0]
    assert memory["peak / plan"] == pytest.approx(2 / memory["plan GB"])
    data_sheet_rows = [row for row in results.parts["machine"].rows if row.get("share of the data sheet") is not None]
    assert len(data_sheet_rows) == 3
    assert torch.cuda.CUDAGraph.return_value.replay.call_count > 2
    # The mocked graph replays compute nothing, so the check of the graphs must fail.
    assert results.parts["graphs"].rows[0]["ok"] is False


def test_busy_time_counts_overlapping_kernels_once(fake_cuda: Accelerator) -> None:
    measured = fake_cuda.profile(lambda: None)
    assert measured.busy_s == pytest.approx(2000e-9)
    assert (measured.kernels, measured.launches) == (2, 2)
    assert measured.describe_longest(1) == "gemm 50%"


def test_profiler_events_have_the_methods_of_fake_event() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(3) + 1
    event = profiled.profiler.kineto_results.events()[0]
    for name in ("name", "device_type", "start_ns", "duration_ns", "is_user_annotation"):
        assert isinstance(getattr(event, name)(), str | int | bool | DeviceType)


def list_torch_cuda_calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield each call of a function of torch.cuda in the scripts, with its dotted name."""
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            # Skip methods of a result, such as `torch.cuda.current_stream().wait_stream`.
            if name.startswith("torch.cuda.") and "(" not in name:
                yield name, node


def test_calls_of_torch_cuda_have_the_signatures_of_torch() -> None:
    names = set()
    for name, call in list_torch_cuda_calls():
        function = torch.cuda
        for part in name.split(".")[2:]:
            function = getattr(function, part)
        keywords = {keyword.arg: None for keyword in call.keywords}
        if isinstance(function, type):
            # Classes of torch check their arguments in C++. Only torch.cuda.graph gets one.
            assert len(call.args) + len(keywords) <= (name == "torch.cuda.graph")
        else:
            inspect.signature(function).bind(*call.args, **keywords)
        names.add(name.removeprefix("torch.cuda."))
    assert names >= {"synchronize", "graph", "CUDAGraph", "max_memory_allocated", "Stream", "stream"}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_other_formulation_can_be_forced(kernel: object) -> None:
    x = torch.ones(2)
    with force_gpu_path():
        is_chosen = attention.uses_kernel(kernel, x)
        with _replace_choice(kernel, is_chosen):
            assert attention.uses_kernel(kernel, x) is not is_chosen
            other_kernels = [other for other in KERNELS if other is not kernel]
            assert [attention.uses_kernel(other, x) for other in other_kernels] == [
                not other.cpu_only for other in other_kernels
            ]
        assert attention.uses_kernel(kernel, x) is is_chosen
    assert attention.uses_kernel(ATTENTION, x)


def build_context(seconds: float = 100.0) -> Context:
    return Context(CpuAccelerator(), True, time.monotonic() + seconds, Path())


def test_an_error_of_a_case_does_not_end_the_part() -> None:
    def fail() -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")

    rows = list(build_context().measure_cases([("first", fail), ("second", lambda: {"ms": 1.0})]))
    assert rows[0] == {"case": "first", "error": "OutOfMemoryError: CUDA out of memory. Tried to allocate"}
    assert rows[1] == {"case": "second", "ms": 1.0}
    rows = list(build_context(-1.0).measure_cases([("late", fail)]))
    assert "not reached" in rows[0]["error"]


def test_worker_ends_after_cuda_error(fake_cuda: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict:
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        # After this error, every call of CUDA fails.
        torch.cuda.synchronize.side_effect = error
        raise error

    def run(context: Context) -> Iterator[dict]:
        yield from context.measure_cases([("before", dict), ("illegal", fail), ("after", dict)])

    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace(run=run))
    assert measure_parts(fake_cuda, build_options(["machine", "steps"]), tmp_path) == FATAL_STATUS
    results = read_results(tmp_path)
    assert list(results.parts) == ["machine"]
    result = results.parts["machine"]
    assert result.rows == [{"case": "before"}]
    assert result.status == "failed" and "illegal memory access" in result.error


WORKER = """#!{python}
import json, sys, time
folder, options = sys.argv[3], json.loads(sys.argv[4])
def append(record):
    with open(folder + "/records.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n")
for name in options["parts"]:
    append({{"event": "begin", "part": name}})
    append({{"event": "row", "part": name, "seconds": 1.0, "row": {{"case": "a", "ms": 2.5}}}})
    if name == "equality":
        time.sleep(600)
    if name == "kernels":
        sys.exit(3)
    append({{"event": "end", "part": name, "seconds": 2.0, "error": ""}})
"""


def build_supervisor(folder: Path, minutes: float, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """Return a supervisor whose worker hangs in the part `equality`, and ends with an error in the part `kernels`."""
    script = folder / "worker"
    script.write_text(WORKER.format(python=PYTHON))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return Supervisor(
        Namespace(minutes=minutes, device="cpu", fast=True, out=folder, reference=None, cases=[], run=None)
    )


def test_part_that_hangs_or_dies_does_not_stop_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = build_supervisor(tmp_path, 5, monkeypatch)
    limits = {"equality": 1.0}
    monkeypatch.setattr(supervisor, "_limit_seconds", lambda name: limits.get(name, 60.0))
    supervisor.run(["machine", "equality", "kernels", "loader"])
    statuses = {name: result.status for name, result in supervisor.results.parts.items()}
    assert statuses == {"machine": "done", "equality": "stopped", "kernels": "stopped", "loader": "done"}
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["parts"]["equality"]["rows"] == [{"case": "a", "ms": 2.5}]
    assert "| a | 2.5 |" in (tmp_path / "results.md").read_text()


def test_parts_after_the_time_limit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = build_supervisor(tmp_path, 0.01, monkeypatch)
    supervisor.run(["machine", "loader"])
    assert supervisor.results.list_problems() == ["machine: not reached", "loader: not reached"]
    assert "## loader: not reached" in (tmp_path / "results.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--out FOLDER is required"),
        (["--out", "new", "--minutes", "0"], "--minutes: 0 must be more than 0"),
        (["--out", "used"], "used has results already"),
        (["--out", "new", "--run", "nowhere.yml", "32x64"], "--run: give a config file"),
        (["--out", "new", "--reference", "used"], "is not the unpacked wheel of miles-credit"),
        (["--out", "new", "--parts", "speed"], "invalid choice: 'speed'"),
    ],
)
def test_invalid_options_are_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "used").mkdir()
    append_record(tmp_path / "used", {"event": "begin"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["device", *arguments])
    with pytest.raises(SystemExit) as error:
        parse_arguments()
    assert error.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_incomplete_record_is_read_later(tmp_path: Path) -> None:
    assert read_records(tmp_path, 0) == ([], 0)
    append_record(tmp_path, {"event": "begin"})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"event":')
    records, offset = read_records(tmp_path, 0)
    assert records == [{"event": "begin"}]
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write(' "end"}\n')
    assert read_records(tmp_path, offset)[0] == [{"event": "end"}]


def test_failed_checks_come_first() -> None:
    rows = [{"case": "a", "ok": False, "x": 0.123456}, {"case": "b", "ok": True}, {"case": "c", "error": "e | f"}]
    results = Results({"device": "cpu"}, {"steps": PartResult("done", 3.0, rows), "loader": PartResult("stopped")})
    assert results.list_problems() == [
        "steps, a: outside the tolerance, or the slower choice",
        "steps, c: e | f",
        "loader: stopped",
    ]
    lines = results.format().splitlines()
    assert "| case | ok | x | error |" in lines
    assert "| a | no | 0.1235 |  |" in lines and "| c |  |  | e / f |" in lines


def test_shares_and_modules_of_the_parts() -> None:
    assert sum(part.share for part in PARTS) == pytest.approx(1.0)
    assert {part.name for part in PARTS} == {path.stem for path in (FOLDER / "parts").glob("[a-z]*.py")}
