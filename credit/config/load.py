"""From YAML text and command-line overrides to a frozen `Config`; every problem is reported at once."""

from __future__ import annotations

import importlib
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from credit.config.migration import find_replacement
from credit.config.schema import Config
from credit.config.schema_data import DataConfig
from credit.config.schema_model import ModelSection, model_section, model_section_names
from credit.errors import ConfigError, did_you_mean, find_nearest

S = TypeVar("S", bound=BaseModel)
# of sections that have a key of one name, in a message
_MOST_PLACES = 3
# characters of a value in a message
_LONGEST_VALUE = 120
_BASE_60 = re.compile(r"^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def load_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file, apply ``section.key=value`` overrides, expand ``$VAR`` and validate.

    Raises:
        ConfigError: naming every problem, each with key, value, rule and, for an unknown key, the nearest right one.
    """
    return build_config(apply_overrides(read_yaml(path), overrides), origin=str(path))


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; a key given twice is an error."""
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config {path}: cannot be read ({error.strerror}); credit_init writes a starter") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config {path}: byte {error.start} is no UTF-8; is it a YAML file? In another encoding, save it as UTF-8"
        ) from error
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"config {path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        kind = "the file is empty" if raw is None else f"this is a {type(raw).__name__}"
        raise ConfigError(
            f"config {path}: must be a mapping of sections, but {kind}; `credit init quickstart` writes a config to "
            "start from"
        )
    return raw


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return `raw` with each ``a.b.c=value`` set; the value is read as YAML, list items are addressed by number."""
    result = _copy(raw)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f'override "{text}": write section.key=value')
        try:
            parsed = yaml.load(value, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f'override "{text}": the value is not valid YAML: {error}') from error
        _set(result, key.split("."), parsed, text)
    return result


def referenced_env_vars(raw: Mapping[str, Any]) -> set[str]:
    """Return the names of the environment's variables that the strings of a config name."""
    return {braced or plain for braced, plain in _VARIABLE.findall(yaml.safe_dump(dict(raw), allow_unicode=True))}


def build_config(raw: Mapping[str, Any], origin: str = "config") -> Config:
    """Validate a plain mapping; see `load_config`."""
    problems: list[str] = []
    expanded = _expand(raw, "", problems)
    _import_plugins(expanded.get("plugins"), problems)
    model = _build_model_section(expanded.get("model"), problems)
    try:
        # the stand-in lets all other sections be checked in the same pass
        config = Config.model_validate({**expanded, "model": model or ModelSection(type="invalid")})
    except ValidationError as error:
        problems += [_describe(Config, detail, "") for detail in error.errors()]
    if problems:
        raise _failure(problems, origin)
    return config


def build_section(section: type[S], raw: Mapping[str, Any], origin: str) -> S:
    """Validate a plain mapping as one section, for files that are no config of a run; `origin` names the file.

    Raises:
        ConfigError: naming every problem.
    """
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        raise _failure([_describe(section, detail, "") for detail in error.errors()], origin) from error


def build_data_config(raw: Mapping[str, Any], origin: str) -> DataConfig:
    """Validate the section ``data`` of a config whose other sections may be wrong.

    Raises:
        ConfigError: naming every problem of the section.
    """
    problems: list[str] = []
    expanded = _expand(raw.get("data") or {}, "data", problems)
    if problems:
        raise _failure(problems, origin)
    return build_section(DataConfig, expanded, origin)


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML; `load_config` reads it back to an equal object."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=110)


