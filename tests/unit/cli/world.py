"""Small data set without faults (two netCDF files and a config), and functions that introduce faults into it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import yaml
import zarr

from tests.unit.data.files_on_the_fly import SPLITS, random_fields, write_file

ROWS = 16
COLUMNS = 32
CONFIG: dict[str, Any] = {
    "save_loc": "run",
    "data": {
        "sources": [{"path": "data_*.nc"}],
        "variables": {
            "prognostic": {"vars_3D": ["t"], "vars_2D": ["t2m"]},
            "dynamic_forcing": {"vars_2D": ["sst", "sin_year"]},
            "static": {"vars_2D": ["ground", "sin_latitude"]},
        },
        "levels": [500, 850],
        "splits": SPLITS,
        "split_gap": "24h",
    },
    "model": {
        "type": "wxformer",
        "dim": [8, 16, 32, 64],
        "depth": [1, 1, 1, 1],
        "dim_head": 8,
        "global_window_size": [4, 2, 1, 1],
        "local_window_size": [4, 2, 1, 1],
        "cross_embed_kernel_sizes": [[2, 4], [2, 4], [2, 4], [2, 4]],
        "padding": {"lat": [8, 8], "lon": [8, 8]},
        "use_spectral_norm": False,
    },
    "trainer": {"device": "cpu", "max_steps": 2, "train_batch_size": 2, "valid_samples": 2},
    "inference": {"lead_time": "6h", "initial_times": {"every": "6h"}},
    "verification": {"climatology": {"harmonics": 0}},
}


def make_fields(times: int = 20, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the fields of one file."""
    varying_fields = {
        "t": random_fields(times, 2, ROWS, COLUMNS, seed=seed),
        "t2m": random_fields(times, ROWS, COLUMNS, seed=seed + 1),
        "sst": random_fields(times, ROWS, COLUMNS, seed=seed + 2),
    }
    return {**varying_fields, "ground": random_fields(ROWS, COLUMNS, seed=99)}


def hours_of_file(file: int) -> list[int]:
    """Return the times of file 1 or 2 in hours."""
    return [6 * n for n in range(20 * (file - 1), 20 * file)]


def write_data_file(folder: Path, file: int, values: dict[str, np.ndarray] | None = None, **options: Any) -> None:
    """Write file 1 or 2 with some variables replaced; `options` are those of `write_file`."""
    values = {**make_fields(seed=10 * file), **(values or {})}
    options = {"hours": hours_of_file(file), "levels": [500, 850], **options}
    write_file(folder / f"data_{file}.nc", values, **options)


def write_world(folder: Path) -> None:
    """Write two files and a config without faults."""
    for file in (1, 2):
        write_data_file(folder, file)
    (folder / "config.yml").write_text(yaml.safe_dump(CONFIG))


def put_value(name: str, index: tuple, value: float) -> Callable[[Path], None]:
    """Return a function that replaces one value of a variable of the first file."""

    def spoil(folder: Path) -> None:
        values = make_fields(seed=10)[name]
        values[index] = value
        write_data_file(folder, 1, {name: values})

    return spoil


def rewrite_file(file: int = 2, values: Callable[[], dict] = dict, **options: Any) -> Callable[[Path], None]:
    """Return a function that writes a file with other options or values."""
    return lambda folder: write_data_file(folder, file, values(), **options)


def rewrite_both_files(values: Callable[[int], dict] = lambda file: {}, **options: Any) -> Callable[[Path], None]:
    """Return a function that writes both files with other options or values."""

    def spoil(folder: Path) -> None:
        for file in (1, 2):
            write_data_file(folder, file, values(file), **options)

    return spoil


def truncate_second_file(folder: Path) -> None:
    """Truncate the second file."""
    path = folder / "data_2.nc"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def coarsen_second_file(folder: Path) -> None:
    """Write the second file on a coarser grid."""
    values = {name: value[..., ::2, ::2] for name, value in make_fields(seed=20).items()}
    write_file(folder / "data_2.nc", values, hours_of_file(2), levels=[500, 850])


def make_files_overlap(folder: Path) -> None:
    """Write a time of the first file into the second file, with other values."""
    write_data_file(folder, 2, hours=[hours_of_file(1)[-1], *hours_of_file(2)[1:]])


