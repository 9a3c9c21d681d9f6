"""The commands: ``credit NAME CONFIG [section.key=value ...]`` and ``credit_NAME`` with the same arguments.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from credit import __version__
from credit.cli.environment import set_environment
from credit.errors import CreditError

# 128 + SIGINT: the exit status that shells give a process that Ctrl-C ended
INTERRUPTED = 130

COMMANDS = {
    "init": "write a starter config",
    "check": "check a config and its data before anything is queued",
    "plan": "predict memory, traffic, time and energy on so many GPUs, without them",
    "preprocess": "turn source files into the training store and fit the statistics",
    "train": "train, or continue a run",
    "rollout": "forecast from a list of initial times",
    "verify": "score forecasts against truth, persistence and climatology",
    "submit": "write and submit PBS or Slurm jobs from the config",
    "checkpoint": "list, verify or prune the checkpoints of a run",
    "doctor": "collect what a bug report needs in one text file",
    "convert": "import published checkpoints, export ours",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``credit``."""
    return _end_quietly(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    """Find the command and run it."""
    parser = argparse.ArgumentParser(
        prog="credit",
        description="Train, run and score global AI weather models. One YAML file describes a run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:11s} {text}" for name, text in COMMANDS.items())
        + "\n\n`credit NAME --help` tells more of each; `credit init quickstart > config.yml` is a beginning.",
    )
    parser.add_argument("--version", action="version", version=f"credit {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="NAME", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the command's own arguments")
    parsed = parser.parse_args(arguments)
    return _run(parsed.command, parsed.arguments, f"credit {parsed.command}")


def build_parser(command: str, program: str) -> argparse.ArgumentParser:
    """Return the parser of one command's arguments.

    Args:
        command: a key of `COMMANDS`.
        program: name of the program in messages.
    """
    module = importlib.import_module(f"credit.cli.{command}")
    parser = argparse.ArgumentParser(
        prog=program, description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    return parser


def _run(command: str, arguments: Sequence[str], program: str) -> int:
    """Run one command and turn what it raises into a message and an exit code."""
    set_environment()
    module = importlib.import_module(f"credit.cli.{command}")
    # overrides may stand before, between and after options
    parsed = build_parser(command, program).parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    try:
        return module.run(parsed)
    except CreditError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _entry(command: str) -> Callable[[], int]:
    """Return the entry point of ``credit_COMMAND``."""
    return lambda: _end_quietly(lambda: _run(command, sys.argv[1:], f"credit_{command}"))


def _end_quietly(command: Callable[[], int]) -> int:
    """Run a command; where nobody reads any more what it prints, as behind ``| head``, end as SIGPIPE would end it."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise
        for stream in unread:  # what is left to be written is flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def _is_unread(stream: TextIO | None) -> bool:
    """Return whether a stream is a pipe whose other end is closed; not one without a descriptor, as in a notebook."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (AttributeError, OSError, ValueError):
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


init = _entry("init")
check = _entry("check")
plan = _entry("plan")
preprocess = _entry("preprocess")
train = _entry("train")
rollout = _entry("rollout")
verify = _entry("verify")
submit = _entry("submit")
checkpoint = _entry("checkpoint")
doctor = _entry("doctor")
convert = _entry("convert")

if __name__ == "__main__":
    sys.exit(main())
