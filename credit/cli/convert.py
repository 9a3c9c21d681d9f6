"""``credit convert``: import published weights, or export the weights of a run."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments, path_argument

HELP = """Import published weights as step 0 of a run, or export the weights of a run.

To import, give --weights, --mean, --std and --static. CONFIG describes the network, the variables, the hybrid levels,
the order of the input channels (data.input_order) and the window of the solar radiation (data.solar.window). Start
from `credit init wxformer_published_6h`. Afterwards, `credit rollout` makes forecasts with the weights, and
`credit train` fine-tunes them.

To export, give --export. Add --checkpoint for a checkpoint other than the best.

example:
  credit convert config.yml --weights model.pt --mean mean.nc --std std.nc --static static.nc
  credit convert config.yml --export weights.safetensors --checkpoint latest"""

__all__ = ["HELP", "add_arguments", "run_command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files of an import and of an export."""
    add_config_arguments(parser)
    parser.add_argument(
        "--weights",
        metavar="FILE",
        type=path_argument,
        help="torch file with a state dict, directly or under the key model_state_dict",
    )
    parser.add_argument("--mean", metavar="FILE", type=path_argument, help="netCDF file with the mean of each variable")
    parser.add_argument(
        "--std",
        metavar="FILE",
        type=path_argument,
        help="netCDF file with the scale (standard deviation) of each variable",
    )
    parser.add_argument(
        "--static", metavar="FILE", type=path_argument, help="netCDF file with the static fields and the grid"
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
        type=path_argument,
        help="write the weights for forecasts into this safetensors file",
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        type=path_argument,
        help="checkpoint to export: best (default), latest or a path",
    )


def run_command(arguments: argparse.Namespace) -> int:
    """Import weights as a checkpoint, or export the weights of a checkpoint; print its path, return the exit status 0.

    Raises:
        ConfigError: if the config is not valid, a file of the import is missing, or ``--rename`` has no equals sign.
        CheckpointError: if the weights do not fit the model, or there is no checkpoint to export.
    """
    from pathlib import Path

    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.train.checkpoint.convert import DEFAULT_RENAME, PublishedFiles, export_weights, import_checkpoint

    # Published weights may have their channels in another order than CONFIG; --levels and --variables give the order.
    overrides = list(arguments.overrides)
    if arguments.levels:
        overrides.append(f"data.levels=[{arguments.levels}]")
    if arguments.variables:
        overrides.append(f"data.variables.prognostic.vars_3D=[{arguments.variables}]")
    config = load_config(arguments.config, overrides)
    if arguments.export:
        print(export_weights(config, arguments.checkpoint, Path(arguments.export)))
        return 0
    # An import needs all four files.
    paths = {}
    missing_options = []
    for name in ("weights", "mean", "std", "static"):
        path = getattr(arguments, name)
        if path is None:
            missing_options.append(f"--{name}")
        else:
            paths[name] = Path(path)
    if missing_options:
        raise ConfigError(f"an import needs {', '.join(missing_options)} as well; --export FILE exports")
    # Names of this package -> names in the published files.
    rename = dict(DEFAULT_RENAME)
    for text in arguments.rename:
        name, equals, published_name = text.partition("=")
        if not equals:
            raise ConfigError(f'--rename: "{text}": write OURS=THEIRS')
        rename[name] = published_name

    print(import_checkpoint(config, PublishedFiles(**paths, rename=rename)))
    return 0
