"""Conversion of a config of miles-credit to a config of this package, with a report of every key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from credit.calendar import parse_duration
from credit.config.load import build_config
from credit.errors import ConfigError
from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.keys.row import Disposition
from credit.interop.miles_credit.keys.table import find_nearest_key, find_row, is_section
from credit.interop.miles_credit.reading import MilesConfig, find_generation, iterate_leaves, read_yaml_tree
from credit.interop.miles_credit.report import ConversionReport
from credit.interop.miles_credit.sections.blocks import convert_pre_and_postblocks
from credit.interop.miles_credit.sections.data_parts import DataParts
from credit.interop.miles_credit.sections.generation_1 import convert_data_1
from credit.interop.miles_credit.sections.generation_2 import convert_data_2
from credit.interop.miles_credit.sections.loss import convert_loss
from credit.interop.miles_credit.sections.networks import convert_network
from credit.interop.miles_credit.sections.trainer import convert_trainer

# Default seed of generation 2.
_SEED = 42
_SECTIONS = ("data", "model", "trainer", "loss")


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        yaml_text: converted config as YAML.
        report: result of the conversion of every key.
        generation: schema of the original config: 2 for the nested schema with ``data.source``, otherwise 1.
        published_files: "mean", "std" and "static" -> path of the published file, if the original config contains it.
        published_names: variable of this package -> its name in these files.
        static_is_normalised: True if the static fields in the published file are already normalised and must be used
            unchanged, even if the files of statistics contain them.
    """

    yaml_text: str
    report: ConversionReport
    generation: int
    published_files: Mapping[str, str]
    published_names: Mapping[str, str]
    static_is_normalised: bool


def convert_file(path: Path) -> Conversion:
    """Convert the config in a file.

    Args:
        path: path of a YAML file of miles-credit; it may be a symbolic link.

    Raises:
        ConfigError: if the file is not a config of miles-credit, or if it has keys without a counterpart. The message
            lists all these keys.
    """
    conversion = convert_tree(read_yaml_tree(path), str(path))
    refused_keys = conversion.report.keys_with(Disposition.REFUSED)
    if refused_keys:
        noun = "key prevents" if len(refused_keys) == 1 else "keys prevent"
        raise ConfigError(
            f"{path}: {len(refused_keys)} {noun} the conversion (generation {conversion.generation}); "
            f"nothing was written\n{conversion.report.describe_refused()}\n  docs/migration_keys.md lists all keys"
        )
    require_valid_config(conversion.yaml_text, str(path))
    return conversion


def convert_tree(tree: Mapping[str, Any], origin: str) -> Conversion:
    """Convert the contents of a config file; the report of the result lists keys that prevent the conversion.

    Args:
        tree: contents of the file.
        origin: path of the file, for messages.

    Raises:
        ConfigError: if the file is not a config of miles-credit.
    """
    generation = find_generation(tree)
    if generation is None:
        raise ConfigError(
            f"{origin}: is not a training config of miles-credit; `data.source` (generation 2) or `data.variables` as "
            "a list (generation 1) is missing"
        )
    report = ConversionReport()
    config = MilesConfig(tree, generation, report)
    draft = ConfigDraft()
    _record_missing_sections(config)
    _write_top_level_keys(config, draft, origin)
    parts, files = _convert_sections(config, draft)
    _convert_lead_time(config, draft)
    # The keys are recorded after all conversions, because the keys that were read are known only now.
    _record_remaining_keys(config, parts)
    header = (
        f"Converted from {Path(origin).name}, a config of miles-credit (generation {generation}).\n"
        "Run `credit check` to compare this config with your data."
    )
    return Conversion(
        yaml_text=draft.to_yaml(header),
        report=report,
        generation=generation,
        published_files=files,
        published_names=parts.published_names,
        # Generation 1 does not normalise static fields; generation 2 normalises every field that has statistics.
        static_is_normalised=generation == 1,
    )


def _record_missing_sections(config: MilesConfig) -> None:
    """Record each missing section (data, model, trainer or loss) in the report as refused."""
    for name in _SECTIONS:
        if not config.peek_section(name):
            key = "model.type" if name == "model" else name
            config.report.record_refused(key, f"the file has no section `{name}`")


def _write_top_level_keys(config: MilesConfig, draft: ConfigDraft, origin: str) -> None:
    """Write the top-level keys of the converted config: `experiment`, `save_loc` and `seed`."""
    draft.set("experiment", Path(origin).stem)
    save_loc = config.get("save_loc")
    if save_loc is None:
        config.report.record_refused("save_loc", "missing; add the folder of the run")
    draft.set("save_loc", str(save_loc))
    draft.set("seed", config.get_integer("seed", _SEED))


