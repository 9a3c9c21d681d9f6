"""Write docs/config.md from the schema: ``python -m credit.config.docs_page > docs/config.md``."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from credit.config.registry import find_registered_sections
from credit.config.schema import Config
from credit.config.sections.base import list_section_classes

_INTRODUCTION = """# Configuration

One YAML file describes a run. This page lists all keys of the file.
Every key is checked. Unknown keys, wrong types and impossible combinations are reported together.

- To replace a key on the command line, append `section.key=value`: `trainer.max_steps=100`,
  `data.sources.0.path=era5.nc`, `model.dim=[32,64,128,256]`.
- `$NAME` and `${NAME}` in any string are replaced with the environment variable. `~` at the start of a path is your
  home folder.
- Durations are `6h`, `30min` or `10d`; a number alone means hours. `1d`, `24` and `24h` are the same.
- Times are `2000-01-01` or `2000-01-01T06:00`, in UTC and in the calendar of the data.

This page is generated from the schema (`python -m credit.config.docs_page`), and a test compares the two.
"""


# Type of a value -> name of the type in the tables.
_TYPE_NAMES: dict[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "`true` or `false`",
    Any: "any value",
}
# Type of a list or mapping -> suffix of the keys of its items.
_ITEM_SUFFIXES: dict[Any, str] = {list: ".N", dict: ".NAME"}
# Keys with the same sections as a key that the page describes elsewhere (`model.postprocess`, `loss`).
_DESCRIBED_ELSEWHERE = ("inference.hyperdiffusion", "inference.postprocess", "loss.terms")


def render_config_reference() -> str:
    """Return the page docs/config.md in Markdown."""
    paragraphs = [_INTRODUCTION]
    # Keys that are not sections are listed first, in a separate table.
    top_level_keys = {}
    for name, field in Config.model_fields.items():
        if not list_section_classes(field.annotation):
            top_level_keys[name] = field
    paragraphs.append("## Top level\n\n" + _render_table("", top_level_keys))
    for name, field in Config.model_fields.items():
        kinds = _describe_registered_sections(field)
        if kinds:
            # The keys of the base class are listed first. The table of each kind then lists only the additional keys.
            base = find_registered_sections(field)[0].base
            paragraphs += _describe_section(name, base, f"`{name}`")
            for section, title in kinds:
                paragraphs += _describe_section(name, section, f"`{name}` with {title}", base=base)
        elif name not in top_level_keys:
            section = list_section_classes(field.annotation)[0]
            paragraphs += _describe_section(name, section, f"`{name}`")
    return "\n".join(paragraphs)


def _describe_section(
    path: str, section: type[BaseModel], title: str, heading: str = "##", base: type[BaseModel] = BaseModel
) -> list[str]:
    """Return the Markdown of a section and all nested sections: heading, docstring and table of each section.

    Args:
        path: dotted key of the section.
        section: class of the section.
        title: text of the heading.
        heading: number signs that set the level of the heading; nested sections have ``###``.
        base: base class of the section; its keys are described elsewhere.
    """
    fields = {}
    for name, field in section.model_fields.items():
        # A subclass may repeat a key with a different type or default.
        if repr(field) != repr(base.model_fields.get(name)):
            fields[name] = field
    paragraphs = [
        f"{heading} {title}\n\n{inspect.cleandoc(section.__doc__)}\n",
        _render_table(f"{path}.", fields),
    ]
    for name, field in fields.items():
        if f"{path}.{name}" in _DESCRIBED_ELSEWHERE:
            continue
        # Sections that the key may contain, each with the kind for its heading.
        choices = _describe_registered_sections(field)
        if not choices:
            for choice in list_section_classes(field.annotation):
                choices.append((choice, f"`kind: {_get_kind(choice)}`"))
        path_below = f"{path}.{name}" + _build_item_suffix(field.annotation)
        for choice, kind_title in choices:
            title_below = f"`{path_below}`"
            if len(choices) > 1:
                title_below += f" with {kind_title}"
            paragraphs += _describe_section(path_below, choice, title_below, heading="###")
    return paragraphs


def _describe_registered_sections(field: FieldInfo) -> list[tuple[type[BaseModel], str]]:
    """Return the sections of the registered kinds that a config key may contain.

    Args:
        field: pydantic field of the key.

    Returns:
        Pairs of section class and title; the title lists the kinds that have this section, as Markdown for a heading:
        "`kind: gaussian` or `kind: bred`". The list is empty for a key without registered kinds.
    """
    # Several kinds may share a section, which is described only once.
    titles: dict[type[BaseModel], list[str]] = {}
    for registered in find_registered_sections(field):
        for name in registered.names():
            section = registered.registry.find_section(name)
            titles.setdefault(section, []).append(f"`{registered.tag}: {name}`")
    return [(section, " or ".join(names)) for section, names in titles.items()]


def _render_table(prefix: str, fields: Mapping[str, FieldInfo]) -> str:
    """Return the keys of a section as a Markdown table.

    Args:
        prefix: dotted key of the section with a dot at the end, as prefix of each name; empty at the top level.
        fields: name -> pydantic field of each key.
    """
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "required"
        if not field.is_required():
            default = _format_default(field.get_default(call_default_factory=True))
        type_name = _describe_type(field.annotation)
        rows.append(f"| `{prefix}{name}` | {type_name} | {default} | {field.description or ''} |")
    return "\n".join(rows) + "\n"


def _format_default(value: Any) -> str:
    """Return a default value as Markdown for a cell of the table."""
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "see below"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _describe_type(annotation: Any) -> str:
    """Return the name of a key's type for the page, such as ``list of number``, ``section`` or `` `a` or `b` ``."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        # None is left out, because the column of defaults shows it. Equal names are listed once.
        names = [_describe_type(argument) for argument in arguments if argument is not type(None)]
        return " or ".join(dict.fromkeys(names))
    if origin in (list, tuple):
        return f"list of {_describe_type(arguments[0])}"
    if origin is dict:
        return f"mapping to {_describe_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return _TYPE_NAMES.get(annotation, str(annotation))


def _get_kind(section: type[BaseModel]) -> str:
    """Return the value of a section's key ``kind``; an empty string for a section without this key."""
    if "kind" not in section.model_fields:
        return ""
    return typing.get_args(section.model_fields["kind"].annotation)[0]


def _build_item_suffix(annotation: Any) -> str:
    """Return the suffix that turns the name of a key into the name of one of its items, as in ``data.sources.N``.

    Args:
        annotation: type of the key.

    Returns:
        ``.N`` for a list of sections, ``.NAME`` for a mapping to sections, empty for any other type.
    """
    # The list or mapping may be a member of a union, such as ``list[SourceConfig] | None``.
    options: Iterable[Any] = (annotation, *typing.get_args(annotation))
    for option in options:
        suffix = _ITEM_SUFFIXES.get(typing.get_origin(option))
        if suffix is not None and list_section_classes(option):
            return suffix
    return ""


if __name__ == "__main__":
    print(render_config_reference(), end="")
