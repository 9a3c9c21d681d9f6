"""``credit_doctor``: what a bug report needs, in one text file."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments, path_argument

HELP = """Collect what a bug report needs in one text file: installation, versions, machine, ranks, environment, the
resolved config, and of the run in save_loc STATUS, heartbeat, newest checkpoints, last metrics, last error and the ends
of its logs.

It only reads, also while the run is at work, and a broken config gets a report, too. Values of names that look like
secrets, credentials in URLs and the name of your home are left out; read the file before you send it nevertheless."""

__all__ = ["HELP", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and the file."""
    add_config_arguments(parser)
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=path_argument,
        help="where it goes, - for the terminal; default: doctor.txt in save_loc",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    import os
    import sys
    from contextlib import suppress
    from pathlib import Path

    from credit.cli.doctor.sections import DiagnosticContext, write_report
    from credit.errors import ConfigError
    from credit.parallel.process_info import read_process_info
    from credit.utils.installation import find_conflicts

    with suppress(ConfigError):
        if not read_process_info().is_main:
            return 0
    for conflict in find_conflicts():
        print(f"credit doctor: {conflict}", file=sys.stderr)
    patient = DiagnosticContext.find(arguments.config, arguments.overrides, os.environ)
    text = write_report(patient)
    if arguments.output == "-":
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="")
        return 0
    folder = patient.folder if patient.folder is not None and patient.folder.is_dir() else Path()
    path = folder / "doctor.txt" if arguments.output is None else Path(arguments.output)
    try:
        # names of files that are not text in this locale are shown by their bytes
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"--output: {path} cannot be written ({error.strerror}); name another file, or - for the terminal"
        ) from error
    print(f"{path}: read it before you send it")
    return 0
