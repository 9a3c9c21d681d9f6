"""The run's network: derived shapes, ranks, memory; one process and many take the same way."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from credit.channels import ChannelMap
from credit.config import Config
from credit.config.schema_inference import ForecastParallelismConfig
from credit.config.schema_trainer import MixedPrecisionConfig, TrainerConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.models.base import ForecastModel
from credit.models.layers.spectral_norm import normalize_together
from credit.models.lora import apply_lora
from credit.models.registry import build_model
from credit.parallel.fsdp2 import _build_mp_policy
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import ProcessInfo
from credit.parallel.state.materialise import allocate_
from credit.train.assets import ModelAssets, build_model_spec

logger = logging.getLogger(__name__)


def use_deterministic_algorithms(on: bool) -> None:
    """Have torch compute with deterministic algorithms alone, or not; to be called before the first product."""
    if on:
        # without which torch refuses every matrix product on a GPU
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if on != torch.are_deterministic_algorithms_enabled():
        # which imports torch's compiler: a second
        torch.use_deterministic_algorithms(on)


def set_tf32(on: bool, device: torch.device) -> None:
    """Have a GPU compute float32 products and convolutions in TF32, or neither; by itself torch does convolutions so.

    Spectral norm's products with vectors have no such kernel, and budgets are float64.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device of ``trainer.device``; of a host's GPUs, the one of the process with `local_rank`.

    A GPU becomes the process's current one: else every rank would take memory on the host's first GPU, too.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: cuda, but torch sees no GPU here; use auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(name)


def build_network(config: Config, channels: ChannelMap, grid: LatLonGrid, attributes: Mapping) -> ForecastModel:
    """Return the untrained network of a run."""
    return build_model(build_model_spec(config.data, channels, grid, attributes), config.model)


def build_parallel_model(
    config: Config, assets: ModelAssets, mesh: DeviceGrid, device: torch.device
) -> tuple[nn.Module, bool]:
    """Return the network on its ranks, with memory but without values, and whether it is to run under autocast.

    It is built on the meta device, so no rank ever holds more than its part.
    """
    conf = config.trainer
    with torch.device("meta"):
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    if conf.lora is not None:
        apply_lora(model, conf.lora.targets, conf.lora.rank, conf.lora.alpha)
    if conf.compile and device.type != "meta":
        require_compiler(device)
    set_tf32(conf.tf32, device)
    sharded = mesh.device_mesh is not None and conf.parallelism.data != "none"
    policy = build_policy(conf, sharded)
    autocast = conf.amp and policy is None
    logger.info(
        "ranks: %s; computed in %s", mesh.describe(), policy or ("bfloat16 (autocast)" if autocast else "float32")
    )
    parallelize(
        model,
        mesh.device_mesh,
        shard=sharded,
        checkpoint=conf.activation_checkpoint,
        compile_blocks=compile_blocks if conf.compile else None,
        policy=policy,
        reshard_after_forward=conf.parallelism.reshard_after_forward,
        cpu_offload=conf.parallelism.cpu_offload,
    )
    allocate_(model, device, host_parameters=sharded and conf.parallelism.cpu_offload)
    # Tensor parallelism has arranged this for the sums of split weights. A compiled block normalises its own weights.
    if device.type != "cpu" and mesh.degrees.tensor == 1 and not conf.compile:
        normalize_together(model, by_unit=sharded or bool(conf.activation_checkpoint))
    return model, autocast


def build_policy(conf: TrainerConfig, sharded: bool) -> MixedPrecisionPolicy | None:
    """Return FSDP2's mixed precision, None where the network computes in float32 or, with ``amp``, under autocast."""
    # weights gathered in bfloat16 would round away what adapters add to them; autocast rounds the sum
    if not (sharded and conf.amp and conf.lora is None):
        return None
    asked = conf.fsdp2_mp_policy or MixedPrecisionConfig()
    return _build_mp_policy({"trainer": {"amp": True, "fsdp2_mp_policy": asked.model_dump()}})


def build_forecast_mesh(conf: ForecastParallelismConfig, launch: ProcessInfo, device_type: str) -> DeviceGrid:
    """Return the ranks that share forecasts (``inference.parallelism``); collective where there are any.

    Without sharing, every rank is a world of its own: no rank waits for another.

    Raises:
        ConfigError: if the number of ranks is no multiple of ``tensor``.
    """
    if not conf.is_spread:
        return DeviceGrid()
    groups, rest = divmod(launch.world, conf.tensor)
    if rest or not groups:
        raise ConfigError(
            f"inference.parallelism.tensor: {conf.tensor} does not divide the {launch.world} ranks that were started; "
            f"start a multiple of {conf.tensor}, or set it to 1"
        )
    degrees = ParallelDims(shard=groups, tensor=conf.tensor) if conf.shard else ParallelDims(groups, 1, conf.tensor)
    return build_mesh(degrees, launch.rank, device_type)


def require_compiler(device: torch.device) -> None:
    """Refuse ``trainer.compile`` where torch would fail at the first step, which looks as if another attempt may pass.

    Raises:
        ConfigError: naming what is missing.
    """
    if device.type == "cuda":
        # triton builds what launches its kernels
        language, names = "C", [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    else:
        language, names = "C++", [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
    missing = None if any(map(shutil.which, names)) else f"no {language} compiler is found ({' or '.join(names)})"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        missing = "the package triton is missing"
    if missing is not None:
        raise ConfigError(f"trainer.compile: true, but {missing}; load or install it, or set trainer.compile to false")


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """torch.compile every marked block, with the checkpointing around it, in place; before FSDP2.

    A block is one graph, and code that torch cannot trace is an error. Forwards are compiled, not modules, so that
    hooks stay outside.

    Args:
        model: on any device.
        backend: of torch.compile; tests take one that compiles faster.
    """
    marked = [module for module in model.modules() if getattr(module, "_fsdp2_shard", False)]
    inside = {id(child) for module in marked for child in module.children()}
    units = [module for module in marked if id(module) not in inside]
    # All blocks count against one limit. Each has a graph for training, for validation and for its last, smaller batch,
    # and for an early view; with frozen weights the first block's input needs a gradient from the rollout's second step
    # on, which is one more.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 5 * len(units))
    for unit in units:
        # Blocks of one class differ in shape: left to itself, torch would compile the second for any shape, where
        # inductor fails ("cannot determine truth value of Relational", torch 2.13).
        unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False, backend=backend)
