"""``credit_convert``: imports published checkpoints, exports ours."""

from __future__ import annotations

import argparse

from credit.cli.common import add_config_arguments, path_argument

HELP = """Import published weights as step 0 of the run of CONFIG, or export the run's weights.

Import: credit_convert CONFIG --weights MODEL.pt --mean MEAN.nc --std STD.nc --static STATIC.nc
  CONFIG (credit_init wxformer_published_6h) holds the rest: the network, the variables, the hybrid levels, the order
  of the input channels (data.input_order) and the window of the solar radiation (data.solar.window). --levels and
  --variables replace data.levels and the 3-D prognostic variables. credit_rollout then forecasts with it, and
  credit_train fine-tunes it.
Export: credit_convert CONFIG --export WEIGHTS.safetensors [--checkpoint best|latest|PATH]"""

__all__ = ["HELP", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files of an import and of an export."""
    add_config_arguments(parser)
    parser.add_argument(
        "--weights", metavar="FILE", type=path_argument, help="torch file with model_state_dict or a bare state dict"
    )
    parser.add_argument("--mean", metavar="FILE", type=path_argument, help="netCDF with the mean of each variable")
    parser.add_argument("--std", metavar="FILE", type=path_argument, help="netCDF with the scale of each variable")
    parser.add_argument(
        "--static", metavar="FILE", type=path_argument, help="netCDF with the static fields and the grid"
    )
    parser.add_argument("--levels", metavar="L1,L2,...", help="levels in the weights' order, instead of data.levels")
    parser.add_argument("--variables", metavar="U,V,...", help="3-D variables in the weights' order")
    parser.add_argument(
        "--rename", metavar="OURS=THEIRS", action="append", default=[], help="a variable's name in these files"
    )
    parser.add_argument(
        "--export", metavar="FILE", type=path_argument, help="write the weights that forecast to one safetensors file"
    )
    parser.add_argument(
        "--checkpoint", default="best", type=path_argument, help="what to export: best (default), latest or a path"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from pathlib import Path

    from credit.config import load_config
    from credit.errors import ConfigError
    from credit.train.checkpoint.convert import DEFAULT_RENAME, PublishedFiles, export_weights, import_checkpoint

    overrides = list(arguments.overrides)
    if arguments.levels:
        overrides.append(f"data.levels=[{arguments.levels}]")
    if arguments.variables:
        overrides.append(f"data.variables.prognostic.vars_3D=[{arguments.variables}]")
    config = load_config(arguments.config, overrides)
    if arguments.export:
        print(export_weights(config, arguments.checkpoint, Path(arguments.export)))
        return 0
    missing = [f"--{name}" for name in ("weights", "mean", "std", "static") if getattr(arguments, name) is None]
    if missing:
        raise ConfigError(f"an import needs {', '.join(missing)} as well; --export FILE exports")
    wrong = [text for text in arguments.rename if "=" not in text]
    if wrong:
        raise ConfigError(f'--rename: "{wrong[0]}": write OURS=THEIRS')
    rename = DEFAULT_RENAME | dict(text.split("=", 1) for text in arguments.rename)
    paths = {name: Path(getattr(arguments, name)) for name in ("weights", "mean", "std", "static")}
    print(import_checkpoint(config, PublishedFiles(**paths, rename=rename)))
    return 0
