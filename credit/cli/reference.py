"""Reference pages of the commands, generated from their parsers: ``python -m credit.cli.reference docs``.

``docs/cli.md`` lists the commands, and each page ``docs/commands/NAME.md`` describes one command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from credit.cli.main import COMMANDS, build_parser
from credit.utils.atomic import atomic_write_text

_INTRODUCTION = """# Commands

Each command exists as `credit NAME` and as `credit_NAME`.
`section.key=value` replaces the value of a config key, for example `trainer.max_steps=100`; repeat it for several keys.
"""
_EXIT_CODES = """
| exit code | meaning |
|---|---|
| 0 | done |
| 1 | any other failure |
| 2 | wrong arguments, config or data |
| 3 | `credit realtime`: there is no usable cycle |
| 4 | `credit realtime`: the forecast starts from an earlier cycle |
| 85 | training was stopped and can be resumed (on one process) |
| 130 | interrupted by Ctrl-C |

These pages are generated from the help texts (`python -m credit.cli.reference docs`), and a test compares the two.
"""


def render_cli_reference() -> dict[str, str]:
    """Return path in docs/ -> page in Markdown: the list of commands, and one page for each command."""
    rows = ["| command | purpose |", "|---|---|"]
    names = []
    pages = {}
    for command, summary in COMMANDS.items():
        rows.append(f"| [`credit {command}`](commands/{command}.md) | {summary} |")
        names.append(f"commands/{command}")
        pages[f"commands/{command}.md"] = _render_command(command, summary)
    toctree = ["```{toctree}", ":hidden:", "", *names, "```", ""]
    pages["cli.md"] = "\n".join([_INTRODUCTION, *rows, _EXIT_CODES, *toctree])
    return pages


def write_cli_reference(folder: Path) -> None:
    """Write the pages of `render_cli_reference` into a folder, and remove pages of commands that no longer exist."""
    pages = render_cli_reference()
    (folder / "commands").mkdir(exist_ok=True)
    for name, page in pages.items():
        atomic_write_text(folder / name, page)
    for path in (folder / "commands").glob("*.md"):
        if f"commands/{path.name}" not in pages:
            path.unlink()


def _render_command(command: str, summary: str) -> str:
    """Return the page of one command in Markdown: its summary, help text and table of arguments.

    Args:
        command: name of the command, such as ``train``.
        summary: summary of the command from `credit.cli.main.COMMANDS`, without a full stop.
    """
    parser = build_parser(command, f"credit {command}")
    # argparse has no public list of its arguments.
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    lines = [f"# `credit {command}`", "", f"{summary[0].upper()}{summary[1:]}.", ""]
    lines += ["```text", _render_usage(f"credit {command}", actions), "", parser.description or "", "```", ""]
    lines += ["| argument | meaning |", "|---|---|"]
    for action in actions:
        name = _escape_table_cell(_render_name(action))
        # Replace line breaks in help texts, because a row of a Markdown table must be one line.
        description = " ".join((action.help or "").split())
        lines.append(f"| `{name}` | {_escape_table_cell(description)} |")
    return "\n".join([*lines, ""])


def _render_usage(program: str, actions: Iterable[argparse.Action]) -> str:
    """Return the usage line of a command, with optional arguments in brackets.

    The usage line of argparse is not used, because it differs between Python versions.

    Args:
        program: name of the program.
        actions: arguments and options of its parser.
    """
    words = [program]
    for action in actions:
        name = _render_name(action)
        if not _is_required(action):
            name = f"[{name}]"
        words.append(name)
    return " ".join(words)


def _render_name(action: argparse.Action) -> str:
    """Return an option with the placeholder of its value (``--nodes N``), or the name of a positional argument."""
    if not action.option_strings:
        return _render_placeholder(action)
    option = action.option_strings[-1]
    # A flag has no value, so it has no placeholder.
    if action.nargs == 0:
        return option
    return f"{option} {_render_placeholder(action)}"


def _render_placeholder(action: argparse.Action) -> str:
    """Return the placeholder of an argument's value: the metavar, the choices in braces, or the argument's name."""
    if isinstance(action.metavar, tuple):
        # An option with several values has one placeholder per value.
        name = " ".join(action.metavar)
    elif action.metavar is not None:
        name = action.metavar
    elif action.choices is not None:
        choices = ",".join(str(choice) for choice in action.choices)
        name = "{" + choices + "}"
    else:
        # Like argparse, write the names of options in capitals and the names of positional arguments unchanged.
        name = action.dest.upper() if action.option_strings else action.dest
    if action.nargs in ("*", "+"):
        return f"{name} ..."
    return name


def _is_required(action: argparse.Action) -> bool:
    """Return True if the command requires the argument."""
    if action.option_strings:
        return action.required
    return action.nargs not in ("*", "?")


def _escape_table_cell(text: str) -> str:
    """Return text for a cell of a Markdown table, with vertical bars escaped because a bar would end the cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    write_cli_reference(Path(sys.argv[1]))
