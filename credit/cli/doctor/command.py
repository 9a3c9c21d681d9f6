"""``credit doctor``: collect the information that a bug report needs in one text."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments, path_argument

HELP = """Collect the facts that a bug report needs in one text file.

The file contains the installation, versions, machine, ranks, environment and the resolved config. Of the run in
save_loc, it contains STATUS, heartbeat, newest checkpoints, last metrics, last error and the ends of the logs.

The command only reads, so you can use it during a run. It also works with a wrong config. It hides values whose names
look like secrets, credentials in URLs and the path of your home folder. Read the file before you send it.

example:
  credit doctor config.yml --output report.txt"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and ``--output``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=path_argument,
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
    from credit.utils.installation import find_conflicts

    # Under a launcher, one rank writes the report. The report also shows a wrong environment of the launcher.
    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    for conflict in find_conflicts():
        print(f"credit doctor: {conflict}", file=sys.stderr)
    context = DiagnosticContext.from_config(arguments.config, arguments.overrides, os.environ)
    text = render_report(context)
    if arguments.output == "-":
        # Characters that the terminal's encoding lacks are shown by their codes.
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
        # File names that are not valid text in this locale are shown by their bytes.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"--output: {path} cannot be written ({error.strerror}); name another file, or - for the terminal"
        ) from error
    print(f"{path}: read it before you send it")
    return 0
