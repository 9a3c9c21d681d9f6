"""Files of products: formats, repeated calls, failures, maps, and `credit products` without a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import yaml
from PIL import Image

from credit.cli.main import main
from credit.config.sections.output import GribConfig, GribParameterConfig, ProductSection
from credit.errors import CreditError
from credit.forecast.io.forecast_reader import open_forecasts
from credit.forecast.io.grib.options import GribOptions
from credit.products import maps, netcdf
from credit.products.base import FieldProduct, FieldReader, ProductContext, derive_info, register_product
from credit.products.description import describe_archive
from tests.registries import isolate
from tests.unit.products.forecasts import (
    GRID,
    INITIAL,
    MEMBERS,
    NAMES,
    compute_product,
    plan_entries,
    random_ensemble,
    write_forecasts,
    write_product_files,
)

FOLDER = "2001-04-01T00"
ENTRIES: list[dict[str, Any]] = [
    {"kind": "wind_speed", "name": "wind850", "of": ["u850", "v850"]},
    {"kind": "wind_speed_at_height", "name": "wind80", "height": 80},
    {"kind": "thickness", "name": "layer", "of": ["z1000", "z500"], "write": False},
    {"kind": "accumulation", "name": "tp24", "of": "tp", "over": "24h"},
    {"kind": "probability", "name": "windy", "of": "wind850", "above": "10 m s-1"},
    {"kind": "quantiles", "name": "layer_q", "of": "layer", "quantiles": [0.1, 0.9]},
    {"kind": "spread", "name": "tp24_spread", "of": "tp24"},
]


@pytest.mark.parametrize(
    "options",
    [{}, {"split": "lead"}, {"split": "member"}, {"format": "zarr"}, {"format": "zarr", "layout": "weatherbench2"}],
    ids=["one file", "leads", "members", "zarr", "weatherbench2"],
)
def test_products_do_not_depend_on_the_format(tmp_path: Path, options: dict[str, str]) -> None:
    ensemble = random_ensemble()
    archive = write_forecasts(tmp_path / "forecasts", ensemble, **options)
    write_product_files(archive, tmp_path / "products", *ENTRIES)
    with xr.open_dataset(tmp_path / "products" / FOLDER / "wind850.nc") as dataset:
        wind = dataset["wind850"]
        assert wind.dims == ("time", "member", "latitude", "longitude")
        expected = np.hypot(ensemble[:, :, NAMES.index("u850")], ensemble[:, :, NAMES.index("v850")])
        np.testing.assert_allclose(wind, expected, rtol=1e-6)
        assert wind.attrs["standard_name"] == "wind_speed" and wind.attrs["units"] == "m s-1"
        assert float(dataset["level"]) == 850.0 and dataset.attrs["checkpoint_step"] == 7
        assert dataset["time"].values[1] == np.datetime64("2001-04-01T12:00")
    with xr.open_dataset(tmp_path / "products" / FOLDER / "layer_q.nc") as dataset:
        assert dataset["layer_q"].dims == ("time", "quantile", "latitude", "longitude")
        np.testing.assert_array_equal(dataset["quantile"], [0.1, 0.9])
    with xr.open_dataset(tmp_path / "products" / FOLDER / "tp24.nc", decode_times=False) as dataset:
        lengths = np.diff(dataset["time_bnds"], axis=1)
        assert (lengths == 1440).all() and dataset["tp24"].attrs["cell_methods"] == "time: sum"
        assert np.isnan(dataset["tp24"][2]).all() and np.isfinite(dataset["tp24"][3]).all()
    assert not (tmp_path / "products" / FOLDER / "layer.nc").exists()


@pytest.mark.parametrize("split", [None, "lead", "member"])
def test_products_of_grib_files(tmp_path: Path, split: str | None) -> None:
    """Names, units and windows equal those of netCDF files. Values differ because of packing with 16 bits."""
    ensemble = random_ensemble()
    grib = GribOptions(GribConfig(parameters={"total": GribParameterConfig(parameter="tp")}))
    expected = write_forecasts(tmp_path / "netcdf", ensemble)
    archive = write_forecasts(tmp_path / "grib", ensemble, format="grib2", split=split, grib=grib)
    assert describe_archive(archive).fields == describe_archive(expected).fields
    entry = {"kind": "accumulation", "name": "tp24", "of": "tp", "over": "24h"}
    np.testing.assert_allclose(
        compute_product(archive, "tp24", entry), compute_product(expected, "tp24", entry), atol=0.01
    )
    probability = {"kind": "probability", "name": "wet", "of": "tp24", "above": "20 mm"}
    write_product_files(archive, tmp_path, entry, probability)
    with xr.open_dataset(tmp_path / FOLDER / "wet.nc", decode_times=False) as dataset:
        # The probability of a sum is no sum, but it has the window of the sum.
        assert "cell_methods" not in dataset["wet"].attrs
        assert (np.diff(dataset["time_bnds"], axis=1) == 1440).all()


def test_windows_of_sums_are_read_from_all_files(tmp_path: Path) -> None:
    """The first file in the folder has one lead time, so windows must be read from the other files as well."""
    archive = write_forecasts(tmp_path, random_ensemble(), split="lead")
    total = compute_product(archive, "sum", {"kind": "accumulation", "name": "sum", "of": "total", "over": "12h"})
    assert np.isfinite(total[1:]).all()


def modification_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "products.json"}


def test_existing_products_are_not_written_again(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    first = write_product_files(archive, tmp_path, *ENTRIES)
    assert (first.num_made, first.num_current) == (6, 0)
    times_before = modification_times(tmp_path / FOLDER)
    second = write_product_files(archive, tmp_path, *ENTRIES)
    assert (second.num_made, second.num_current) == (0, 6) and modification_times(tmp_path / FOLDER) == times_before

    # A changed setting affects the product, and the products that are computed from it.
    changed = [{**entry, "of": ["u500", "v500"]} if entry["name"] == "wind850" else entry for entry in ENTRIES]
    assert write_product_files(archive, tmp_path, *changed).num_made == 2
    times_after = modification_times(tmp_path / FOLDER)
    assert {name for name in times_after if times_after[name] != times_before[name]} == {"wind850.nc", "windy.nc"}

    # A removed file is written again. With overwrite, all files are.
    (tmp_path / FOLDER / "wind80.nc").unlink()
    assert write_product_files(archive, tmp_path, *changed).num_made == 1
    assert write_product_files(archive, tmp_path, *changed, overwrite=True).num_made == 6


@pytest.mark.parametrize("options", [{}, {"format": "zarr"}])
def test_products_of_a_new_forecast_are_made_again(tmp_path: Path, options: dict[str, str]) -> None:
    entry = {"kind": "mean", "name": "mean", "of": "t2m"}
    write_forecasts(tmp_path / "forecasts", random_ensemble(), **options)
    archive = open_forecasts(tmp_path / "forecasts")
    write_product_files(archive, tmp_path, entry)
    if options:
        # In a store, a forecast counts as new only if the checksum of its analysis differs.
        assert write_product_files(open_forecasts(tmp_path / "forecasts"), tmp_path, entry).num_made == 0
        return
    ensemble = random_ensemble(seed=9)
    (tmp_path / "forecasts" / "forecast_2001-04-01T00.nc").unlink()
    archive = write_forecasts(tmp_path / "forecasts", ensemble)
    assert write_product_files(archive, tmp_path, entry).num_made == 1
    with xr.open_dataset(tmp_path / FOLDER / "mean.nc") as dataset:
        expected = ensemble[:, :, NAMES.index("t2m")].mean(axis=1)
        np.testing.assert_allclose(dataset["mean"], expected, rtol=1e-6)


def test_changed_stations_make_new_values(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    stations = tmp_path / "stations.csv"
    entry = {"kind": "stations", "name": "cities", "of": ["t2m"], "stations": str(stations)}
    stations.write_text("name,latitude,longitude\nA,10,20\n")
    write_product_files(archive, tmp_path, entry)
    assert write_product_files(archive, tmp_path, entry).num_made == 0
    stations.write_text("name,latitude,longitude\nA,10,21\n")
    assert write_product_files(archive, tmp_path, entry).num_made == 1


def test_maps_of_removed_lead_times_are_deleted(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    entry = {"kind": "map", "name": "map", "of": "t2m"}
    write_product_files(archive, tmp_path, {**entry, "lead_times": ["6h", "12h"]})
    write_product_files(archive, tmp_path, {**entry, "lead_times": ["12h"], "member": 1, "range": [260, 300]})
    assert [path.name for path in (tmp_path / FOLDER).glob("*.png")] == ["map_012h.png"]
    with Image.open(tmp_path / FOLDER / "map_012h.png") as image:
        assert image.width > 1000


def test_maps_of_all_kinds_of_fields(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    maps = []
    for name in ("wind80", "windy", "layer_q", "tp24"):
        maps.append({"kind": "map", "name": f"map_{name}", "of": name, "lead_times": ["6h"]})
    write_product_files(archive, tmp_path, *ENTRIES, *maps)
    sizes = [path.stat().st_size for path in (tmp_path / FOLDER).glob("map_*_006h.png")]
    assert len(sizes) == 4 and min(sizes) > 10_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lead_times": ["7h"]}, "the forecasts have no lead time 7h"),
        ({"member": MEMBERS}, f"{MEMBERS} is not a member of t2m"),
        ({"colormap": "virids"}, 'did you mean "viridis"'),
        ({"range": [1, 0]}, "must increase"),
    ],
)
def test_wrong_maps_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    archive = write_forecasts(tmp_path, random_ensemble())
    with pytest.raises(CreditError, match=message):
        plan_entries(archive, {"kind": "map", "name": "map", "of": "t2m", **changes})


def test_failure_leaves_no_incomplete_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the third lead time. Complete products stay, and the next call writes the others."""
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    write_product_files(archive, tmp_path, *ENTRIES[:1])
    add = netcdf.FieldFile.add

    def fail_late(self: netcdf.FieldFile, lead_index: int) -> None:
        if lead_index == 2:
            raise CreditError("the disk is full")
        add(self, lead_index)

    with monkeypatch.context() as patch:
        patch.setattr(netcdf.FieldFile, "add", fail_late)
        with pytest.raises(CreditError, match="the disk is full"):
            write_product_files(archive, tmp_path, *ENTRIES)
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["products.json", "wind850.nc"]
    assert write_product_files(archive, tmp_path, *ENTRIES).num_made == 5


