"""``credit convert``: convert a config of miles-credit, import published weights, or export the weights of a run."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from credit.cli.common import add_config_arguments, parse_path

if TYPE_CHECKING:
    from pathlib import Path

    from credit.config import Config

HELP = """Convert a config of miles-credit, import published weights as step 0 of a run, or export the weights of a run.

To convert a config of NCAR's miles-credit, give --output. A report next to the output lists every key of CONFIG. If
some keys have no counterpart, the command lists them, writes nothing and ends with exit code 2. With --weights, it
also imports the weights; --mean, --std and --static are then by default the files that CONFIG names.

To import, give --weights, --mean, --std and --static. CONFIG describes the network, the variables, the hybrid levels,
the order of the input channels (data.input_order) and the window of the solar radiation (data.solar.window). Start
from `credit init wxformer_published_6h`. Afterwards, `credit rollout` makes forecasts with the weights, and
`credit train` fine-tunes them.

To export weights, give --export with a name that ends in .safetensors. If the name ends in .pt2, the command exports
the whole forecast step, which needs only torch and numpy, and writes a runner next to it. The best checkpoint is
exported by default; --checkpoint chooses a different checkpoint.

To score forecasts with WeatherBench-X, give --weatherbench. The command writes the forecasts of inference.folder, the
data as truth and the climatology, with the variable names of WeatherBench. --rename OURS=THEIRS changes a name.

