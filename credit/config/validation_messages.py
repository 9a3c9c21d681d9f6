"""Messages about invalid configs: one line per problem with key, value, rule and, if possible, the correct key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from credit.config.migration import find_replacement
from credit.config.registry import WRONG_KIND, find_registered_sections
from credit.config.schema import Config
from credit.config.sections.base import list_section_classes
from credit.errors import ConfigError, did_you_mean, find_nearest

# Largest number of sections in the message about a key in the wrong section.
_MAX_SECTIONS_LISTED = 3
# Largest number of characters of a value in a message.
_MAX_VALUE_LENGTH = 120
# Placeholder for an item of a list or a mapping in a dotted key, as in ``data.sources.N.path``.
_ITEM_PREFIXES: dict[type | None, str] = {list: "N.", dict: "NAME."}


class UnknownKeyProblem(str):
    """Description of a key that does not exist, for an error message.

    Attributes:
        keys: string with all keys of the section; empty if the description already names the correct key.
        is_foreign: True for a key of miles-credit.
    """

    keys: str = ""
    is_foreign: bool = False


def build_error(problems: Sequence[str], origin: str) -> ConfigError:
    """Return the error that lists all problems.

    The allowed keys of a section are listed only once, at the end, even if the section has several unknown keys.

    Args:
        problems: descriptions of the problems; `describe_problem` returns most of them.
        origin: file with the config, for the first line of the message.
    """
    lines = [f"  - {problem}" for problem in problems]
    key_lists: list[str] = []
    has_foreign_keys = False
    for problem in problems:
        if isinstance(problem, UnknownKeyProblem):
            if problem.keys and problem.keys not in key_lists:
                key_lists.append(problem.keys)
            if problem.is_foreign:
                has_foreign_keys = True
    lines += [f"  {keys}" for keys in key_lists]
    if has_foreign_keys:
        lines.append(
            "  docs/migration.md lists the replacements of miles-credit's keys; `credit convert FILE -o my_run.yml` "
            "converts a whole config of miles-credit"
        )
    noun = "problem" if len(problems) == 1 else "problems"
    title = f"{origin}: {len(problems)} {noun}"
    return ConfigError("\n".join([title, *lines]))


def describe_problem(root: type[BaseModel], raw: Any, detail: Mapping[str, Any]) -> str:
    """Describe a pydantic error in one line with key, value, rule and, for an unknown key, the nearest existing key.

    Args:
        root: class of the section that was validated.
        raw: mapping that was validated as `root`.
        detail: one item of pydantic's ``ValidationError.errors()``.
    """
    # Pydantic adds the types of its validators to the location. Names of validators contain a bracket, keys do not.
    location = []
    for part in detail["loc"]:
        if isinstance(part, int) or "[" not in part:
            location.append(part)
    # Sections that may contain the key, and sections that may be the value of the key.
    parents, _ = _resolve_location(root, raw, location[:-1])
    choices, path = _resolve_location(root, raw, location)
    key = ".".join(str(part) for part in path)

    # Describe problems of keys. The type of an error identifies the violated rule.
    kind = detail["type"]
    if kind == "union_tag_not_found":
        return f"{key}.kind: this key is missing{did_you_mean('', _list_kinds(choices))}"
    if kind == "union_tag_invalid":
        tag = detail["ctx"]["tag"]
        return f'{key}.kind: "{tag}" does not exist{did_you_mean(tag, _list_kinds(choices))}'
    if kind == "extra_forbidden":
        parent = parents[0] if parents else None
        return _describe_unknown_key(key, parent)
    if kind == WRONG_KIND:
        return f"{key}.{detail['ctx']['tag']}: {detail['ctx']['text']}"
    if kind == "missing":
        return f"{key}: this key is missing"

    # Describe problems of values. The message contains the value and the rule.
    value = detail.get("input")
    rule = detail["msg"].removeprefix("Value error, ")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        rule = "must be a section, which is a mapping of keys"
    if kind == "string_type" and isinstance(value, bool | int | float):
        yaml_type = "true or false" if isinstance(value, bool) else "a number"
        rule = f"must be text, but YAML reads the value as {yaml_type}; write it in quotes"
    replacement = find_replacement(key, only_changed=True)
    if replacement is not None:
        rule += f" (unlike miles-credit's {key}; here {replacement})"
    if isinstance(value, Mapping | BaseModel):
        # The value is a whole section, which the message does not repeat. A rule about several keys of a section may
        # already begin with the whole key.
        if not key or rule.startswith(f"{key}."):
            return rule
        return f"{key}: {rule}"
    shown_value = repr(value)
    if len(shown_value) > _MAX_VALUE_LENGTH:
        shown_value = f"{shown_value[:_MAX_VALUE_LENGTH]}..."
    return f"{key}: {shown_value}: {rule}"


def _describe_unknown_key(key: str, section: type[BaseModel] | None) -> UnknownKeyProblem:
    """Describe a key that `section` does not have, and suggest the correct key if possible.

    Args:
        key: dotted key.
        section: class of the section; None if it is not known.
    """
    other_kinds = _describe_other_kinds(key, section)
    if other_kinds:
        return UnknownKeyProblem(f"{key}: {other_kinds}")
    replacement = find_replacement(key)
    if replacement is not None:
        problem = UnknownKeyProblem(f"{key}: a key of miles-credit; here {replacement}")
        problem.is_foreign = True
        return problem
    # Suggest a key of this section with a similar name, otherwise keys with this name in other sections. Otherwise list
    # all keys of this section.
    section_key, _, name = key.rpartition(".")
    keys = list(section.model_fields) if section is not None else []
    nearest = find_nearest(name, keys)
    if nearest is not None:
        return UnknownKeyProblem(f'{key}: unknown key; did you mean "{nearest}"?')
    same_name = _find_keys_named(name)
    if 0 < len(same_name) <= _MAX_SECTIONS_LISTED:
        return UnknownKeyProblem(f"{key}: unknown key; the key with this name is {' or '.join(same_name)}")
    problem = UnknownKeyProblem(f"{key}: unknown key")
    if keys:
        problem.keys = f"keys of {section_key or 'the config'}: {', '.join(sorted(keys))}"
    return problem


def _describe_other_kinds(key: str, section: type[BaseModel] | None) -> str:
    """Describe a key that only other kinds of its section have, such as a key of a different ``model.type``.

    Args:
        key: dotted key.
        section: class of the section; None if it is not known.

    Returns:
        The description; an empty string if no other kind has the key or the section has no registered kinds.
    """
    section_key, _, name = key.rpartition(".")
    if section_key not in Config.model_fields:
        return ""
    for registered in find_registered_sections(Config.model_fields[section_key]):
        sections = {kind: registered.registry.find_section(kind) for kind in registered.names()}
        kinds_here = [kind for kind, kind_section in sections.items() if kind_section is section]
        kinds_with_key = [kind for kind, kind_section in sections.items() if name in kind_section.model_fields]
        if kinds_here and kinds_with_key:
            return (
                f"{section_key}.{registered.tag} {' or '.join(kinds_here)} has no such key; it is a key of "
                f"{', '.join(kinds_with_key)}. Remove it, or replace the whole section "
                f"({section_key}={{{registered.tag}: {kinds_here[0]}}})"
            )
    return ""


def _find_keys_named(name: str) -> list[str]:
    """Search all sections for keys with this name, and return their dotted keys."""
    # Sections that remain to be searched, each with its dotted key and a dot at the end.
    sections: list[tuple[str, type[BaseModel]]] = [("", Config)]
    dotted_keys = set()
    while sections:
        prefix, section = sections.pop()
        for key, field in section.model_fields.items():
            dotted_key = f"{prefix}{key}"
            if key == name:
                dotted_keys.add(dotted_key)
            # These keys contain the same sections as `model`.
            if dotted_key in ("inference.hyperdiffusion", "inference.postprocess"):
                continue
            registered_sections = find_registered_sections(field)
            sections_below = []
            if not registered_sections:
                sections_below = list_section_classes(field.annotation)
            for registered in registered_sections:
                sections_below += [registered.registry.find_section(kind) for kind in registered.names()]
            item_prefix = _ITEM_PREFIXES.get(_find_container_type(field.annotation), "")
            for section_below in sections_below:
                sections.append((f"{dotted_key}.{item_prefix}", section_below))
    return sorted(dotted_keys)


def _find_container_type(annotation: Any) -> type | None:
    """Return `list` or `dict` for the type of a list or mapping, which may be optional; None for any other type."""
    for option in (annotation, *get_args(annotation)):
        if get_origin(option) in (list, dict):
            return get_origin(option)
    return None


def _resolve_location(
    root: type[BaseModel], raw: Any, location: Sequence[Any]
) -> tuple[list[type[BaseModel]], list[Any]]:
    """Return the possible section classes at the location of a pydantic error, and the key of this location.

    For a value that may be a section of several kinds, pydantic adds the kind to the location. The returned key does
    not contain the kind.

    Args:
        root: class of the section that was validated.
        raw: mapping that was validated as `root`; its sections name their kinds.
        location: keys and indices of list items, starting at `root`.

    Returns:
        The possible section classes, and the parts of the dotted key. There are no classes if the value at the location
        is not a section.
    """
    # Section classes that are possible at the processed part of the location.
    choices = [root]
    path: list[Any] = []
    value = raw
    # Annotation of a key with registered kinds, until the value that names its kind is processed.
    registered = None
    for part in location:
        # If there are several choices, pydantic has added the chosen kind, which is not part of the key.
        if isinstance(part, str) and len(choices) > 1:
            choices = [choice for choice in choices if part in _list_kinds([choice])]
            continue
        path.append(part)
        value = _get_item(value, part)
        # A number, or a name in a mapping of sections (data.variable_options.NAME), does not change the section class.
        if choices and part in choices[0].model_fields:
            field = choices[0].model_fields[part]
            registered = next(iter(find_registered_sections(field)), None)
            choices = list_section_classes(field.annotation)
        # The kind that the value names determines the section class.
        if registered is not None and registered.find_section(value) is not None:
            choices = [registered.find_section(value)]
            registered = None
    return choices, path


def _get_item(value: Any, key: Any) -> Any:
    """Return an item of a mapping or list; None if `value` does not have this item or is not a mapping or list."""
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return None


def _list_kinds(sections: Iterable[type[BaseModel]]) -> list[str]:
    """Return the allowed values of the key ``kind`` of these sections."""
    kinds: list[str] = []
    for section in sections:
        kinds += get_args(section.model_fields["kind"].annotation)
    return kinds