def _failure(problems: list[str], origin: str) -> ConfigError:
    """Return the error that names all problems; the keys of a section are listed once, however many are unknown."""
    lines = [f"  - {problem}" for problem in problems]
    lists = dict.fromkeys(problem.keys for problem in problems if isinstance(problem, _UnknownKey) and problem.keys)
    lines += [f"  {keys}" for keys in lists]
    if any(isinstance(problem, _UnknownKey) and problem.is_foreign for problem in problems):
        lines.append(
            "  docs/migration.md says where the keys of miles-credit went; `credit init wxformer_1deg` is a config to "
            "start from"
        )
    title = f"{origin}: {len(problems)} problem{'s' if len(problems) > 1 else ''}"
    return ConfigError("\n".join([title, *lines]))


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice and leaves dates and times of day as text.

    A calendar may have a 30 February, and YAML 1.1 takes 12:00:00 for a number in base 60, 43200.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for _first in "+-0123456789":
        yaml_implicit_resolvers[_first] = [("tag:yaml.org,2002:str", _BASE_60), *yaml_implicit_resolvers[_first]]

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        # here, because a merge (<<) adds the keys of another mapping later, which this one may replace
        lines: list[tuple[Any, int]] = []
        for key_node, _ in node.value:
            is_plain = isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge"
            key = self.construct_object(key_node) if is_plain else key_node.value
            for other, line in lines:
                if other == key:
                    raise yaml.composer.ComposerError(
                        None, None, f'key "{key}" is given twice, first in line {line}', key_node.start_mark
                    )
            lines.append((key, key_node.start_mark.line + 1))
        return node


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _set(node: Any, keys: list[str], value: Any, text: str) -> None:
    for position, key in enumerate(keys):
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f'override "{text}": "{key}" is no item of a list of {len(node)}')
            key = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f'override "{text}": {".".join(keys[:position])} is a value, not a section')
        if position == len(keys) - 1:
            node[key] = value
            return
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]


def _expand(value: Any, key: str, problems: list[str]) -> Any:
    """Replace ``$NAME`` and ``${NAME}`` in every string; the only place where the environment enters a config."""
    if isinstance(value, Mapping):
        return {name: _expand(item, f"{key}.{name}" if key else str(name), problems) for name, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, f"{key}.{number}", problems) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            problems.append(f'{key}: "{value}": the environment has no variable {name}; export it or write the path')
            return match[0]
        return os.environ[name]

    return _VARIABLE.sub(replace, value)


def _import_plugins(plugins: Any, problems: list[str]) -> None:
    for name in plugins if isinstance(plugins, list) else ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f'plugins: "{name}" cannot be imported ({error}); is it installed or on PYTHONPATH?')
        except Exception as error:  # a module may raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}; {place.filename}, line {place.lineno}"
            problems.append(f'plugins: "{name}" fails when it is imported ({what}); correct it')


def _build_model_section(raw: Any, problems: list[str]) -> ModelSection | None:
    if raw is None:
        problems.append("model: this section is missing")
        return None
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        problems.append(f"model.type: must name a model; choices are {', '.join(model_section_names())}")
        return None
    section = model_section(raw["type"])
    if section is None:
        problems.append(f'model.type: "{raw["type"]}" is no model{did_you_mean(raw["type"], model_section_names())}')
        return None
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        problems += [_describe(section, detail, "model.") for detail in error.errors()]
        return None


def _describe(root: type[BaseModel], detail: Mapping[str, Any], prefix: str) -> str:
    """Turn one pydantic error into a line with key, value, rule and the nearest right key."""
    location = [part for part in detail["loc"] if not (isinstance(part, str) and "[" in part)]
    owners, _ = _sections_at(root, location[:-1])
    choices, parts = _sections_at(root, location)
    key = (prefix + ".".join(str(part) for part in parts)).rstrip(".")
    if detail["type"] == "union_tag_not_found":
        return f"{key}.kind: this key is missing{did_you_mean('', _kinds_of(choices))}"
    if detail["type"] == "union_tag_invalid":
        tag = detail["ctx"]["tag"]
        return f'{key}.kind: "{tag}" is none{did_you_mean(tag, _kinds_of(choices))}'
    if detail["type"] == "extra_forbidden":
        return _describe_unknown(key, owners[0] if owners else None)
    if detail["type"] == "missing":
        return f"{key}: this key is missing"
    rule = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        rule = "must be a section, which is a mapping of keys"
    if detail["type"] == "string_type" and isinstance(detail.get("input"), bool | int | float):
        kind = "true or false" if isinstance(detail["input"], bool) else "a number"
        rule = f"must be text, and YAML reads what stands there as {kind}; write it in quotes"
    change = find_replacement(key, of_changed=True)
    if change is not None:
        rule += f" (unlike miles-credit's {key}; here {change})"
    value = detail.get("input")
    if isinstance(value, Mapping | BaseModel):
        # a rule on several keys of a section may begin with the whole key
        return f"{key}: {rule}" if key and not rule.startswith(f"{key}.") else rule
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = f"{shown[:_LONGEST_VALUE]}..."
    return f"{key}: {shown}: {rule}"


