"""Comparison of the run's data with the data that weights were trained on, and adaptation of weights to new data.

With ``trainer.resume_changes``, a run may start with weights that were trained on fewer channels or a different grid.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from credit.channels import ChannelMap
from credit.data.formats.units import find_conversion, normalise_units
from credit.data.reader import FieldReader
from credit.data.store.statistics import Statistics
from credit.errors import CheckpointError, ConfigError, DataError
from credit.grid import LatLonGrid
from credit.models.base import ForecastModel
from credit.models.data_axes import extend_channels, find_channel_axes, find_row_dims, interpolate_rows
from credit.train.build.assets import ModelAssets


def require_same_fields(
    assets: ModelAssets,
    reader: FieldReader,
    path: Path,
    channels: ChannelMap | None = None,
    changes: Collection[str] | None = None,
) -> None:
    """Raise an error if the channels, grid or units of the data differ from the checkpoint.

    Args:
        assets: the assets of the checkpoint.
        reader: reader of the data. Only the units of its variables are compared.
        path: the checkpoint, for messages.
        channels: the channels of the config, if the reader has only some of them; by default the reader's channels.
        changes: ``trainer.resume_changes`` at the start of a new run, None in all other cases. With ``channels``, the
            data may have additional channels. With ``grid``, the grid of the data may differ.

    Raises:
        CheckpointError: if the channels differ.
        DataError: if the grid or the units of a variable differ.
    """
    allowed_changes = changes or ()
    run_channels = channels or reader.channels
    difference = assets.channels.describe_mismatch(run_channels)
    if difference and "channels" not in allowed_changes:
        advice = "" if changes is None else "; trainer.resume_changes: [channels] lets a new run add channels"
        raise CheckpointError(f"{path}: trained on channels that differ from data.variables: {difference}{advice}")
    if difference:
        _require_added_channels(assets.channels, run_channels, path)
    difference = assets.grid.describe_mismatch(reader.grid)
    if difference and "grid" not in allowed_changes:
        advice = "" if changes is None else "; trainer.resume_changes: [grid] lets a new run use a different grid"
        raise DataError(
            f"{path}: trained on a grid that differs from the data: {difference}; set data.grid to the grid of the "
            f"run, so that the data are regridded{advice}"
        )
    for variable, attributes in assets.attributes.items():
        trained_units = attributes.get("units")
        data_units = reader.attributes.get(variable, {}).get("units")
        if not trained_units or not data_units:
            continue
        if normalise_units(trained_units) != normalise_units(data_units):
            remedy = _describe_units_remedy(variable, data_units, trained_units)
            raise DataError(
                f"{variable}: the data are in {data_units}, but the checkpoint {path} was trained on {trained_units}; "
                f"{remedy}"
            )


def _require_added_channels(trained: ChannelMap, new: ChannelMap, path: Path) -> None:
    """Raise CheckpointError unless a new run has all channels of its initial checkpoint, in the same groups.

    A forcing may become prognostic: its input stays the same, and the tendency of the variable is a new output. Other
    changes of the group would change the meaning of an output. The output is the value of a diagnostic variable, but
    the tendency of a prognostic variable.

    Args:
        trained: the channels of the checkpoint.
        new: the channels of the run.
        path: the checkpoint, for messages.

    Raises:
        CheckpointError: if a channel is missing or in a different group; the message names the channel.
    """
    group_by_name = {channel.name: channel.group for channel in (*new.input, *new.output)}
    for channel in dict.fromkeys((*trained.input, *trained.output)):
        new_group = group_by_name.get(channel.name)
        if new_group is None:
            raise CheckpointError(
                f"{path}: trained with {channel.name}, which is missing in data.variables; with "
                "trainer.resume_changes: [channels], a run may add channels but not remove them"
            )
        if new_group != channel.group and (channel.group, new_group) != ("dynamic_forcing", "prognostic"):
            raise CheckpointError(
                f"{path}: trained with {channel.name} as {channel.group}, but it is {new_group} in data.variables; "
                "with trainer.resume_changes: [channels], only a dynamic_forcing may become prognostic"
            )


def find_tensors_to_adapt(model: ForecastModel, meta: Mapping[str, Any]) -> set[str]:
    """Return the names of the stored tensors that must be adapted to the channels or the grid of a new run.

    Args:
        model: the model of the new run; it may be sharded.
        meta: contents of the meta.json of the stored weights.

    Raises:
        CheckpointError: if the channels differ and the model does not declare which weights belong to channels.
    """
    names: set[str] = set()
    if ChannelMap.from_dict(meta["channels"]) != model.spec.channels:
        names |= find_channel_axes(model).keys()
        if not names:
            raise CheckpointError(
                f"trainer.resume_changes: [channels]: {type(model).__name__} does not declare which of its weights "
                "belong to channels; declare them in its constructor, see docs/add_a_model.md"
            )
    if _has_different_rows(model, meta):
        names |= find_row_dims(model).keys()
    return names


def adapt_weights(
    model: ForecastModel, stored: Mapping[str, torch.Tensor], meta: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Adapt the stored tensors that depend on channels or rows to the channels and the grid of a model.

    Args:
        model: the model of a new run; it may be sharded.
        stored: name -> complete tensor on the CPU, at least for the names that `find_tensors_to_adapt` returns. Missing
            tensors are omitted from the result, and tensors with an unexpected shape are returned unchanged.
        meta: contents of the meta.json of the stored weights.

    Raises:
        CheckpointError: if the channels differ and the model does not declare which weights belong to channels.
    """
    adapted = {name: stored[name] for name in find_tensors_to_adapt(model, meta) if name in stored}
    trained = ChannelMap.from_dict(meta["channels"])
    if trained != model.spec.channels:
        axes = {}
        for name, tensor_axes in find_channel_axes(model).items():
            if name in adapted and all(axis.fits(adapted[name], trained) for axis in tensor_axes):
                axes[name] = tensor_axes
        adapted |= extend_channels(axes, adapted, trained, model.spec.channels)
    trained_grid = LatLonGrid.from_dict(meta["grid"])
    if _has_different_rows(model, meta):
        row_dims = {}
        for name, dim in find_row_dims(model).items():
            if name in adapted and adapted[name].shape[dim] == trained_grid.shape[0]:
                row_dims[name] = dim
        adapted |= interpolate_rows(row_dims, adapted, trained_grid, model.spec.grid)
    return adapted


