"""Tests that commands on ranks that divide the fields of a forecast give the files and scores of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from credit.cli.main import main
from tests.parallel.forked import launch
from tests.smoke.conftest import world

pytestmark = pytest.mark.slow

TRAINING = (
    "trainer.max_steps=3", "trainer.members=2", "loss.kind=crps", "trainer.valid_members=2",
    "model.noise={kind: cell, channels: 4, memory: [0h, forecast]}", "trainer.valid_samples=4",
    "trainer.validate_every=3",
)  # fmt: skip
# Members differ by noise of cells, by bred vectors, whose norms are over the globe, and by factors of tendencies. Three
# members in batches of two make two batches.
FORECASTS = (
    *TRAINING,
    "inference.initial_times=[2000-02-10T06:00, 2000-02-12T00:00]", "inference.lead_time=18h",
    "inference.output_every=6h", "inference.batch_size=2",
    "inference.ensemble={members: 3, perturbation: {kind: bred, cycles: 1}, stochastic: {amplitude: 0.3}}",
)  # fmt: skip
DOMAIN = "inference.parallelism.domain=2"
ZARR = "inference.format=zarr"


@pytest.fixture(scope="module")
def ensemble_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an ensemble that was trained on one process, and its forecasts in ``netcdf`` and ``zarr``."""
    folder = world(tmp_path_factory.mktemp("ensemble"))
    config = str(folder / "config.yml")
    assert main(["train", config, *TRAINING]) == 0
    assert main(["rollout", config, *FORECASTS, "inference.folder=netcdf"]) == 0
    assert main(["rollout", config, *FORECASTS, ZARR, "inference.folder=zarr"]) == 0
    return folder


def run_on_ranks(num_ranks: int, command: str, folder: Path, *overrides: str) -> str:
    """Run a command of `credit` on several ranks and return its output."""
    return launch("credit.cli.main", num_ranks, command, str(folder / "config.yml"), *FORECASTS, *overrides)


def require_equal_files(folder: Path, expected_folder: Path) -> None:
    """Require that two folders have the same files, with equal layout and attributes and nearly equal fields."""
    names = [path.name for path in sorted(expected_folder.iterdir()) if not path.name.startswith(".")]
    assert [path.name for path in sorted(folder.iterdir()) if not path.name.startswith(".")] == names
    for name in names:
        engine = "zarr" if name.endswith(".zarr") else None
        data = xr.open_dataset(folder / name, engine=engine)
        expected = xr.open_dataset(expected_folder / name, engine=engine)
        assert data.attrs == expected.attrs
        assert list(data.variables) == list(expected.variables)
        for variable in expected.variables:
            require_equal_variables(data[variable], expected[variable])


def require_equal_variables(variable: xr.DataArray, expected: xr.DataArray) -> None:
    """Require equal dimensions and attributes, and values that differ by at most 1e-5 of the largest value."""
    assert variable.dims == expected.dims and variable.attrs == expected.attrs, expected.name
    if expected.dtype != np.float32:
        assert np.array_equal(variable, expected), expected.name
        return
    tolerance = 1e-5 * float(np.abs(expected).max())
    np.testing.assert_allclose(variable, expected, rtol=0, atol=tolerance, err_msg=str(expected.name))


@pytest.mark.parametrize(
    ("num_ranks", "format", "overrides"),
    [
        (2, "netcdf", (DOMAIN,)),
        (4, "netcdf", ("inference.parallelism={domain: 2, tensor: 2, shard: true}",)),
        # The plugin shows that ranks do not send fields to each other.
        (
            4,
            "zarr",
            (
                "inference.parallelism={domain: {lat: 1, lon: 2}, ensemble: 2}",
                "plugins=[tests.parallel.commands.forbid_sends]",
            ),
        ),
    ],
    ids=["domain 2", "sharded tensor 2 x domain 2", "ensemble 2 x domain 2"],
)
def test_files_are_those_of_one_process(
    ensemble_folder: Path, num_ranks: int, format: str, overrides: tuple[str, ...]
) -> None:
    folder = f"{format}_on_{num_ranks}"
    options = (*overrides, f"inference.format={format}", f"inference.folder={folder}")
    output = run_on_ranks(num_ranks, "rollout", ensemble_folder, *options)
    assert "rank 0: 2 forecasts written" in output and "rank 1:" not in output
    require_equal_files(ensemble_folder / "run" / folder, ensemble_folder / "run" / format)


def test_scores_without_files_are_those_of_one_process(ensemble_folder: Path) -> None:
    scores = ensemble_folder / "run" / "scores.csv"
    assert main(["verify", str(ensemble_folder / "config.yml"), *FORECASTS, "--online"]) == 0
    expected_scores = pd.read_csv(scores)
    scores.unlink()
    run_on_ranks(4, "verify", ensemble_folder, "inference.parallelism={domain: 2, ensemble: 2}", "--online")
    rank_scores = pd.read_csv(scores)
    assert len(expected_scores) > 100
    pd.testing.assert_frame_equal(rank_scores, expected_scores, rtol=1e-4, atol=1e-6)


def test_rank_that_cannot_write_stops_all_ranks_of_a_store(ensemble_folder: Path) -> None:
    """Both ranks report the error, and no forecast counts as complete."""
    options = (DOMAIN, ZARR, "inference.folder=full")
    with pytest.raises(AssertionError) as failure:
        run_on_ranks(2, "rollout", ensemble_folder, *options, "plugins=[tests.parallel.commands.fail_on_rank1]")
    assert str(failure.value).count("credit rollout: [Errno 28] No space left") == 2, failure.value
    with xr.open_dataset(ensemble_folder / "run" / "full" / "forecasts.zarr", engine="zarr") as store:
        assert not store["written"].any()
