"""List of all config keys with their values, for the completion of command lines."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from credit.config.registry import find_registered_sections
from credit.config.schema import Config


def list_keys() -> dict[str, list[str]]:
    """Return each dotted key and its values, if these can be listed; otherwise an empty list.

    Keys below an item of a list or mapping, such as ``data.sources.0.path``, are left out.
    """
    keys: dict[str, list[str]] = {}
    for key, values in _iterate_keys(Config, ""):
        # Several kinds of a section may have the same key, each with other values.
        keys[key] = list(dict.fromkeys([*keys.get(key, []), *values]))
    return keys


def _iterate_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, values) of a section and the sections below it.

    Args:
        section: class of the section.
        prefix: dotted key of the section with a dot at the end; empty for the whole config.
    """
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, _list_values(field.annotation)
        sections = _list_sections(field.annotation)
        # In place of their base class, a key may hold the section of each registered kind.
        for registered in find_registered_sections(field) if sections else []:
            yield f"{key}.{registered.tag}", registered.names()
            sections += [registered.registry.find_section(kind) for kind in registered.names()]
        for section_below in dict.fromkeys(sections):
            yield from _iterate_keys(section_below, f"{key}.")


def _list_sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes that are options of a type; those of items of a list or mapping are left out."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    sections = []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for argument in typing.get_args(annotation):
            sections += _list_sections(argument)
    return sections


def _list_values(annotation: Any) -> list[str]:
    """Return the values of a type as text of YAML, if they can be listed."""
    origin = typing.get_origin(annotation)
    if annotation is bool:
        return ["true", "false"]
    if origin is Literal:
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in typing.get_args(annotation)]
    values = []
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        for argument in typing.get_args(annotation):
            values += _list_values(argument)
    return values