example:
  credit convert THEIRS.yml --output my_run.yml
  credit convert config.yml --weights model.pt --mean mean.nc --std std.nc --static static.nc
  credit convert config.yml --export weights.safetensors --checkpoint latest
  credit convert config.yml --export step.pt2
  credit convert config.yml --weatherbench FOLDER"""

__all__ = ["HELP", "add_arguments", "run_command"]

# Options that name the files of an import.
_IMPORTED_FILES = ("weights", "mean", "std", "static")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `credit convert`."""
    add_config_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=parse_path,
        help="convert CONFIG, a config of miles-credit, to this YAML file, and write a report next to it (.report.md)",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        type=parse_path,
        help="torch file with a state dict, directly or under the key model_state_dict",
    )
    parser.add_argument("--mean", metavar="FILE", type=parse_path, help="netCDF file with the mean of each variable")
    parser.add_argument(
        "--std",
        metavar="FILE",
        type=parse_path,
        help="netCDF file with the scale (standard deviation) of each variable",
    )
    parser.add_argument(
        "--static", metavar="FILE", type=parse_path, help="netCDF file with the static fields and the grid"
    )
    parser.add_argument(
        "--levels", metavar="L1,L2,...", help="levels in the order of the weights, instead of data.levels"
    )
    parser.add_argument("--variables", metavar="U,V,...", help="3-D prognostic variables in the order of the weights")
    parser.add_argument(
        "--rename",
        metavar="OURS=THEIRS",
        action="append",
        default=[],
        help="name of a variable in these files; repeat for several variables",
    )
    parser.add_argument(
        "--export",
        metavar="FILE",
        type=parse_path,
        help="write the weights for forecasts into this safetensors file, or the forecast step into this .pt2 file",
    )
    parser.add_argument(
        "--weatherbench",
        metavar="FOLDER",
        type=parse_path,
        help="write forecasts, truth and climatology for WeatherBench-X into this new folder",
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        type=parse_path,
        help="checkpoint to export: best (default), latest or a path",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Convert a config, import weights or export weights; print the paths of the results; return the exit status 0.

    Raises:
        ConfigError: if the config is not valid or cannot be converted, a file of the import is missing, or ``--rename``
            has no equals sign.
        CheckpointError: if the weights do not match the model, or there is no checkpoint to export.
    """
    from pathlib import Path

    from credit.config import load_config
    from credit.errors import ConfigError

    if arguments.output is not None:
        return _convert_config(arguments)
    # The channels of published weights may be in a different order from CONFIG; --levels and --variables give the
    # order.
    overrides = _list_overrides(arguments)
    try:
        config = load_config(arguments.config, overrides)
    except ConfigError as error:
        if _is_miles_config(Path(arguments.config)):
            raise ConfigError(
                f"{arguments.config}: is a config of miles-credit; `credit convert {arguments.config} -o my_run.yml` "
                "converts it"
            ) from error
        raise
    if arguments.export and arguments.weatherbench:
        raise ConfigError("--export and --weatherbench cannot be combined; give only one option")
    if arguments.export:
        _export_model(config, arguments.checkpoint, Path(arguments.export))
        return 0
    if arguments.weatherbench:
        print(_export_forecasts(config, Path(arguments.weatherbench), _read_renames(arguments, {}, {})))
        return 0
    paths = {name: getattr(arguments, name) for name in _IMPORTED_FILES}
    missing_options = [f"--{name}" for name, path in paths.items() if path is None]
    if missing_options:
        raise ConfigError(f"an import also needs {', '.join(missing_options)}; to export, give --export FILE")
    from credit.train.checkpoint.convert import DEFAULT_RENAME

    _import_weights(config, paths, _read_renames(arguments, DEFAULT_RENAME, {}))
    return 0


def _export_model(config: Config, checkpoint: str, target: Path) -> None:
    """Export the weights of a run, and print the paths of the written files.

    If the suffix of `target` is ``.pt2``, export a program that computes a complete forecast step instead.
    """
    if target.suffix == ".pt2":
        from credit.train.export.program import export_program

        for path in export_program(config, checkpoint, target):
            print(path)
        return
    from credit.train.checkpoint.convert import export_weights

    print(export_weights(config, checkpoint, target))


def _export_forecasts(config: Config, folder: Path, rename: Mapping[str, str]) -> Path:
    """Write the forecasts of a run and their truth for WeatherBench-X, and return the folder.

    Args:
        config: config of the run.
        folder: the folder to create.
        rename: variable -> its name in the stores.
    """
    from pathlib import Path

    from credit.forecast.export.weatherbench import ExportNames, export_weatherbench
    from credit.forecast.io.forecast_reader import open_forecasts
    from credit.train.build.open_data import open_data_and_splits
    from credit.verify.scores.baselines import build_climatology

    data = config.data
    archive = open_forecasts(Path(config.save_loc) / config.inference.folder, level_units=data.level_units)
    # Accumulated variables of the data are sums over one time step.
    hours = {}
    if data.step_minutes % 60 == 0:
        for variable, cell_methods in archive.cell_methods.items():
            if cell_methods == "time: sum" and variable not in config.inference.derive:
                hours[variable] = data.step_minutes // 60
    names = ExportNames(rename, hours, data.level_units)
    reader, splits = open_data_and_splits(config)
    channel_names = [channel.name for channel in reader.channels.output]
    climatology, climatology_grid = build_climatology(config.verification, data, reader, channel_names, splits["train"])
    # A climatology from a file may be on a different grid from the data if the scores are (``verification.grid``).
    is_on_grid = climatology_grid.describe_mismatch(reader.grid) is None
    evaluate = climatology.evaluate if is_on_grid else None
    return export_weatherbench(folder, archive, reader, evaluate, names)


def _list_overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of the command line, including the overrides that ``--levels`` and ``--variables`` set."""
    overrides = list(arguments.overrides)
    if arguments.levels:
        overrides.append(f"data.levels=[{arguments.levels}]")
    if arguments.variables:
        overrides.append(f"data.variables.prognostic.vars_3D=[{arguments.variables}]")
    return overrides


def _is_miles_config(path: Path) -> bool:
    """Return True if a file is a training config of miles-credit."""
    from credit.errors import ConfigError
    from credit.interop.miles_credit import find_generation, read_yaml_tree

    try:
        return find_generation(read_yaml_tree(path)) is not None
    except ConfigError:
        return False


def _convert_config(arguments: argparse.Namespace) -> int:
    """Write the converted config and the report; import the weights if the command line names weights.

    Raises:
        ConfigError: if an option would have no effect, an output file already exists, the config cannot be converted,
            or a file of the import is missing.
    """
    from pathlib import Path

    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.interop.miles_credit import convert_file
    from credit.utils.atomic import atomic_write

    if arguments.overrides or arguments.export:
        raise ConfigError("--output: give no overrides and no --export; edit the converted config instead")
    output = Path(arguments.output)
    report_path = output.with_suffix(".report.md")
    for path in (output, report_path):
        if path.exists():
            raise ConfigError(f"{path}: already exists; remove it or name a different file")
    conversion = convert_file(Path(arguments.config))
    paths = {}
    if arguments.weights:
        paths = _find_imported_files(arguments, conversion.published_files)
        if conversion.report.import_obstacles:
            reasons = "\n".join(f"  - {reason}" for reason in conversion.report.import_obstacles)
            raise ConfigError(f"--weights: weights of {arguments.config} cannot be imported\n{reasons}")

    report_text = conversion.report.to_markdown(arguments.config, conversion.generation)
    atomic_write(output, lambda path: path.write_text(conversion.yaml_text, encoding="utf-8"))
    atomic_write(report_path, lambda path: path.write_text(report_text, encoding="utf-8"))
    counts = conversion.report.count()
    print(f"{arguments.config}: generation {conversion.generation}; values to check:")
    print(conversion.report.describe_derived())
    print(", ".join(f"{number} {name}" for name, number in counts.items() if number))
    print(output)
    print(report_path)
    if paths:
        config = load_config(output, _list_overrides(arguments))
        from credit.train.checkpoint.convert import DEFAULT_RENAME

        rename = _read_renames(arguments, DEFAULT_RENAME, conversion.published_names)
        _import_weights(config, paths, rename, conversion.static_is_normalised)
    return 0


def _find_imported_files(arguments: argparse.Namespace, files: Mapping[str, str]) -> dict[str, str]:
    """Return the path of each file of an import: from its option or, without the option, from the converted config.

    Args:
        arguments: the arguments of the command.
        files: option name -> path in the converted config.

    Raises:
        ConfigError: if the path of a file is not known or the file does not exist.
    """
    import os
    from pathlib import Path

    from credit.errors import ConfigError

    paths = {}
    problems = []
    for name in _IMPORTED_FILES:
        path = getattr(arguments, name)
        if path is None and name in files:
            path = os.path.expandvars(files[name])
            if not Path(path).exists():
                problems.append(f"--{name}: {path}, which the config names, does not exist; give the option")
                continue
        if path is None:
            problems.append(f"--{name}: the config names no such file; give the option")
        else:
            paths[name] = path
    if problems:
        raise ConfigError("\n".join(problems))
    return paths


def _read_renames(
    arguments: argparse.Namespace, default_names: Mapping[str, str], names_in_config: Mapping[str, str]
) -> dict[str, str]:
    """Return variable -> its name in the files.

    ``--rename`` overrides the converted config, which overrides the defaults.

    Args:
        arguments: the arguments of the command.
        default_names: variable -> default name in the files.
        names_in_config: variable -> its name in the files according to a converted config.

    Raises:
        ConfigError: if ``--rename`` has no equals sign.
    """
    from credit.errors import ConfigError

    rename = {**default_names, **names_in_config}
    for text in arguments.rename:
        name, equals, published_name = text.partition("=")
        if not equals:
            raise ConfigError(f'--rename: "{text}": write OURS=THEIRS')
        rename[name] = published_name
    return rename


def _import_weights(
    config: Config, paths: Mapping[str, str], rename: Mapping[str, str], static_is_normalised: bool = False
) -> None:
    """Import published weights and print the path of the checkpoint.

    Args:
        config: config of the run.
        paths: option name -> path of the file.
        rename: variable -> its name in these files.
        static_is_normalised: True to treat static fields as normalised, even if the files contain their statistics.
    """
    from pathlib import Path

    from credit.train.checkpoint.convert import PublishedFiles, import_checkpoint

    files = {name: Path(path) for name, path in paths.items()}
    print(import_checkpoint(config, PublishedFiles(**files, rename=rename, static_is_normalised=static_is_normalised)))
