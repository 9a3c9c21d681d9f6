"""Conversion of the preblocks and postblocks of generation 2, and of the bounds of generation 1.

A preblock changes the input of the network, and a postblock changes its output. Bounds are limits of output variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from credit.interop.miles_credit.draft import ConfigDraft
from credit.interop.miles_credit.keys.other_keys import IGNORED_POSTBLOCKS, REFUSED_POSTBLOCKS
from credit.interop.miles_credit.reading import MilesConfig, to_number
from credit.interop.miles_credit.sections.data_parts import GROUPS, DataParts

# Variables of ERA5 that are missing over land.
_MASKED_VARIABLES = ("sst", "sea_surface_temperature", "SST", "SSTK", "sea_ice_cover", "ci", "CI")
# Default offset of the logarithm.
_LOG_OFFSET = 1e-8


def convert_pre_and_postblocks(config: MilesConfig, draft: ConfigDraft, parts: DataParts) -> dict[str, str]:
    """Convert preblocks and postblocks: write transforms and bounds into the draft, and record the normalisation.

    Returns:
        "mean" and "std" -> path of the file of means or standard deviations, if the config names it.
    """
    files = {}
    for name in ("mean", "std"):
        path = config.get(f"data.{name}_path")
        if path:
            files[name] = str(path)
    # If the preblocks have a normaliser, generation 2 uses the files of the normaliser. They replace the older keys.
    for key, block in _iterate_blocks(config, "preblocks"):
        _convert_preblock(config, draft, parts, key, block)
        if block.get("type") == "era5_normalizer":
            for name in ("mean", "std"):
                path = (block.get("args") or {}).get(f"{name}_path")
                if path:
                    files[name] = str(path)
    for key, block in _iterate_blocks(config, "postblocks"):
        _convert_postblock(config, draft, parts, key, block)
    convert_bounds(config, draft, parts)
    return files


def _iterate_blocks(config: MilesConfig, section: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (dotted key, contents) of each preblock or postblock in a section.

    The blocks are in the subsection ``per_step``. In older files, they are directly in the section.
    """
    for name, value in config.peek_section(section).items():
        if name == "per_step" and isinstance(value, Mapping):
            for block_name, block in value.items():
                if isinstance(block, Mapping):
                    yield f"{section}.per_step.{block_name}", block
        elif isinstance(value, Mapping):
            yield f"{section}.{name}", value


def _convert_preblock(
    config: MilesConfig, draft: ConfigDraft, parts: DataParts, key: str, block: Mapping[str, Any]
) -> None:
    """Write the keys that correspond to a preblock, which changes the input of the network.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        parts: variables of the run.
        key: dotted key of the block.
        block: contents of the block.
    """
    report = config.report
    kind = str(config.get(f"{key}.type"))
    arguments = config.get_section(f"{key}.args")
    names = _find_variables(config, f"{key}.args.variables", arguments.get("variables"), parts)
    if kind in ("concat", "to_device"):
        report.record_derived(f"{key}.type", "`data.input_order` has the order of the channels")
    elif kind == "era5_normalizer":
        report.record_derived(
            f"{key}.type", "fitted by `credit preprocess`; the files are defaults of `--mean` and `--std`"
        )
    elif kind == "bridgescaler_transform":
        _convert_scaler(config, key, arguments)
    elif kind in ("log_transform", "sqrt_transform"):
        for name in names:
            transform: dict[str, Any] = {"kind": "sqrt"}
            if kind == "log_transform":
                # A different base of the logarithm changes only a factor, which the normalisation removes.
                offset = to_number(arguments.get("eps", _LOG_OFFSET)) or _LOG_OFFSET
                transform = {"kind": "log1p", "unit": offset}
            draft.set(f"data.transforms.{name}", transform)
        report.record_derived(f"{key}.type", f"`data.transforms` of {', '.join(names)}")
    elif kind == "fill_values":
        _convert_filling(config, draft, parts, key, names)
    else:
        report.record_refused(f"{key}.type", f"`{kind}` has no counterpart; apply this block to the files yourself")


def _convert_scaler(config: MilesConfig, key: str, arguments: Mapping[str, Any]) -> None:
    """Record the normalisation of a preblock; only normalisation by mean and standard deviation has a counterpart."""
    report = config.report
    scaler_type = arguments.get("scaler_type", "standard")
    if scaler_type not in ("standard", "quantile"):
        report.record_refused(
            f"{key}.args.scaler_type",
            f"`{scaler_type}`: this package normalises with mean and standard deviation; use `data.transforms` for "
            "skewed variables",
        )
        return
    if scaler_type == "quantile":
        report.record_derived(
            f"{key}.args.scaler_type",
            "approximate: normalised with mean and standard deviation instead of quantiles; consider "
            "`data.transforms` for skewed variables",
        )
        report.import_obstacles.append(f"`{key}.args.scaler_type`: inputs and outputs are quantiles")
    # The scalers are JSON files of a different library; a new training run does not need them.
    report.record_derived(f"{key}.type", "mean and standard deviation of each channel, fitted by `credit preprocess`")
    if arguments.get("spatial_variables"):
        names = ", ".join(arguments["spatial_variables"])
        report.record_derived(
            f"{key}.args.spatial_variables", "approximate: statistics of each channel instead of each cell"
        )
        report.import_obstacles.append(f"`{key}.args.spatial_variables`: {names} has statistics of each cell")


