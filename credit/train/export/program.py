"""Export of one forecast step as a program of `torch.export`, together with a script that runs the program.

The program includes normalisation and post-processes.

Shape suffixes: B batch, C channels, T input frames, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from credit import __version__
from credit.config import Config, build_config
from credit.errors import ConfigError, CreditError
from credit.forecast.stepper import Stepper
from credit.models.inference import prepare_for_inference
from credit.parallel.mesh import DeviceGrid
from credit.train.build.assets import ModelAssets
from credit.train.build.fine_tuning import load_forecast_network
from credit.train.build.stepper import build_stepper
from credit.train.checkpoint import checkpoint
from credit.utils.atomic import atomic_write, atomic_write_text

# Name of the description inside the exported file.
DESCRIPTION = "credit.json"
_RUNNER = Path(__file__).with_name("run_exported.py")
# Groups of channels that are inputs of the program; static fields are stored inside the program.
_INPUT_GROUPS = ("prognostic", "dynamic_forcing")
# Batch size of the example inputs: torch.export would treat a size of 0 or 1 as a constant.
_EXAMPLE_BATCH = 2
# Largest difference between the program and the network in standard deviations of a channel. In float32, a pressure of
# 1e5 Pa has a rounding error of 4e-3 Pa.
_MAX_ERROR = 1e-3


class ForecastStep(nn.Module):
    """Module that computes one forecast step, with inputs and outputs in physical units.

    Args:
        stepper: stepper of the network.
        missing_CHW: bool, True where an output channel is always missing.
    """

    def __init__(self, stepper: Stepper, missing_CHW: Tensor) -> None:
        super().__init__()
        self.network = stepper.model
        self.normalizer = stepper.normalizer
        self.register_buffer("missing_CHW", missing_CHW)
        self._stepper = stepper

    def forward(self, state_BCTHW: Tensor, forcing_BCTHW: Tensor) -> Tensor:
        """Return the output channels (B, C, H, W) in physical units, NaN where they are always missing.

        Args:
            state_BCTHW: prognostic channels of the input frames in physical units, NaN where missing.
            forcing_BCTHW: dynamic forcing of the same frames in physical units, NaN where missing.
        """
        state = self.normalizer.encode(state_BCTHW, "prognostic")
        forcing = self.normalizer.encode(forcing_BCTHW, "dynamic_forcing")
        output = self._stepper.decode(self._stepper.step(state, forcing))
        return torch.where(self.missing_CHW, torch.nan, output)


def export_program(config: Config, name_or_path: str, target: Path) -> tuple[Path, Path]:
    """Write one forecast step as a program of `torch.export`, and a script that runs the program.

    The program accepts any batch size and computes in float32.

    Args:
        config: the config of the run.
        name_or_path: the checkpoint: ``best``, ``latest`` or a path.
        target: program file to write, which ends in ``.pt2``; the script gets the same name with the suffix ``.py``.

    Returns:
        The paths of the program and of the script.

    Raises:
        CheckpointError: if the checkpoint does not exist or is damaged.
        ConfigError: if the network was trained with noise, which the program cannot sample.
        CreditError: if `torch.export` cannot trace the network, if the output of the program differs from the output of
            the network, or if a file cannot be written.
    """
    path = checkpoint.resolve_checkpoint(Path(config.save_loc) / "checkpoints", name_or_path, "--checkpoint")
    meta = checkpoint.load_meta(path)
    trained = build_config(meta["config"], origin=str(path / "meta.json"))
    if trained.model.noise:
        raise ConfigError(
            f"{path}: was trained with model.noise, and an exported step cannot sample noise; export the weights "
            "instead, with --export NAME.safetensors"
        )
    assets = ModelAssets.from_stored(meta, checkpoint.load_tensors(path, "assets"))
    lora = trained.trainer.lora
    # The trainer section of the current config contains the new path of a base that was moved (``trainer.resume``).
    trained = trained.model_copy(update={"trainer": config.trainer})
    device = torch.device("cpu")
    network = prepare_for_inference(load_forecast_network(trained, lora, assets, path, device, DeviceGrid()))
    step = ForecastStep(build_stepper(trained, assets, network, device, amp=False), _build_missing_mask(assets)).eval()
    num_frames = trained.data.history_len
    try:
        program = trace_step(step, assets, num_frames)
        require_same_output(step, program, assets, num_frames)
    except Exception as error:
        # The errors of torch.export have no common base class, and plugins may raise any exception.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CreditError(
            f"{path}: torch.export fails for the {trained.model.type} network ({reason}); export the weights "
            "instead, with --export NAME.safetensors"
        ) from error
    description = {
        "checkpoint_step": meta["step"],
        "weights": checkpoint.read_weights_checksum(path, "forecast"),
        **_describe_arrays(trained, assets),
    }
    extra_files = {DESCRIPTION: json.dumps(description)}
    atomic_write(target, lambda temporary: _save_program(program, temporary, extra_files))
    return target, atomic_write_text(target.with_suffix(".py"), _RUNNER.read_text(encoding="utf-8"))


def _describe_arrays(config: Config, assets: ModelAssets) -> dict[str, object]:
    """Return the description of the input and output arrays of a program; the script of the program reads it.

    Args:
        config: config that the weights were trained with.
        assets: channels, grid and attributes of the model.
    """
    return {
        "credit": __version__,
        "model": config.model.type,
        "step_minutes": config.data.step_minutes,
        "num_frames": config.data.history_len,
        **{group: [channel.name for channel in assets.channels.group(group)] for group in _INPUT_GROUPS},
        "output": [channel.name for channel in assets.channels.output],
        "units": {name: attributes.get("units", "") for name, attributes in assets.attributes.items()},
        "latitude": assets.grid.lat.tolist(),
        "longitude": assets.grid.lon.tolist(),
    }


def trace_step(step: ForecastStep, assets: ModelAssets, num_frames: int) -> torch.export.ExportedProgram:
    """Trace a forecast step and return it as a program with a variable batch size.

    Args:
        step: the step, in eval mode.
        assets: channels and grid of the model.
        num_frames: number of input frames.
    """
    examples = _make_examples(step, assets, num_frames, _EXAMPLE_BATCH)
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        # Networks build tables in their first call. A table that is built while torch.export traces has no values, so
        # the step is called once before.
        step(*examples)
        program = torch.export.export(step, examples, dynamic_shapes=({0: batch}, {0: batch}))
    # Some constants are views of a larger or a repeated tensor, which torch.export.save cannot write.
    for tensors in (program.state_dict, program.constants):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                plain = tensor.detach().clone(memory_format=torch.contiguous_format)
                if isinstance(tensor, nn.Parameter):
                    plain = nn.Parameter(plain, requires_grad=False)
                tensors[name] = plain
    return program


def _make_examples(step: ForecastStep, assets: ModelAssets, num_frames: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return an example state and forcing in physical units, (B, C, T, H, W) each.

    The values are random, with the mean and standard deviation of each channel in the training data.
    """
    generator = torch.Generator().manual_seed(0)
    examples = []
    for group in _INPUT_GROUPS:
        num_channels = len(assets.channels.group(group))
        shape = (batch_size, num_channels, num_frames, *assets.grid.shape)
        examples.append(step.normalizer.decode(torch.randn(shape, generator=generator), group))
    return examples[0], examples[1]


