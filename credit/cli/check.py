"""``credit_check``: everything that can be known to go wrong before a job is queued, all at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from credit.cli.arguments import add_config_arguments as add_arguments

if TYPE_CHECKING:
    from credit.config import Config
    from credit.data.problems import Problems
    from credit.data.reader import FieldReader
    from credit.data.splits import Split
    from credit.grid import LatLonGrid

HELP = """Check CONFIG and its data before anything is queued: files, variables, levels, units, the times of each split,
samples of each, room for the store, save_loc, and the model on this grid. Nothing is written.

Prints every problem with what to do about it. Exit codes: 0 no problem, 2 problems."""

__all__ = ["HELP", "add_arguments", "check", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from credit.config import load_config

    problems = check(load_config(arguments.config, arguments.overrides), say=print)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    if not problems:
        print("no problem found")
    return 2 if problems else 0


def check(config: Config, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Return every problem of a config and its data, each with its fix.

    Args:
        config: a valid config.
        say: receives a line for each thing that was found in order.
    """
    from credit.data.problems import Problems
    from credit.data.splits import build_splits
    from credit.times import Clock

    problems = Problems()
    _check_save_loc(config, problems, say)
    reader = _open(config, problems, say)
    splits: dict[str, Split] = {}
    with problems.collect():
        splits = build_splits(config.data, reader.clock if reader else Clock())
    if reader is None:
        grid = _grid_alone(config)
        if grid is not None:
            _check_model(config, grid, {}, problems, say)
        return problems.messages
    if splits:
        _check_store(config, reader, splits, problems, say)
        _check_times(config, reader, splits, problems, say)
    _check_settings(config, reader, problems)
    _check_model(config, reader.grid, reader.attributes, problems, say)
    return problems.messages


def _open(config: Config, problems: Problems, say: Callable[[str], None]) -> FieldReader | None:
    """Open the store where it is complete, else the sources that it is to be made from."""
    from pathlib import Path

    from credit.data.reader import open_reader
    from credit.data.sources import open_sources

    conf = config.data
    reader = None
    with problems.collect():
        reader = open_reader(conf) if conf.store and Path(conf.store).exists() else open_sources(conf)
        height, width = reader.grid.shape
        names = ", ".join(channel.name for channel in reader.channels.stored + reader.channels.static_stored)
        say(f"data: {len(reader.times)} times, calendar {reader.clock.calendar}, {height} x {width} cells; {names}")
    return reader


def _grid_alone(config: Config) -> LatLonGrid | None:
    """Return the grid of sources that cannot be opened for another reason."""
    from credit.data.files import OpenFiles
    from credit.data.problems import Problems
    from credit.data.scan import scan_sources

    scan = scan_sources(config.data, OpenFiles(), Problems())
    return scan.grid if scan else None


def _check_save_loc(config: Config, problems: Problems, say: Callable[[str], None]) -> None:
    import tempfile
    from pathlib import Path

    folder = Path(config.save_loc).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            say(f"save_loc: {config.save_loc} can be written")
    except OSError as error:
        problems.add(
            f"save_loc: {config.save_loc}: {folder} cannot be written ({error.strerror}); choose another folder"
        )


def _check_store(
    config: Config, reader: FieldReader, splits: dict[str, Split], problems: Problems, say: Callable[[str], None]
) -> None:
    from pathlib import Path

    from credit.data.preprocess import bytes_needed, require_space, times_within
    from credit.data.store import StoreReader

    if config.data.store is None:
        return
    if isinstance(reader, StoreReader):
        say(f"store: {config.data.store} is complete")
        return
    with problems.collect():
        need = bytes_needed(reader, len(times_within(reader, splits)))
        require_space(Path(config.data.store), need)
        say(f"store: {config.data.store} is to be written (credit_preprocess), at most {need / 2**30:.2f} GiB")


def _check_times(
    config: Config, reader: FieldReader, splits: dict[str, Split], problems: Problems, say: Callable[[str], None]
) -> None:
    """Count the samples of each split, list its gaps, and read the first, a middle and the last of each."""
    from credit.data.dataset import ForecastDataset
    from credit.data.frames import Frames
    from credit.data.loader import PositionSampler
    from credit.data.splits import describe_gaps, require_samples
    from credit.forecast.initial_times import choose_initial_times

    data, clock, step = config.data, reader.clock, config.data.step_minutes
    frames = Frames(reader, data, None)
    lengths = {"train": data.forecast_len, "valid": data.valid_forecast_len, "test": data.forecast_len}
    for name, split in splits.items():
        with problems.collect():
            found = require_samples(reader.times, split, clock, step, data.history_len, lengths[name])
            inside = reader.times[(reader.times >= split.first) & (reader.times <= split.last)]
            gaps = describe_gaps(inside, clock, step)
            say(f"{split.describe(clock)}: {len(inside)} times, {len(found)} samples; {gaps}")
            samples = ForecastDataset(frames, found, step, data.history_len, lengths[name])
            for index in sorted({0, len(samples) // 2, len(samples) - 1}):
                samples[index]
            if name == "train":
                trainer = config.trainer
                PositionSampler(len(samples), trainer.train_batch_size, trainer.grad_accum_every, config.seed, 0, 1)
    with problems.collect():
        initial = choose_initial_times(config.inference, reader.times, clock, splits["test"], step, data.history_len)
        first, last = clock.format(initial[0]), clock.format(initial[-1])
        say(f"inference.initial_times: {len(initial)} times, {first} to {last}")


def _check_settings(config: Config, reader: FieldReader, problems: Problems) -> None:
    """Build what training, forecasting and scoring build from the config alone."""
    import numpy as np

    from credit.forecast.layout import build_layout
    from credit.losses import build_loss
    from credit.parallel.launch import read_launch
    from credit.parallel.mesh import plan_degrees
    from credit.train.assemble import require_monitor
    from credit.verify.scoring import figure_channels

    channels, step = reader.channels, config.data.step_minutes
    with problems.collect():
        launch = read_launch()
        if launch.world > 1:
            plan_degrees(config.trainer.parallelism, launch.world)
    with problems.collect():
        require_monitor(config, channels)
    with problems.collect():
        scale = np.ones(len(channels.group("prognostic")))
        build_loss(config.loss, channels, reader.grid.area_weights(), scale, reader.masks)
    with problems.collect():
        conf, units = config.inference, config.data.level_units
        build_layout(channels, reader.grid, reader.clock, reader.attributes, step, [step], units, conf.variables)
    with problems.collect():
        figure_channels(config, channels.output)


def _check_model(
    config: Config, grid: LatLonGrid, attributes: dict[str, dict], problems: Problems, say: Callable[[str], None]
) -> None:
    """Build the model without memory for its weights, and send shapes through it."""
    import torch

    from credit.models.lora import apply_lora
    from credit.train.network import build_network

    channels = config.data.channel_map()
    with problems.collect(), torch.device("meta"), torch.no_grad():
        model = build_network(config, channels, grid, attributes).eval()
        count = sum(parameter.numel() for parameter in model.parameters())
        out = model(torch.empty(1, len(channels.input), config.data.history_len, *grid.shape))
        expected = (1, len(channels.output), 1, *grid.shape)
        assert tuple(out.shape) == expected, f"the model gives {tuple(out.shape)}, expected {expected}"
        say(f"model: {config.model.type}, {count:,} parameters, {len(channels.input)} channels in, {expected[1]} out")
        if config.trainer.lora is not None:
            apply_lora(model, config.trainer.lora)
            say(f"trainer.lora: {sum(p.numel() for p in model.parameters() if p.requires_grad):,} parameters train")
