"""Files of at most 400 lines, functions of at most 60. The exceptions may only get fewer and shorter."""

from __future__ import annotations

import ast
import json
from pathlib import Path

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 60
# path below the root -> lines it may have
LONG_FILES: dict[str, int] = {}
# "path:function" -> lines it may have
LONG_FUNCTIONS: dict[str, int] = json.loads((Path(__file__).parent / "exceptions.json").read_text())["lines a function"]


def function_lengths(source: str) -> dict[str, int]:
    """Return qualified name -> lines of every function, decorators and docstring included."""
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


def check(counts: dict[str, int], limit: int, exceptions: dict[str, int], unit: str = "lines") -> list[str]:
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
    """Return "path:function" -> lines of every function of the package, the tests and the benchmarks."""
    lengths = {}
    for folder in ("credit", "tests", "benchmarks", "applications"):
        for path in sorted((repository / folder).rglob("*.py")):
            for name, lines in function_lengths(path.read_text(encoding="utf-8")).items():
                lengths[f"{path.relative_to(repository)}:{name}"] = lines
    return lengths


def test_file_lengths(repository: Path, files: list[Path]) -> None:
    code = [path for path in files if path.suffix in (".py", ".js")]
    lengths = {str(p.relative_to(repository)): len(p.read_text(encoding="utf-8").splitlines()) for p in code}
    assert check(lengths, MOST_LINES_A_FILE, LONG_FILES) == []


def test_function_lengths(repository: Path) -> None:
    assert check(measure_functions(repository), MOST_LINES_A_FUNCTION, LONG_FUNCTIONS) == []


def test_the_check_itself() -> None:
    assert function_lengths("class A:\n    @staticmethod\n    def f():\n        def g():\n            pass\n") == {
        "A.f": 4,
        "A.f.g": 2,
    }
    assert check({"a": 81}, 80, {}) == ["a has 81 lines, at most 80 are allowed"]
    assert check({"a": 90}, 80, {"a": 90}) == []
    assert len(check({"a": 91}, 80, {"a": 90})) == 1
    assert len(check({"a": 85}, 80, {"a": 90})) == 1
    assert len(check({"a": 80}, 80, {"a": 90})) == 1
    assert len(check({}, 80, {"gone": 90})) == 1