def occupy_run_folder(name: str) -> Callable[[Path], None]:
    """Return a function that writes a file or store of another run into the run folder."""

    def spoil(folder: Path) -> None:
        path = folder / "run" / name
        path.parent.mkdir(parents=True)
        path.mkdir() if path.suffix == ".zarr" else path.touch()

    return spoil


def write_climatology(rows: int = ROWS, columns: int = COLUMNS) -> Callable[[Path], None]:
    """Return a function that writes clim.nc, a climatology by day of the year."""

    def spoil(folder: Path) -> None:
        values = {"t": random_fields(366, 2, rows, columns), "t2m": random_fields(366, rows, columns)}
        dims = {
            "t": ("dayofyear", "level", "lat", "lon"),
            "t2m": ("dayofyear", "lat", "lon"),
            "dayofyear": ("dayofyear",),
        }
        lat, lon = np.linspace(90 - 90 / rows, -90 + 90 / rows, rows), np.arange(columns) * 360 / columns
        values["dayofyear"] = np.arange(1, 367)
        write_file(folder / "clim.nc", values, None, levels=[500, 850], lat=lat, lon=lon, dims=dims)

    return spoil


def write_other_forecasts(
    rows: int = ROWS, levels: tuple[float, ...] = (500.0, 850.0), start: str = "2000-01-08", lead: int = 6,
    **units: str | None,
) -> Callable[[Path], None]:  # fmt: skip
    """Return a function that writes others.zarr, forecasts of another program.

    The forecasts have the variables t and t2m, eight initial times, and rows from south to north.
    """

    def spoil(folder: Path) -> None:
        columns, units_of = 2 * rows, {"t": "K", "t2m": "K", **units}
        coords = {
            "time": np.datetime64(start, "ns") + np.arange(8) * np.timedelta64(6, "h"),
            "prediction_timedelta": ("prediction_timedelta", [lead], {"units": "hours"}),
            "level": list(levels),
            "latitude": np.linspace(90 / rows - 90, 90 - 90 / rows, rows),
            "longitude": np.arange(columns) * 360 / columns,
        }
        values = random_fields(8, 1, len(levels), rows, columns)
        flat = tuple(dim for dim in coords if dim != "level")
        attributes = {name: {} if text is None else {"units": text} for name, text in units_of.items()}
        fields = {"t": (tuple(coords), values, attributes["t"]), "t2m": (flat, values[:, :, 0], attributes["t2m"])}
        xr.Dataset(fields, coords).to_zarr(folder / "others.zarr", zarr_format=2)

    return spoil


def write_other_forecasts_with_gap(folder: Path) -> None:
    """Write forecasts of another program with missing values of t2m near the north pole."""
    write_other_forecasts()(folder)
    shutil.rmtree(folder / "others.zarr" / "t2m")
    t2m = xr.Dataset({"t2m": xr.open_zarr(folder / "others.zarr")["t"].isel(level=0, drop=True)})
    t2m_with_gap = t2m.where(t2m["latitude"] < 80)
    t2m_with_gap.to_zarr(folder / "others.zarr", zarr_format=2, mode="a")


