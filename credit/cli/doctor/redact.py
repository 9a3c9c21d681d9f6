"""Takes out of a text what is nobody else's business: secrets, by their names and by their looks, and the user's home.

A secret that was found by its name is taken out wherever else it stands. A word that looks like nothing special in a
place that says nothing cannot be told from text; so reports say that they should be read before they are sent.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HIDDEN = "***"
# not pwd alone, which is where a shell stands
_WORDS = r"token|secret|passw|passphrase|_pwd|credential|cookie|jwt|signature|authorization|authkey"
_SECRET_NAME = re.compile(rf"{_WORDS}|key(?!board)|\bauth\b|_auth|\bsig\b", re.IGNORECASE)
_NAME = rf"[\w.-]*(?:{_WORDS})[\w.-]*|[\w.-]*key(?:s|_?id)?|(?:[\w.-]*[_.-])?(?:auth|sig)"
_VALUE = r"\"[^\"]*\"|'[^']*'|[^\s\"',;&)}\]]+"
_ASSIGNED = re.compile(rf"(?<![\w.-])(?P<before>[\"']?(?:{_NAME})[\"']?\s*[:=]\s*)(?P<value>{_VALUE})", re.IGNORECASE)
_OPTION = re.compile(rf"(?P<before>--(?:{_NAME})[ =])(?P<value>{_VALUE})", re.IGNORECASE)
_HEADER = re.compile(r"(?P<before>\b(?:authorization[\"']?\s*[:=]\s*[\"']?\w+|bearer)\s+)(?P<value>[\w.~+/=-]+)", re.I)
_USERINFO = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://)(?P<value>[^/\s\"']+)(?=@)", re.IGNORECASE)
# access keys of AWS; tokens of GitHub, GitLab, Hugging Face, Slack and others; JSON web tokens; private keys
_LOOKS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bhf_\w{16,}"
    r"|\bxox[a-z]-[\w-]{10,}|\bsk-[\w-]{16,}|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
# a shorter value may be a word that the text needs
_SHORTEST = 6


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name may hold a secret."""
    return bool(_SECRET_NAME.search(name))


def mask(text: str, environ: Mapping[str, str], secrets: Iterable[str] = ()) -> str:
    """Return `text` without secrets, and with ``~`` for the user's home.

    Args:
        text: of a report.
        environ: its secret values are taken out wherever they stand.
        secrets: further values.
    """
    known = {value for name, value in environ.items() if is_secret(name)} | set(secrets)
    for pattern in (_HEADER, _USERINFO, _ASSIGNED, _OPTION):
        values = {match["value"].strip("\"'") for match in pattern.finditer(text)}
        values |= {value.partition(":")[2] for value in values} if pattern is _USERINFO else set()
        # "token: missing" says a word that others may need
        known |= {value for value in values if not value.isalpha()}
        text = pattern.sub(lambda match: match["before"] + HIDDEN, text)
    text = _LOOKS.sub(HIDDEN, text)
    for value in sorted(known, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, HIDDEN)
    for home in {environ.get("HOME", ""), str(Path.home()), os.path.realpath(Path.home())} - {"", "/"}:
        text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def mask_values(value: Any, secrets: set[str], hidden: bool = False) -> Any:
    """Return plain data with the values of secret names hidden, whatever they are; `secrets` receives them."""
    if isinstance(value, Mapping):
        return {key: mask_values(item, secrets, hidden or is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_values(item, secrets, hidden) for item in value]
    if not hidden or value is None:
        return value
    secrets.add(str(value))
    return HIDDEN
