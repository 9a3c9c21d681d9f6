"""Colours, wrapping and tables in the output of commands."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from credit.cli.console import terminal


class FakeTerminal(io.StringIO):
    """Stream that reports to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def clear_terminal_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables for colour and width."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    ("variables", "on_terminal", "in_pipe"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
    ],
)
def test_environment_decides_about_color(
    variables: dict[str, str], on_terminal: bool, in_pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert terminal.supports_color(FakeTerminal()) == on_terminal
    assert terminal.supports_color(io.StringIO()) == in_pipe


def test_style_leaves_text_for_a_pipe_unchanged() -> None:
    assert terminal.colorize("ERROR", "red", io.StringIO()) == "ERROR"
    assert terminal.colorize("ERROR", "red", FakeTerminal()) == "\x1b[31mERROR\x1b[0m"


def test_streams_that_are_missing_or_closed_are_no_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = FakeTerminal()
    closed.close()
    monkeypatch.setattr(sys, "stdout", None)
    assert not terminal.supports_color(None)
    assert terminal.get_terminal_width() is None
    assert not terminal.is_terminal(io.StringIO())


def test_text_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/very/long/path/that/people/want/to/copy/as-it-is.nc"
    text = f"data.sources: {path} has no variable T; choose another file or rename it"
    lines = terminal.wrap_text(text, FakeTerminal(), indent="  ").split("\n")
    assert " ".join(line.strip() for line in lines) == text
    assert all(len(line) <= 40 or path in line for line in lines)
    assert all(line.startswith("  ") for line in lines[1:])
    assert terminal.wrap_text(text, io.StringIO()) == text


def test_wrapping_keeps_lines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = "2 problems\n  - one that is so long that it needs another line\n  - two"
    assert terminal.wrap_text(text, FakeTerminal()).split("\n") == [
        "2 problems",
        "  - one that is so long that it needs",
        "  another line",
        "  - two",
    ]


def test_table_is_aligned_with_and_without_color() -> None:
    plain = terminal.format_table(["name", "rmse"], [["z500", "10.2"], ["t2m", "9.8"]], right_aligned=["rmse"])
    assert plain == "name  rmse\nz500  10.2\nt2m    9.8"
    colored = [["\x1b[31mz500\x1b[0m", "10.2"], ["t2m", "9.8"]]
    assert terminal.format_table(["name", "rmse"], colored, right_aligned=["rmse"]).split("\n")[2] == "t2m    9.8"


def test_log_records_are_colored_on_a_terminal_only() -> None:
    record = logging.LogRecord("credit", logging.WARNING, "", 0, "the disk is %s", ("full",), None)
    assert terminal.LogFormatter(io.StringIO()).format(record) == "WARNING: the disk is full"
    assert terminal.LogFormatter(FakeTerminal()).format(record) == "\x1b[33mWARNING\x1b[0m: the disk is full"
