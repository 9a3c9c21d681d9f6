"""Rules of style: names, openings of docstrings, number of parameters, and number of files in a folder.

`tests/repo/exceptions.json` lists violations that existed when a rule was introduced. Exceptions may only shrink.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.test_sizes import find_violations

# Names that do not describe the thing that they refer to.
COINED_NAMES = {
    "apart", "beside", "few", "found", "kept", "known", "made", "one", "ours", "own", "place", "places", "said",
    "theirs", "told", "wanted", "what", "where", "whole", "wish",
}  # fmt: skip
# A docstring begins with a sentence ("Return the mean.") or a noun phrase ("Cache around a reader.").
REFUSED_OPENINGS = ("How", "What", "When", "Where", "Whether", "Which", "Who")
MAX_PARAMETERS = 8
MAX_FILES_PER_FOLDER = 12

Function = ast.FunctionDef | ast.AsyncFunctionDef
EXCEPTIONS = json.loads((Path(__file__).parent / "exceptions.json").read_text(encoding="utf-8"))


def find_coined_names(tree: ast.AST) -> list[str]:
    """Return the variables and parameters of a module that have a coined name, once for each binding."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return [name for name in names if name in COINED_NAMES]


def find_refused_docstrings(tree: ast.AST) -> list[str]:
    """Return the names of classes and functions whose docstring begins with a question word."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | Function):
            docstring = ast.get_docstring(node)
            if docstring and docstring.split()[0] in REFUSED_OPENINGS:
                names.append(node.name)
    return names


def count_parameters(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield name and number of parameters of each function; `self` and `cls` do not count."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [parameter.arg for parameter in parameters if parameter.arg not in ("self", "cls")]
            yield node.name, len(names)


def count_for_rule(repository: Path, rule: str) -> dict[str, int]:
    """Return the counts of a rule by path, or by path and function."""
    counts: Counter[str] = Counter()
    for path in sorted((repository / "credit").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        key = str(path.relative_to(repository))
        if rule == "coined names":
            counts[key] = len(find_coined_names(tree))
        elif rule == "docstrings":
            counts[key] = len(find_refused_docstrings(tree))
        elif rule == "parameters":
            for name, number in count_parameters(tree):
                counts[f"{key}:{name}"] = max(counts[f"{key}:{name}"], number)
        elif path.name != "__init__.py":
            counts[str(path.parent.relative_to(repository))] += 1
    return dict(counts)


RULES = {"coined names": 0, "docstrings": 0, "parameters": MAX_PARAMETERS, "files a folder": MAX_FILES_PER_FOLDER}


@pytest.mark.parametrize("rule", RULES)
def test_rule(repository: Path, rule: str) -> None:
    problems = find_violations(count_for_rule(repository, rule), RULES[rule], EXCEPTIONS[rule], unit=rule)
    assert problems == [], "\n".join(problems)


def test_rules_find_violations() -> None:
    tree = ast.parse(
        'def f(own, b):\n    "What it is."\n    made = [one for one in b]\nclass A:\n    "Return it."\n'
        "    def g(self, a, b, c, d, e, f, g, h, i):\n        pass\n"
    )
    assert sorted(find_coined_names(tree)) == ["made", "one", "own"]
    assert find_refused_docstrings(tree) == ["f"]
    assert dict(count_parameters(tree)) == {"f": 2, "g": 9}


if __name__ == "__main__":  # Update the exceptions: python -m tests.repo.test_style
    from tests.repo.test_sizes import MAX_LINES_PER_FUNCTION, measure_functions

    root = Path(__file__).parents[2]
    exceptions = {}
    for name, limit in RULES.items():
        exceptions[name] = {key: number for key, number in count_for_rule(root, name).items() if number > limit}
    lengths = measure_functions(root)
    exceptions["lines a function"] = {key: n for key, n in lengths.items() if n > MAX_LINES_PER_FUNCTION}
    text = json.dumps(exceptions, indent=1, sort_keys=True)
    (Path(__file__).parent / "exceptions.json").write_text(text + "\n", encoding="utf-8")