def test_an_interruption_does_not_mix_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call with new settings is interrupted after the first map. The next call restores the old settings."""
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    entry = {"kind": "map", "name": "map", "of": "t2m", "lead_times": ["6h", "12h"]}
    write_product_files(archive, tmp_path, entry)
    paths = sorted((tmp_path / FOLDER).glob("*.png"))
    bytes_before = [path.read_bytes() for path in paths]
    draw = maps.save_figure

    def interrupt_second(path: Path, *arguments: Any) -> Path:
        if path.name == "map_012h.png":
            raise KeyboardInterrupt
        return draw(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(maps, "save_figure", interrupt_second)
        with pytest.raises(KeyboardInterrupt):
            write_product_files(archive, tmp_path, {**entry, "colormap": "plasma"})
    assert paths[0].read_bytes() != bytes_before[0] and paths[1].read_bytes() == bytes_before[1]
    assert write_product_files(archive, tmp_path, entry).num_made == 1
    assert [path.read_bytes() for path in paths] == bytes_before


def test_a_damaged_record_makes_all_products_again(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    write_product_files(archive, tmp_path, *ENTRIES)
    (tmp_path / FOLDER / "products.json").write_text('{"wind850": ')
    assert write_product_files(archive, tmp_path, *ENTRIES).num_made == 6


def test_a_plugin_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch)

    class DoubleSection(ProductSection):
        kind: str = "double"
        of: str

    @register_product("double", DoubleSection)
    class Double(FieldProduct):
        def __init__(self, section: DoubleSection, context: ProductContext) -> None:
            super().__init__(section, context)
            self.inputs = (section.of,)
            self.info = derive_info(context.find_field(section.of), section.name)

        def compute(self, fields: FieldReader, lead_index: int) -> np.ndarray:
            return 2 * fields.read(self.inputs[0], lead_index)

    ensemble = random_ensemble()
    archive = write_forecasts(tmp_path, ensemble)
    result = compute_product(archive, "twice", {"kind": "double", "name": "twice", "of": "t2m"})
    np.testing.assert_array_equal(result, 2 * ensemble[:, :, NAMES.index("t2m")])


def test_single_channel_equals_channel_of_all_members(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path, random_ensemble(), split="member")
    all_MCHW = archive.read_members(INITIAL, 3)
    for index, name in enumerate(archive.channel_names):
        np.testing.assert_array_equal(archive.read_channel(INITIAL, 3, name), all_MCHW[:, index])


def run_products(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return the exit status and the output of ``credit products``."""
    status = main(["products", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def write_products_file(path: Path, **changes: Any) -> Path:
    entries = [
        {"kind": "mean", "name": "mean", "of": "t2m"},
        {"kind": "map", "name": "map", "of": "mean", "lead_times": ["6h"]},
    ]
    path.write_text(yaml.safe_dump({"products": entries, **changes}))
    return path


def test_command_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = 1440
    for number in range(2):
        write_forecasts(tmp_path / "forecasts", random_ensemble(number), initial=INITIAL + number * day)
    file = write_products_file(tmp_path / "products.yml", forecasts=str(tmp_path / "forecasts"))
    status, text = run_products(capsys, file, "--initial-time", "latest")
    assert status == 0 and "2 products written, 0 already existed" in text
    assert [path.name for path in (tmp_path / "forecasts" / "products").iterdir()] == ["2001-04-02T00"]
    status, text = run_products(capsys, file)
    assert status == 0 and "2 products written, 2 already existed" in text
    status, text = run_products(capsys, file, "--overwrite", "--initial-time", "2001-04-01")
    assert status == 0 and "2 products written, 0 already existed" in text
    assert sorted(os.listdir(tmp_path / "forecasts" / "products" / FOLDER)) == [
        "map_006h.png", "mean.nc", "products.json",
    ]  # fmt: skip
    # The folder of the products does not hide the forecasts.
    assert len(open_forecasts(tmp_path / "forecasts").initial_minutes) == 2


def test_nothing_is_written_into_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store is recognised by its content, also if its name does not end with .zarr."""
    write_forecasts(tmp_path, random_ensemble(), format="zarr")
    store = (tmp_path / "forecasts.zarr").rename(tmp_path / "archive")
    content = set(os.listdir(store))
    file = write_products_file(tmp_path / "products.yml", forecasts=str(store))
    assert run_products(capsys, file)[0] == 0
    assert set(os.listdir(store)) == content and (tmp_path / "products" / FOLDER / "mean.nc").exists()


def test_command_with_names_of_another_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command reads a store with other variable names and a land mask, and writes to a given folder."""
    write_forecasts(tmp_path, random_ensemble(), format="zarr")
    land = xr.DataArray(
        (GRID.lat[:, None] > 0) * np.ones(GRID.shape), {"lat": GRID.lat, "lon": GRID.lon}, ("lat", "lon"),
        attrs={"standard_name": "land_binary_mask"},
    )  # fmt: skip
    land["lat"].attrs["standard_name"], land["lon"].attrs["standard_name"] = "latitude", "longitude"
    land.to_dataset(name="lsm").to_netcdf(tmp_path / "land.nc")
    entries = [{"kind": "map", "name": "map", "of": "temperature", "lead_times": ["6h"]}]
    file = write_products_file(
        tmp_path / "products.yml", forecasts=str(tmp_path / "forecasts.zarr"), rename={"temperature": "t2m"},
        output=str(tmp_path / "out"), land=str(tmp_path / "land.nc"), products=entries,
    )  # fmt: skip
    assert run_products(capsys, file)[0] == 0
    map_with_coast = (tmp_path / "out" / FOLDER / "map_006h.png").read_bytes()
    file = write_products_file(
        tmp_path / "products.yml", forecasts=str(tmp_path / "forecasts.zarr"), rename={"temperature": "t2m"},
        output=str(tmp_path / "out2"), products=entries,
    )  # fmt: skip
    assert run_products(capsys, file)[0] == 0
    assert (tmp_path / "out2" / FOLDER / "map_006h.png").read_bytes() != map_with_coast


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["forecasts=none"], "none: does not exist"),
        ({"forecats": "x"}, [], 'did you mean "forecasts"'),
        ({}, ["--initial-time", "2001-05-01"], "there is no forecast from 2001-05-01"),
        ({"products": []}, [], "products"),
        ({"land": "none.nc"}, [], "land: none.nc cannot be read"),
        ({"products": [{"kind": "mean", "name": "m", "of": "t3m"}]}, [], "products.0.of"),
        ({"plugins": ["no_such_module"]}, [], '"no_such_module" cannot be imported'),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], arguments: list[str], message: str
) -> None:
    write_forecasts(tmp_path / "forecasts", random_ensemble())
    file = write_products_file(tmp_path / "products.yml", **{"forecasts": str(tmp_path / "forecasts"), **changes})
    status, text = run_products(capsys, file, *arguments)
    assert status == 2 and message in " ".join(text.split())


def test_record_names_settings_and_files(tmp_path: Path) -> None:
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    write_product_files(archive, tmp_path, *ENTRIES)
    record = json.loads((tmp_path / FOLDER / "products.json").read_text())
    assert record["windy"]["files"] == ["windy.nc"]
    assert record["windy"]["made_by"]["inputs"]["wind850"]["settings"]["of"] == ["u850", "v850"]
