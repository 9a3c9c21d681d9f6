"""The netCDF files of a forecast and of its scores keep the CF conventions: says IOOS's compliance-checker, offline.

The checker has pyproj, whose PROJ and ecCodes' cannot live in one environment; so it has its own (``make test`` makes
it), and runs as a program. Its table of standard names comes with it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import netCDF4
import pytest

from tests.smoke.test_budgets import write_air
from tests.unit.forecast.air import UNITS
from tests.unit.products.forecasts import make, random_ensemble, write_forecasts
from tests.unit.products.test_make import ENTRIES

# what the checker recommends, and why our files do without
WITHOUT = {
    "strict_monotonicity: unsupported operand": "coordinates of scores are names, too, which the checker subtracts",
    "_QuantizeBitRoundNumberOfSignificantBits": "netCDF's own name of what keep_bits rounds to; underscores are its",
    "does not cross 1582-10-15": "the standard calendar is allowed, and the one that the data name",
}
# of ensembles in one file
TIME_FIRST = {"dimensions are not located left of T, Z, Y, X": "CDO opens no file whose first dimension is not time"}
# of statistics of the members
STANDARD_NAME_OF_MEMBERS = {
    "name component realization does not match": "section 7.3 allows standard names, which the checker does not know"
}
STANDARD_NAMES = {
    "t": "air_temperature", "u": "eastward_wind", "v": "northward_wind", "q": "specific_humidity",
    "sp": "surface_air_pressure", "tp": "lwe_thickness_of_precipitation_amount", "zs": "surface_geopotential",
}  # fmt: skip
DERIVED = (
    "{z: {kind: geopotential}, msl: {kind: mean_sea_level_pressure}, wind: {kind: wind_speed}, "
    "r: {kind: relative_humidity}, tp12: {kind: accumulation, of: tp, over: 12h}, "
    "total: {kind: accumulation, of: tp}}"
)
ENSEMBLE = "inference.ensemble={members: 2, perturbation: {kind: correlated}}"


@pytest.fixture(scope="session")
def checker() -> str:
    """The checker's program."""
    installed_path = Path(sys.prefix) / "cf" / "bin" / "compliance-checker"
    program = str(installed_path) if installed_path.exists() else shutil.which("compliance-checker")
    if program is None:
        pytest.skip(f"no compliance-checker in {installed_path.parent} or on PATH; make test brings it")
    return program


def findings(checker: str, path: Path) -> list[str]:
    """Return what the checker finds in a file by the conventions that it names, and which of its checks broke down."""
    with netCDF4.Dataset(path) as file:
        convention = file.Conventions.removeprefix("CF-")
    report = path.with_suffix(".json")
    command = [checker, f"--test=cf:{convention}", "--criteria=strict", "--format=json", f"--output={report}", path]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert report.exists(), process.stderr
    (result,) = json.loads(report.read_text()).values()
    checks = [*result["high_priorities"], *result["medium_priorities"], *result["low_priorities"]]
    assert len(checks) > 10, "the checker has hardly looked"
    broken = [line for line in process.stderr.splitlines() if line.startswith(f"cf:{convention}.")]
    return [message for check in checks for message in check["msgs"]] + broken


def test_the_checker_finds_what_is_wrong(checker: str, tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "wrong.nc", "w") as file:
        file.Conventions = "CF-1.8"
        file.createDimension("x", 2)
        for name, standard_name, units in (("a", "air_temprature", "K"), ("b", "air_temperature", "Pa")):
            file.createVariable(name, "f4", ("x",)).setncatts({"standard_name": standard_name, "units": units})
    messages = "\\n".join(findings(checker, tmp_path / "wrong.nc"))
    assert "air_temprature" in messages and 'Units "Pa" for variable b must be convertible' in messages


@pytest.mark.slow
def test_forecasts_and_scores_keep_the_conventions(checker: str, tmp_path: Path, command) -> None:
    """Single forecasts and ensembles, on model and on pressure levels, one file a start, day, lead time or member."""
    config, run = write_air(tmp_path), tmp_path / "run"
    with netCDF4.Dataset(tmp_path / "air.nc", "a") as file:
        for name in UNITS:
            if name in STANDARD_NAMES:
                file[name].standard_name = STANDARD_NAMES[name]
            else:
                file[name].long_name = f"{name} of ERA5"
        # units are the data's, and these of ERA5 are no units of UDUNITS
        file["e"].units = "m"
    short = ("inference.lead_time=18h", "inference.initial_times=[2000-02-08]", "verification.figure_channels=[sp]",
             "verification.regions=[global]")  # fmt: skip
    products = ("inference.pressure_levels=[850, 500]", f"inference.derive={DERIVED}")
    assert command("train", config, "trainer.max_steps=1", "trainer.validate_every=1").returncode == 0
    for folder, options in {
        "single": (),
        "products": products,
        "ensemble": (ENSEMBLE, *products, "inference.split=day"),
        "members": (ENSEMBLE, *products, "inference.split=member"),
        "leads": (ENSEMBLE, "inference.split=lead", "inference.keep_bits=12", "inference.compression=1"),
    }.items():
        done = command("rollout", config, *short, f"inference.folder={folder}", *options)
        assert done.returncode == 0, done.stderr
    done = command("verify", config, *short, ENSEMBLE, "inference.folder=leads")
    assert done.returncode == 0, done.stderr
    files = [min((run / folder).rglob("*.nc")) for folder in ("single", "products", "ensemble", "leads", "members")]
    for path in [*files, run / "scores.nc"]:
        known = WITHOUT | (TIME_FIRST if path.parent.name in ("ensemble", "leads") else {})
        wrong = [message for message in findings(checker, path) if not any(own in message for own in known)]
        assert not wrong, f"{path}: {wrong}"


def test_products_keep_the_conventions(checker: str, tmp_path: Path) -> None:
    """Fields of members, quantiles, probabilities, sums over hours, and winds on a level and at a height."""
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    make(archive, tmp_path, *ENTRIES, {"kind": "mean", "name": "mean", "of": "tp24"})
    for path in sorted((tmp_path / "2001-04-01T00").glob("*.nc")):
        known = WITHOUT | TIME_FIRST | STANDARD_NAME_OF_MEMBERS
        wrong = [message for message in findings(checker, path) if not any(text in message for text in known)]
        assert not wrong, f"{path}: {wrong}"