@torch.no_grad()
def require_same_output(
    step: ForecastStep, program: torch.export.ExportedProgram, assets: ModelAssets, num_frames: int
) -> None:
    """Raise CreditError if the output of a program differs from the output of the forecast step.

    The comparison uses a different batch size from the traced example.

    Args:
        step: the step, in eval mode.
        program: the program of `trace_step`.
        assets: channels and grid of the model.
        num_frames: number of input frames.

    Raises:
        CreditError: if an output differs by more than rounding in float32.
    """
    inputs = _make_examples(step, assets, num_frames, _EXAMPLE_BATCH + 1)
    expected = step.normalizer.encode(step(*inputs), "output")
    output = step.normalizer.encode(program.module()(*inputs), "output")
    largest_error = float((output - expected).abs().max())
    # A comparison with NaN is False.
    if not largest_error < _MAX_ERROR:
        raise CreditError(f"its output differs by {largest_error:.1g} standard deviations from the network's output")


def _save_program(program: torch.export.ExportedProgram, path: Path, extra_files: dict[str, str]) -> None:
    """Write a program and its extra files to `path`; the path may have any suffix."""
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files=extra_files)


def _build_missing_mask(assets: ModelAssets) -> Tensor:
    """Return a bool tensor (C, H, W), True where an output channel is always missing."""
    missing_CHW = np.zeros((len(assets.channels.output), *assets.grid.shape), dtype=bool)
    for index, channel in enumerate(assets.channels.output):
        if channel.variable in assets.masks:
            missing_CHW[index] = assets.masks[channel.variable]
    return torch.from_numpy(missing_CHW)
