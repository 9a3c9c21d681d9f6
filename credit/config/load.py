"""Build a frozen `Config` from YAML text and command-line overrides; all problems are reported in one error."""

from __future__ import annotations

import importlib
import logging
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from credit.config.renamed_keys import (
    describe_renamed,
    drop_former_loss_keys,
    find_old_key,
    rename_keys,
    rename_override,
)
from credit.config.schema import Config
from credit.config.sections.data import DataConfig
from credit.config.validation_messages import build_error, describe_problem
from credit.errors import ConfigError

logger = logging.getLogger(__name__)

SectionClass = TypeVar("SectionClass", bound=BaseModel)
# Matches $NAME and ${NAME}.
_ENVIRONMENT_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
# Matches 12:00:00, which YAML 1.1 reads as the number 43200.
_BASE_60_NUMBER = re.compile(r"^[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")


def load_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Config:
    """Load the config of a YAML file: apply ``section.key=value`` overrides, expand ``$VAR`` and validate.

    Args:
        path: the YAML file; ``~`` is expanded.
        overrides: overrides of the form ``section.key=value``.

    Raises:
        ConfigError: if the config is not valid. The message lists every problem with key, value and rule, and suggests
            the nearest existing key for an unknown key.
    """
    return build_config(read_config(path, overrides), origin=str(path))


def read_config(path: str | os.PathLike, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the mapping in a YAML file with ``section.key=value`` overrides applied, without validation.

    Old names of keys are replaced with the new names, with one warning for each key. There is no warning for a config
    that a run has saved in its folder, because no user wrote this file.

    Args:
        path: the YAML file; ``~`` is expanded.
        overrides: overrides of the form ``section.key=value``.

    Raises:
        ConfigError: if the file cannot be read, an override cannot be applied, or a key is set by both its names.
    """
    # Old key -> file or override in which it occurs first, for the warning.
    origins: dict[str, str] = {}
    # The keys of the file are renamed first, so that overrides are applied only to new names.
    raw, old_keys = rename_keys(read_yaml(path), origin=str(path))
    if not _is_saved_by_run(Path(path)):
        origins = dict.fromkeys(old_keys, str(path))
    renamed_overrides = []
    for text in overrides:
        old_key = find_old_key(text.partition("=")[0])
        if old_key is not None:
            origins.setdefault(old_key, f'override "{text}"')
        renamed_overrides.append(rename_override(text))
    # The value of an override may be a section with old keys, such as trainer={max_steps: 5, early_view: {}}.
    raw, old_keys = rename_keys(apply_overrides(raw, renamed_overrides), origin="overrides")
    for old_key in old_keys:
        origins.setdefault(old_key, "overrides")
    for old_key, origin in origins.items():
        logger.warning("%s", describe_renamed(old_key, origin))
    return raw


def _is_saved_by_run(path: Path) -> bool:
    """Return True if a config file is the copy that a training run saves in its run folder."""
    return path.name == "config.yml" and (path.expanduser().parent / "checkpoints").is_dir()


def read_yaml(path: str | os.PathLike) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: if the file cannot be read, is not YAML, has a key twice, or is not a mapping.
    """
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"config {path}: cannot be read ({error.strerror}); `credit init quickstart` writes a config to start from"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"config {path}: byte {error.start} is not UTF-8; is it a YAML file? If it has another encoding, save it "
            "as UTF-8"
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
    """Apply each override ``section.key=value`` to a copy of a config and return the copy.

    The value is read as YAML. An item of a list is identified by its index, from 0. Missing sections are added.

    Args:
        raw: a config, not yet validated.
        overrides: overrides of the form ``section.key=value``.

    Raises:
        ConfigError: if an override has a different form, its value is not YAML, or its key is inside a value that is
            not a section or names an item that a list does not have.
    """
    result = _copy_nested(raw)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f'override "{text}": write section.key=value')
        try:
            parsed = yaml.load(value, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f'override "{text}": the value is not valid YAML: {error}') from error
        _set_value(result, key.split("."), parsed, text)
    return result


