"""Export of networks as programs of torch.export, whose script gives the forecasts of ``credit rollout``."""

from __future__ import annotations

import ast
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import xarray as xr
import yaml

import credit
from credit.cli.main import main
from credit.errors import ConfigError, CreditError
from credit.train.export import program
from tests.networks.networks import SECTIONS
from tests.smoke.conftest import world

INITIAL_TIME = "2000-02-09T00:00"


def load_script(path: Path) -> ModuleType:
    """Return the script beside an exported file, as a module."""
    spec = spec_from_file_location("exported_script", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(folder: Path, *overrides: str, **sections: dict) -> str:
    """Train for two steps in a small world with masked and transformed variables; return the path of the config."""
    world(folder)
    path = folder / "config.yml"
    config = yaml.safe_load(path.read_text())
    config.update(sections)
    path.write_text(yaml.safe_dump(config))
    arguments = [str(path), "trainer.max_steps=2", "trainer.validate_every=2", "data.history_len=2", *overrides]
    assert main(["train", *arguments]) == 0
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_exported_script_gives_forecasts_of_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    config = train(tmp_path, model=SECTIONS[name])
    common_options = (config, "data.history_len=2")
    forecast_options = (
        "inference.lead_time=24h",
        f"inference.initial_times=[{INITIAL_TIME}]",
        "inference.batch_size=1",
    )
    assert main(["rollout", *common_options, *forecast_options]) == 0
    assert main(["convert", *common_options, "--export", str(tmp_path / "step.pt2")]) == 0

    model = credit.load(tmp_path / "run", device="cpu")
    with xr.open_dataset(tmp_path / "data.nc") as fields:
        inputs = model.network_inputs(fields, "24h", initial_time=INITIAL_TIME)
    np.savez(tmp_path / "inputs.npz", **inputs)
    script = load_script(tmp_path / "step.py")
    arguments = ["step.py", *(str(tmp_path / file) for file in ("step.pt2", "inputs.npz", "forecast.npz"))]
    monkeypatch.setattr(sys, "argv", arguments)
    script.main()

    with np.load(tmp_path / "forecast.npz") as result:
        output_NCHW, channels = result["output"][0], result["channels"].tolist()
    expected = xr.open_dataset(next((tmp_path / "run" / "forecasts").glob("*.nc")))
    assert channels == ["z850", "z500", "t2m", "rain"] and len(output_NCHW) == 4
    for index, channel in enumerate(channels):
        values = expected["z"].sel(level=float(channel[1:])) if channel[0] == "z" else expected[channel]
        # Between two steps the state is rounded to float32 in physical units.
        np.testing.assert_allclose(output_NCHW[:, index], values.values, rtol=2e-6, atol=1e-4 * float(values.std()))
    # Several forecasts in a batch equal single forecasts.
    exported = script.ExportedModel(str(tmp_path / "step.pt2"))
    states, forcings = (np.stack([inputs[key], 1.01 * inputs[key], inputs[key]]) for key in ("state", "forcing"))
    batch_BCHW = exported.step(states, forcings[:, :, :2])
    np.testing.assert_allclose(batch_BCHW[0], output_NCHW[0], rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(batch_BCHW[0], batch_BCHW[2])
    with pytest.raises(ValueError, match="the shape is"):
        next(exported.forecast(states[:, :1], forcings))
    with pytest.raises(ValueError, match="3 samples, and the forcing 2"):
        next(exported.forecast(states, forcings[:2]))


def test_exported_script_imports_only_torch_and_numpy() -> None:
    tree = ast.parse(program._RUNNER.read_text(encoding="utf-8"))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    third_party_modules = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    assert third_party_modules == {"torch", "numpy"}


def test_wrong_program_and_noise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_path = train(tmp_path, model=SECTIONS["unet"])
    config = credit.config.load_config(config_path, ["data.history_len=2"])

    def export_zeros(step: torch.nn.Module, *arguments: object) -> torch.export.ExportedProgram:
        traced = trace_step(step, *arguments)
        for name in traced.state_dict:
            if name.startswith("network."):
                traced.state_dict[name] = torch.nn.Parameter(traced.state_dict[name] * 0)
        return traced

    trace_step = program.trace_step
    monkeypatch.setattr(program, "trace_step", export_zeros)
    with pytest.raises(CreditError, match=r"fails for the unet .*differs by .* standard deviations.*safetensors"):
        program.export_program(config, "best", tmp_path / "step.pt2")
    assert not list(tmp_path.glob("step*"))
    noisy = credit.config.build_config({**yaml.safe_load(Path(config_path).read_text())}, origin="test")
    monkeypatch.setattr(
        program, "build_config",
        lambda *_, **__: noisy.model_copy(update={"model": noisy.model.model_copy(update={"noise": ["x"]})}),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="was trained with model.noise"):
        program.export_program(config, "best", tmp_path / "step.pt2")
