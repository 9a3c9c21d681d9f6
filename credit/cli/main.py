"""Entry points of the commands: ``credit NAME CONFIG [section.key=value ...]``, or ``credit_NAME`` and its arguments.

Modules that are slow to import are imported only when a command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from credit import __version__
from credit.cli.common import set_environment_defaults
from credit.cli.console.interrupt import INTERRUPTED, InterruptGuard, end_process
from credit.cli.console.terminal import LogFormatter, colorize, wrap_text
from credit.errors import CreditError

COMMANDS = {
    "init": "write a starter config",
    "check": "find problems in a config and its data before you submit a job",
    "plan": "predict memory and communication on N GPUs, and estimate time and energy",
    "preprocess": "write the training store from source files, and compute the statistics",
    "train": "train a model, or resume a run",
    "rollout": "make forecasts from a list of initial times",
    "products": "make products from forecasts: derived fields, probabilities, station values, tracks, maps",
    "realtime": "make a forecast from the newest operational analysis",
    "verify": "score forecasts, and compare them with baselines and other runs",
    "compare": "train and score several configs at equal cost, and write one HTML page",
    "sweep": "train a config with many values of some keys, and list the results",
    "submit": "write and submit PBS or Slurm jobs",
    "runs": "list training runs with their state, progress and remaining time",
    "checkpoint": "list, verify or prune the checkpoints of a run",
    "doctor": "write a text file with the facts that a bug report needs",
    "convert": "convert a config of miles-credit, import published weights, or export the weights of a run",
    "completion": "print the script with which bash, zsh or fish completes command lines",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``credit NAME ...`` and return its exit status.

    Args:
        arguments: words after ``credit``. If None, use the words of the command line; an interrupt then ends the
            process, and the function does not return.

    Raises:
        SystemExit: from argparse, with status 0 after ``--help`` and 2 after a wrong argument.
    """
    if arguments is None and "_ARGCOMPLETE" in os.environ:
        # The shell runs `credit` to complete a command line (see `credit completion`).
        from credit.cli.completion.words import complete

        complete()
    return _run_with_exit_status(lambda: _parse_and_run(arguments), owns_process=arguments is None)


