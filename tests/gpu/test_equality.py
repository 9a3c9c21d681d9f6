"""Results on a GPU equal those on the CPU: losses, gradients, weights, forecasts, checkpoints and golden numbers.

The tests need a GPU and are skipped without one. They run one process on one GPU, with NCCL for collectives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xarray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from credit.cli.main import main
from credit.cli.plan import build_grid
from credit.config import Config
from credit.data.samples.batch import Batch
from credit.forecast.objectives.base import build_objective
from credit.models.initialise import initial_values
from credit.models.layers.spectral_norm import advance_power_iterations
from credit.parallel.mesh import DeviceGrid, ParallelDims
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.state.materialise import fill_
from credit.train.build.assets import ModelAssets
from credit.train.build.dry_run import build_placeholder_assets
from credit.train.build.model import build_parallel_model
from credit.train.build.stepper import build_objective_context, build_run_loss, build_stepper
from credit.train.build.training import build_training_step
from credit.train.ema import EMA
from credit.train.optim import build_optimizer
from tests.gpu.worker import GRID, TRAINING
from tests.unit.hpc.measured import small_config
from tests.unit.models import test_golden

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FLOAT32 = ["trainer.amp=false", "trainer.tf32=false"]
ENSEMBLE = ["data.forecast_len=2", "loss={kind: crps}", "trainer.members=3"]
# Name of a case -> overrides of the quickstart with a small network.
CASES = {
    "one step": [],
    "recomputed, accumulated": ["trainer.activation_checkpoint=true", "trainer.grad_accum_every=2"],
    "selective": ["trainer.activation_checkpoint=selective", "data.forecast_len=2"],
    "transposed decoder": ["model.decoder=transposed"],
    "hyperdiffusion": ["model.hyperdiffusion={time: 3h}", "data.forecast_len=2"],
    "members one by one, global noise": [*ENSEMBLE, "model.noise={kind: global, memory: [0h, 24h]}"],
    "members at once, cell noise": [*ENSEMBLE, "model.noise=cell", "trainer.members_at_once=3"],
    "members one by one, spherical noise": [*ENSEMBLE, "model.noise=spherical"],
    "members one by one, dropout": [*ENSEMBLE, "model.noise=dropout"],
    "spectral and multi-scale losses": [
        "trainer.members=2",
        "model.noise=global",
        "loss={kind: sum, terms: [{kind: spectral_crps}, {kind: multiscale_crps, scales: [1600km, 0km]}]}",
    ],
    "amse": ["loss={kind: amse}"],
}


def make_batches(config: Config, assets: ModelAssets, device: torch.device) -> Iterator[Batch]:
    """Yield random batches, the same on every device."""
    generator = torch.Generator().manual_seed(3)
    channels = {name: len(assets.channels.group(name)) for name in ("prognostic", "dynamic_forcing")}
    frames, steps, cells = config.data.history_len, config.data.forecast_len, assets.grid.shape
    for number in range(100):
        times = (360 * number, 360 * number + 720)
        yield Batch(
            torch.randn(2, channels["prognostic"], frames, *cells, generator=generator),
            torch.randn(2, channels["dynamic_forcing"], frames + steps - 1, *cells, generator=generator),
            torch.randn(2, len(assets.channels.output), steps, *cells, generator=generator),
            times,
        ).to(device)


def train(overrides: list[str], device: torch.device, mesh: DeviceGrid | None = None) -> dict[str, Tensor]:
    """Take three optimizer steps; return losses, gradient norms and the final weights, on the CPU."""
    config = small_config(*overrides)
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    model, autocast = build_parallel_model(config, assets, mesh or DeviceGrid(), device)
    fill_(model, initial_values(model, config.seed))
    stepper = build_stepper(config, assets, model.train(), device, autocast)
    loss = build_run_loss(config, assets, device)
    optimizer = build_optimizer(model, config.trainer)
    objective = build_objective(config.trainer.objective, build_objective_context(config, assets, stepper, loss))
    step = build_training_step(config, objective, optimizer, EMA(model, 0.9), lambda _: config.data.forecast_len, 0)
    batches = make_batches(config, assets, device)
    results = [step(batches, number, 1e-3) for number in range(3)]
    losses = torch.stack([result.loss.detach().cpu() for result in results])
    norms = torch.stack([result.grad_norm.detach().cpu() for result in results])
    if mesh is not None:
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    weights = {name: gather_on_cpu(parameter) for name, parameter in model.named_parameters()}
    return {"losses": losses, "norms": norms, **weights}


def gather_on_cpu(parameter: Tensor) -> Tensor:
    """Return a parameter on the CPU, gathered if it is sharded."""
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.cpu()


def require_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Compare losses and gradient norms by relative error, and weights with the change in three steps."""
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=rtol, atol=0)
    torch.testing.assert_close(actual["norms"], expected["norms"], rtol=10 * rtol, atol=0)
    for name in expected.keys() - {"losses", "norms"}:
        difference = (actual[name] - expected[name]).abs().mean()
        # Adam changes each weight by about the learning rate, 1e-3, at each of three steps.
        assert difference < 1e-4, f"{name}: mean difference {difference}"


@pytest.mark.parametrize("name", CASES)
def test_training_steps_equal_those_of_the_cpu(name: str) -> None:
    overrides = [*FLOAT32, *CASES[name]]
    require_close(train(overrides, CUDA), train(overrides, CPU), rtol=2e-5)


