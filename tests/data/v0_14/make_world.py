"""Write data.nc and config.yml: forty days of travelling waves on 16 x 32 cells."""

from pathlib import Path

import xarray as xr
import yaml

from tests.smoke.conftest import CONFIG, write_world

write_world(Path("whole.nc"), times=160)
with xr.open_dataset("whole.nc", mask_and_scale=False) as dataset:
    encoding = {name: {"zlib": True, "complevel": 9, "shuffle": True} for name in ("z", "t2m", "rain", "sst", "land")}
    # Rounded values compress well.
    rounded = dataset.load().assign({name: dataset[name].round(1) for name in ("z", "t2m", "rain", "sst")})
    rounded.to_netcdf("data.nc", encoding=encoding)
Path("whole.nc").unlink()
raw = {**CONFIG, "experiment": "compatibility", "save_loc": "run", "seed": 7}
raw["data"] = {
    **raw["data"],
    "sources": [{"path": "data.nc"}],
    "store": "store.zarr",
    "splits": {
        "train": ["2000-01-01", "2000-01-20"],
        "valid": ["2000-01-24", "2000-01-28"],
        "test": ["2000-02-01", "2000-02-08"],
    },
    "bad_times": "fail",
}
raw["preprocess"] = {"climatology": True}
raw["model"] = {
    **raw["model"],
    "dim": [4, 8, 16, 32],
    "dim_head": 4,
    "hyperdiffusion": {"time": "6h", "order": 4},
    "post": [{"kind": "clamp", "variable": "t2m", "minimum": 150.0, "maximum": 350.0}],
}
raw["trainer"] = {
    **raw["trainer"],
    "early_view": {"lead_time": "24h", "cases": 2},
    "max_steps": 20,
    "validate_every": 10,
    "checkpoint_every": 10,
    "log_every": 1,
}
Path("config.yml").write_text(yaml.safe_dump(raw, sort_keys=False))
