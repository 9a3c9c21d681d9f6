"""Render job scripts from templates.

Values in a template are quoted for the shell unless a filter marks them as something else. So no name or path can end a
command or begin another.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from credit.errors import ConfigError
from credit.hpc.job import Job


class _AsIs(str):
    """Text that is not quoted."""

    def __html__(self) -> str:
        # Jinja2 recognises finished text, such as blocks and macros, by this method.
        return self


def render(job: Job) -> str:
    """Return the script of a job, from a template of the package or of the user.

    A user's template can extend one of the package (``{% extends "slurm.sh.j2" %}``) and replace its blocks.

    Raises:
        ConfigError: if the user's template is missing or wrong.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.hpc", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=lambda value: value if hasattr(value, "__html__") else _AsIs(shlex.quote(str(value))),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(words=_words, word=_word, line=_line)
    user_template = job.asked.template
    if user_template is None:
        return environment.get_template(f"{job.scheduler}.sh.j2").render(job=job, asked=job.asked)
    try:
        return environment.from_string(Path(user_template).read_text(encoding="utf-8")).render(job=job, asked=job.asked)
    except OSError as error:
        raise ConfigError(f"{job.scheduler}.template: {user_template}: cannot be read ({error.strerror})") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"{job.scheduler}.template: {user_template}: {type(error).__name__}: {error}") from error


def _words(values: Sequence[object]) -> _AsIs:
    """Return the words of a command, each of them quoted."""
    return _AsIs(shlex.join(str(value) for value in values))


def _word(value: object) -> _AsIs:
    """Return one word of a directive, in which quotes are not possible."""
    text = str(value)
    assert re.fullmatch(r"[^\s#'\"\\$`;<>]+", text), f"{text!r} is not a word of a directive"
    return _AsIs(text)


def _line(value: object) -> _AsIs:
    """Return a line of shell from the config, unchanged."""
    text = str(value)
    assert len(text.splitlines()) == 1, f"{text!r} is not a single line"
    return _AsIs(text)