def _convert_filling(config: MilesConfig, draft: ConfigDraft, parts: DataParts, key: str, names: Sequence[str]) -> None:
    """Set the option `missing` for variables whose missing values a preblock fills, such as sea surface temperature.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        parts: variables of the run.
        key: dotted key of the block.
        names: variables whose missing values are filled.
    """
    # An empty list in the file means all variables, but most variables never have missing values.
    masked_names = [name for name in names if len(names) < len(parts.list_names(*GROUPS)) or name in _MASKED_VARIABLES]
    for name in masked_names:
        draft.set_option(name, "missing", "fill_mean")
    if masked_names:
        config.report.record_derived(
            f"{key}.type",
            f"approximate: `missing: fill_mean` for {', '.join(masked_names)}, which also adds a channel with the mask",
        )
        config.report.import_obstacles.append(f"`{key}`: this package fills with the mean and adds a mask channel")
    else:
        config.report.record_derived(
            f"{key}.type", "no variable should have missing values; a missing value stops the run"
        )


def _convert_postblock(
    config: MilesConfig, draft: ConfigDraft, parts: DataParts, key: str, block: Mapping[str, Any]
) -> None:
    """Write the keys that correspond to a postblock, which changes the output of the network.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        parts: variables of the run.
        key: dotted key of the block.
        block: contents of the block.
    """
    kind = str(config.get(f"{key}.type"))
    arguments = config.get_section(f"{key}.args")
    if kind == "tracer_fixer":
        names = _find_variables(config, f"{key}.args.tracer_vars", arguments.get("tracer_vars"), parts)
        _set_bounds(config, draft, key, (names, arguments.get("tracer_thres"), "minimum"))
        _set_bounds(config, draft, key, (names, arguments.get("tracer_thres_max"), "maximum"))
    elif kind in REFUSED_POSTBLOCKS:
        config.report.record_refused(f"{key}.type", f"`{kind}`: {REFUSED_POSTBLOCKS[kind]}")
    elif kind in IGNORED_POSTBLOCKS:
        config.report.record_derived(f"{key}.type", IGNORED_POSTBLOCKS[kind])
    else:
        config.report.record_refused(f"{key}.type", f"`{kind}` has no counterpart")


def convert_bounds(config: MilesConfig, draft: ConfigDraft, parts: DataParts) -> None:
    """Write the bounds in `model.post_conf.tracer_fixer` as bounds of variables, in units of the variable."""
    section = "model.post_conf"
    is_active = config.get_flag(f"{section}.activate", False)
    if not is_active or not config.get_flag(f"{section}.tracer_fixer.activate", False):
        return
    key = f"{section}.tracer_fixer"
    names = config.get_names(f"{key}.tracer_name")
    outputs = parts.list_names("prognostic", "diagnostic")
    for name in names:
        if name not in outputs:
            config.report.record_derived(
                f"{key}.tracer_name", f"`{name}` is not an output of the network, so it has no bound"
            )
    _set_bounds(config, draft, key, (names, config.get(f"{key}.tracer_thres"), "minimum"))
    _set_bounds(config, draft, key, (names, config.get(f"{key}.tracer_thres_max"), "maximum"))


def _set_bounds(config: MilesConfig, draft: ConfigDraft, key: str, bounds: tuple[Sequence[str], Any, str]) -> None:
    """Set the minimum or the maximum of several variables.

    Args:
        config: config to convert.
        draft: draft to which keys are added.
        key: dotted key of the fixer.
        bounds: (names of variables, values, ``minimum`` or ``maximum``). The values are a list with one value for each
            variable, a single value for all variables, or None for no bounds.
    """
    names, values, option = bounds
    if values is None:
        return
    outputs = set()
    for group in ("prognostic", "diagnostic"):
        for members in draft.values["data"]["variables"].get(group, {}).values():
            outputs.update(members)
    # A single number is the bound of all variables.
    if not isinstance(values, list):
        values = [values] * len(names)
    numbers = [to_number(value) for value in values]
    if len(numbers) != len(names) or None in numbers:
        config.report.record_refused(key, f"`{values}`: write one number for each of {', '.join(names)}")
        return
    options = draft.values["data"].get("variable_options", {})
    for name, number in zip(names, numbers, strict=True):
        if name in outputs:
            # If two fixers bound the same variable, the tighter bound is written.
            tighter = max if option == "minimum" else min
            draft.set_option(name, option, tighter(number, options.get(name, {}).get(option, number)))


def _find_variables(config: MilesConfig, key: str, value: Any, parts: DataParts) -> list[str]:
    """Return the names of variables from paths such as ``SOURCE/GROUP/3d/NAME``; all variables for an empty list.

    The computed radiation is omitted, because it has neither a transform nor missing values.

    Args:
        config: config to convert.
        key: dotted key of the value.
        value: a variable, a list of variables, or null.
        parts: variables of the run.
    """
    all_names = [name for name in parts.list_names(*GROUPS) if name not in parts.published_names]
    if value is None or value == []:
        return all_names
    keys = value if isinstance(value, list) else [value]
    names = [str(item).rpartition("/")[2] for item in keys]
    unknown_names = set(names) - set(all_names) - set(parts.published_names.values())
    if unknown_names:
        config.report.record_refused(key, f"`{', '.join(sorted(unknown_names))}`: no such variable in `data.source`")
    return [name for name in names if name in all_names]
