"""Messages about wrong configs: each problem becomes a line with key, value, rule and, if possible, the right key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from credit.config.migration import find_replacement
from credit.config.registry import WRONG_KIND, find_registered_sections
from credit.config.schema import Config
from credit.config.sections.base import sections_in
from credit.errors import ConfigError, did_you_mean, find_nearest

# A key in the wrong section: the sections that have a key of this name are listed, up to this number.
_MAX_SECTIONS_LISTED = 3
# Longer values are cut in messages, in characters.
_MAX_VALUE_LENGTH = 120


class UnknownKeyProblem(str):
    """Description of a key that does not exist.

    Attributes:
        keys: text with the keys that its section has; empty where the description names the right key.
        is_foreign: whether it is a key of miles-credit.
    """

    keys: str = ""
    is_foreign: bool = False


def build_error(problems: Sequence[str], origin: str) -> ConfigError:
    """Return the error that lists all problems.

    The keys of a section are listed once at the end, however many of them are unknown.

    Args:
        problems: from `describe_problem` and others.
        origin: the file, for the title.
    """
    lines = [f"  - {problem}" for problem in problems]
    # The keys of a section are listed once, however many of them are wrong.
    unknown = [problem for problem in problems if isinstance(problem, UnknownKeyProblem)]
    for keys in dict.fromkeys(problem.keys for problem in unknown if problem.keys):
        lines.append(f"  {keys}")
    if any(problem.is_foreign for problem in unknown):
        lines.append(
            "  docs/migration.md lists the replacements of miles-credit's keys; `credit init wxformer_1deg` writes a "
            "config to start from"
        )
    title = f"{origin}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ConfigError("\n".join([title, *lines]))


def describe_problem(root: type[BaseModel], raw: Any, detail: Mapping[str, Any]) -> str:
    """Return one pydantic error as a line with key, value, rule and, for an unknown key, the nearest existing one.

    Args:
        root: the section that was validated.
        raw: the mapping that was validated as `root`.
        detail: an item of ``ValidationError.errors()``.
    """
    # Names with a bracket are pydantic's own: the type of a validator.
    location = [part for part in detail["loc"] if not (isinstance(part, str) and "[" in part)]
    parents, _ = _resolve_location(root, raw, location[:-1])
    choices, path = _resolve_location(root, raw, location)
    key = ".".join(str(part) for part in path)
    # Problems of keys; pydantic names the rule that is broken by a type.
    kind = detail["type"]
    if kind == "union_tag_not_found":
        return f"{key}.kind: this key is missing{did_you_mean('', _kinds_of(choices))}"
    if kind == "union_tag_invalid":
        tag = detail["ctx"]["tag"]
        return f'{key}.kind: "{tag}" does not exist{did_you_mean(tag, _kinds_of(choices))}'
    if kind == "extra_forbidden":
        return _describe_unknown_key(key, parents[0] if parents else None)
    if kind == WRONG_KIND:
        return f"{key}.{detail['ctx']['tag']}: {detail['ctx']['text']}"
    if kind == "missing":
        return f"{key}: this key is missing"

    # Problems of values: text of the rule, then the value.
    value = detail.get("input")
    rule = detail["msg"].removeprefix("Value error, ")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        rule = "must be a section, which is a mapping of keys"
    if kind == "string_type" and isinstance(value, bool | int | float):
        yaml_type = "true or false" if isinstance(value, bool) else "a number"
        rule = f"must be text, but YAML reads the value as {yaml_type}; write it in quotes"
    replacement = find_replacement(key, of_changed=True)
    if replacement is not None:
        rule += f" (unlike miles-credit's {key}; here {replacement})"
    if isinstance(value, Mapping | BaseModel):
        # A rule about several keys of a section may already begin with the whole key.
        return f"{key}: {rule}" if key and not rule.startswith(f"{key}.") else rule
    shown_value = repr(value)
    if len(shown_value) > _MAX_VALUE_LENGTH:
        shown_value = f"{shown_value[:_MAX_VALUE_LENGTH]}..."
    return f"{key}: {shown_value}: {rule}"


def _describe_unknown_key(key: str, section: type[BaseModel] | None) -> UnknownKeyProblem:
    """Describe a key that `section` does not have, with the right key where it can be guessed."""
    replacement = find_replacement(key)
    if replacement is not None:
        problem = UnknownKeyProblem(f"{key}: a key of miles-credit; here {replacement}")
        problem.is_foreign = True
        return problem
    # A misspelled key of this section; else a key of this name in another section; else all keys of this section.
    section_key, _, name = key.rpartition(".")
    keys = list(section.model_fields) if section is not None else []
    nearest = find_nearest(name, keys)
    if nearest is not None:
        return UnknownKeyProblem(f'{key}: unknown key; did you mean "{nearest}"?')
    same_name = _find_keys_named(name)
    if 0 < len(same_name) <= _MAX_SECTIONS_LISTED:
        return UnknownKeyProblem(f"{key}: unknown key; the key of this name is {' or '.join(same_name)}")
    problem = UnknownKeyProblem(f"{key}: unknown key")
    if keys:
        problem.keys = f"keys of {section_key or 'the config'}: {', '.join(sorted(keys))}"
    return problem


def _find_keys_named(name: str) -> list[str]:
    """Return the dotted keys of all sections whose last part is `name`."""
    sections: list[tuple[str, type[BaseModel]]] = [("", Config)]
    dotted_keys = set()
    while sections:
        prefix, section = sections.pop()
        for key, field in section.model_fields.items():
            if key == name:
                dotted_keys.add(f"{prefix}{key}")
            item_suffix = {list: "N.", dict: "NAME."}.get(_container_of(field.annotation), "")
            sections_below = sections_in(field.annotation)
            if f"{prefix}{key}" in ("inference.hyperdiffusion", "inference.postprocess"):
                # The same sections as below `model`.
                sections_below = []
            elif find_registered_sections(field):
                sections_below = []
                for annotation in find_registered_sections(field):
                    sections_below += [annotation.registry.find_section(kind) for kind in annotation.names()]
            for section_below in sections_below:
                sections.append((f"{prefix}{key}.{item_suffix}", section_below))
    return sorted(dotted_keys)


def _container_of(annotation: Any) -> type | None:
    """Return list or dict where a type, perhaps optional, is a list or a mapping."""
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) in (list, dict):
            return get_origin(option)
    return None


def _resolve_location(
    root: type[BaseModel], raw: Any, location: Sequence[Any]
) -> tuple[list[type[BaseModel]], list[Any]]:
    """Return the section classes that may lie at a location of pydantic's, and the location as the config has it.

    Where a list has sections of several kinds, pydantic puts the kind into the location; it is left out here. The class
    of a registered kind is the one that `raw` names.
    """
    # The section classes that the part of the location so far may stand for.
    choices = [root]
    path: list[Any] = []
    value = raw
    registered = None
    for part in location:
        if isinstance(part, str) and len(choices) > 1:
            choices = [choice for choice in choices if part in _kinds_of([choice])]
            continue
        path.append(part)
        value = _item_of(value, part)
        # A number, or a name in a mapping of sections (data.variable_options.NAME), stays in the same section.
        if choices and part in choices[0].model_fields:
            field = choices[0].model_fields[part]
            registered = next(iter(find_registered_sections(field)), None)
            choices = sections_in(field.annotation)
        if registered is not None and registered.find_section(value) is not None:
            choices = [registered.find_section(value)]
            registered = None
    return choices, path


def _item_of(value: Any, key: Any) -> Any:
    """Return the item of a mapping or list, None where there is none."""
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None


def _kinds_of(sections: Iterable[type[BaseModel]]) -> list[str]:
    """Return the kinds that sections stand for: the values of their key ``kind``."""
    kinds: list[str] = []
    for section in sections:
        kinds += get_args(section.model_fields["kind"].annotation)
    return kinds
