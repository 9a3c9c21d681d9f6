"""``credit doctor``: collect the facts that a bug report needs in one text file."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments, parse_path

HELP = """Write a text file with the facts that a bug report needs.

The file contains the installation, versions, machine, ranks, environment and the config with all defaults. Of the
run in save_loc, it contains STATUS, heartbeat, newest checkpoints, last metrics, last error and the ends of the logs.

The command only reads the files of the run, so you can use it during a run. It also works with an invalid config. It
hides credentials in URLs, the path of your home folder, and values that have a name like a secret. Read the file before
you send it.

example:
  credit doctor config.yml --output report.txt"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit doctor`: CONFIG, overrides and ``--output``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=parse_path,
        help="file to write (- for standard output); default: doctor.txt in save_loc",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Write the report to a file or to standard output; return the exit status 0.

    Raises:
        ConfigError: if the file cannot be written.
    """
    import os
    import sys
    from contextlib import suppress
    from pathlib import Path

    from credit.cli.doctor.sections import DiagnosticContext, render_report
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info
    from credit.utils.installation import describe_conflicts

    # Under a launcher, only rank 0 writes the report. The report also contains errors in the launcher's environment.
    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    for conflict in describe_conflicts():
        print(f"credit doctor: {conflict}", file=sys.stderr)
    context = DiagnosticContext.from_config(arguments.config, arguments.overrides, os.environ)
    text = render_report(context)
    if arguments.output == "-":
        # Characters that the terminal's encoding does not support are printed as escape codes.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="")
        return 0
    if arguments.output is not None:
        path = Path(arguments.output)
    elif context.folder is not None and context.folder.is_dir():
        path = context.folder / "doctor.txt"
    else:
        path = Path("doctor.txt")
    try:
        # File names that cannot be decoded in this locale are written as escaped bytes.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"--output: {path} cannot be written ({error.strerror}); choose a different file, or - for the terminal"
        ) from error
    print(f"{path}: read the file before you send it")
    return 0