def _convert_sections(config: MilesConfig, draft: ConfigDraft) -> tuple[DataParts, dict[str, str]]:
    """Convert all sections and write them into the draft; return the data section's parts and the published files."""
    if config.generation == 1:
        parts = convert_data_1(config, draft)
    else:
        parts = convert_data_2(config, draft)
    files = convert_pre_and_postblocks(config, draft, parts)
    # For an import of weights, the static fields are read from the last source that has the first static variable.
    static_names = parts.list_names("static")
    for path, names in parts.sources.items():
        if static_names and static_names[0] in names:
            files["static"] = path
    # The network is converted after the data, because it is compared with the variables. The loss and the trainer
    # depend on both.
    convert_network(config, draft)
    convert_loss(config, draft)
    convert_trainer(config, draft)
    return parts, files


def _convert_lead_time(config: MilesConfig, draft: ConfigDraft) -> None:
    """Write `inference.lead_time`, if the original config has the length of forecasts in a supported form."""
    key = "inference.batch_forecast.forecast_length"
    lead_time = config.get(key)
    if config.generation == 1:
        key = "predict.forecasts.days"
        days = config.get(key)
        lead_time = None if days is None else f"{days}d"
    if lead_time is None:
        return
    try:
        minutes = parse_duration(str(lead_time))
        timestep = parse_duration(draft.values["data"]["timestep"])
    except ConfigError:
        config.report.record_derived(key, f"`{lead_time}` is not a number of days or hours; set `inference.lead_time`")
        return
    # A forecast has a whole number of steps.
    steps = max(round(minutes / timestep), 1)
    draft.set("inference.lead_time", f"{steps * timestep // 60}h")


def _record_remaining_keys(config: MilesConfig, parts: DataParts) -> None:
    """Record the result of every key of the original config for which no conversion has recorded a result.

    An unknown key is recorded as refused. A known key that no conversion has read is recorded as ignored.
    """
    variables = set(parts.list_names("prognostic", "diagnostic", "dynamic_forcing", "static"))
    variables.update(parts.published_names.values())
    # If the network has no counterpart, its keys are not reported in addition.
    network_entry = config.report.entries.get("model.type")
    has_other_network = network_entry is not None and network_entry.disposition is Disposition.REFUSED
    for key, value in iterate_leaves(config.tree):
        row = find_row(key, config.generation, variables)
        if value in (None, {}) and is_section(key, config.generation):
            row = None
        if row is None:
            _record_unknown(config, key, value)
            continue
        disposition = row.disposition
        text = row.text
        if disposition is Disposition.REFUSED and value in row.harmless_values:
            disposition = Disposition.IGNORED
            text = f"has no effect with this value; for other values: {row.text}"
        if disposition is Disposition.REFUSED and has_other_network and key.startswith("model."):
            disposition = Disposition.IGNORED
            text = "a key of the network in `model.type`"
        inactive_section = _find_inactive_section(config.tree, key)
        if inactive_section:
            disposition = Disposition.IGNORED
            text = f"`{inactive_section}` is not active"
        elif disposition in (Disposition.MAPPED, Disposition.DERIVED) and not config.is_read(key):
            disposition = Disposition.IGNORED
            text = "has no effect in combination with the other values of this file"
        previous = config.report.entries.get(key)
        if previous is not None:
            config.report.add(previous.disposition, key, previous.text, value)
        else:
            config.report.add(disposition, key, text, value)


def _record_unknown(config: MilesConfig, key: str, value: Any) -> None:
    """Record a key that is not in the table of keys: an empty section is ignored, and other keys are refused."""
    if value in (None, {}) and is_section(key, config.generation):
        config.report.add(Disposition.IGNORED, key, "an empty section", value)
        return
    nearest = find_nearest_key(key, config.generation)
    reason = "is not a known key of miles-credit"
    if nearest is not None:
        reason += f"; did you mean `{nearest}`?"
    config.report.record_refused(key, reason)


def _find_inactive_section(tree: Mapping[str, Any], key: str) -> str:
    """Return the dotted key of the outermost inactive section (``activate: false``) around a key; empty if none."""
    names = key.split(".")
    node: Any = tree
    for position, name in enumerate(names[:-1]):
        node = node.get(name) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping):
            return ""
        is_switch = position == len(names) - 2 and names[-1] == "activate"
        if "activate" in node and not node["activate"] and not is_switch:
            return ".".join(names[: position + 1])
    return ""


def require_valid_config(yaml_text: str, origin: str) -> None:
    """Require that a converted config is valid.

    Environment variables need not be set, because the config may be for a different machine.

    Args:
        yaml_text: the converted config.
        origin: path of the original file, for messages.

    Raises:
        ConfigError: if the converted config has problems.
    """
    text = re.sub(r"\$\{?(\w+)\}?", r"\1", yaml_text)
    try:
        build_config(yaml.safe_load(text), origin=origin)
    except ConfigError as error:
        raise ConfigError(f"the config converted from {origin} is not valid; nothing was written\n{error}") from error
