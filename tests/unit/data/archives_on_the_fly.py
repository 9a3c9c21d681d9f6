"""Zarr stores with the layouts of public archives, and an HTTP server that counts requests.

The values are computed from the sample data. Names, dimensions, chunks and attributes follow the published
descriptions: the README of google-research/arco-era5, and the data guide and the evaluation notebook of
google-research/weatherbench2.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import numpy as np
import xarray as xr

LEVELS = [50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000]
# The levels of ARCO-ERA5.
ARCO_LEVELS = [
    1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 125, 150, 175, 200, 225, 250, 300, 350, 400, 450, 500, 550, 600, 650, 700,
    750, 775, 800, 825, 850, 875, 900, 925, 950, 975, 1000,
]  # fmt: skip
# Attributes of the variables, as published: long_name, short_name, standard_name, units.
_ATTRIBUTES = {
    "geopotential": ("Geopotential", "z", "geopotential", "m**2 s**-2"),
    "temperature": ("Temperature", "t", "air_temperature", "K"),
    "u_component_of_wind": ("U component of wind", "u", "eastward_wind", "m s**-1"),
    "v_component_of_wind": ("V component of wind", "v", "northward_wind", "m s**-1"),
    "specific_humidity": ("Specific humidity", "q", "specific_humidity", "kg kg**-1"),
    "2m_temperature": ("2 metre temperature", "t2m", None, "K"),
    "10m_u_component_of_wind": ("10 metre U wind component", "u10", None, "m s**-1"),
    "10m_v_component_of_wind": ("10 metre V wind component", "v10", None, "m s**-1"),
    "mean_sea_level_pressure": ("Mean sea level pressure", "msl", "air_pressure_at_mean_sea_level", "Pa"),
    "surface_pressure": ("Surface pressure", "sp", "surface_air_pressure", "Pa"),
    "total_precipitation": ("Total precipitation", "tp", None, "m"),
    "total_precipitation_6hr": ("Total precipitation", "tp", None, "m"),
    "geopotential_at_surface": ("Geopotential", "z", "geopotential", "m**2 s**-2"),
    "land_sea_mask": ("Land-sea mask", "lsm", "land_binary_mask", "(0 - 1)"),
}
STATIC = ("geopotential_at_surface", "land_sea_mask")


def compute_fields(num_times: int, levels: list[int], latitude: np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of the archives by name, ([time, [level,]] latitude, longitude) float32, from the sample data.

    Times are six hours apart from 2000-01-01. Variables and levels that are not in the sample are computed from those
    that are.
    """
    file = Path(str(resources.files("credit.data.bundled"))) / "speedy" / "speedy_2000q1.nc"
    with xr.open_dataset(file, decode_times=False) as dataset:
        sample = (
            dataset.isel(time=slice(0, num_times))
            .drop_vars("time")
            .interp(latitude=latitude, kwargs={"fill_value": "extrapolate"})
        )
        z500 = sample["z"].sel(level_z=500).values
        t850 = sample["t"].sel(level_t=850).values
        t2m = sample["t2m"].values
        msl = sample["msl"].values
        surface = {name: sample[name].values for name in STATIC}
    pressure = np.array(levels, dtype=np.float64)[:, None, None]
    surface["land_sea_mask"] = np.clip(surface["land_sea_mask"], 0, 1)
    slope = np.gradient(z500, axis=-1) / 500
    fields = {
        "geopotential": z500[:, None] - 287.0 * 255.0 * np.log(pressure / 500),
        "temperature": t850[:, None] * (pressure / 850) ** 0.15,
        "u_component_of_wind": 10 - slope[:, None] * (1 + 200 / pressure),
        "v_component_of_wind": slope[:, None] * (1 + 100 / pressure),
        "specific_humidity": 0.01 * np.exp((t850[:, None] - 290) / 15) * (pressure / 1000) ** 3,
        "2m_temperature": t2m,
        "10m_u_component_of_wind": 3 - 0.5 * slope,
        "10m_v_component_of_wind": 0.5 * slope,
        "mean_sea_level_pressure": msl,
        "surface_pressure": msl - 11.0 * surface["geopotential_at_surface"] / 9.80665,
        "total_precipitation": 1e-5 * np.abs(slope),
        **surface,
    }
    return {name: values.astype(np.float32) for name, values in fields.items()}


def _build_attributes(name: str) -> dict[str, str]:
    keys = ("long_name", "short_name", "standard_name", "units")
    return {key: text for key, text in zip(keys, _ATTRIBUTES[name], strict=True) if text is not None}


