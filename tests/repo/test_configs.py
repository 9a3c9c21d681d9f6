"""Every file in config/ is a link to a template of the package, loads, and builds its model on the meta device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from credit.config import load_config
from credit.grid import LatLonGrid
from credit.train.build.model import build_network

REPOSITORY = Path(__file__).parents[2]
TEMPLATES = REPOSITORY / "credit" / "config" / "templates"
CONFIGS = sorted((REPOSITORY / "config").glob("*.yml"))


def _equiangular(rows: int, columns: int) -> np.ndarray:
    return 90.0 - (np.arange(rows) + 0.5) * 180.0 / rows


def _with_poles(rows: int, columns: int) -> np.ndarray:
    return np.linspace(90.0, -90.0, rows)


def _gaussian(rows: int, columns: int) -> np.ndarray:
    return np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(rows)[0]))


# Name of a config -> grid of its data.
GRIDS = {
    "quickstart": (_equiangular, 32, 64),
    "speedy_5p6deg": (_equiangular, 32, 64),
    "speedy_unet": (_equiangular, 32, 64),
    "speedy_ensemble": (_equiangular, 32, 64),
    "weatherbench2_5p6deg": (_equiangular, 32, 64),
    "weatherbench2_1p5deg": (_with_poles, 121, 240),
    "gfs_wind_1deg": (_with_poles, 181, 360),
    "wxformer_1deg": (_with_poles, 181, 360),
    "realtime_gfs": (_with_poles, 181, 360),
    "realtime_ifs": (_with_poles, 181, 360),
    "wxformer_0p25deg": (_with_poles, 721, 1440),
    "arco_era5": (_with_poles, 721, 1440),
    "wxformer_published_6h": (_gaussian, 640, 1280),
}
# Name of a config -> number of parameters, if it must equal a published size.
PARAMETERS = {"wxformer_1deg": 10_309_328, "wxformer_published_6h": 124_388_963}


def build_grid(name: str) -> LatLonGrid:
    """Return the grid of the data of config `name`."""
    build_latitudes, rows, columns = GRIDS[name]
    return LatLonGrid.from_coords(build_latitudes(rows, columns), np.arange(columns) * 360.0 / columns)[0]


def test_each_config_is_a_link_to_its_template() -> None:
    assert {path.name for path in CONFIGS} == {path.name for path in TEMPLATES.glob("*.yml")}
    for path in CONFIGS:
        assert path.is_symlink(), f"{path} is a copy; link it to {TEMPLATES / path.name}"
        assert path.resolve() == (TEMPLATES / path.name).resolve()


def test_the_ensemble_fine_tunes_the_network_of_its_base_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDY", "/nowhere")
    base = load_config(REPOSITORY / "config" / "speedy_unet.yml")
    ensemble = load_config(REPOSITORY / "config" / "speedy_ensemble.yml")
    assert Path(ensemble.trainer.resume) == Path(base.save_loc)
    # The ensemble adds only noise, because the weights of the base fit no other network.
    assert ensemble.model.noise and not base.model.noise
    assert ensemble.model.model_copy(update={"noise": base.model.noise}) == base.model
    # Its rollouts are shorter, because each step computes two members.
    assert (
        ensemble.data.model_copy(update={"forecast_len": base.data.forecast_len}).model_dump() == base.data.model_dump()
    )


def test_readme_lists_all_configs() -> None:
    page = (REPOSITORY / "config" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"`(\w+\.yml)`", page)) == [path.name for path in CONFIGS]


def test_each_config_begins_with_a_description() -> None:
    for path in CONFIGS:
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        assert re.fullmatch(r"# .{20,}", first_line), path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_builds_its_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{?(\w+)", path.read_text(encoding="utf-8")):
        monkeypatch.setenv(name, "/nowhere")
    config = load_config(path)
    channels, grid = config.data.channel_map(), build_grid(path.stem)
    with torch.device("meta"):
        model = build_network(config, channels, grid, attributes={}).eval()
        x_BCTHW = torch.empty(1, len(channels.input), config.data.history_len, *grid.shape)
        with torch.no_grad():
            out = model(x_BCTHW)
    assert out.shape == (1, len(channels.output), 1, *grid.shape)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PARAMETERS.get(path.stem, count)
