"""Builders of the model of a run: device, precision, sharding and compilation, for one process or many ranks."""

from __future__ import annotations

import functools
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
from credit.config.sections.execution import MixedPrecisionConfig
from credit.config.sections.inference import ForecastParallelismConfig
from credit.config.sections.trainer import TrainerConfig
from credit.errors import ConfigError
from credit.grid import LatLonGrid
from credit.models.base import ForecastModel
from credit.models.layers.spectral_norm import install_batched_normalization
from credit.models.registry import build_model
from credit.parallel.blocks.cuda_graphs import require_one_rank_for_cuda_graphs
from credit.parallel.domain.split import split_domain
from credit.parallel.fsdp2 import _build_mp_policy
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import ProcessInfo
from credit.parallel.state.materialise import allocate_
from credit.train.build.assets import ModelAssets, build_model_spec
from credit.train.learning_rates import select_trained_weights

logger = logging.getLogger(__name__)


def use_deterministic_algorithms(on: bool) -> None:
    """Switch torch's deterministic algorithms on or off, before the first matrix product.

    If they are switched on, the environment variable ``CUBLAS_WORKSPACE_CONFIG`` is set, unless it is already set.
    """
    if on:
        # Without this variable, every matrix product on a GPU raises an error in deterministic mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if on != torch.are_deterministic_algorithms_enabled():
        # torch is only called if the setting changes, because the call imports torch's compiler, which takes a second.
        torch.use_deterministic_algorithms(on)


def set_tf32(on: bool, device: torch.device) -> None:
    """Switch TF32 on or off for float32 matrix products and convolutions on a GPU.

    By default, torch uses TF32 only for convolutions. Spectral norm and budgets are not affected: matrix-vector
    products have no TF32 kernel, and budgets are computed in float64.

    Args:
        on: True to use TF32.
        device: device of the model; on a CPU, the function does nothing.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if on else "highest")
        torch.backends.cudnn.allow_tf32 = on


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the device for the value of ``trainer.device``; with several GPUs per host, the GPU of the local rank.

    The GPU becomes the current device of the process. Otherwise, every rank would also use memory on the first GPU.

    Args:
        name: value of ``trainer.device``: "cuda", "cpu" or "auto".
        local_rank: the rank of the process on its host.

    Raises:
        ConfigError: if `name` is "cuda" and torch finds no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: cuda, but torch finds no GPU on this host; set it to auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        # With more processes than GPUs on a host, several processes share a GPU.
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device(name)


def build_network(
    config: Config, channels: ChannelMap, grid: LatLonGrid, attributes: Mapping[str, Mapping[str, str]]
) -> ForecastModel:
    """Return the untrained network of a run on torch's default device.

    The network maps B samples of C_in input channels at T input frames, (B, C_in, T, H, W), to the output channels of
    the next time step, (B, C_out, 1, H, W), both in normalised units on H latitude rows and W longitude columns.

    Args:
        config: the config of the run.
        channels: the channels of the model.
        grid: the grid of the fields.
        attributes: variable -> its attributes units, standard_name and long_name.

    Raises:
        ConfigError: if the section ``model`` does not fit the channels or the grid.
    """
    spec = build_model_spec(config.data, channels, grid, attributes)
    return build_model(spec, config.model)


def build_parallel_model(
    config: Config, assets: ModelAssets, mesh: DeviceGrid, device: torch.device
) -> tuple[nn.Module, bool]:
    """Collective: return this rank's part of the network, and True if the network runs under autocast.

    The parameters have allocated memory, but no values yet. The network is first built on the meta device, so a rank
    never allocates more than its shard.

    Args:
        config: the config of the run.
        assets: channels, grid and attributes of the model.
        mesh: device mesh of the ranks that share the network.
        device: the device of this rank.

    Raises:
        ConfigError: if the network cannot be built, split over this mesh, or compiled on this host, or if CUDA graphs
            are requested on several ranks.
    """
    conf = config.trainer
    require_one_rank_for_cuda_graphs(conf, mesh.degrees.world)
    with torch.device("meta"):
        model = build_network(config, assets.channels, assets.grid, assets.attributes)
    select_trained_weights(model, conf)
    if conf.compile and device.type != "meta":
        require_compiler(device)
    set_tf32(conf.tf32, device)

    # FSDP2 casts sharded parameters to bfloat16 before it gathers them, which saves communication. Other parameters are
    # cast by autocast.
    sharded = mesh.device_mesh is not None and conf.parallelism.data != "none"
    policy = build_mixed_precision_policy(conf, sharded)
    autocast = conf.amp and policy is None
    if policy is not None:
        precision = str(policy)
    elif autocast:
        precision = "bfloat16 (autocast)"
    else:
        precision = "float32"
    logger.info("ranks: %s; computed in %s", mesh.describe(), precision)

    if mesh.degrees.num_field_parts > 1:
        split_domain(model, mesh.domain_group, conf.parallelism.domain_parts)
    # The network now has its final structure. Memory is allocated only for this rank's shard.
    compile_function = functools.partial(compile_blocks, mode=conf.compile_mode) if conf.compile else None
    parallelize(
        model,
        mesh.device_mesh,
        shard=sharded,
        checkpoint=conf.activation_checkpoint,
        compile_blocks=compile_function,
        policy=policy,
        reshard_after_forward=conf.parallelism.reshard_after_forward,
        cpu_offload=conf.parallelism.cpu_offload,
    )
    allocate_(model, device, host_parameters=sharded and conf.parallelism.cpu_offload)
    # With tensor parallelism, `parallelize` has already grouped the weights for the sums over their shards. A compiled
    # block normalises its weights inside its graph.
    if device.type != "cpu" and mesh.degrees.tensor == 1 and not conf.compile:
        install_batched_normalization(model, by_unit=sharded or bool(conf.activation_checkpoint))
    return model, autocast


def build_mixed_precision_policy(conf: TrainerConfig, sharded: bool) -> MixedPrecisionPolicy | None:
    """Return FSDP2's mixed-precision policy; None if the network computes in float32 or under autocast.

    Args:
        conf: the trainer section of the config.
        sharded: True if FSDP2 shards the parameters.
    """
    if not sharded or not conf.amp:
        return None
    # FSDP2 would gather base weights and adapters in bfloat16. The rounding to bfloat16 would lose the small changes of
    # adapters. Under autocast, base weights and adapters are added in float32, and only the sum is rounded.
    if conf.lora is not None:
        return None
    # `_build_mp_policy` belongs to a fixed interface, which expects the config as plain values.
    policy_config = conf.fsdp2_mp_policy or MixedPrecisionConfig()
    return _build_mp_policy({"trainer": {"amp": True, "fsdp2_mp_policy": policy_config.model_dump()}})


def build_forecast_mesh(conf: ForecastParallelismConfig, process_info: ProcessInfo, device_type: str) -> DeviceGrid:
    """Collective: return the device mesh of the ranks that compute a forecast or an ensemble together.

    Args:
        conf: ``inference.parallelism``. If it distributes neither the model nor the fields nor the members, every rank
            makes separate forecasts.
        process_info: rank and number of ranks of this process.
        device_type: "cuda" or "cpu".

    Raises:
        ConfigError: if the number of ranks is not a multiple of ``tensor`` x ``domain`` x ``ensemble``.
    """
    if not conf.needs_process_group:
        return DeviceGrid()
    num_groups = process_info.world
    ranks_per_group = 1
    named_degrees = (("tensor", conf.tensor), ("domain", conf.num_domain_ranks), ("ensemble", conf.ensemble))
    for index, (name, degree) in enumerate(named_degrees):
        ranks_per_group *= degree
        if num_groups % degree:
            product = " x ".join(f"{other} {other_degree}" for other, other_degree in named_degrees[: index + 1])
            raise ConfigError(
                f"inference.parallelism.{name}: {product} does not divide the {process_info.world} ranks that were "
                f"started; start a multiple of {ranks_per_group} ranks, or set the key to 1"
            )
        # Members are divided among data-parallel ranks, so this degree is not a factor of the number of ranks.
        if name != "ensemble":
            num_groups //= degree
    degrees = ParallelDims(
        replicate=1 if conf.shard else num_groups,
        shard=num_groups if conf.shard else 1,
        tensor=conf.tensor,
        ensemble=conf.ensemble,
        domain=conf.num_domain_ranks,
    )
    return build_mesh(degrees, process_info.rank, device_type, shares_weights=conf.shares_forecasts)


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError unless the compilers that torch.compile needs on a device are installed.

    Without this check, torch would fail at the first step, and a job script could mistake the error for a temporary
    one.

    Args:
        device: the device that the model is compiled for.

    Raises:
        ConfigError: if a compiler or the package triton is missing.
    """
    if device.type == "cuda":
        # Triton compiles the C code that launches its kernels.
        language = "C"
        commands = ["gcc", "clang"]
        if "CC" in os.environ:
            commands = [os.environ["CC"]]
    else:
        # Inductor compiles the kernels of a CPU as C++.
        language = "C++"
        default_command = "clang++" if sys.platform == "darwin" else "g++"
        commands = [os.environ.get("CXX", default_command)]
    problem = None
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        problem = "the package triton is missing"
    elif not any(shutil.which(command) for command in commands):
        problem = f"no {language} compiler is found ({' or '.join(commands)})"
    if problem is not None:
        raise ConfigError(f"trainer.compile is set, but {problem}; load or install it, or set trainer.compile to false")


