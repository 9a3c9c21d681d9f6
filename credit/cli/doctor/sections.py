"""Sections of the report of ``credit doctor``. An error in a section does not affect the other sections.

The arguments of each section function are the context of the report and a set. The function returns the text of the
section and adds secret values to the set. These values are then hidden in the whole report.
"""

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
from credit.config import Config, build_config
from credit.config.load import read_config
from credit.config.redact import HIDDEN, is_secret, redact, redact_values
from credit.errors import ConfigError, CreditError
from credit.parallel.mesh import DeviceGrid, plan_degrees
from credit.parallel.process_info import read_process_info
from credit.train.checkpoint import checkpoint
from credit.train.monitor.run_files import read_last_lines, read_last_metrics
from credit.utils.installation import describe_conflicts, describe_installation

# Packages whose versions are listed.
_PACKAGES = ("torch", "numpy", "xarray", "zarr", "netCDF4", "cftime", "dask", "pydantic", "safetensors", "einops",
             "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "tensorboard",
             "wandb", "mlflow")  # fmt: skip
# Names of environment variables of the launcher, the scheduler and the devices. Other variables are left out.
_VARIABLES = re.compile(
    r"(SLURM_|PBS_|PALS_|PMI_|OMPI_|MPI_|NCCL_|GLOO_|FI_|UCX_|TORCH|PYTORCH_|CUDA_|OMP_|MKL_|MASTER_|LOCAL_|CREDIT_)\w+"
    r"|RANK|WORLD_SIZE|PYTHONPATH|HDF5_USE_FILE_LOCKING|TMPDIR"
)
# Limits that keep the report short: number of logs, last lines of each log, lines from the last error on, rows of
# metrics.jsonl, characters of a row, and number of verified checkpoints.
_MAX_LOGS = 8
_LOG_LINES = 40
_ERROR_LINES = 60
_METRICS_ROWS = 5
_ROW_LENGTH = 2000
_NUM_CHECKPOINTS = 2
# Regular expression of a log line at which an error begins.
_ERROR = re.compile(r"^Traceback \(most recent call last\)|\bERROR\b|\bCRITICAL\b")


@dataclass(frozen=True)
class DiagnosticContext:
    """Config, run folder and environment that a report describes.

    Attributes:
        config: the validated config with all defaults; None if the config is not valid.
        config_error: error message of an invalid config; empty for a valid config.
        raw: contents of the config file, not validated; empty if the file cannot be read.
        folder: run folder (save_loc); None if the file does not set it.
        environ: environment variables.
    """

    config: Config | None
    config_error: str
    raw: Mapping[str, Any]
    folder: Path | None
    environ: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_config(cls, path: str, overrides: Sequence[str], environ: Mapping[str, str]) -> DiagnosticContext:
        """Read a config file and return its context; an error of the config is stored in the context.

        Args:
            path: config file.
            overrides: overrides ``section.key=value``.
            environ: environment variables.
        """
        raw: Mapping[str, Any] = {}
        try:
            raw = read_config(path, overrides)
            config = build_config(raw, origin=str(path))
            return cls(config, "", raw, Path(config.save_loc), environ)
        except ConfigError as error:
            config_error = str(error)
        except Exception as error:
            # A plugin may raise any exception. The report must then be written nevertheless.
            config_error = f"{type(error).__name__}: {error}"
        # The run folder is described even if the config has errors.
        folder = None
        save_loc = raw.get("save_loc")
        if isinstance(save_loc, str):
            folder = Path(os.path.expandvars(save_loc))
            # The error message of the config already reports an unknown home folder.
            with suppress(RuntimeError):
                folder = folder.expanduser()
        return cls(None, config_error, raw, folder, environ)


def render_report(context: DiagnosticContext) -> str:
    """Return the text of the whole report, with secrets hidden."""
    secrets: set[str] = set()
    section_texts = []
    for title, describe_section in SECTIONS.items():
        try:
            text = describe_section(context, secrets)
        except CreditError as error:
            text = str(error)
        # No exception may end the report, because it is needed most if something unexpected is wrong.
        except Exception as error:
            text = f"not available: {type(error).__name__}: {error}"
        section_texts.append(f"==== {title} ====\n{text.rstrip()}\n")
    # Redact the whole text at the end, because a log may contain a value that only the config identifies as secret.
    return redact("\n".join(section_texts), context.environ, secrets)


