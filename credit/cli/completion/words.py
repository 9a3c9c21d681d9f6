"""Completion of the words of a command line. The shell requests completions by running ``credit``.

The package argcomplete finds the current word and the arguments that the parser accepts there. This module chooses the
parser and completes config keys. Only the parser of the command in the command line is built, because building all
parsers would be slow.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import NoReturn

import argcomplete
from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line

from credit.cli.main import COMMANDS, build_parser

# Name of an argument that accepts overrides ``section.key=value`` -> True if it also accepts paths.
_OVERRIDE_ARGUMENTS = {"overrides": False, "grid": False, "ranges": False, "rest": True, "runs": True}


def complete() -> NoReturn:
    """Print the completions for the command line in the environment variable COMP_LINE, and end the process."""
    line = os.environ["COMP_LINE"]
    words = split_line(line, int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in COMMANDS:
        parser = build_parser(words[1], f"credit {words[1]}")
        add_completers(parser, words[1])
        # Index of the first word that the parser handles, which is the name of the command.
        os.environ["_ARGCOMPLETE"] = "2"
    else:
        parser = argparse.ArgumentParser(prog="credit")
        parser.add_argument("--version", action="store_true")
        parser.add_argument("command", choices=list(COMMANDS))
    argcomplete.autocomplete(parser, always_complete_options=False)
    # `autocomplete` ends the process itself.
    raise SystemExit(1)


def add_completers(parser: argparse.ArgumentParser, command: str) -> None:
    """Attach functions that complete values to the arguments of a command's parser.

    Args:
        parser: parser of the command.
        command: name of the command.
    """
    for action in parser._actions:
        completer: Callable[..., list[str]] | None = None
        if action.dest in _OVERRIDE_ARGUMENTS and action.nargs in ("*", "+"):
            completer = complete_override
            if _OVERRIDE_ARGUMENTS[action.dest]:
                completer = complete_path_or_override
        elif command == "init" and action.dest == "name":
            completer = complete_starter_config
        elif action.dest == "cluster":
            completer = complete_cluster
        elif action.dest == "job":
            completer = complete_job_kind
        if completer is not None:
            # argcomplete reads the completion function from this attribute.
            action.completer = completer  # type: ignore[attr-defined]


def complete_override(prefix: str, **context: object) -> list[str]:
    """Return all keys as ``section.key=``; after an equals sign, return the values of the key as ``section.key=value``.

    argcomplete keeps only the completions that begin with the prefix.

    Args:
        prefix: the typed part of the word. An empty prefix has no completions, because there are hundreds of keys.
        context: further arguments of argcomplete; not used.
    """
    if not prefix:
        return []
    from credit.config.keys import list_keys

    keys = list_keys()
    key, equals, _ = prefix.partition("=")
    if equals:
        return [f"{key}={value}" for value in keys.get(key, [])]
    return [f"{name}=" for name in keys]


def complete_path_or_override(prefix: str, **context: object) -> list[str]:
    """Return the files and the overrides that begin with a prefix (arguments: see `complete_override`)."""
    return [*FilesCompleter()(prefix), *complete_override(prefix)]


def complete_starter_config(prefix: str, **context: object) -> list[str]:
    """Return the names of the starter configs (arguments: see `complete_override`)."""
    from credit.cli.init import load_starter_configs

    return sorted(load_starter_configs())


def complete_cluster(prefix: str, **context: object) -> list[str]:
    """Return the names of clusters and the files that begin with a prefix (arguments: see `complete_override`)."""
    from credit.hpc.cluster import cluster_names

    return [*cluster_names(), *FilesCompleter(("yml", "yaml"))(prefix)]


def complete_job_kind(prefix: str, **context: object) -> list[str]:
    """Return the kinds of jobs (arguments: see `complete_override`)."""
    from credit.hpc.job import JOB_KINDS

    return list(JOB_KINDS)
