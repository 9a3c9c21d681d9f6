"""Write the golden numbers of FuXi: what another implementation computes for tiny networks with random weights.

The other implementation is FuXi of miles-credit 2026.2.0 (NCAR). Its import name is `credit` too, so run this script in
an environment of its own, from another folder and without PYTHONPATH:

    python -m venv golden_env
    golden_env/bin/pip install torch==2.13.0 numpy safetensors tqdm
    golden_env/bin/pip install --no-deps timm==1.0.31 miles-credit==2026.2.0
    golden_env/bin/python make_fuxi_golden.py FOLDER

For each case the script writes NAME.json, the arguments of both implementations, and NAME.npz:

- `x`, `y`: input (B, C, T, H, W) and output in evaluation mode,
- `loss`: mean of the squares of the output,
- `state::<name>`: state dict under the names of the reference; integers are in units of 1 / 128,
- `gradient::<name>`: gradient of the loss with respect to each weight that has one.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

# Weights are multiples of this number, so that they can be stored as integers of 8 bits.
UNIT = 1 / 128
COMMON = {"dim": 8, "num_heads": 2, "num_groups": 4, "depth": 2, "levels": 1, "frames": 1, "frame_patch_size": 1}
COMMON_SWIN = {"dim": 8, "heads": 2, "num_groups": 4, "depth": 2, "edges": "published", "patch_size": 2}
# name -> arguments of the reference, and arguments of this package where their names differ
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fuxi_plain": (
        {"image_height": 16, "image_width": 24, "channels": 2, "surface_channels": 1, "window_size": 2},
        {"in_channels": 3, "out_channels": 3, "padding": None},
    ),
    # Two frames, odd rows, padding across the poles, and windows that do not divide the tokens.
    "fuxi_spectral_norm": (
        {
            "image_height": 21,
            "image_width": 24,
            "channels": 1,
            "surface_channels": 1,
            "input_only_channels": 1,
            "frames": 2,
            "frame_patch_size": 2,
            "window_size": 3,
            "use_spectral_norm": True,
            "padding_conf": {"activate": True, "mode": "earth", "pad_lat": [3, 4], "pad_lon": [4, 4]},
        },
        {
            "in_channels": 3,
            "out_channels": 2,
            "padding": {"mode": "earth", "lat": [3, 4], "lon": [4, 4], "pole": "published"},
        },
    ),
    # Rows that the patches do not cover, so that the output is interpolated.
    "fuxi_interpolated": (
        {
            "image_height": 23,
            "image_width": 16,
            "channels": 1,
            "surface_channels": 1,
            "window_size": 3,
            "dim": 4,
            "padding_conf": {"activate": True, "mode": "mirror", "pad_lat": [2, 2], "pad_lon": [2, 2]},
        },
        {
            "in_channels": 2,
            "out_channels": 2,
            "dim": 4,
            "padding": {"mode": "mirror", "lat": [2, 2], "lon": [2, 2], "pole": "published"},
        },
    ),
}
SAME_NAMES = ("image_height", "image_width", "frames", "window_size", "use_spectral_norm")


class _Placeholder(types.ModuleType):
    """Module whose attributes are empty classes, in place of one that the network imports but does not use."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {})


class _PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of placeholders for modules that would need further packages."""

    PREFIXES = ("torchvision", "timm.data", "credit.postblock", "credit.models.base_model")

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.startswith(self.PREFIXES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """A placeholder needs no code."""


def import_fuxi() -> type:
    """Return the class of the reference, without importing the other models of its package."""
    import credit

    sys.meta_path.insert(0, _PlaceholderFinder())
    # The package of the models imports them all, so it is replaced by one with the same folder and no code.
    models = types.ModuleType("credit.models")
    models.__path__ = [str(Path(credit.__path__[0]) / "models")]
    sys.modules["credit.models"] = models
    from credit.models.fuxi import Fuxi

    return Fuxi


@torch.no_grad()
def draw_state(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return a random state dict, with singular vectors that belong to its weights."""
    state = model.state_dict()
    for name, value in state.items():
        if name.endswith(("weight_u", "weight_v")):
            continue
        integers = torch.randint(-48, 49, value.shape, generator=generator)
        if value.dim() == 1 and "norm" in name and name.endswith("weight"):
            integers += 128
        if name.endswith("logit_scale"):
            integers = torch.randint(100, 128, value.shape, generator=generator)
        state[name] = integers * UNIT
    for name in state:
        if name.endswith("weight_u"):
            weight = state[name.replace("_u", "_orig")]
            # The output channels of a transposed convolution are its second dimension.
            matrix = (
                weight.transpose(0, 1).flatten(1) if name == "u_transformer.up.conv.weight_u" else weight.flatten(1)
            )
            u, _, v = torch.linalg.svd(matrix, full_matrices=False)
            state[name] = u[:, 0].clone()
            state[name.replace("_u", "_v")] = v[0].clone()
    return state


def write_case(folder: Path, name: str, fuxi_class: type) -> None:
    """Write the two files of a case."""
    changes, swin_changes = CASES[name]
    arguments = {**COMMON, "use_spectral_norm": False, **changes}
    swin_arguments = {**COMMON_SWIN, **swin_changes}
    swin_arguments.update({key: arguments[key] for key in SAME_NAMES})
    generator = torch.Generator().manual_seed(7)
    model = fuxi_class(**arguments, patch_height=2, patch_width=2).eval()
    state = draw_state(model, generator)
    model.load_state_dict(state)
    shape = (2, swin_arguments["in_channels"], arguments["frames"], arguments["image_height"], arguments["image_width"])
    x = torch.randint(-256, 257, shape, generator=generator) * UNIT
    y = model(x)
    loss = y.square().mean()
    loss.backward()
    arrays = {"x": x.half().numpy(), "y": y.detach().numpy(), "loss": loss.detach().numpy()}
    for key, value in state.items():
        is_vector = key.endswith(("weight_u", "weight_v"))
        arrays[f"state::{key}"] = value.numpy() if is_vector else (value / UNIT).to(torch.int16).numpy()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            arrays[f"gradient::{key}"] = parameter.grad.numpy()
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    settings = {
        "fuxi": arguments,
        "parameters_in_reference": sum(parameter.numel() for parameter in model.parameters()),
        "swin": swin_arguments,
    }
    (folder / f"{name}.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    reference_class = import_fuxi()
    for case_name in CASES:
        write_case(Path(sys.argv[1]), case_name, reference_class)