def _copy_nested(value: Any) -> Any:
    """Copy nested data. Sections that are one object because of a YAML alias become separate objects.

    An example of an alias is ``slurm: *jobs``. With `copy.deepcopy`, the sections would remain one object, and an
    override of one section would change the other section.
    """
    if isinstance(value, Mapping):
        return {key: _copy_nested(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_nested(item) for item in value]
    return value


def _set_value(node: Any, keys: list[str], value: Any, override: str) -> None:
    """Set the value at a path of keys inside a mapping or list, in place.

    Args:
        node: mapping or list at which the path starts.
        keys: parts of a dotted key, from the outermost section to the value; an item of a list is identified by its
            index.
        value: the value to set.
        override: text of the override, for messages.

    Raises:
        ConfigError: if a key is inside a value that is not a section, or names an item that a list does not have.
    """
    for position, key in enumerate(keys):
        is_last = position == len(keys) - 1
        index: str | int = key
        if isinstance(node, list):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(
                    f'override "{override}": "{key}" is not an item of a list of {len(node)}; items are numbered from 0'
                )
            index = int(key)
        elif not isinstance(node, dict):
            raise ConfigError(f'override "{override}": {".".join(keys[:position])} is a value, not a section')
        if is_last:
            node[index] = value
            return
        # Add a section that is missing in the file or empty.
        if isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[index]


def list_environment_variables(raw: Mapping[str, Any]) -> set[str]:
    """Return the names of the environment variables that a config contains as ``$NAME`` or ``${NAME}``.

    Args:
        raw: a config, not yet validated.
    """
    text = yaml.safe_dump(dict(raw), allow_unicode=True)
    # The first group of the pattern is the name in ${NAME}, the second group the name in $NAME. One group is empty.
    return {braced or plain for braced, plain in _ENVIRONMENT_VARIABLE.findall(text)}


def build_config(raw: Mapping[str, Any], origin: str = "config") -> Config:
    """Build the config from a plain mapping: expand ``$VAR``, import plugins and validate.

    Old names of keys are accepted without a warning, so that saved files of earlier versions can be read.

    Args:
        raw: the mapping, from `read_config` or from the metadata of a checkpoint.
        origin: file from which the mapping was read, for messages.

    Raises:
        ConfigError: if the config is not valid; the message lists every problem.
    """
    # Problems of all stages are collected, so that they are reported together.
    problems: list[str] = []
    renamed, _ = rename_keys(raw, origin)
    expanded = _expand_environment(renamed, "", problems)
    # Plugins register the kinds of losses, models and so on that the validation accepts.
    _import_plugins(expanded.get("plugins"), problems)
    expanded = drop_former_loss_keys(expanded)
    try:
        config = Config.model_validate(expanded)
    except ValidationError as error:
        problems += [describe_problem(Config, expanded, detail) for detail in error.errors()]
    if problems:
        raise build_error(problems, origin)
    return config


def build_section(section: type[SectionClass], raw: Mapping[str, Any], origin: str) -> SectionClass:
    """Build a section from a plain mapping, for example the section of a cluster file.

    Args:
        section: class of the section.
        raw: keys and values of the section.
        origin: file from which the mapping was read, for messages.

    Raises:
        ConfigError: if the mapping is not valid; the message lists every problem.
    """
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        problems = [describe_problem(section, raw, detail) for detail in error.errors()]
        raise build_error(problems, origin) from error


def build_file_section(section: type[SectionClass], raw: Mapping[str, Any], origin: str) -> SectionClass:
    """Build the section of a separate file: expand ``$VAR``, import the modules in ``plugins`` and validate.

    Args:
        section: class of the section.
        raw: keys and values of the file.
        origin: the file, for messages.

    Raises:
        ConfigError: if the file is not valid; the message lists every problem.
    """
    problems: list[str] = []
    expanded = _expand_environment(raw, "", problems)
    _import_plugins(expanded.get("plugins"), problems)
    if problems:
        raise build_error(problems, origin)
    return build_section(section, expanded, origin)


def build_data_config(raw: Mapping[str, Any], origin: str) -> DataConfig:
    """Build the section ``data`` of a config that may have errors in other sections.

    Args:
        raw: the whole config, as returned by `read_config`.
        origin: file from which the config was read, for messages.

    Raises:
        ConfigError: if the section is not valid; the message lists every problem.
    """
    problems: list[str] = []
    expanded = _expand_environment(raw.get("data") or {}, "data", problems)
    if problems:
        raise build_error(problems, origin)
    return build_section(DataConfig, expanded, origin)


def dump_config(config: Config) -> str:
    """Return the config with all defaults as YAML; `load_config` of this text gives an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=110)


def _build_implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern]]]:
    """Return the patterns with which `_StrictLoader` determines the type of an unquoted value.

    Returns:
        First character of a value -> pairs of a type and the pattern of its values. The first matching pattern
        determines the type.
    """
    resolvers = {}
    for character, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items():
        resolvers[character] = [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    # Times of day begin with a digit or a sign. Their pattern must precede the pattern of numbers.
    for character in "+-0123456789":
        resolvers[character].insert(0, ("tag:yaml.org,2002:str", _BASE_60_NUMBER))
    return resolvers


class _StrictLoader(yaml.SafeLoader):
    """Loader of plain YAML that raises an error for duplicate keys and reads dates and times of day as strings.

    Dates are strings because a calendar may have a 30 February. Times of day are strings because YAML 1.1 reads
    12:00:00 as a number in base 60.
    """

    # PyYAML reads this attribute.
    yaml_implicit_resolvers = _build_implicit_resolvers()

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        """Return the node of a mapping; PyYAML calls this method.

        Raises:
            yaml.composer.ComposerError: if a key is given twice.
        """
        node = super().compose_mapping_node(anchor)
        # A merge (<<) later adds the keys of another mapping, and keys of this mapping may replace them. The check for
        # duplicates must therefore precede the merge. The keys are stored in a list with their lines, because some keys
        # are not hashable.
        seen: list[tuple[Any, int]] = []
        for key_node, _ in node.value:
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"
            if isinstance(key_node, yaml.ScalarNode) and not is_merge:
                key = self.construct_object(key_node)
            else:
                key = key_node.value
            for other_key, line in seen:
                if other_key == key:
                    raise yaml.composer.ComposerError(
                        None, None, f'key "{key}" is given twice, first in line {line}', key_node.start_mark
                    )
            seen.append((key, key_node.start_mark.line + 1))
        return node


def _expand_environment(value: Any, key: str, problems: list[str]) -> Any:
    """Replace environment variables, ``$NAME`` and ``${NAME}``, in every string of a value, and return the result.

    The environment does not change a config in any other way.

    Args:
        value: a part of the config.
        key: dotted key of this part, for messages.
        problems: receives a message for each variable that is not set.
    """
    # Process the items of sections and lists recursively.
    if isinstance(value, Mapping):
        expanded = {}
        for name, item in value.items():
            key_below = f"{key}.{name}" if key else str(name)
            expanded[name] = _expand_environment(item, key_below, problems)
        return expanded
    if isinstance(value, list):
        return [_expand_environment(item, f"{key}.{number}", problems) for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match) -> str:
        # The first group is the name in ${NAME}, the second group the name in $NAME. The other group is None.
        name = match[1] or match[2]
        if name not in os.environ:
            problems.append(
                f'{key}: "{value}": there is no variable {name} in the environment; export it or write the path'
            )
            # Keep the text, so that the validation continues and reports further problems.
            return match[0]
        return os.environ[name]

    return _ENVIRONMENT_VARIABLE.sub(replace, value)


def _import_plugins(plugins: Any, problems: list[str]) -> None:
    """Import the modules in ``plugins``, which register models, losses and sources.

    Args:
        plugins: names of modules. A value that is not a list is ignored; the validation reports it later.
        problems: receives a message for each module that cannot be imported.
    """
    if not isinstance(plugins, list):
        return
    for name in plugins:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.append(f'plugins: "{name}" cannot be imported ({error}); is it installed or on PYTHONPATH?')
        # The code of a plugin may raise any exception.
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            cause = f"{type(error).__name__}: {error}; {frame.filename}, line {frame.lineno}"
            problems.append(f'plugins: "{name}" fails when it is imported ({cause}); correct it')
