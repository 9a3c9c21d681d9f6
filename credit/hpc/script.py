"""From a job to the text of its script.

Whatever a template puts out is quoted for the shell, unless a filter says that it is something else; so a name or path
cannot end a command or begin another, whatever it holds.
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
    """Text that is not to be quoted."""

    def __html__(self) -> str:
        # the mark by which Jinja2 knows text that is finished: blocks and macros come with it too
        return self


def render(job: Job) -> str:
    """Return the script of a job, from the package's template or the user's.

    A template of the user's may extend ours (``{% extends "slurm.sh.j2" %}``) and replace its blocks.

    Raises:
        ConfigError: if the user's template is not there, or wrong.
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
    own = job.asked.template
    if own is None:
        return environment.get_template(f"{job.scheduler}.sh.j2").render(job=job, asked=job.asked)
    try:
        return environment.from_string(Path(own).read_text(encoding="utf-8")).render(job=job, asked=job.asked)
    except OSError as error:
        raise ConfigError(f"{job.scheduler}.template: {own}: cannot be read ({error.strerror})") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"{job.scheduler}.template: {own}: {type(error).__name__}: {error}") from error


def _words(values: Sequence[object]) -> _AsIs:
    """Words of a command, each of them quoted."""
    return _AsIs(shlex.join(str(value) for value in values))


def _word(value: object) -> _AsIs:
    """A word of a directive, which knows no quotes."""
    text = str(value)
    assert re.fullmatch(r"[^\s#'\"\\$`;<>]+", text), f"{text!r} is no word of a directive"
    return _AsIs(text)


def _line(value: object) -> _AsIs:
    """A line that the user wrote to stand in a script."""
    text = str(value)
    assert len(text.splitlines()) == 1, f"{text!r} is no single line"
    return _AsIs(text)
