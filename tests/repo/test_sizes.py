"""Files have at most 400 lines, and functions at most 60. Exceptions may only become fewer and shorter."""

from __future__ import annotations

import ast
import json
from pathlib import Path

MAX_LINES_PER_FILE = 400
MAX_LINES_PER_FUNCTION = 60
# Path below the root -> allowed number of lines.
LONG_FILES: dict[str, int] = {}
# "path:function" -> allowed number of lines.
LONG_FUNCTIONS: dict[str, int] = json.loads((Path(__file__).parent / "exceptions.json").read_text())["lines a function"]


def measure_function_lengths(source: str) -> dict[str, int]:
    """Return the number of lines of every function by qualified name, with decorators and docstring."""
    lengths = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                lengths[name] = child.end_lineno - first + 1
            visit(child, name)

    visit(ast.parse(source), "")
    return lengths


def find_violations(counts: dict[str, int], limit: int, exceptions: dict[str, int], unit: str = "lines") -> list[str]:
    """Return a message for each count above the limit, and for each exception that is larger than its count."""
    problems = []
    for name, count in counts.items():
        allowed = max(limit, exceptions.get(name, 0))
        if count > allowed:
            problems.append(f"{name} has {count} {unit}, at most {allowed} are allowed")
    for name, allowed in exceptions.items():
        count = counts.get(name, 0)
        if count <= limit:
            problems.append(f"{name}: the exception for its {unit} is not needed any more; remove it")
        elif count < allowed:
            problems.append(f"{name}: has only {count} {unit}; lower its exception from {allowed}")
    return problems


def measure_functions(repository: Path) -> dict[str, int]:
    """Return the number of lines of every function in the package, tests and benchmarks, by "path:function"."""
    lengths = {}
    for folder in ("credit", "tests", "benchmarks", "applications"):
        for path in sorted((repository / folder).rglob("*.py")):
            for name, lines in measure_function_lengths(path.read_text(encoding="utf-8")).items():
                lengths[f"{path.relative_to(repository)}:{name}"] = lines
    return lengths


def test_file_lengths(repository: Path, files: list[Path]) -> None:
    code = [path for path in files if path.suffix in (".py", ".js")]
    lengths = {str(p.relative_to(repository)): len(p.read_text(encoding="utf-8").splitlines()) for p in code}
    assert find_violations(lengths, MAX_LINES_PER_FILE, LONG_FILES) == []


def test_function_lengths(repository: Path) -> None:
    assert find_violations(measure_functions(repository), MAX_LINES_PER_FUNCTION, LONG_FUNCTIONS) == []


def test_violations_are_found() -> None:
    assert measure_function_lengths(
        "class A:\n    @staticmethod\n    def f():\n        def g():\n            pass\n"
    ) == {
        "A.f": 4,
        "A.f.g": 2,
    }
    assert find_violations({"a": 81}, 80, {}) == ["a has 81 lines, at most 80 are allowed"]
    assert find_violations({"a": 90}, 80, {"a": 90}) == []
    assert len(find_violations({"a": 91}, 80, {"a": 90})) == 1
    assert len(find_violations({"a": 85}, 80, {"a": 90})) == 1
    assert len(find_violations({"a": 80}, 80, {"a": 90})) == 1
    assert len(find_violations({}, 80, {"gone": 90})) == 1
