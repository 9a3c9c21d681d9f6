"""Sections of the report of ``credit doctor``. Sections are independent; a failing one does not affect the others."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from credit import __version__
from credit.cli.doctor.redact import HIDDEN, is_secret, redact, redact_values
from credit.config import Config, build_config
from credit.config.load import read_config
from credit.errors import ConfigError, CreditError
from credit.parallel.mesh import DeviceGrid, plan_degrees
from credit.parallel.process_info import read_process_info
from credit.train.checkpoint import checkpoint
from credit.train.monitor.run_files import read_last_metrics, tail_lines
from credit.utils.installation import describe_installation, find_conflicts

_PACKAGES = ("torch", "numpy", "xarray", "zarr", "netCDF4", "cftime", "dask", "pydantic", "safetensors", "einops",
             "triton", "nvidia-nccl-cu12", "nvidia-cudnn-cu12")  # fmt: skip
# Variables that tell how and on what the run was started; all others stay out of the report.
_VARIABLES = re.compile(
    r"(SLURM_|PBS_|PALS_|PMI_|OMPI_|MPI_|NCCL_|GLOO_|FI_|UCX_|TORCH|PYTORCH_|CUDA_|OMP_|MKL_|MASTER_|LOCAL_|CREDIT_)\w+"
    r"|RANK|WORLD_SIZE|PYTHONPATH|HDF5_USE_FILE_LOCKING|TMPDIR"
)
_MAX_LOGS = 8
_LOG_LINES = 40
_ERROR_LINES = 60
_METRICS_ROWS = 5
_ROW_LENGTH = 2000
_NUM_CHECKPOINTS = 2
_ERROR = re.compile(r"^Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b")


@dataclass(frozen=True)
class DiagnosticContext:
    """The run that a report is about.

    Attributes:
        config: the resolved config, None if it is not valid.
        config_error: the reason, empty for a valid config.
        raw: contents of the file, empty if it cannot be read.
        folder: the run's folder, None if the file does not name it.
        environ: environment variables.
    """

    config: Config | None
    config_error: str
    raw: Mapping[str, Any]
    folder: Path | None
    environ: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_config(cls, path: str, overrides: Sequence[str], environ: Mapping[str, str]) -> DiagnosticContext:
        """Read a config as far as it can be read."""
        raw: Mapping[str, Any] = {}
        try:
            raw = read_config(path, overrides)
            config = build_config(raw, origin=str(path))
            return cls(config, "", raw, Path(config.save_loc), environ)
        except Exception as error:
            # A plugin may raise anything, and its author needs the report most.
            config_error = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        save_loc = raw.get("save_loc")
        folder = Path(os.path.expandvars(save_loc)) if isinstance(save_loc, str) else None
        return cls(None, config_error, raw, folder, environ)


def render_report(context: DiagnosticContext) -> str:
    """Return the report."""
    secrets: set[str] = set()
    parts = []
    for title, section in SECTIONS.items():
        try:
            text = section(context, secrets)
        except CreditError as error:
            text = str(error)
        except Exception as error:
            text = f"not available: {type(error).__name__}: {error}"
        parts.append(f"==== {title} ====\n{text.rstrip()}\n")
    return redact("\n".join(parts), context.environ, secrets)


def _report(context: DiagnosticContext, secrets: set[str]) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"credit {__version__}, {now}\ncommand {' '.join(sys.argv)}\nin {Path.cwd()}"


def _installation(context: DiagnosticContext, secrets: set[str]) -> str:
    conflicts = [f"CONFLICT: {conflict}" for conflict in find_conflicts()]
    return "\n".join([describe_installation(), *conflicts])


def _versions(context: DiagnosticContext, secrets: set[str]) -> str:
    lines = [f"python {sys.version.split()[0]} ({sys.executable})"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    # Nothing here uses a GPU, which would take memory that the run may need.
    lines.append(f"torch was built for CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    if torch.version.cuda is not None:
        lines.append(f"cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}")
    return "\n".join(lines)


def _machine(context: DiagnosticContext, secrets: set[str]) -> str:
    lines = [f"{platform.platform()} on {socket.gethostname()}"]
    for path, key in (("/proc/cpuinfo", "model name"), ("/proc/meminfo", "MemTotal"), ("/proc/meminfo", "MemAvail")):
        with suppress(OSError, StopIteration):
            lines.append(next(line for line in Path(path).read_text().splitlines() if line.startswith(key)))
    lines.append(f"{os.cpu_count()} CPUs; torch computes on {torch.get_num_threads()}")
    if hasattr(os, "sched_getaffinity"):
        lines[-1] += f", this process may use {len(os.sched_getaffinity(0))}"
    if context.folder is not None and context.folder.is_dir():
        disk = shutil.disk_usage(context.folder)
        lines.append(f"disk of save_loc: {disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB are free")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=20)
        lines += [f"GPU {line}" for line in (gpus.stdout or gpus.stderr).splitlines()]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines.append(f"no GPU: nvidia-smi: {error}")
    return "\n".join(lines)


def _ranks(context: DiagnosticContext, secrets: set[str]) -> str:
    launch = read_process_info(context.environ)
    lines = [str(launch)]
    if context.config is not None:
        degrees = plan_degrees(context.config.trainer.parallelism, launch.world)
        lines.append(f"mesh: {DeviceGrid(degrees, launch.rank).describe()}")
    return "\n".join(lines)


def _environment(context: DiagnosticContext, secrets: set[str]) -> str:
    chosen = {name: value for name, value in context.environ.items() if _VARIABLES.fullmatch(name)}
    return "\n".join(f"{name}={HIDDEN if is_secret(name) else value}" for name, value in sorted(chosen.items()))


def _config(context: DiagnosticContext, secrets: set[str]) -> str:
    plain = context.raw if context.config is None else context.config.model_dump(mode="json")
    shown = yaml.safe_dump(redact_values(plain, secrets), sort_keys=False, width=110)
    return f"{context.config_error}\n\nas it was read:\n{shown}" if context.config is None else shown


def _run(context: DiagnosticContext, secrets: set[str]) -> str:
    folder = _folder(context)
    lines = []
    for name in ("STATUS", "heartbeat.json", "jobs.json"):
        with suppress(OSError):
            lines.append(f"{name} ({_age(folder / name)}): {(folder / name).read_text(encoding='utf-8').strip()}")
    for path in sorted(folder.iterdir()):
        with suppress(OSError):
            size = f"{len(list(path.iterdir()))} entries" if path.is_dir() else f"{path.stat().st_size} bytes"
            lines.append(f"{path.name}: {size}, {_age(path)}")
    return "\n".join(lines)


def _checkpoints(context: DiagnosticContext, secrets: set[str]) -> str:
    folder = _folder(context) / "checkpoints"
    paths = checkpoint.list_checkpoints(folder)
    lines = [f"{len(paths)} in {folder}"]
    for name in ("latest", "best"):
        with suppress(OSError):
            lines.append(f"{name} -> {os.readlink(folder / name)}")
    for path in reversed(paths[-_NUM_CHECKPOINTS:]):
        with suppress(OSError):
            age = _age(path)
            state = checkpoint.verify_checkpoint(path) or "intact"
            if not path.exists():
                # A run at work removes checkpoints.
                state = "removed just now"
            lines.append(f"{path.name}: {state}, {age}")
    return "\n".join(lines)


def _metrics(context: DiagnosticContext, secrets: set[str]) -> str:
    rows = read_last_metrics(_folder(context))
    training_rows = [row for row in rows if not row.keys() & {"valid", "early"}]
    validation_rows = [row for row in rows if "valid" in row]
    shown_rows = training_rows[-_METRICS_ROWS:] + validation_rows[-1:]
    return "\n".join(json.dumps(row)[:_ROW_LENGTH] for row in shown_rows) or "no rows"


def _last_error(context: DiagnosticContext, secrets: set[str]) -> str:
    for path in _logs(context):
        lines = tail_lines(path)
        error_lines = [number for number, line in enumerate(lines) if _ERROR.search(line)]
        if error_lines:
            start = error_lines[-1]
            if start - 1 in error_lines:
                # A traceback belongs to the message before it.
                start -= 1
            return "\n".join([f"{path.name}:", *lines[start : start + _ERROR_LINES]])
    return "none in the logs"


def _log_tails(context: DiagnosticContext, secrets: set[str]) -> str:
    parts = [
        "\n".join([f"---- {path.name}, {_age(path)}", *tail_lines(path)[-_LOG_LINES:]])
        for path in _logs(context)[:_MAX_LOGS]
    ]
    return "\n\n".join(parts) or "no logs"


def _folder(context: DiagnosticContext) -> Path:
    if context.folder is None or not context.folder.is_dir():
        raise ConfigError(f"save_loc: {context.folder} does not exist")
    return context.folder


def _logs(context: DiagnosticContext) -> list[Path]:
    """Return the files in ``logs/``, the last written one first."""
    folder = _folder(context) / "logs"
    files = [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)


def _age(path: Path) -> str:
    return f"changed {max(0.0, time.time() - path.stat().st_mtime):.0f} s ago"


SECTIONS: dict[str, Callable[[DiagnosticContext, set[str]], str]] = {
    "report": _report,
    "installation": _installation,
    "versions": _versions,
    "machine": _machine,
    "ranks": _ranks,
    "environment": _environment,
    "config": _config,
    "run": _run,
    "checkpoints": _checkpoints,
    "metrics": _metrics,
    "last error": _last_error,
    "logs": _log_tails,
}
