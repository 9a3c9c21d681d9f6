"""Imports run one way: a room imports from rooms below it, never from its own level or above."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# from the top; rooms on one line are on one level
LEVELS = (
    {"cli", "api"},
    {"compare", "realtime"},
    {"hpc", "verify", "train"},
    {"products"},
    {"forecast"},
    {"models", "losses", "metrics", "interop", "drawing"},
    {"data", "parallel"},
    {"config"},
    {"physics"},
    {"channels", "grid", "calendar"},
    {"utils"},
    {"errors"},
    {"__init__"},
)
HEIGHT = {room: -number for number, rooms in enumerate(LEVELS) for room in rooms}


def room_of(module: str) -> str:
    """Return the room of a dotted name below ``credit``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"


def imported_modules(source: str) -> list[tuple[int, str]]:
    """Return (line, dotted name) of every import of our own, wherever it stands."""
    imports = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.lineno, "credit.<relative>"))
    return [(line, name) for line, name in imports if name.split(".")[0] == "credit"]


def wrong_imports(package: Path) -> list[str]:
    """Return the imports that run upwards or sideways, as messages."""
    problems = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).with_suffix("").parts
        room = inside[0]
        if room not in HEIGHT:
            problems.append(f"{path.relative_to(package.parent)}: {room} is no room of DESIGN.md; give it a level here")
            continue
        for line, name in imported_modules(path.read_text(encoding="utf-8")):
            other = room_of(name)
            if "<relative>" in name:
                problems.append(f"{path.relative_to(package.parent)}:{line}: relative import; write the whole name")
            elif room == "__init__" and other == "api":
                # `credit.load` and so on, which `credit/__init__.py` imports when they are used.
                continue
            elif other != room and HEIGHT[other] >= HEIGHT[room]:
                problems.append(f"{path.relative_to(package.parent)}:{line}: {room} must not import {name}")
    return problems


def test_imports_run_one_way(repository: Path) -> None:
    assert wrong_imports(repository / "credit") == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("data/reader.py", "from credit.train.step import TrainingStep"),
        ("data/reader.py", "from credit.parallel import launch"),
        ("verify/plots.py", "import credit.train.monitor.metrics_log"),
        ("losses/one.py", "def late():\n    from credit.models.registry import build_model"),
        ("channels.py", "from credit import grid"),
        ("errors.py", "from credit import channels"),
        ("new_room/one.py", "import math"),
        ("train/step.py", "from .log import write_status"),
    ],
)
def test_wrong_imports_are_found(tmp_path: Path, path: str, line: str) -> None:
    file = tmp_path / "credit" / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line + "\n")
    assert len(wrong_imports(tmp_path / "credit")) == 1


def test_parallel_knows_no_model(repository: Path) -> None:
    for path in (repository / "credit" / "parallel").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(room_of(name) == "models" for _, name in imported_modules(text)), path
        assert "wxformer" not in text.lower(), f"{path} names a model"


def test_no_part_but_the_registry_knows_a_model_by_name(repository: Path) -> None:
    """Training, forecasts, plans and commands reach a model through the registry and its base class alone."""
    package = repository / "credit"
    models = {path.parent.name for path in (package / "models").glob("*/model.py")}
    assert "wxformer" in models
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[:2] in {("models", name) for name in models}:
            continue
        for line, name in imported_modules(path.read_text(encoding="utf-8")):
            is_model = name.startswith("credit.models.") and name.split(".")[2] in models
            assert not is_model, f"{path}:{line}: {name}; use credit.models.registry"


def test_commands_and_configs_start_without_torch(repository: Path) -> None:
    """``--help`` and loading a built-in config import no torch, which takes seconds."""
    codes = [
        "from credit.config import load_config; load_config('config/quickstart.yml')",
        "from credit.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
        "from credit.cli.main import main\ntry:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass",
    ]
    for code in codes:
        script = f"{code}\nimport sys\nassert 'torch' not in sys.modules"
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_tensor_code_never_sees_the_whole_config(repository: Path) -> None:
    config_modules = ("credit.config.Config", "credit.config.schema", "credit.config.load")
    for room in ("data", "parallel", "models", "losses", "metrics", "forecast"):
        for path in (repository / "credit" / room).rglob("*.py"):
            for line, name in imported_modules(path.read_text(encoding="utf-8")):
                is_whole_config = name in config_modules or name.startswith(
                    ("credit.config.schema.", "credit.config.load.")
                )
                assert not is_whole_config, f"{path}:{line}: {name}; hand the section over instead"
