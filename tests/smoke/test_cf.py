"""NetCDF files of forecasts and scores follow the CF conventions, by the compliance-checker of IOOS, offline.

The checker depends on pyproj, whose PROJ library conflicts with that of ecCodes. The checker therefore has an
environment of its own, which ``make test`` creates, and runs as a program. It contains its table of standard names.
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
from tests.unit.products.forecasts import random_ensemble, write_forecasts, write_product_files
from tests.unit.products.test_make import ENTRIES

# Messages of the checker that are accepted, with the reason.
ACCEPTED = {
    "strict_monotonicity: unsupported operand": "coordinates of scores are names, too, which the checker subtracts",
    "_QuantizeBitRoundNumberOfSignificantBits": "netCDF's own name of what keep_bits rounds to; underscores are its",
    "does not cross 1582-10-15": "the standard calendar is allowed, and the one that the data name",
}
# Accepted for files that contain all members of an ensemble.
ACCEPTED_IN_ENSEMBLES = {
    "dimensions are not located left of T, Z, Y, X": "CDO opens no file whose first dimension is not time"
}
# Accepted for statistics over the members.
ACCEPTED_IN_STATISTICS = {
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
    """Path of the checker program."""
    installed_path = Path(sys.prefix) / "cf" / "bin" / "compliance-checker"
    program = str(installed_path) if installed_path.exists() else shutil.which("compliance-checker")
    if program is None:
        pytest.skip(f"no compliance-checker in {installed_path.parent} or on PATH; make test brings it")
    return program


def run_checker(checker: str, path: Path) -> list[str]:
    """Return the checker's messages about a file, and the names of checks that raised an error.

    The checker uses the version of the conventions that the file declares.
    """
    with netCDF4.Dataset(path) as file:
        convention = file.Conventions.removeprefix("CF-")
    report = path.with_suffix(".json")
    command = [checker, f"--test=cf:{convention}", "--criteria=strict", "--format=json", f"--output={report}", path]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert report.exists(), process.stderr
    (result,) = json.loads(report.read_text()).values()
    checks = [*result["high_priorities"], *result["medium_priorities"], *result["low_priorities"]]
    assert len(checks) > 10, "the checker has hardly looked"
    failed_checks = [line for line in process.stderr.splitlines() if line.startswith(f"cf:{convention}.")]
    return [message for check in checks for message in check["msgs"]] + failed_checks


def test_checker_finds_errors(checker: str, tmp_path: Path) -> None:
    with netCDF4.Dataset(tmp_path / "wrong.nc", "w") as file:
        file.Conventions = "CF-1.8"
        file.createDimension("x", 2)
        for name, standard_name, units in (("a", "air_temprature", "K"), ("b", "air_temperature", "Pa")):
            file.createVariable(name, "f4", ("x",)).setncatts({"standard_name": standard_name, "units": units})
    messages = "\\n".join(run_checker(checker, tmp_path / "wrong.nc"))
    assert "air_temprature" in messages and 'Units "Pa" for variable b must be convertible' in messages


@pytest.mark.slow
def test_forecasts_and_scores_follow_the_conventions(checker: str, tmp_path: Path, command) -> None:
    """The files are single forecasts and ensembles, on model and pressure levels, for several values of split."""
    config, run = write_air(tmp_path), tmp_path / "run"
    with netCDF4.Dataset(tmp_path / "air.nc", "a") as file:
        for name in UNITS:
            if name in STANDARD_NAMES:
                file[name].standard_name = STANDARD_NAMES[name]
            else:
                file[name].long_name = f"{name} of ERA5"
        # Forecasts keep the units of the data, and UDUNITS does not know the ERA5 units of e.
        file["e"].units = "m"
    short_options = ("inference.lead_time=18h", "inference.initial_times=[2000-02-08]",
                     "verification.figure_channels=[sp]", "verification.regions=[global]")  # fmt: skip
    products = ("inference.pressure_levels=[850, 500]", f"inference.derive={DERIVED}")
    assert command("train", config, "trainer.max_steps=1", "trainer.validate_every=1").returncode == 0
    for folder, options in {
        "single": (),
        "products": products,
        "ensemble": (ENSEMBLE, *products, "inference.split=day"),
        "members": (ENSEMBLE, *products, "inference.split=member"),
        "leads": (ENSEMBLE, "inference.split=lead", "inference.keep_bits=12", "inference.compression=1"),
    }.items():
        result = command("rollout", config, *short_options, f"inference.folder={folder}", *options)
        assert result.returncode == 0, result.stderr
    result = command("verify", config, *short_options, ENSEMBLE, "inference.folder=leads")
    assert result.returncode == 0, result.stderr
    files = [min((run / folder).rglob("*.nc")) for folder in ("single", "products", "ensemble", "leads", "members")]
    for path in [*files, run / "scores.nc"]:
        accepted = ACCEPTED | (ACCEPTED_IN_ENSEMBLES if path.parent.name in ("ensemble", "leads") else {})
        messages = [message for message in run_checker(checker, path) if not any(text in message for text in accepted)]
        assert not messages, f"{path}: {messages}"


def test_products_follow_the_conventions(checker: str, tmp_path: Path) -> None:
    """The products are members, quantiles, probabilities, sums over hours, and winds on levels and at heights."""
    archive = write_forecasts(tmp_path / "forecasts", random_ensemble())
    write_product_files(archive, tmp_path, *ENTRIES, {"kind": "mean", "name": "mean", "of": "tp24"})
    for path in sorted((tmp_path / "2001-04-01T00").glob("*.nc")):
        accepted = ACCEPTED | ACCEPTED_IN_ENSEMBLES | ACCEPTED_IN_STATISTICS
        messages = [message for message in run_checker(checker, path) if not any(text in message for text in accepted)]
        assert not messages, f"{path}: {messages}"