def _describe_report(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the version of the package, the time, the command line and the current folder."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"credit {__version__}, {now}\ncommand {' '.join(sys.argv)}\nin {Path.cwd()}"


def _describe_installation(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the folder and the distribution of the package, and conflicts with other distributions."""
    conflicts = [f"CONFLICT: {conflict}" for conflict in describe_conflicts()]
    return "\n".join([describe_installation(), *conflicts])


def _describe_versions(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the versions of Python, of the packages that this package uses, and of the GPU libraries."""
    lines = [f"python {sys.version.split()[0]} ({sys.executable})"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    # This section does not use the GPU, because GPU memory that it uses would not be available to the run.
    lines.append(f"torch was built for CUDA {torch.version.cuda}, HIP {torch.version.hip}")
    if torch.version.cuda is not None:
        lines.append(f"cuDNN {torch.backends.cudnn.version()}, NCCL {torch.cuda.nccl.version()}")
    return "\n".join(lines)


def _describe_machine(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return operating system, processor, memory, free disk space and GPUs."""
    lines = [f"{platform.platform()} on {socket.gethostname()}"]
    # Print the first line of each file that begins with the key. The files exist only on Linux.
    facts = (("/proc/cpuinfo", "model name"), ("/proc/meminfo", "MemTotal"), ("/proc/meminfo", "MemAvail"))
    for path, key in facts:
        with suppress(OSError):
            for line in Path(path).read_text().splitlines():
                if line.startswith(key):
                    lines.append(line)
                    break
    lines.append(f"{os.cpu_count()} CPUs; torch computes on {torch.get_num_threads()}")
    if hasattr(os, "sched_getaffinity"):
        lines[-1] += f", this process may use {len(os.sched_getaffinity(0))}"
    if context.folder is not None and context.folder.is_dir():
        disk = shutil.disk_usage(context.folder)
        lines.append(f"disk of save_loc: {disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB are free")
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20)
        # If nvidia-smi fails, its error message gives the reason.
        output = result.stdout or result.stderr
        lines += [f"GPU {line}" for line in output.splitlines()]
    except (OSError, subprocess.TimeoutExpired) as error:
        lines.append(f"no GPU: nvidia-smi: {error}")
    return "\n".join(lines)


def _describe_ranks(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the rank and world size that the launcher sets, and the mesh of the ranks.

    Raises:
        ConfigError: if the launcher's variables contradict each other or the ranks cannot form a mesh. The error
            message then becomes the text of the section.
    """
    process_info = read_process_info(context.environ)
    lines = [str(process_info)]
    if context.config is not None:
        degrees = plan_degrees(context.config.trainer.parallelism, process_info.world)
        lines.append(f"mesh: {DeviceGrid(degrees, process_info.rank).describe()}")
    return "\n".join(lines)


def _describe_environment(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the environment variables that affect a run or describe its job, one per line."""
    lines = []
    for name, value in sorted(context.environ.items()):
        if _VARIABLES.fullmatch(name):
            shown_value = HIDDEN if is_secret(name) else value
            lines.append(f"{name}={shown_value}")
    return "\n".join(lines)


def _describe_config(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the config with all defaults as YAML; for an invalid config, its error and the contents of the file."""
    if context.config is None:
        text = yaml.safe_dump(redact_values(context.raw, secrets), sort_keys=False, width=110)
        return f"{context.config_error}\n\ncontents of the file:\n{text}"
    document = context.config.model_dump(mode="json")
    return yaml.safe_dump(redact_values(document, secrets), sort_keys=False, width=110)


def _describe_run_folder(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the contents of the state files in the run folder, and the name, size and age of each entry."""
    folder = _require_folder(context)
    lines = []
    for name in ("STATUS", "heartbeat.json", "jobs.json"):
        with suppress(OSError):
            age = _format_age(folder / name)
            contents = (folder / name).read_text(encoding="utf-8")
            lines.append(f"{name} ({age}): {contents.strip()}")
    for path in sorted(folder.iterdir()):
        # A run in progress may remove files while the folder is listed.
        with suppress(OSError):
            if path.is_dir():
                size = f"{len(list(path.iterdir()))} entries"
            else:
                size = f"{path.stat().st_size} bytes"
            lines.append(f"{path.name}: {size}, {_format_age(path)}")
    return "\n".join(lines)


def _describe_checkpoints(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the number of checkpoints, the links ``latest`` and ``best``, and the state of the newest checkpoints."""
    folder = _require_folder(context) / "checkpoints"
    paths = checkpoint.list_checkpoints(folder)
    lines = [f"{len(paths)} in {folder}"]
    for name in ("latest", "best"):
        with suppress(OSError):
            lines.append(f"{name} -> {os.readlink(folder / name)}")
    for path in reversed(paths[-_NUM_CHECKPOINTS:]):
        with suppress(OSError):
            age = _format_age(path)
            state = checkpoint.verify_checkpoint(path) or "intact"
            if not path.exists():
                # A run in progress may remove old checkpoints while they are listed.
                state = "removed just now"
            lines.append(f"{path.name}: {state}, {age}")
    return "\n".join(lines)


def _describe_last_metrics(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the last rows of metrics.jsonl with training steps, and the last row with a validation."""
    rows = read_last_metrics(_require_folder(context))
    # Rows with the key "valid" contain a validation, rows with the key "early" a preview.
    training_rows = [row for row in rows if not row.keys() & {"valid", "early"}]
    validation_rows = [row for row in rows if "valid" in row]
    shown_rows = training_rows[-_METRICS_ROWS:] + validation_rows[-1:]
    if not shown_rows:
        return "no rows"
    lines = [json.dumps(row)[:_ROW_LENGTH] for row in shown_rows]
    return "\n".join(lines)


def _describe_last_error(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the last error in the logs, with the lines after the error. Newer logs are searched first."""
    for path in _list_logs(context):
        lines = read_last_lines(path)
        error_lines = [number for number, line in enumerate(lines) if _ERROR.search(line)]
        if error_lines:
            start = error_lines[-1]
            if start - 1 in error_lines:
                # A traceback belongs to the log message before the traceback.
                start -= 1
            return "\n".join([f"{path.name}:", *lines[start : start + _ERROR_LINES]])
    return "none in the logs"


def _describe_log_tails(context: DiagnosticContext, secrets: set[str]) -> str:
    """Return the last lines of the newest logs."""
    log_tails = []
    for path in _list_logs(context)[:_MAX_LOGS]:
        header = f"---- {path.name}, {_format_age(path)}"
        last_lines = read_last_lines(path)[-_LOG_LINES:]
        log_tails.append("\n".join([header, *last_lines]))
    return "\n\n".join(log_tails) or "no logs"


def _require_folder(context: DiagnosticContext) -> Path:
    """Return the run folder.

    Raises:
        ConfigError: if the folder does not exist. The error message then becomes the text of the section.
    """
    if context.folder is None or not context.folder.is_dir():
        raise ConfigError(f"save_loc: {context.folder} does not exist; start the run, or correct the path")
    return context.folder


def _list_logs(context: DiagnosticContext) -> list[Path]:
    """Return the files in ``logs/``, sorted by modification time with the newest first."""
    folder = _require_folder(context) / "logs"
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)


def _format_age(path: Path) -> str:
    """Return the time since the last change of a file or folder in the form ``changed N s ago``."""
    # The clock of a file server may be ahead of the clock of this machine, so the difference may be negative.
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    return f"changed {seconds:.0f} s ago"


# Title of a section -> function that returns the text of the section, in the order of the report.
SECTIONS: dict[str, Callable[[DiagnosticContext, set[str]], str]] = {
    "report": _describe_report,
    "installation": _describe_installation,
    "versions": _describe_versions,
    "machine": _describe_machine,
    "ranks": _describe_ranks,
    "environment": _describe_environment,
    "config": _describe_config,
    "run": _describe_run_folder,
    "checkpoints": _describe_checkpoints,
    "metrics": _describe_last_metrics,
    "last error": _describe_last_error,
    "logs": _describe_log_tails,
}
