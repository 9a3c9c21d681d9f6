"""Runner of a network that `credit convert CONFIG --export NAME.pt2` has exported. It needs torch and numpy alone.

    python NAME.py NAME.pt2 inputs.npz forecast.npz

``inputs.npz`` has two arrays in physical units: ``state``, the prognostic channels of the input frames (C, T, H, W), or
(B, C, T, H, W) for a batch, and ``forcing``, the dynamic forcing of all input frames (F, T + N - 1, H, W) of N steps.
``forecast.npz`` gets ``output``, the outputs of the N steps (B, N, C, H, W), with the names of its channels.

Shape suffixes: B batch, C channels, T input frames, N steps, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch.export.passes import move_to_device_pass


class ExportedModel:
    """One step of a network, with its normalisation and post-processes, in physical units.

    Args:
        path: file that ends in ``.pt2``.
        device: device of the computation, such as ``cpu`` or ``cuda``.

    Attributes:
        description: names of the channels (``prognostic``, ``dynamic_forcing``, ``output``), ``units``, ``latitude``,
            ``longitude``, ``step_minutes``, ``num_frames`` (T) and the origin of the weights.
    """

    def __init__(self, path: str, device: str = "cpu") -> None:
        extra_files = {"credit.json": ""}
        program = torch.export.load(path, extra_files=extra_files)
        self.description = json.loads(extra_files["credit.json"])
        self._device = torch.device(device)
        if self._device.type != "cpu":
            program = move_to_device_pass(program, self._device)
        self._step = program.module()

    @torch.no_grad()
    def step(self, state_BCTHW: np.ndarray, forcing_BCTHW: np.ndarray) -> np.ndarray:
        """Return the output channels (B, C, H, W) one step after the last input frame.

        Args:
            state_BCTHW: prognostic channels of the input frames, NaN where missing.
            forcing_BCTHW: dynamic forcing of the input frames, NaN where missing.
        """
        arrays = (state_BCTHW, forcing_BCTHW)
        tensors = [torch.as_tensor(array, dtype=torch.float32, device=self._device) for array in arrays]
        return self._step(*tensors).cpu().numpy()

    def forecast(self, state_BCTHW: np.ndarray, forcing_BCTHW: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the output (B, C, H, W) of each step.

        Args:
            state_BCTHW: prognostic channels of the input frames; their last frame is at the initial time.
            forcing_BCTHW: dynamic forcing from the first input frame to the input of the last step. Its T + N - 1
                frames make N steps.

        Raises:
            ValueError: if an array has another shape.
        """
        num_frames = self.description["num_frames"]
        for name, array in (("prognostic", state_BCTHW), ("dynamic_forcing", forcing_BCTHW)):
            num_channels, rows, columns = (len(self.description[key]) for key in (name, "latitude", "longitude"))
            if array.ndim != 5 or (array.shape[1], *array.shape[3:]) != (num_channels, rows, columns):
                raise ValueError(
                    f"{name}: the shape is {array.shape}, must be (B, {num_channels}, T, {rows}, {columns})"
                )
        if state_BCTHW.shape[2] != num_frames or forcing_BCTHW.shape[2] < num_frames:
            raise ValueError(f"the state must have {num_frames} frames, and the forcing as many or more")
        if len(state_BCTHW) != len(forcing_BCTHW):
            raise ValueError(f"the state has {len(state_BCTHW)} samples, and the forcing {len(forcing_BCTHW)}")
        num_prognostic = len(self.description["prognostic"])
        for number in range(forcing_BCTHW.shape[2] - num_frames + 1):
            output_BCHW = self.step(state_BCTHW, forcing_BCTHW[:, :, number : number + num_frames])
            # The prognostic channels are the first ones of the output.
            newest_BCTHW = output_BCHW[:, :num_prognostic, None]
            state_BCTHW = np.concatenate([state_BCTHW[:, :, 1:], newest_BCTHW], axis=2)
            yield output_BCHW


def main() -> None:
    """Make a forecast from files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="file that ends in .pt2")
    parser.add_argument("inputs", help="file of numpy.savez with state and forcing")
    parser.add_argument("forecast", help="file to write")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    arguments = parser.parse_args()
    model = ExportedModel(arguments.model, arguments.device)
    inputs = np.load(arguments.inputs)
    state, forcing = inputs["state"], inputs["forcing"]
    if state.ndim == 4:
        state, forcing = state[None], forcing[None]
    output = np.stack(list(model.forecast(state, forcing)), axis=1)
    np.savez(arguments.forecast, output=output, channels=np.array(model.description["output"]))


if __name__ == "__main__":
    main()
