"""Files of at most 400 lines, functions of at most 80. The lists of exceptions may only get shorter."""

from __future__ import annotations

import ast
from pathlib import Path

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 80
# path below the root -> lines it may have
LONG_FILES: dict[str, int] = {}
# "path:function" -> lines it may have
LONG_FUNCTIONS: dict[str, int] = {}


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


def check(found: dict[str, int], most: int, exceptions: dict[str, int]) -> list[str]:
    """Return what is too long, and exceptions that are larger than what they are for."""
    problems = [
        f"{name} has {lines} lines, at most {max(most, exceptions.get(name, 0))} are allowed; split it"
        for name, lines in found.items()
        if lines > max(most, exceptions.get(name, 0))
    ]
    for name, allowed in exceptions.items():
        lines = found.get(name, 0)
        if lines <= most:
            problems.append(f"{name}: the exception is not needed any more; remove it")
        elif lines < allowed:
            problems.append(f"{name}: has shrunk to {lines} lines; lower its exception from {allowed}")
    return problems


def test_file_lengths(repository: Path, files: list[Path]) -> None:
    code = [path for path in files if path.suffix in (".py", ".js")]
    found = {str(p.relative_to(repository)): len(p.read_text(encoding="utf-8").splitlines()) for p in code}
    assert check(found, MOST_LINES_A_FILE, LONG_FILES) == []


def test_function_lengths(repository: Path, python_files: list[Path]) -> None:
    found = {
        f"{path.relative_to(repository)}:{name}": lines
        for path in python_files
        for name, lines in function_lengths(path.read_text(encoding="utf-8")).items()
    }
    assert check(found, MOST_LINES_A_FUNCTION, LONG_FUNCTIONS) == []


def test_the_check_itself() -> None:
    assert function_lengths("class A:\n    @staticmethod\n    def f():\n        def g():\n            pass\n") == {
        "A.f": 4,
        "A.f.g": 2,
    }
    assert check({"a": 81}, 80, {}) == ["a has 81 lines, at most 80 are allowed; split it"]
    assert check({"a": 90}, 80, {"a": 90}) == []
    assert len(check({"a": 91}, 80, {"a": 90})) == 1
    assert len(check({"a": 85}, 80, {"a": 90})) == 1
    assert len(check({"a": 80}, 80, {"a": 90})) == 1
    assert len(check({}, 80, {"gone": 90})) == 1