def compile_blocks(model: nn.Module, backend: str = "inductor", mode: str | None = None) -> None:
    """Compile each block of a model with torch.compile, in place. Call this function before FSDP2 shards the model.

    Each block is compiled as one graph, including its activation checkpointing. Code that torch cannot trace is an
    error. Only the forward methods are compiled, so that hooks stay outside the graphs.

    Args:
        model: the model, on any device; its blocks are marked with ``_fsdp2_shard``.
        backend: the backend of torch.compile. Tests use a backend that compiles faster.
        mode: the mode of torch.compile, such as "reduce-overhead" for CUDA graphs; None for torch's default. With
            "reduce-overhead", call `Stepper.begin_iteration` before each step. Otherwise torch treats every block
            without a gradient as a new iteration and overwrites the results of the previous blocks.
    """
    marked_modules = [module for module in model.modules() if getattr(module, "_fsdp2_shard", False)]
    # A checkpointed block and its wrapper are both marked. Only the wrapper is compiled, which includes the block.
    ids_of_children = set()
    for module in marked_modules:
        ids_of_children.update(id(child) for child in module.children())
    units = [module for module in marked_modules if id(module) not in ids_of_children]
    # The limit applies to the graphs of all blocks together. Each block needs up to five graphs: for training,
    # validation, the smaller last batch of the validation, and the preview. With frozen weights, the first block needs
    # a fifth graph, because its input needs a gradient only from the second rollout step on.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 5 * len(units))
    for unit in units:
        # Blocks of the same class differ in shape. By default, torch would compile the second block for dynamic shapes,
        # which fails in inductor ("cannot determine truth value of Relational", torch 2.13).
        unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False, backend=backend, mode=mode)