class _UnknownKey(str):
    """The description of a key that there is not.

    Attributes:
        keys: those that its section has, in words; empty where the description names the right one.
        is_foreign: whether it is a key of miles-credit.
    """

    keys: str = ""
    is_foreign: bool = False


def _describe_unknown(key: str, section: type[BaseModel] | None) -> _UnknownKey:
    """Describe a key that `section` does not have, with the right one where that can be told."""
    replacement = find_replacement(key)
    if replacement is not None:
        problem = _UnknownKey(f"{key}: a key of miles-credit; here {replacement}")
        problem.is_foreign = True
        return problem
    above, _, name = key.rpartition(".")
    keys = list(section.model_fields) if section is not None else []
    nearest = find_nearest(name, keys)
    if nearest is not None:
        return _UnknownKey(f'{key}: unknown key; did you mean "{nearest}"?')
    elsewhere = _find_key(name)
    if 0 < len(elsewhere) <= _MOST_PLACES:
        return _UnknownKey(f"{key}: unknown key; the key of this name is {' or '.join(elsewhere)}")
    problem = _UnknownKey(f"{key}: unknown key")
    if keys:
        problem.keys = f"keys of {above or 'the config'}: {', '.join(sorted(keys))}"
    return problem


def _find_key(name: str) -> list[str]:
    """Return the dotted keys of all sections that end with `name`."""
    roots = [("", Config)]
    roots += [("model.", section) for section in map(model_section, model_section_names()) if section is not None]
    dotted_keys: dict[str, None] = {}
    while roots:
        prefix, section = roots.pop()
        for key, field in section.model_fields.items():
            if key == name:
                dotted_keys[f"{prefix}{key}"] = None
            inner = [item for item in _classes_in(field.annotation) if issubclass(item, BaseModel)]
            container = {list: "N.", dict: "NAME."}.get(_container_of(field.annotation), "")
            roots += [(f"{prefix}{key}.{container}", item) for item in inner]
    return sorted(dotted_keys)


def _container_of(annotation: Any) -> type | None:
    """Return list or dict where an annotation, perhaps optional, is one of sections."""
    options = [annotation, *get_args(annotation)]
    return next((get_origin(option) for option in options if get_origin(option) in (list, dict)), None)


def _sections_at(root: type[BaseModel], location: list) -> tuple[list[type[BaseModel]], list]:
    """Return the section classes that may lie at `location` below `root`, and the location as the config has it.

    Where a list has sections of several kinds, pydantic puts the kind into the location.
    """
    choices, passed = [root], []
    for part in location:
        if isinstance(part, str) and len(choices) > 1:
            choices = [one for one in choices if part in _kinds_of([one])]
            continue
        passed.append(part)
        # a number, or a key of a mapping of sections, such as data.fields.NAME, leads to no other section
        if choices and part in choices[0].model_fields:
            found = _classes_in(choices[0].model_fields[part].annotation)
            choices = [item for item in found if issubclass(item, BaseModel)]
    return choices, passed


def _kinds_of(sections: Iterable[type[BaseModel]]) -> list[str]:
    return [kind for one in sections for kind in get_args(one.model_fields["kind"].annotation)]


def _classes_in(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        return [annotation]
    return [item for argument in get_args(annotation) for item in _classes_in(argument)]