@pytest.mark.parametrize("name", TRAINING)
def test_training_step_does_not_wait_for_the_gpu(name: str) -> None:
    overrides = [override for override in TRAINING[name] if not override.startswith("trainer.resume")]
    overrides = [override for override in overrides if not override.startswith("trainer.lora")]
    config = small_config(*overrides)
    assets = build_placeholder_assets(config, build_grid(GRID), {})
    model, autocast = build_parallel_model(config, assets, DeviceGrid(), CUDA)
    fill_(model, initial_values(model, config.seed))
    stepper = build_stepper(config, assets, model.train(), CUDA, autocast)
    objective = build_objective(
        config.trainer.objective,
        build_objective_context(config, assets, stepper, build_run_loss(config, assets, CUDA)),
    )
    optimizer = build_optimizer(model, config.trainer)
    step = build_training_step(config, objective, optimizer, EMA(model, 0.9), lambda _: config.data.forecast_len, 0)
    batches = iter(list(zip(range(8), make_batches(config, assets, CUDA), strict=False)))
    source = (batch for _, batch in batches)
    step(source, 0, 1e-3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(source, 1, 1e-3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("overrides", [["trainer.amp=true"], ["trainer.tf32=true", "trainer.amp=false"]])
def test_lower_precision_stays_near_float32(overrides: list[str]) -> None:
    exact = train(FLOAT32, CUDA)
    low = train(overrides, CUDA)
    torch.testing.assert_close(low["losses"], exact["losses"], rtol=5e-3, atol=0)
    torch.testing.assert_close(low["norms"], exact["norms"], rtol=5e-2, atol=0)
    assert not torch.equal(low["losses"], exact["losses"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["true", "reduce-overhead"])
@pytest.mark.parametrize("amp", [False, True])
def test_compiled_steps_equal_eager_ones(amp: bool, mode: str) -> None:
    overrides = [f"trainer.amp={amp}", "trainer.tf32=false"]
    rtol = 5e-3 if amp else 1e-4
    require_close(train([*overrides, f"trainer.compile={mode}"], CUDA), train(overrides, CUDA), rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recomputed, accumulated", "selective", "members one by one, global noise"])
def test_cuda_graphs_of_several_passes_equal_eager_steps(name: str) -> None:
    overrides = [*FLOAT32, *CASES[name]]
    require_close(train([*overrides, "trainer.compile=reduce-overhead"], CUDA), train(overrides, CUDA), rtol=1e-4)


@pytest.mark.parametrize("overrides", [[], ["trainer.amp=true"], ["trainer.activation_checkpoint=true"]])
def test_fsdp2_over_nccl_equals_no_sharding(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29531")
    settings = ["trainer.tf32=false", *overrides, "trainer.parallelism={data: fsdp2}"]
    launch = read_process_info()
    with process_group(launch, CUDA, timeout_minutes=1):
        # `build_mesh` makes no mesh for one rank, so it is made here.
        device_mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
        mesh = DeviceGrid(ParallelDims(1, 1, 1), 0, device_mesh)
        sharded = train(settings, CUDA, mesh)
    rtol = 5e-3 if "trainer.amp=true" in overrides else 1e-5
    require_close(sharded, train(["trainer.tf32=false", *overrides], CUDA), rtol)


@pytest.mark.parametrize("name", test_golden.NAMES)
def test_golden_numbers(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    golden = test_golden.Case(name)
    model, x = golden.model.to(CUDA), golden.stored["x"].to(CUDA)
    with torch.no_grad():
        test_golden.assert_same_field(model.eval()(x).cpu(), golden.stored["y_eval"])
    advance_power_iterations(model)
    test_golden.assert_same_field(model.train()(x).detach().cpu(), golden.stored["y_train"])


SHORT_RUN = [
    "model={type: wxformer, dim: [16, 32, 64, 128], depth: [1, 1, 1, 1], dim_head: 8, decoder: pixel_shuffle, "
    "global_window_size: [4, 4, 2, 1], local_window_size: [4, 4, 2, 1], padding: {mode: earth, lat: auto, lon: auto}}",
    "trainer.valid_samples=4", "trainer.validate_every=4", "trainer.valid_batch_size=2", "trainer.use_ema=true",
    "trainer.checkpoint_every=4", "data.valid_forecast_len=2", "trainer.tf32=false",
    "inference.lead_time=24h", "inference.initial_times={every: 240h}",
]  # fmt: skip


def read_losses(folder: Path) -> list[float]:
    """Return the losses of a run's log."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if "loss" in entry]


@pytest.mark.slow
def test_run_moves_between_gpu_and_cpu(tmp_path: Path, repository: Path) -> None:
    config = str(repository / "config" / "quickstart.yml")
    losses, forecasts = {}, {}
    # Name of a run -> device of its first four and of its last four steps.
    runs = {"cpu": ("cpu", "cpu"), "gpu": ("cuda", "cuda"), "both": ("cuda", "cpu"), "back": ("cpu", "cuda")}
    for name, devices in runs.items():
        folder = tmp_path / name
        settings = [*SHORT_RUN, f"save_loc={folder}", "trainer.log_every=1"]
        for device, steps in zip(devices, (4, 8), strict=True):
            run = [*settings, f"trainer.device={device}", f"trainer.max_steps={steps}", "trainer.resume=auto"]
            assert main(["train", config, *run]) == 0
        assert main(["rollout", config, *settings, f"trainer.device={devices[1]}"]) == 0
        assert main(["verify", config, *settings, f"trainer.device={devices[1]}"]) == 0
        losses[name] = torch.tensor(read_losses(folder))
        assert len(losses[name]) == 8
        paths = sorted((folder / "forecasts").glob("*.nc"))
        assert paths
        with xarray.open_dataset(paths[0]) as dataset:
            forecasts[name] = dataset["z"].load()
    for name in ("gpu", "both", "back"):
        xarray.testing.assert_allclose(forecasts[name], forecasts["cpu"], rtol=1e-4)
        torch.testing.assert_close(losses[name], losses["cpu"], rtol=1e-4, atol=0)