def _count_hours_since(epoch: str) -> int:
    """Return the hours from a date to the first time of the archives, 2000-01-01."""
    return int((np.datetime64("2000-01-01") - np.datetime64(epoch)) // np.timedelta64(1, "h"))


def write_arco_era5(path: Path, num_hours: int = 24, names: list[str] | None = None) -> Path:
    """Write a store like ``ar/full_37-1h-0p25deg-chunk-1.zarr-v3``, on a grid of 33 x 64 points.

    The store has zarr format 2, hourly times and one time per chunk. Latitudes descend. All variables have a time axis,
    including the static ones. The time axis is longer than the data: only `num_hours` times from 2000-01-01 have
    values, and the attributes contain the first and the last date with values.
    """
    latitude = np.linspace(90, -90, 33).astype(np.float32)
    fields = compute_fields(num_hours, ARCO_LEVELS, latitude)
    # 1999-12-31 and the day after the last value are empty, like the years before 1940 in the archive.
    hours = np.arange(-24, num_hours + 24) + _count_hours_since("1900-01-01")
    variables = {}
    for name in names or fields:
        values = fields[name]
        if name in STATIC:
            values = np.repeat(values[None], num_hours, axis=0)
        padding = [(24, 24)] + [(0, 0)] * (values.ndim - 1)
        values = np.pad(values, padding, constant_values=np.nan)
        dims = ("time", *(["level"] if values.ndim == 4 else []), "latitude", "longitude")
        variables[name] = (dims, values, _build_attributes(name), {"chunks": (1, *values.shape[1:])})
    dataset = xr.Dataset(
        variables,
        coords={
            "time": ("time", hours, {"units": "hours since 1900-01-01", "calendar": "proleptic_gregorian"}),
            "level": ("level", np.array(ARCO_LEVELS, dtype=np.int64)),
            "latitude": ("latitude", latitude, {"long_name": "latitude", "units": "degrees_north"}),
            "longitude": (
                "longitude",
                (np.arange(64) * 5.625).astype(np.float32),
                {"long_name": "longitude", "units": "degrees_east"},
            ),
        },
        attrs={
            "valid_time_start": "2000-01-01",
            "valid_time_stop": str(np.datetime64("2000-01-01") + (num_hours - 1) // 24),
            "last_updated": "2026-10-01 00:00:00",
        },
    )
    dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return path


def write_weatherbench2(path: Path, num_times: int = 120, times_per_chunk: int = 100) -> Path:
    """Write a store like ``era5/1959-2022-6h-64x32_equiangular_conservative.zarr``.

    The store has zarr format 2, six-hourly times and 100 times per chunk. Latitudes ascend, and longitude comes before
    latitude. Coordinates have no units, and static variables have no time axis.
    """
    latitude = -90 + 180 / 64 + np.arange(32) * 180 / 32
    fields = compute_fields(num_times, LEVELS, latitude)
    fields["total_precipitation_6hr"] = fields.pop("total_precipitation")
    variables = {}
    for name, values in fields.items():
        values = np.swapaxes(values, -1, -2)
        dims = ("longitude", "latitude")
        chunks = values.shape
        if name not in STATIC:
            dims = ("time", *(["level"] if values.ndim == 4 else []), *dims)
            chunks = (times_per_chunk, *values.shape[1:])
        variables[name] = (dims, values, _build_attributes(name), {"chunks": chunks})
    hours = np.arange(num_times) * 6 + _count_hours_since("1959-01-01")
    dataset = xr.Dataset(
        variables,
        coords={
            "time": ("time", hours, {"units": "hours since 1959-01-01", "calendar": "proleptic_gregorian"}),
            "level": ("level", np.array(LEVELS, dtype=np.int64)),
            "latitude": ("latitude", latitude),
            "longitude": ("longitude", np.arange(64) * 5.625),
        },
    )
    dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return path


class ArchiveServer:
    """HTTP server of a local folder, as a context manager. It counts the requests and can delay or refuse them.

    Args:
        folder: the folder.
        delay: seconds before each answer.

    Attributes:
        url: address of the folder.
        requests: number of requests for each path.
        num_bytes: number of bytes that were sent.
        failures: HTTP error statuses of the next answers for each path. Each answer uses and removes the first one.
        most_at_once: largest number of requests that were answered at the same time.
    """

    def __init__(self, folder: Path, delay: float = 0.0) -> None:
        self.delay = delay
        self.requests: Counter[str] = Counter()
        self.num_bytes = 0
        self.failures: dict[str, list[int]] = {}
        self.most_at_once = 0
        self._num_running = 0
        self._lock = threading.Lock()
        archive = self

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                archive._answer(self, super().do_GET)

            def copyfile(self, source: object, outputfile: object) -> None:
                content = source.read()
                with archive._lock:
                    archive.num_bytes += len(content)
                outputfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, handler: SimpleHTTPRequestHandler, serve_file: object) -> None:
        with self._lock:
            self.requests[handler.path] += 1
            self._num_running += 1
            self.most_at_once = max(self.most_at_once, self._num_running)
            statuses = self.failures.get(handler.path, [])
            status = statuses.pop(0) if statuses else None
        time.sleep(self.delay)
        try:
            if status is None:
                serve_file()
            else:
                handler.send_error(status)
        finally:
            with self._lock:
                self._num_running -= 1

    def count_chunks(self) -> Counter[str]:
        """Return the number of requests for each chunk of an array with a time axis, by path."""
        chunks: Counter[str] = Counter()
        for path, num_requests in self.requests.items():
            if path.rsplit("/", 1)[-1].count(".") >= 2 and not path.rsplit("/", 1)[-1].startswith("."):
                chunks[path] = num_requests
        return chunks

    def __enter__(self) -> ArchiveServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *arguments: object) -> None:
        self._server.shutdown()
        self._server.server_close()
