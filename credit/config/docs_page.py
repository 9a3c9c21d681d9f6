"""Writes docs/config.md from the schema: ``python -m credit.config.docs_page > docs/config.md``."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from credit.config.registry import kinds_in
from credit.config.schema import Config

_INTRODUCTION = """# Configuration

One YAML file describes a run. Every key is checked; an unknown key, a wrong type or an impossible combination is
reported with all others at once. `section.key=value` after the file's name on the command line replaces a single key
(`trainer.max_steps=100`, `data.sources.0.path=era5.nc`, `model.dim=[32,64,128,256]`). `$NAME` and `${NAME}` in any
string are taken from the environment, and `~` at the beginning of a path is your home folder. Durations are written
`6h`, `30min` or `10d`, and a number alone means hours; a run keeps them in hours, or in minutes where these are no
whole hours: `1d`, `24` and `24 h` are one config. Times are written `2000-01-01` or `2000-01-01T06:00`, always UTC, in
the data's calendar.

This page is generated from the schema (`python -m credit.config.docs_page`); a test keeps it true.
"""


def describe() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    plain = [(n, f) for n, f in Config.model_fields.items() if _section_of(f.annotation) is None]
    parts.append("## Top level\n\n" + _table("", plain))
    for name, field in Config.model_fields.items():
        kinds = _registered_sections(field)
        if kinds:
            for section, title in kinds:
                parts += _describe_section(name, section, f"`{name}` with {title}")
        elif _section_of(field.annotation) is not None:
            parts += _describe_section(name, _section_of(field.annotation), f"`{name}`")
    return "\n".join(parts)


def _describe_section(path: str, section: Any, title: str) -> Iterator[str]:
    yield f"## {title}\n\n{section.__doc__}\n"
    yield from _tables(path, section)


def _tables(path: str, section: type[BaseModel]) -> Iterator[str]:
    yield _table(f"{path}.", list(section.model_fields.items()))
    for name, field in section.model_fields.items():
        below = f"{path}.{name}" + _inside(field.annotation)
        kinds = _registered_sections(field)
        # the list of post-processes has the same kinds wherever it stands
        if kinds and path == "inference" and name in ("hyperdiffusion", "postprocess"):
            continue
        inner_sections = kinds or [(section, "") for section in _sections_of(field.annotation)]
        for inner, title in inner_sections:
            suffix = f" with {title}" if title and len(inner_sections) > 1 else ""
            yield f"### `{below}`{suffix}\n\n{inner.__doc__}\n"
            yield from _tables(below, inner)


def _table(prefix: str, fields: list) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields:
        default = "required" if field.is_required() else _show(field.get_default(call_default_factory=True))
        rows.append(f"| `{prefix}{name}` | {_type_name(field.annotation)} | {default} | {field.description or ''} |")
    return "\n".join(rows) + "\n"


def _show(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{item}`" for item in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_name(item) for item in arguments if item is not type(None)))
    if origin in (list, tuple):
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return getattr(annotation, "__name__", str(annotation))


def _sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes inside an annotation such as ``list[SourceConfig]`` or ``PaddingConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for item in typing.get_args(annotation) for found in _sections_of(item)]


def _section_of(annotation: Any) -> type[BaseModel] | None:
    return next(iter(_sections_of(annotation)), None)


def _registered_sections(field: FieldInfo) -> list[tuple[type[BaseModel], str]]:
    """Return the sections of the registered kinds that a key may hold, each with the text that names its kinds."""
    titles: dict[type[BaseModel], list[str]] = {}
    for kind in kinds_in(field):
        names = [kind.default] if kind.default == "hyperdiffusion" else kind.names()
        for name in names:
            titles.setdefault(kind.registry.find_section(name), []).append(f"`{kind.tag}: {name}`")
    return [(section, " or ".join(names)) for section, names in titles.items()]


def _inside(annotation: Any) -> str:
    """Return how items are addressed below the key: ``.N`` for lists of sections, ``.NAME`` for mappings."""
    for item in (annotation, *typing.get_args(annotation)):
        found = {list: ".N", dict: ".NAME"}.get(typing.get_origin(item))
        if found and _sections_of(item):
            return found
    return ""


if __name__ == "__main__":
    print(describe(), end="")
