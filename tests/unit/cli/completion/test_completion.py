"""Completion in real shells with the script of ``credit completion``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from credit.cli.completion.words import complete_override
from credit.cli.main import main

BASH = """
eval "$(credit completion bash)"
COMP_LINE={line}
COMP_POINT=${{#COMP_LINE}}
COMP_TYPE=9
_python_argcomplete credit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a shell in which ``credit`` runs the code of this checkout."""
    command = tmp_path / "bin" / "credit"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m credit.cli.main "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}


def complete_in_bash(line: str, environment: dict[str, str], folder: Path) -> list[str]:
    """Return the completions of bash at the end of a line."""
    script = BASH.format(line=shlex.quote(line))
    shell = subprocess.run(
        ["bash", "--norc", "-c", script], env=environment, cwd=folder, capture_output=True, text=True, check=True
    )
    assert shell.stderr == ""
    return [word.rstrip() for word in shell.stdout.splitlines() if word]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("credit ro", ["rollout"]),
        ("credit train my", ["my_run.yml"]),
        ("credit train my_run.yml trainer.learning_r", ["trainer.learning_rate=", "trainer.learning_rate_factors="]),
        # For bash, a new word begins after the equals sign.
        ("credit train my_run.yml trainer.optimizer=", ["adamw", "muon"]),
        ("credit submit my_run.yml --cluster de", ["derecho"]),
        ("credit sweep my_run.yml --grid trainer.weight", ["trainer.weight_decay="]),
    ],
)
@pytest.mark.slow
def test_completions_of_bash(line: str, expected: list[str], environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "my_run.yml").touch()
    assert complete_in_bash(line, environment, tmp_path) == expected


@pytest.mark.slow
def test_completions_of_fish(environment: dict[str, str], tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if fish is None:
        pytest.skip("fish is not installed")
    for line, expected in (("credit ro", "rollout"), ("credit train c.yml trainer.opt", "trainer.optimizer=")):
        script = f"credit completion fish | source; complete --do-complete {shlex.quote(line)}"
        shell = subprocess.run(
            [fish, "--no-config", "-c", script],
            env=environment, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert [row.split("\t")[0] for row in shell.stdout.splitlines()] == [expected]


def test_every_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert "_ARGCOMPLETE" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "csh"])


def test_completion_of_empty_words_and_values() -> None:
    assert complete_override("") == []
    assert complete_override("trainer.amp=") == ["trainer.amp=true", "trainer.amp=false"]
    assert complete_override("trainer.learning_rate=") == [] and complete_override("no.key=") == []
