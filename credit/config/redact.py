"""Redact secrets and the path of the home folder in a text or a config.

Secrets are recognised by the name of their key or variable, or by their form. A recognised value is hidden everywhere.
Other secrets cannot be recognised, so the command asks the user to read the report before sending it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from credit.config.schema import Config

# Text that replaces a hidden value.
HIDDEN = "***"
# Words in the names of secrets. "pwd" alone is not a secret name, because it is the current folder of a shell.
_SECRET_WORDS = r"token|secret|passw|passphrase|_pwd|credential|cookie|jwt|signature|authorization|authkey"
# The name of a secret contains one of these words, or "key" (but not "keyboard"), or the word "auth" or "sig".
_SECRET_NAME = re.compile(rf"{_SECRET_WORDS}|key(?!board)|\bauth\b|_auth|\bsig\b", re.IGNORECASE)
# Regular expressions of a secret name before a value, and of a value: quoted, or up to a space or separator.
_NAME = rf"[\w.-]*(?:{_SECRET_WORDS})[\w.-]*|[\w.-]*key(?:s|_?id)?|(?:[\w.-]*[_.-])?(?:auth|sig)"
_VALUE = r"\"[^\"]*\"|'[^']*'|[^\s\"',;&)}\]]+"
# Regular expressions of "name: value" and "name=value", "--name value", headers of HTTP requests, and "user:password@"
# in URLs.
_ASSIGNED = re.compile(rf"(?<![\w.-])(?P<before>[\"']?(?:{_NAME})[\"']?\s*[:=]\s*)(?P<value>{_VALUE})", re.IGNORECASE)
_OPTION = re.compile(rf"(?P<before>--(?:{_NAME})[ =])(?P<value>{_VALUE})", re.IGNORECASE)
_HEADER = re.compile(r"(?P<before>\b(?:authorization[\"']?\s*[:=]\s*[\"']?\w+|bearer)\s+)(?P<value>[\w.~+/=-]+)", re.I)
_USERINFO = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://)(?P<value>[^/\s\"']+)(?=@)", re.IGNORECASE)
# Secrets that are recognised by their form: access keys of AWS; tokens of GitHub, GitLab, Hugging Face, Slack and
# others; JSON web tokens; private keys.
_SECRET_FORMS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}"
    r"|\bxox[a-z]-[\w-]{10,}|\bsk-[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# A shorter value may be an ordinary word of the text, so it is hidden only after the name of a secret.
_MIN_LENGTH = 6


def is_secret(name: str) -> bool:
    """Return True if a variable or key with this name may contain a secret."""
    return bool(_SECRET_NAME.search(name))


def hide_secrets(text: str, environ: Mapping[str, str], secrets: Iterable[str] = ()) -> str:
    """Return `text` with secrets hidden.

    Args:
        text: text in which secrets are hidden.
        environ: environment variables; the values of variables with secret names are hidden.
        secrets: additional values to hide.
    """
    secret_values = set(secrets)
    for name, value in environ.items():
        if is_secret(name):
            secret_values.add(value)
    # Hide values that follow the name of a secret, and collect these values.
    for pattern in (_HEADER, _USERINFO, _ASSIGNED, _OPTION):
        values = {match["value"].strip("\"'") for match in pattern.finditer(text)}
        if pattern is _USERINFO:
            # The password without the user name may appear elsewhere in the text.
            values |= {value.partition(":")[2] for value in values}
        # In a text such as "token: missing", the value is an ordinary word.
        secret_values |= {value for value in values if not value.isalpha()}
        text = pattern.sub(lambda match: match["before"] + HIDDEN, text)
    text = _SECRET_FORMS.sub(HIDDEN, text)
    # Hide all occurrences of the collected values. Longer values are hidden first, because they may contain shorter
    # values.
    for value in sorted(secret_values, key=len, reverse=True):
        if len(value) >= _MIN_LENGTH:
            text = text.replace(value, HIDDEN)
    return text


def redact(text: str, environ: Mapping[str, str], secrets: Iterable[str] = ()) -> str:
    """Return `text` with secrets hidden and ``~`` for the home folder.

    Args:
        text, environ, secrets: as for `hide_secrets`.
    """
    text = hide_secrets(text, environ, secrets)
    # The path of the home folder contains the user's name. It may be written with or without symbolic links.
    home_folders = {environ.get("HOME", ""), str(Path.home()), os.path.realpath(Path.home())}
    for home in home_folders - {"", "/"}:
        # Only whole components of a path: not the beginning of a longer user name.
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def redact_values(value: Any, secrets: set[str], hidden: bool = False) -> Any:
    """Return a copy of plain data in which the values of keys with secret names are hidden.

    Args:
        value: mappings, lists, strings, numbers and so on, as read from YAML.
        secrets: set to which the hidden values are added.
        hidden: True to hide all values in `value`, because the name of its key is secret.
    """
    if isinstance(value, Mapping):
        redacted = {}
        for key, item in value.items():
            redacted[key] = redact_values(item, secrets, hidden or is_secret(str(key)))
        return redacted
    if isinstance(value, list | tuple):
        return [redact_values(item, secrets, hidden) for item in value]
    if not hidden or value is None:
        return value
    secrets.add(str(value))
    return HIDDEN


def redact_config(config: Config) -> dict[str, Any]:
    """Return a config as plain values, with hidden secrets and with ``~`` instead of the home folder.

    The values of environment variables with secret names are also hidden wherever the config contains them.
    """
    secrets: set[str] = set()
    values = redact_values(config.model_dump(mode="json"), secrets)
    return _redact_strings(values, secrets)


def _redact_strings(value: Any, secrets: set[str]) -> Any:
    """Return a copy of plain data in which `redact` is applied to each string."""
    if isinstance(value, Mapping):
        return {key: _redact_strings(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact_strings(item, secrets) for item in value]
    if isinstance(value, str):
        return redact(value, os.environ, secrets)
    return value
