"""Post-processing of the output of every step (``model.postprocess``): base class, registry and chain.

Shape suffixes: B batch, C channels, T time frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from credit.channels import ChannelMap
from credit.config.registry import POSTPROCESSES
from credit.config.sections.data import DataConfig
from credit.config.sections.postprocess import PostprocessSection
from credit.data.normalize import Normalizer
from credit.data.sources.levels.vertical_layers import VerticalLayers
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.parallel.domain.domain import Domain, allows_divided_fields


@dataclass(frozen=True)
class PostprocessContext:
    """Channels, grid, data and device of a run, from which a post-process is built.

    Attributes:
        data: config section ``data``.
        channels: channels of the model. ``channels.output`` has the order of the output, prognostic channels first.
        grid: grid of the fields.
        attributes: name of a variable -> its units, standard_name and long_name.
        masks: name of a variable -> (H, W) bool, True where it is always missing.
        static_CHW: static channels in physical units.
        layers: pressure layers around the levels of the run; None if no entry needs them.
        normalizer: conversion between physical units and normalised space.
        device: device of the fields.
        key: config key of the entry, for messages, such as ``model.postprocess.0``.
        entries: config sections of all entries of the chain, in order.
        domain: the ranks that share the grid; None if this rank has the whole grid. `grid` and `masks` always describe
            the whole grid, but fields and `static_CHW` contain only the rows and columns of ``domain.part``.
    """

    data: DataConfig
    channels: ChannelMap
    grid: LatLonGrid
    attributes: Mapping[str, Mapping[str, str]]
    masks: Mapping[str, np.ndarray]
    static_CHW: np.ndarray
    layers: VerticalLayers | None
    normalizer: Normalizer
    device: torch.device
    key: str = "model.postprocess"
    entries: tuple[PostprocessSection, ...] = ()
    domain: Domain | None = None


class Postprocess:
    """Base class of post-processes.

    A post-process changes the output of each step in training, validation and forecasts, so it must be differentiable.
    ``credit plan`` runs it with tensors that have no values, so store constants as tensors and do not call `.item()`.

    Args:
        context: channels, grid, units and device of the run.
        section: config section of the entry.

    Attributes:
        corrected_channels: indices of the output channels that this entry corrects. After the conversion to physical
            units, the bounds of earlier entries are not enforced again on these channels.
        supports_domain: True if the class supports domain parallelism (`PostprocessContext.domain`). With domain
            parallelism, a class without this support is an error. A subclass does not inherit the attribute, and must
            declare it again.
    """

    corrected_channels: Sequence[int] = ()
    supports_domain: ClassVar[bool] = False

    def __init__(self, context: PostprocessContext, section: PostprocessSection) -> None:
        pass

    def forward(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """Return the post-processed output, (B, C, H, W) normalised, float32.

        If no gradient is recorded, the result may overwrite `output_BCHW`.

        Args:
            output_BCHW: normalised output channels of the step.
            previous_BCHW: normalised prognostic channels of the last input frame.
            forcing_BCHW: normalised dynamic forcing of the last input frame.
        """
        raise NotImplementedError

    def limit_state(self, state_BCTHW: Tensor) -> Tensor:
        """Return a perturbed initial state, limited to the bounds of this entry; unchanged if the entry has no bounds.

        Args:
            state_BCTHW: normalised prognostic channels of the input frames.

        Returns:
            (B, C, T, H, W) normalised.
        """
        return state_BCTHW

    def limit_physical(self, output_BCHW: Tensor) -> Tensor:
        """Return an output in physical units, limited to the bounds of this entry; unchanged without bounds.

        The limits are applied again because rounding in the conversion to physical units may move values out of bounds.

        Args:
            output_BCHW: output channels in physical units.

        Returns:
            (B, C, H, W) in physical units.
        """
        return output_BCHW

    def set_corrected_later(self, channel_index: frozenset[int]) -> None:
        """Set the output channels that later entries of the chain correct; called once, before the first step.

        The base class, for entries without bounds, ignores these channels.

        Args:
            channel_index: indices of the output channels that any later entry corrects.
        """

    def merge(self, following: Postprocess) -> Postprocess | None:
        """Return a single post-process that replaces this entry and the next entry; None if they cannot be merged.

        Args:
            following: the next entry of the list.
        """
        return None


PostprocessClass = TypeVar("PostprocessClass", bound=type[Postprocess])


def register_postprocess(
    name: str, section: type[PostprocessSection]
) -> Callable[[PostprocessClass], PostprocessClass]:
    """Class decorator that makes a post-process available as ``model.postprocess.N.kind: name``.

    Args:
        name: value of ``kind`` in the config.
        section: class of the config section of the post-process.

    Raises:
        ConfigError: if another class is registered under `name`, or if the class or its section does not derive from
            the base class.
    """

    return POSTPROCESSES.register(name, section, Postprocess, PostprocessSection)


class PostprocessChain:
    """Sequence of post-processes that are applied to a step's output one after another.

    Args:
        entries: post-processes in the order of their application.
    """

    def __init__(self, entries: Sequence[Postprocess] = ()) -> None:
        self._entries = tuple(entries)

    def __call__(self, output_BCHW: Tensor, previous_BCHW: Tensor, forcing_BCHW: Tensor) -> Tensor:
        """Return the output of a step (B, C, H, W) after all post-processes; see `Postprocess.forward`."""
        for entry in self._entries:
            output_BCHW = entry.forward(output_BCHW, previous_BCHW, forcing_BCHW)
        return output_BCHW

    def limit_state(self, state_BCTHW: Tensor) -> Tensor:
        """Return a perturbed initial state (B, C, T, H, W), normalised, limited to the bounds of all entries."""
        for entry in self._entries:
            state_BCTHW = entry.limit_state(state_BCTHW)
        return state_BCTHW

    def limit_physical(self, output_BCHW: Tensor) -> Tensor:
        """Return an output (B, C, H, W) in physical units, limited to the bounds of all entries."""
        for entry in self._entries:
            output_BCHW = entry.limit_physical(output_BCHW)
        return output_BCHW


def build_postprocess(entries: Mapping[str, PostprocessSection], context: PostprocessContext) -> PostprocessChain:
    """Build the chain of post-processes of a run, including clamps for the bounds in the data section.

    Args:
        entries: config key -> section, for the entries of ``model.postprocess`` in order. Shorthands in the config are
            already expanded to sections.
        context: context of the run. Its `key` and `entries` are replaced for each entry.

    Raises:
        ConfigError: if the levels, units, temporal meaning or mask of a variable do not fit an entry.
    """
    entries = add_clamps_for_data_bounds(entries, context.data, context.channels)
    context = replace(context, entries=tuple(entries.values()))
    postprocesses: list[Postprocess] = []
    for key, section in entries.items():
        try:
            postprocess_class = POSTPROCESSES.find_class(section.kind)
            if context.domain is not None and not allows_divided_fields(postprocess_class):
                raise ConfigError(
                    f"{key}: {section.kind} does not support domain parallelism (supports_domain); remove it, or set "
                    "domain to 1 (trainer.parallelism in training, inference.parallelism in forecasts)"
                )
            postprocesses.append(postprocess_class(replace(context, key=key), section))
        except Exception as error:
            # The error of a plugin does not name the entry of the list, so add a note with the entry.
            error.add_note(f"{key}: {section.kind}")
            raise
    # The loop runs from the last entry to the first, because the bounds of an entry do not apply to channels that later
    # entries correct.
    chain: list[Postprocess] = []
    corrected_later: frozenset[int] = frozenset()
    for entry in reversed(postprocesses):
        entry.set_corrected_later(corrected_later)
        corrected_later |= frozenset(entry.corrected_channels)
        # The first entry of the chain so far is the successor of this entry.
        merged = None
        if chain:
            merged = entry.merge(chain[0])
        if merged is not None:
            chain[0] = merged
        else:
            chain.insert(0, entry)
    return PostprocessChain(chain)


def add_clamps_for_data_bounds(
    entries: Mapping[str, PostprocessSection], data: DataConfig, channels: ChannelMap
) -> dict[str, PostprocessSection]:
    """Return the entries plus a clamp for each output variable with bounds in ``data.variable_options``.

    These clamps are placed directly after the hyperdiffusion, because it may move values out of bounds. If there is no
    hyperdiffusion, they are placed before all entries.

    Args:
        entries: config key -> section, in order.
        data: data section of the config.
        channels: channels of the model.
    """
    clamp_section = POSTPROCESSES.find_section("clamp")
    data_clamps: dict[str, PostprocessSection] = {}
    # Names of the output variables without repetitions, in the order of the channels.
    output_variables = dict.fromkeys(channel.variable for channel in channels.output)
    for variable in output_variables:
        options = data.options_of(variable)
        if options.minimum is not None or options.maximum is not None:
            values = {"kind": "clamp", "variable": variable, "minimum": options.minimum, "maximum": options.maximum}
            data_clamps[f"data.variable_options.{variable}"] = clamp_section.model_validate(values)
    kinds = [section.kind for section in entries.values()]
    position = 0
    if "hyperdiffusion" in kinds:
        position = kinds.index("hyperdiffusion") + 1
    items = list(entries.items())
    return dict([*items[:position], *data_clamps.items(), *items[position:]])
