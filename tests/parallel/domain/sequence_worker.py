"""Worker of test_sequence_parallel: compares networks on a mesh with whole networks, also with a broken step."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from credit.models.lora import apply_lora
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.domain.split import split_domain
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import process_group, read_process_info
from credit.parallel.tensor import sequence_parallel, tensor_parallel
from credit.train.build.model import compile_blocks
from tests.parallel.domain import networks

MUTATIONS = ("whole weights", "split weights", "position bias", "order of tokens", "numbers of cells")


@dataclass(frozen=True)
class SequenceCase:
    """A network and a mesh.

    Attributes:
        network: name of a case in `networks.CASES`.
        tensor: number of tensor-parallel ranks.
        domain: number of ranks of the axis domain.
        shard: number of data-parallel ranks; each has one of the two samples if there are two.
        checkpoint: value of ``trainer.activation_checkpoint``.
        changes: settings of the network that replace those of its case.
        lora: True for adapters of low rank in all split layers.
        float32: True to compute in float32.
        compiled: True to compile the blocks.
    """

    network: str
    tensor: int
    domain: int = 1
    shard: int = 1
    checkpoint: bool | str = False
    changes: Mapping[str, Any] | None = None
    lora: bool = False
    float32: bool = False
    compiled: bool = False


# The numbers of heads and of hidden units of the networks are multiples of 2. With 4 ranks, the attention of the first
# stages is not split, because it has fewer heads.
CASES: dict[int, dict[str, SequenceCase]] = {
    2: {
        **{name: SequenceCase(name, 2) for name in ("noise", "odd rows", "one window", "swin")},
        "checkpointed": SequenceCase("noise", 2, checkpoint=True),
        "selective": SequenceCase("odd rows", 2, checkpoint="selective"),
        "spectral norm": SequenceCase("pixel shuffle", 2, changes={"use_spectral_norm": True}, float32=True),
        "adapters": SequenceCase("pixel shuffle", 2, lora=True),
        "compiled": SequenceCase("odd rows", 2, checkpoint=True, compiled=True),
    },
    4: {
        **{f"{name}, tensor 4": SequenceCase(name, 4) for name in ("pixel shuffle", "noise", "one window")},
        **{
            f"{name}, domain 2": SequenceCase(name, 2, domain=2)
            for name in ("noise", "odd rows", "interpolated", "swin")
        },
        "shard 2": SequenceCase("odd rows", 2, shard=2),
        "spectral norm, domain 2": SequenceCase(
            "odd rows", 2, domain=2, changes={"use_spectral_norm": True}, float32=True
        ),
    },
}


@contextmanager
def break_step(mutation: str) -> Iterator[None]:
    """Break one step of sequence parallelism while the context is open."""
    parts = sequence_parallel.TokenParts
    ranks = sequence_parallel.SequenceRanks
    patches: dict[str, tuple[Any, str, Any]] = {
        # Norms and biases keep only the gradient of the tokens of one rank.
        "whole weights": (sequence_parallel.GradientAverage, "_average", lambda average: average._reduced.clear()),
        "split weights": (tensor_parallel, "_scale_weight_gradient", lambda weight, group: weight),
        "position bias": (
            tensor_parallel, "_average_gradient_of_output", tensor_parallel._sum_gradient_of_output,
        ),
        # Each rank gets the sums for the tokens of another one.
        "order of tokens": (parts, "sum", _swap_tokens(parts.sum)),
        # The cells of the first rank get the masks of the cells of the second rank, and the reverse.
        "numbers of cells": (ranks, "build", _reverse_field_ranks(ranks.build)),
    }  # fmt: skip
    owner, name, replacement = patches[mutation]
    with mock.patch.object(owner, name, replacement):
        yield


def _swap_tokens(method: Any) -> Any:
    def sum_swapped_tokens(parts: sequence_parallel.TokenParts, x: torch.Tensor) -> torch.Tensor:
        return method(parts, x.flip(0))

    return sum_swapped_tokens


def _reverse_field_ranks(build_ranks: Any) -> Any:
    def build_reversed_ranks(
        group: dist.ProcessGroup, domain_group: dist.ProcessGroup
    ) -> sequence_parallel.SequenceRanks:
        ranks = build_ranks(group, domain_group)
        return replace(ranks, field_ranks=ranks.field_ranks[::-1])

    return build_reversed_ranks


def build(case: SequenceCase) -> nn.Module:
    """Return the network of a case."""
    network_case = networks.CASES[case.network]
    settings = {**network_case.settings, **(case.changes or {})}
    network = networks.build_network(networks.NetworkCase(settings, network_case.noise, network_case.model))
    if case.lora:
        apply_lora(network, ["*.to_qkv", "*.to_out", "*.expand", "*.contract"], 2, 4.0)
        network.double()
        generator = torch.Generator().manual_seed(9)
        for parameter in network.parameters():
            # The second factors start as zeros.
            if parameter.requires_grad:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return network.float() if case.float32 else network


def compare(case: SequenceCase, mesh: DeviceGrid, context: AbstractContextManager[None] | None = None) -> dict:
    """Collective: return the largest relative differences between a network on the mesh and the whole network.

    Args:
        case: the network.
        mesh: the ranks.
        context: context in which the network runs on the mesh, but not the whole network; None for none.

    Returns:
        Differences of ``output``, ``input_gradient`` and ``gradients``, the same on all ranks.
    """
    network = build(case)
    dtype = next(network.parameters()).dtype
    inputs = networks.draw_inputs(networks.CASES[case.network])
    x_BCTHW, cotangent_BCTHW = inputs[0].to(dtype), inputs[1].to(dtype)
    condition = None
    if inputs[2] is not None:
        # Seeds of dropout stay integers.
        condition = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs[2].items()}
    whole_result = networks.run(copy.deepcopy(network), x_BCTHW, cotangent_BCTHW, condition)
    samples = slice(None)
    if case.shard > 1:
        samples = slice(mesh.data_rank, mesh.data_rank + 1)
    with context or nullcontext():
        split_domain(network, mesh.domain_group)
        compile_function = partial(compile_blocks, backend="aot_eager") if case.compiled else None
        parallelize(network, mesh.device_mesh, checkpoint=case.checkpoint, compile_blocks=compile_function)
        slices = (samples, ..., *network.domain.part.slices)
        # FSDP2 averages gradients over all ranks, so a rank's part of the loss is multiplied by their number.
        num_ranks = dist.get_world_size()
        part_result = networks.run(network, x_BCTHW[slices], num_ranks * cotangent_BCTHW[slices], condition)
    part_gradients = {}
    for name, gradient in part_result.gradients.items():
        part_gradients[strip_wrapper_prefixes(name)] = gradient.full_tensor()
    # Parameters whose gradient is zero except for rounding errors are compared on the scale of all gradients.
    floor = 1e-2 if case.float32 else 1e-6
    total_norm = torch.stack([gradient.norm() for gradient in whole_result.gradients.values()]).norm()
    gradient_errors = [torch.zeros((), dtype=dtype)]
    for name, gradient in whole_result.gradients.items():
        difference = part_gradients.get(name, torch.zeros_like(gradient)) - gradient
        gradient_errors.append(difference.norm() / (gradient.norm() + floor * total_norm))
    errors = torch.stack(
        [
            (part_result.output - whole_result.output[slices]).abs().max() / whole_result.output.abs().max(),
            (part_result.input_gradient / num_ranks - whole_result.input_gradient[slices]).abs().max()
            / whole_result.input_gradient.abs().max(),
            torch.stack(gradient_errors).max(),
        ]
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return dict(zip(("output", "input_gradient", "gradients"), errors.tolist(), strict=True))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    process_info = read_process_info()
    results: dict[str, Any] = {"cases": {}, "mutations": {}}
    with process_group(process_info, torch.device("cpu"), timeout_minutes=5):
        meshes: dict[ParallelDims, DeviceGrid] = {}
        for name, case in CASES[process_info.world].items():
            degrees = ParallelDims(shard=case.shard, tensor=case.tensor, domain=case.domain, sequence_parallel=True)
            mesh = meshes.setdefault(degrees, build_mesh(degrees, process_info.rank, "cpu"))
            results["cases"][name] = compare(case, mesh)
        if process_info.world == 2:
            for mutation in MUTATIONS:
                results["mutations"][mutation] = compare(CASES[2]["noise"], mesh, break_step(mutation))
        dist.barrier()
    if process_info.is_main:
        (folder / f"{process_info.world}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
