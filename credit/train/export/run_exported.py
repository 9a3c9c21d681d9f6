"""Script that runs a network exported by `credit convert CONFIG --export NAME.pt2`. It needs only torch and numpy.

    python NAME.py NAME.pt2 inputs.npz forecast.npz

``inputs.npz`` contains two arrays in physical units, with an additional first dimension B for a batch:

- ``state``, the prognostic channels of the input frames (C, T, H, W);
- ``forcing``, the dynamic forcing of the input frames of all N steps (F, T + N - 1, H, W).

The script writes ``forecast.npz`` with ``output``, the outputs of the N steps (B, N, C, H, W), and ``channels``, the
names of the output channels.

Shape suffixes: B batch, C channels, F forcing channels, T input frames, N steps, H latitude rows, W longitude columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import numpy as np
import torch
from torch.export.passes import move_to_device_pass


class ExportedModel:
    """Exported network that computes forecast steps in physical units, with normalisation and post-processes.

    Args:
        path: program file, which ends in ``.pt2``.
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
        """Yield the output (B, C, H, W) of each of the N forecast steps.

        Args:
            state_BCTHW: prognostic channels of the T input frames; the last frame is at the initial time.
            forcing_BCTHW: dynamic forcing from the first input frame to the last input frame of step N, T + N - 1
                frames.

        Raises:
            ValueError: if an array has a wrong shape.
        """
        num_frames = self.description["num_frames"]
        for name, array in (("prognostic", state_BCTHW), ("dynamic_forcing", forcing_BCTHW)):
            num_channels, rows, columns = (len(self.description[key]) for key in (name, "latitude", "longitude"))
            if array.ndim != 5 or (array.shape[1], *array.shape[3:]) != (num_channels, rows, columns):
                raise ValueError(
                    f"{name}: the shape is {array.shape}, but must be (B, {num_channels}, T, {rows}, {columns})"
                )
        if state_BCTHW.shape[2] != num_frames or forcing_BCTHW.shape[2] < num_frames:
            raise ValueError(f"the state must have {num_frames} frames, and the forcing at least as many")
        if len(state_BCTHW) != len(forcing_BCTHW):
            raise ValueError(f"the state has {len(state_BCTHW)} samples, and the forcing {len(forcing_BCTHW)}")
        num_prognostic = len(self.description["prognostic"])
        for number in range(forcing_BCTHW.shape[2] - num_frames + 1):
            output_BCHW = self.step(state_BCTHW, forcing_BCTHW[:, :, number : number + num_frames])
            # The first channels of the output are the prognostic channels.
            newest_BCTHW = output_BCHW[:, :num_prognostic, None]
            state_BCTHW = np.concatenate([state_BCTHW[:, :, 1:], newest_BCTHW], axis=2)
            yield output_BCHW


def main() -> None:
    """Read inputs from a file, make a forecast, and write the forecast to a file."""
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
