"""Layers of the package: a subpackage (room) imports only from rooms on lower levels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

# Levels from top to bottom. Rooms in the same set are on the same level.
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


def find_room(module: str) -> str:
    """Return the room, which is the subpackage or module below ``credit``, of a dotted name."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"


def list_imports(source: str) -> list[tuple[int, str]]:
    """Return (line, dotted name) of every import from ``credit``, also inside functions."""
    imports = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append((node.lineno, "credit.<relative>"))
    return [(line, name) for line, name in imports if name.split(".")[0] == "credit"]


def find_wrong_imports(package: Path) -> list[str]:
    """Return a message for each import that is relative, or from the same or a higher level."""
    problems = []
    for path in sorted(package.rglob("*.py")):
        module_path = path.relative_to(package).with_suffix("").parts
        room = module_path[0]
        if room not in HEIGHT:
            problems.append(f"{path.relative_to(package.parent)}: {room} is no room of DESIGN.md; give it a level here")
            continue
        for line, name in list_imports(path.read_text(encoding="utf-8")):
            imported_room = find_room(name)
            if "<relative>" in name:
                problems.append(f"{path.relative_to(package.parent)}:{line}: relative import; write the whole name")
            elif room == "__init__" and imported_room == "api":
                # `credit.load` and so on, which `credit/__init__.py` imports when they are used.
                continue
            elif imported_room != room and HEIGHT[imported_room] >= HEIGHT[room]:
                problems.append(f"{path.relative_to(package.parent)}:{line}: {room} must not import {name}")
    return problems


def test_rooms_import_only_from_lower_levels(repository: Path) -> None:
    assert find_wrong_imports(repository / "credit") == []


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
    assert len(find_wrong_imports(tmp_path / "credit")) == 1


def test_parallel_imports_no_model(repository: Path) -> None:
    for path in (repository / "credit" / "parallel").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(find_room(name) == "models" for _, name in list_imports(text)), path
        assert "wxformer" not in text.lower(), f"{path} names a model"


def test_only_the_registry_imports_models(repository: Path) -> None:
    """Training, forecasts, plans and commands use models only through the registry and the base class."""
    package = repository / "credit"
    models = {path.parent.name for path in (package / "models").glob("*/model.py")}
    assert "wxformer" in models
    for path in package.rglob("*.py"):
        if path.relative_to(package).parts[:2] in {("models", name) for name in models}:
            continue
        for line, name in list_imports(path.read_text(encoding="utf-8")):
            is_model = name.startswith("credit.models.") and name.split(".")[2] in models
            assert not is_model, f"{path}:{line}: {name}; use credit.models.registry"


def test_commands_and_configs_start_without_torch(repository: Path) -> None:
    """``--help`` and loading a built-in config must not import torch, which takes seconds."""
    codes = [
        "from credit.config import load_config; load_config('config/quickstart.yml')",
        "from credit.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
        "from credit.cli.main import main\ntry:\n    main(['train', '--help'])\nexcept SystemExit:\n    pass",
    ]
    for code in codes:
        script = f"{code}\nimport sys\nassert 'torch' not in sys.modules"
        process = subprocess.run(
            [sys.executable, "-c", script], cwd=repository, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, process.stderr


def test_tensor_code_does_not_import_the_whole_config(repository: Path) -> None:
    config_modules = ("credit.config.Config", "credit.config.schema", "credit.config.load")
    for room in ("data", "parallel", "models", "losses", "metrics", "forecast"):
        for path in (repository / "credit" / room).rglob("*.py"):
            for line, name in list_imports(path.read_text(encoding="utf-8")):
                is_whole_config = name in config_modules or name.startswith(
                    ("credit.config.schema.", "credit.config.load.")
                )
                assert not is_whole_config, f"{path}:{line}: {name}; hand the section over instead"