def _parse_and_run(arguments: Sequence[str] | None) -> int:
    """Parse the name of the command, run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="credit",
        description="Train, run and score global AI weather models. One YAML file describes a run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_describe_commands(),
    )
    parser.add_argument("--version", action="version", version=f"credit {__version__}")
    parser.add_argument("command", choices=list(COMMANDS), metavar="NAME", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    parsed = parser.parse_args(arguments)
    return _run_command(parsed.command, parsed.arguments, f"credit {parsed.command}")


def _describe_commands() -> str:
    """Return the last part of ``credit --help``: the list of commands and the first steps for a new user."""
    lines = ["commands:"]
    for name, summary in COMMANDS.items():
        lines.append(f"  {name:11s} {summary}")
    lines += [
        "",
        "`credit NAME --help` describes a command. To begin, write a config and train on the sample data:",
        "  credit init quickstart > config.yml",
        "  credit train config.yml",
    ]
    return "\n".join(lines)


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


def _run_command(command: str, arguments: Sequence[str], program: str) -> int:
    """Run one command and return its exit status; print a `CreditError` as one message without a traceback.

    Args:
        command: a key of `COMMANDS`.
        arguments: words after the command name.
        program: name of the program in messages.
    """
    with InterruptGuard() as guard:
        try:
            set_environment_defaults()
            module = importlib.import_module(f"credit.cli.{command}")
            # Overrides may appear before, between and after options.
            parsed = build_parser(command, program).parse_intermixed_args(arguments)
            _set_up_output(quiet=getattr(parsed, "quiet", False))
            return module.run_command(parsed)
        except CreditError as error:
            # After Ctrl-C, an error of the command is only a consequence of the interrupt.
            if not guard.interrupted:
                _print_error(program, str(error))
                return error.exit_code
        except KeyboardInterrupt:
            guard.silence_threads()
        except Exception:
            # Libraries may raise a different exception when they are interrupted.
            if not guard.interrupted:
                raise
        _print_error(program, "interrupted")
        return INTERRUPTED


def _set_up_output(quiet: bool) -> None:
    """Send log messages to standard error.

    Args:
        quiet: True to hide progress bars and messages below a warning.
    """
    # tqdm is imported only here, because importing it would take most of the time of ``--help``.
    from credit.utils.progress import set_quiet

    set_quiet(quiet)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(sys.stderr))
    # Only this handler has the higher level. The root logger passes all messages to the log files of a run.
    level = logging.WARNING if quiet else logging.INFO
    handler.setLevel(level)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _print_error(program: str, message: str) -> None:
    """Print ``PROGRAM: MESSAGE`` on standard error, wrapped and coloured if this is a terminal."""
    prefix = f"{program}:"
    # Wrap lines before adding colours, because the escape sequences of colours would make lines longer.
    text = wrap_text(f"{prefix} {message}", sys.stderr, indent="  ")
    colored_prefix = colorize(prefix, "red", sys.stderr)
    print(colored_prefix + text.removeprefix(prefix), file=sys.stderr)


def _build_entry_point(command: str) -> Callable[[], int]:
    """Return the entry point of the program ``credit_COMMAND``, to which setup.cfg refers."""

    def run_program() -> int:
        program = f"credit_{command}"
        return _run_with_exit_status(lambda: _run_command(command, sys.argv[1:], program), owns_process=True)

    return run_program


def _run_with_exit_status(command: Callable[[], int], owns_process: bool) -> int:
    """Run a command and return its exit status, also after Ctrl-C or if the reader of the output has closed the pipe.

    Args:
        command: function that parses the arguments, runs the command and returns the exit status.
        owns_process: True if the process ends with the command. After an interrupt, this function then ends the process
            and does not return.
    """
    try:
        status = _run_tolerating_closed_pipe(command)
    except KeyboardInterrupt:
        # `_run_command` handles Ctrl-C while the command runs. This Ctrl-C came before or after.
        status = INTERRUPTED
    if owns_process:
        if status == INTERRUPTED:
            end_process()
        # The work is finished. With the default handler, Ctrl-C during the interpreter's shutdown prints no traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # Exclude all objects from garbage collection, which would take a second during the shutdown.
        gc.freeze()
    return status


def _run_tolerating_closed_pipe(command: Callable[[], int]) -> int:
    """Run a command and return its exit status.

    If the reader of the output has closed the pipe, as ``| head`` does, the status is 128 + SIGPIPE, as in a shell.

    Args:
        command: function that parses the arguments, runs the command and returns the exit status.

    Raises:
        BrokenPipeError: if the broken pipe is neither standard output nor standard error.
    """
    try:
        try:
            return command()
        finally:
            # Flush here, so that a closed pipe raises an error that can be handled, not an error at the interpreter's
            # exit.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        closed_streams = [stream for stream in (sys.stdout, sys.stderr) if _is_closed_pipe(stream)]
        if not closed_streams:
            raise
        for stream in closed_streams:
            # Python flushes the rest of the output at its exit. Redirect the output, so that this does not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def _is_closed_pipe(stream: TextIO | None) -> bool:
    """Return True if a stream is a pipe that its reader has closed; False for a stream without a file descriptor."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except (AttributeError, OSError, ValueError):
        # The stream is None, has no file descriptor, or is closed.
        return False
    # A pipe without a reader reports one of these events. With a timeout of 0, `poll` returns without waiting.
    closed_events = select.POLLERR | select.POLLHUP
    return any(event & closed_events for _, event in poll.poll(0))


# Entry points of the programs credit_init, credit_check and so on in setup.cfg.
init = _build_entry_point("init")
check = _build_entry_point("check")
plan = _build_entry_point("plan")
preprocess = _build_entry_point("preprocess")
train = _build_entry_point("train")
rollout = _build_entry_point("rollout")
products = _build_entry_point("products")
realtime = _build_entry_point("realtime")
verify = _build_entry_point("verify")
compare = _build_entry_point("compare")
sweep = _build_entry_point("sweep")
submit = _build_entry_point("submit")
runs = _build_entry_point("runs")
checkpoint = _build_entry_point("checkpoint")
doctor = _build_entry_point("doctor")
convert = _build_entry_point("convert")
completion = _build_entry_point("completion")

if __name__ == "__main__":
    sys.exit(main())
