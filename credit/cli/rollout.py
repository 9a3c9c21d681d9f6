"""``credit_rollout``: forecasts from a list of initial times."""

from __future__ import annotations

import argparse

from credit.cli.arguments import add_config_arguments

HELP = """Forecast from the initial times of inference.initial_times with the checkpoint inference.checkpoint.

Writes save_loc/forecasts (inference.folder): one CF netCDF file an initial time, or one zarr store (inference.format).
Forecasts that are already complete are not made again. Files of other weights or of another length are replaced; a zarr
store of those is refused: remove it, or choose another inference.folder."""

__all__ = ["HELP", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, overrides and the part."""
    add_config_arguments(parser)
    parser.add_argument("--part", metavar="I/N", help="only the I-th of N parts of the initial times, for job arrays")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    import numpy as np
    from tqdm import tqdm

    from credit.config import load_config
    from credit.forecast.initial_times import choose_initial_times, take_part
    from credit.forecast.run import forecast, require_finite
    from credit.forecast.writer import ForecastWriter
    from credit.parallel.launch import require_one_process
    from credit.times import parse_duration
    from credit.train.assemble import assemble_forecaster, describe_run, open_fields

    require_one_process("rollout")
    config = load_config(arguments.config, arguments.overrides)
    reader, splits = open_fields(config)
    made = assemble_forecaster(config, reader, config.inference.checkpoint)
    conf, step = config.inference, config.data.step_minutes
    initial = choose_initial_times(conf, reader.times, reader.clock, splits["test"], step, config.data.history_len)
    steps = parse_duration(conf.lead_time) // step
    kept = range(1, steps + 1)
    if conf.output_every is not None:
        kept = [number for number in kept if number * step % parse_duration(conf.output_every) == 0]
    folder = Path(config.save_loc) / conf.folder
    writer = ForecastWriter(
        folder,
        made.assets.channels,
        made.assets.grid,
        reader.clock,
        made.assets.attributes,
        step,
        lead_minutes=[number * step for number in kept],
        initial_minutes=initial,
        level_units=config.data.level_units,
        format=conf.format,
        layout=conf.layout,
        variables=conf.variables,
        masks=made.assets.masks,
        global_attributes=describe_run(made, reader),
    )
    mine = take_part(initial, arguments.part) if arguments.part else initial
    todo = [minutes for minutes in mine if not writer.is_complete(minutes)]
    with tqdm(total=len(todo), desc="forecasting", unit="start", disable=None) as bar:
        for first in range(0, len(todo), conf.batch_size):
            batch = todo[first : first + conf.batch_size]
            rollout = forecast(made.stepper, made.frames, batch, steps, step, config.data.history_len)
            fields = [out.cpu().numpy() for number, out in enumerate(rollout, start=1) if number in kept]
            for row, minutes in enumerate(batch):
                require_finite(fields, row, f"{made.path}: forecast from {reader.clock.format(minutes)}")
                writer.write(minutes, np.stack([field[row] for field in fields]))
                bar.update()
    writer.close()
    print(f"{len(todo)} forecasts written, {len(mine) - len(todo)} were there: {folder}")
    return 0