def cut_to_hemisphere(folder: Path) -> None:
    """Cut both files to the northern hemisphere."""
    for file in (1, 2):
        values = {name: value[..., : ROWS // 2, :] for name, value in make_fields().items()}
        lat = np.linspace(90 - 90 / ROWS, -90 + 90 / ROWS, ROWS)[: ROWS // 2]
        write_file(folder / f"data_{file}.nc", values, hours_of_file(file), levels=[500, 850], lat=lat)


def drop_variables(*names: str) -> Callable[[Path], None]:
    """Return a function that writes both files without some variables."""

    def spoil(folder: Path) -> None:
        for file in (1, 2):
            values = {name: value for name, value in make_fields(seed=10 * file).items() if name not in names}
            write_file(folder / f"data_{file}.nc", values, hours_of_file(file), levels=[500, 850])

    return spoil


def make_t2m_in_celsius(file: int) -> dict[str, np.ndarray]:
    return {"t2m": make_fields(seed=10 * file)["t2m"] - 273.15}


def make_uniform_t2m(file: int) -> dict[str, np.ndarray]:
    return {"t2m": np.full((20, ROWS, COLUMNS), 280.0, dtype=np.float32)}


def make_static_with_time(file: int) -> dict[str, np.ndarray]:
    return {"ground": random_fields(20, ROWS, COLUMNS)}


def write_text_file(name: str, content: str) -> Callable[[Path], object]:
    """Return a function that writes a text file."""
    return lambda folder: (folder / name).write_text(content)


def change_store_attributes(key: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Return a function that changes an entry of the store's attributes."""

    def spoil(folder: Path) -> None:
        path = folder / "store.zarr" / "zarr.json"
        description = json.loads(path.read_text())
        change(description["attributes"][key])
        path.write_text(json.dumps(description))

    return spoil


def remove_chunk(folder: Path, index: int = 0) -> None:
    """Remove the chunk of one time from the store."""
    shutil.rmtree(folder / "store.zarr" / "fields" / "c" / str(index))


def damage_chunk(folder: Path, index: int) -> None:
    """Flip one bit of the chunk of one time in the store."""
    path = folder / "store.zarr" / "fields" / "c" / str(index) / "0" / "0" / "0"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def change_source(folder: Path) -> None:
    """Write the second file with other values, and let the store's sources have their paths in this folder."""
    path = folder / "data_2.nc"
    store = zarr.open_group(folder / "store.zarr", mode="r+")
    meta = dict(store.attrs)["credit"]
    states = {str(folder / Path(key).name): state for key, state in meta["sources"].items()}
    store.attrs["credit"] = meta | {"sources": states}
    write_data_file(folder, 2, make_fields(seed=5))
    os.utime(path, ns=(0, 0))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of the run, oldest first."""
    return sorted((folder / "run" / "checkpoints").glob("step_*"))


def damage_checkpoints(*numbers: int) -> Callable[[Path], None]:
    """Return a function that flips one bit in the checkpoints of these indices."""

    def spoil(folder: Path) -> None:
        for number in numbers:
            file = next((list_checkpoints(folder)[number] / "model").glob("*.safetensors"))
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

    return spoil


def remove_last_manifest(folder: Path) -> None:
    (list_checkpoints(folder)[-1] / "manifest.json").unlink()


def write_slow_metrics(folder: Path) -> None:
    """Write metrics of a run with 0.1 samples per second."""
    (folder / "run").mkdir(exist_ok=True)
    rows = [{"step": n, "loss": 1.0, "samples_per_s": 0.1} for n in (1, 2)]
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


MODEL = """
import torch
from torch import nn
from credit.config.sections.model import ModelSection
from credit.models.base import ForecastModel
from credit.models.registry import register_model

@register_model("seeded", ModelSection)
class Seeded(ForecastModel):
    def __init__(self, spec, section):
        super().__init__(spec, section)
        self.out = nn.Conv2d(spec.in_channels * spec.input_frames, spec.out_channels, 1)
        {init}

    def forward(self, x, condition=None):
        y = self.out(x.flatten(1, 2))
        {forward}
        return y[:, :, None]
"""


def write_failing_postprocess() -> Callable[[Path], object]:
    """Return a function that writes a plugin whose post-process fails in its constructor."""
    return write_text_file(
        "seeded_postprocess.py",
        "from typing import Literal\n"
        "from credit.config.sections.postprocess import PostprocessSection\n"
        "from credit.forecast.postprocess.base import Postprocess, register_postprocess\n"
        "class Section(PostprocessSection):\n"
        "    kind: Literal['seeded_postprocess']\n"
        "@register_postprocess('seeded_postprocess', Section)\n"
        "class SeededPostprocess(Postprocess):\n"
        "    def __init__(self, context, section):\n"
        "        self.area = context.no_such_attribute\n",
    )


def write_failing_objective(
    method: str = "__init__(self, context, section)", error: str = "ValueError('no members')"
) -> Callable[[Path], object]:
    """Return a function that writes a plugin whose training objective raises an error in a method."""
    return write_text_file(
        "seeded_objective.py",
        "from typing import Literal\n"
        "from credit.config.sections.trainer import ObjectiveSection\n"
        "from credit.forecast.objectives.base import register_objective\n"
        "from credit.forecast.objectives.deterministic import DeterministicRollout\n"
        "class Section(ObjectiveSection):\n"
        "    kind: Literal['seeded_objective']\n"
        "@register_objective('seeded_objective', Section)\n"
        "class SeededObjective(DeterministicRollout):\n"
        f"    def {method}:\n"
        f"        raise {error}\n",
    )


def write_model_plugin(forward: str = "pass", init: str = "pass") -> Callable[[Path], object]:
    """Return a function that writes a plugin with a model."""
    return write_text_file("seeded_model.py", MODEL.format(forward=forward, init=init))
