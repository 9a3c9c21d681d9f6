"""Rendering of job scripts from templates.

Values in a template are quoted for the shell, unless a filter marks them as shell code. A name or path can therefore
not end a command or begin a new command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2

from credit.errors import ConfigError
from credit.hpc.job import Job


class _ShellCode(str):
    """String that is shell code and must not be quoted again."""

    def __html__(self) -> str:
        """Return the string itself; Jinja2 does not quote objects that have this method."""
        return self


def render_script(job: Job) -> str:
    """Return the script of a job, rendered from a template of the package or of the user.

    A user's template can extend a template of the package (``{% extends "slurm.sh.j2" %}``) and replace its blocks.

    Args:
        job: description of the job; the key ``template`` of its settings is the path of the user's template.

    Raises:
        ConfigError: if the user's template cannot be read or rendered.
    """

    def quote_value(value: object) -> object:
        if hasattr(value, "__html__"):
            return value
        return _ShellCode(shlex.quote(str(value)))

    # With `autoescape`, Jinja2 passes every value through `finalize`, which quotes it. Undefined names are errors.
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("credit.hpc", "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=quote_value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        words=_quote_words, word=_to_single_word, line=_to_single_line, command=_quote_command_with_variables
    )
    user_template = job.asked.template
    if user_template is None:
        # An error in a template of the package is a bug, so it is not reported as an error of the config.
        return environment.get_template(f"{job.scheduler}.sh.j2").render(job=job, asked=job.asked)
    try:
        template_text = Path(user_template).read_text(encoding="utf-8")
        return environment.from_string(template_text).render(job=job, asked=job.asked)
    except OSError as error:
        raise ConfigError(f"{job.scheduler}.template: {user_template}: cannot be read ({error.strerror})") from error
    except ConfigError as error:
        # The errors of the filters do not contain the path of the template, so it is added here.
        raise ConfigError(f"{job.scheduler}.template: {user_template}: {error}") from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"{job.scheduler}.template: {user_template}: {type(error).__name__}: {error}") from error


def _quote_words(values: Sequence[object]) -> _ShellCode:
    """Return the words of a command; each word is quoted for the shell (filter ``words``)."""
    return _ShellCode(shlex.join(str(value) for value in values))


def _quote_command_with_variables(words: Sequence[str], **variables: str | int) -> _ShellCode:
    """Return a command for the shell, with placeholders replaced with shell variables (filter ``command``).

    Args:
        words: words of the command, with placeholders such as ``{node}``.
        **variables: placeholder -> a number, or the name of a shell variable.

    Raises:
        ConfigError: if the command has other placeholders.
    """
    # A marker consists of characters that need no quotes, so it is not changed when the words are quoted.
    values = {name: value if isinstance(value, int) else f"@{name}@" for name, value in variables.items()}
    try:
        text = shlex.join(word.format(**values) for word in words)
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"cluster file: {list(words)}: the only placeholders here are {', '.join(sorted(variables))}"
        ) from error
    for name, value in variables.items():
        text = text.replace(f"@{name}@", f'"${value}"')
    return _ShellCode(text)


def _to_single_word(value: object) -> _ShellCode:
    """Return a word of a scheduler directive without quotes, which directives cannot contain (filter ``word``).

    Raises:
        ConfigError: if the value is not a single word.
    """
    text = str(value)
    if re.fullmatch(r"[^\s#'\"\\$`;<>]+", text) is None:
        raise ConfigError(
            "the filter `word` needs a single word without spaces, quotes and special characters of the shell, not "
            f"{text!r}; change the value, or remove the filter, so that the value is quoted"
        )
    return _ShellCode(text)


def _to_single_line(value: object) -> _ShellCode:
    """Return a line of shell code from the config, unchanged (filter ``line``).

    Raises:
        ConfigError: if the value is not a single line.
    """
    text = str(value)
    if len(text.splitlines()) != 1:
        raise ConfigError(
            f"the filter `line` needs a single line, not {text!r}; apply the filter to each line of the value"
        )
    return _ShellCode(text)
