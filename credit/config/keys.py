"""List of all config keys and their possible values, for the completion of command lines."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

from credit.config.registry import find_registered_sections
from credit.config.schema import Config


def list_keys() -> dict[str, list[str]]:
    """Return dotted key -> possible values, or an empty list if the values cannot be listed.

    Keys of items of a list or mapping, such as ``data.sources.0.path``, are left out.
    """
    keys: dict[str, list[str]] = {}
    for key, values in _iterate_keys(Config, ""):
        # Several kinds of a section may have the same key with different values.
        keys[key] = list(dict.fromkeys([*keys.get(key, []), *values]))
    return keys


def _iterate_keys(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (dotted key, values) of each key of a section and its nested sections.

    Args:
        section: class of the section.
        prefix: dotted key of the section with a dot at the end; empty for the whole config.
    """
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, _list_values(field.annotation)
        sections = _list_sections(field.annotation)
        # A key may contain the section of each registered kind instead of the base class.
        for registered in find_registered_sections(field) if sections else []:
            yield f"{key}.{registered.tag}", registered.names()
            sections += [registered.registry.find_section(kind) for kind in registered.names()]
        for section_below in dict.fromkeys(sections):
            yield from _iterate_keys(section_below, f"{key}.")


def _list_sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the section classes in a type annotation: the annotation itself, or the members of a union.

    The item types of lists and mappings are not searched.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    sections = []
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        for argument in typing.get_args(annotation):
            sections += _list_sections(argument)
    return sections


def _list_values(annotation: Any) -> list[str]:
    """Return the possible values of a type as YAML text; an empty list if they cannot be listed."""
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