def _has_different_rows(model: ForecastModel, meta: Mapping[str, Any]) -> bool:
    """Return True if the latitude rows of the model's grid differ from the rows that the weights were trained on."""
    trained_lat = LatLonGrid.from_dict(meta["grid"]).lat
    return not np.array_equal(trained_lat, model.spec.grid.lat)


@contextmanager
def add_grid_advice(model: ForecastModel, meta: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that adds advice to errors about tensor shapes if the grid differs from the trained grid.

    Args:
        model: the model of a new run; it may be sharded.
        meta: contents of the meta.json of the stored weights.
    """
    try:
        yield
    except CheckpointError as error:
        if LatLonGrid.from_dict(meta["grid"]).describe_mismatch(model.spec.grid) is None:
            raise
        raise CheckpointError(
            f"{error}. On a different grid, set sizes that depend on the grid to the values of the old run, such as "
            "model.max_degree of sfno; see docs/fine_tuning.md, Use another grid"
        ) from error


def describe_adaptation(model: ForecastModel, meta: Mapping[str, Any]) -> str | None:
    """Return a list of the new channels and of the change of the grid, as a string; None if nothing has changed.

    Args:
        model: the model of a new run; it may be sharded.
        meta: contents of the meta.json of the stored weights.
    """
    trained = ChannelMap.from_dict(meta["channels"])
    sentences = []
    for kind, trained_channels, run_channels in (
        ("input", trained.input, model.spec.channels.input),
        ("output", trained.output, model.spec.channels.output),
    ):
        trained_names = {channel.name for channel in trained_channels}
        new_names = [channel.name for channel in run_channels if channel.name not in trained_names]
        if new_names:
            sentences.append(f"new {kind} channels, whose initial weights are zeros: {', '.join(new_names)}")
    difference = LatLonGrid.from_dict(meta["grid"]).describe_mismatch(model.spec.grid)
    if difference:
        sentences.append(f"different grid: {difference}")
    return "; ".join(sentences) or None


def adapt_assets(trained: ModelAssets, fitted: ModelAssets) -> ModelAssets:
    """Return the assets of a run that starts with weights for fewer channels or a different grid.

    The channels of the checkpoint keep their statistics and units, because the weights depend on these values. On the
    same grid, these channels also keep their static fields and masks. The climatology, the vertical layers and all
    assets of new channels come from the data of the run.

    Args:
        trained: the assets of the checkpoint, which `require_same_fields` has accepted.
        fitted: the assets that were computed from the data of the run.
    """
    static_CHW = fitted.static_CHW
    masks = dict(fitted.masks)
    if trained.grid.describe_mismatch(fitted.grid) is None:
        static_CHW = np.array(static_CHW)
        trained_names = [channel.name for channel in trained.channels.group("static")]
        for index, channel in enumerate(fitted.channels.group("static")):
            if channel.name in trained_names:
                static_CHW[index] = trained.static_CHW[trained_names.index(channel.name)]
        masks |= trained.masks
    return replace(
        fitted,
        statistics=_merge_statistics(trained.statistics, fitted.statistics),
        attributes={**fitted.attributes, **trained.attributes},
        static_CHW=static_CHW,
        masks=masks,
        trained_periods=trained.trained_periods,
    )


def _merge_statistics(trained: Statistics, fitted: Statistics) -> Statistics:
    """Return the trained statistics, with the statistics of the run's data added for new channels.

    Args:
        trained: the statistics that the weights were trained with. Published statistics may contain channels that the
            data do not contain, such as a computed forcing.
        fitted: the statistics of the data of the run.
    """
    new_names = [name for name in fitted.names if name not in trained.names]
    added = fitted.select(new_names)
    arrays = {}
    for field in fields(Statistics):
        if field.name != "names":
            arrays[field.name] = np.concatenate([getattr(trained, field.name), getattr(added, field.name)])
    merged = Statistics(names=(*trained.names, *new_names), **arrays)
    # The channels have the order of the data, followed by channels that only the trained statistics contain.
    further_names = [name for name in trained.names if name not in fitted.names]
    return merged.select((*fitted.names, *further_names))


def _describe_units_remedy(variable: str, data_units: str, trained_units: str) -> str:
    """Return advice on how to read a variable in the units of the checkpoint, as the end of an error message."""
    try:
        find_conversion(data_units, trained_units, variable, "the data")
    except DataError:
        return (
            "these units measure different quantities: correct the units in the file, or read the same quantity as in "
            "training (data.sources.N.rename)"
        )
    except ConfigError:
        # Without UDUNITS, the conversion cannot be checked. If the user sets the key, an error reports this.
        pass
    return f'data.variable_options.{variable}.units: "{trained_units}" converts them'
