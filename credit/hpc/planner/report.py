"""Report of a plan, as text or JSON.

The report states for each value of memory if it is exact or an upper bound. All times are estimates.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from credit.hpc.planner.gpus import (
    COMPUTE_SHARE,
    KERNEL_SECONDS,
    LINK_SHARE,
    MEMORY_SHARE,
    RESERVED_GIB,
    RESERVED_SHARE,
    Gpu,
)
from credit.hpc.planner.mesh import MeshPlan
from credit.hpc.planner.plan import Plan
from credit.hpc.planner.planned_run import PlannedRun
from credit.hpc.planner.traffic import count_calls_by_kind, sum_bytes_by_kind, sum_ring_bytes_by_kind
from credit.parallel.blocks.cuda_graphs import CUDA_GRAPHS, describe_cuda_graphs

_MAX_MESHES_SHOWN = 10
# If a run of several epochs has fewer optimizer steps than this number, the report warns about it.
_MIN_USUAL_STEPS = 1000
# Attribute of `Memory` -> its meaning and its accuracy.
_MEMORY_KINDS = {
    "parameters": "weights, this rank's part (exact)",
    "gradients": "gradients, this rank's part (exact)",
    "optimizer": "the optimizer's state, this rank's part (exact)",
    "average": "moving average of the weights (exact)",
    "buffers": "buffers (exact)",
    "fields": "static fields, masks, weights of the loss (exact)",
    "activations": "activations and samples (traced; without the workspace of kernels)",
    "gathered": "gathered weights (upper bound)",
    "reduced": "gradients before the reduction (upper bound)",
}
_HOW_ESTIMATED = (
    "All times, and the energy computed from them, are estimates. The time of a kernel is the longer of its arithmetic "
    "time and its memory time, from data sheets (roofline model). The host queues one kernel after another. The time "
    "of a collective is the time to send its bytes over the slowest link, plus the latency of its hops."
)


def format_plan(plan: Plan, run: PlannedRun) -> str:
    """Return the report of a plan as text with tables in Markdown."""
    best = plan.best
    gpu = plan.gpu
    world = best.degrees.world
    lines = [
        f"{plan.parameters / 1e6:.1f} million parameters on {world} x {gpu.name} ({_describe_nodes(gpu, world)})",
        "",
        *_format_meshes(plan),
        "",
        f"recommended: {format_settings(best)}; of the fastest meshes that fit, the one with the shortest collectives",
        *_explain_choice(plan),
        f"  {best.samples} samples per step, {best.steps} steps, {best.flops / 1e12:.1f} TFLOP per GPU and step",
        f"  a checkpoint has at most {count_checkpoint_files(best, gpu.per_node)} files; only the first replica writes",
        describe_reads(best, run),
        f"  estimate of the run: {best.hours:.3g} hours, {best.megawatt_hours:.3g} MWh at full power of all GPUs",
        f"  estimate of a step: {best.step_seconds:.3f} s = max(kernels {best.kernel_seconds:.3f}, their launch by the "
        f"host {best.launch_seconds:.3f}, overlapped collectives {best.overlapped_seconds:.3f}) + collectives for "
        f"which kernels wait {best.blocking_seconds:.3f}",
        "",
        *_format_memory(best, gpu),
        "",
        *_format_collectives(best),
        "",
        *_format_checkpointing(plan, run),
        "",
        *_format_members_at_once(plan, run),
        _HOW_ESTIMATED,
        "",
        "assumed:",
    ]
    lines += [f"- {assumption}" for assumption in list_assumptions(run, gpu)]
    # With ``max_steps`` instead of ``num_epoch``, the user has chosen the number of steps, so no note is necessary.
    has_few_steps = 0 < best.steps < _MIN_USUAL_STEPS
    if has_few_steps and run.trainer.num_epoch:
        lines += ["", f"note: {best.steps} optimizer steps is a small number for {run.trainer.num_epoch} epochs"]
    return "\n".join(lines)


def plan_to_dict(plan: Plan, run: PlannedRun) -> dict[str, Any]:
    """Return the report of a plan for JSON, in bytes, seconds and hours; the key ``estimate`` has estimated values."""
    # The keys are written as in YAML: false, selective, true.
    checkpointing = {}
    for kind, mesh in plan.checkpointing.items():
        checkpointing[str(kind).lower()] = _mesh_to_dict(mesh)
    return {
        "parameters": plan.parameters,
        "gpu": asdict(plan.gpu),
        "usable_bytes": plan.gpu.usable_bytes,
        "recommended": _mesh_to_dict(plan.best),
        "checkpoint_files": count_checkpoint_files(plan.best, plan.gpu.per_node),
        "reads": {"opens": count_chunk_opens(plan.best, run), "bytes_per_time": run.bytes_per_time},
        "configured": _mesh_to_dict(plan.configured),
        "meshes": [_mesh_to_dict(mesh) for mesh in plan.meshes],
        "checkpointing": checkpointing,
        "members_at_once": {number: _mesh_to_dict(mesh) for number, mesh in plan.members_at_once.items()},
        "recommended_members_at_once": plan.best_members_at_once,
        "domain_refusal": plan.domain_refusal,
        "estimated_how": _HOW_ESTIMATED,
        "assumed": list_assumptions(run, plan.gpu),
    }


def count_checkpoint_files(mesh: MeshPlan, ranks_per_node: int) -> int:
    """Return the maximum number of files of a checkpoint (`credit.train.checkpoint.sharded.index`).

    Args:
        mesh: plan of the mesh; only its first replica writes.
        ranks_per_node: number of ranks on a node; they write into the same files.
    """
    degrees = mesh.degrees
    num_writers = degrees.shard * degrees.domain * degrees.tensor
    num_nodes = math.ceil(num_writers / ranks_per_node)
    # The columns that tensor parallelism splits are written into separate files.
    files_per_node = min(degrees.tensor, ranks_per_node)
    # The trained weights, the weights for forecasts and the optimizer state each have an index. Assets, metadata and
    # manifest are stored once.
    return 3 * (num_nodes * files_per_node + 1) + 3


def count_chunk_opens(mesh: MeshPlan, run: PlannedRun) -> int:
    """Return the number of times that all ranks together open a chunk of the training store in an optimizer step.

    A chunk has all fields of a valid time. In a tensor-parallel or ensemble group, one rank opens the chunk and sends
    the fields to the other ranks. In a domain group, each rank opens the chunk.

    Args:
        mesh: plan of the mesh.
        run: settings of the run; its longest rollout is used.
    """
    return mesh.samples * run.times_per_sample * mesh.degrees.domain


def describe_reads(mesh: MeshPlan, run: PlannedRun) -> str:
    """Return a line of the report about the reads from the training store in an optimizer step."""
    num_opens = count_chunk_opens(mesh, run)
    # If a chunk has blocks, or a copy on the node, the ranks of a domain group together read the chunk only once.
    read_bytes = num_opens // mesh.degrees.domain * run.bytes_per_time
    rates = f"{num_opens / mesh.step_seconds:.0f} opens/s, {read_bytes / 1e9 / mesh.step_seconds:.3g} GB/s"
    return (
        f"  a step reads {read_bytes / 1e9:.3g} GB of fields, uncompressed, with {num_opens} opens of chunks of the "
        f"training store (estimate: {rates}); with data.cache: disk, a node reads each chunk from the store once"
    )


def format_settings(mesh: MeshPlan) -> str:
    """Return the value of ``trainer.parallelism`` that selects a mesh, or "one GPU"."""
    degrees = mesh.degrees
    if degrees.world == 1:
        return "one GPU"
    ensemble = ""
    if degrees.ensemble > 1:
        ensemble = f", ensemble: {degrees.ensemble}"
    division = ""
    if degrees.domain > 1:
        division = f", domain: {degrees.domain}"
    if degrees.sequence_parallel:
        division += ", sequence_parallel: true"
    if mesh.data == "fsdp2":
        return f"{{data: fsdp2, replicate: {degrees.replicate}, tensor: {degrees.tensor}{division}{ensemble}}}"
    if mesh.data == "none":
        # Tensor parallelism alone: all ranks share each sample, so there are no ensemble groups.
        return f"{{data: none, tensor: {degrees.tensor}}}"
    return f"{{data: ddp{ensemble}}}"


def list_assumptions(run: PlannedRun, gpu: Gpu) -> list[str]:
    """Return the assumptions of the estimates, one string for each assumption."""
    trainer = run.trainer
    lines = []
    if run.max_samples_per_step is not None:
        lines.append(f"an optimizer step has at most {run.max_samples_per_step} samples (--samples-per-step)")
    lines += [
        f"kernels reach {COMPUTE_SHARE:.0%} of the peak rate or {MEMORY_SHARE:.0%} of the memory bandwidth, and need "
        f"at least {KERNEL_SECONDS * 1e6:.0f} us",
        f"the host needs {gpu.launch_seconds * 1e6:g} us to queue a kernel (--launch), as measured on one virtual "
        "machine with an H100; trainer.compile needs fewer kernels",
        f"links reach {LINK_SHARE:.0%} of {gpu.node_gbs:g} GB/s in a node and {gpu.network_gbs:g} GB/s per GPU between "
        "nodes; hops have the latency of NCCL's cost model; FSDP2's collectives run at the same time as kernels",
        f"CUDA, NCCL, libraries and fragmentation use {RESERVED_GIB:g} GiB and {RESERVED_SHARE:.0%} of the memory",
        f"{run.samples} samples in the training period; loading, validation and checkpoints take no time",
    ]
    if trainer.compile:
        lines.append("the step is traced without trainer.compile, which needs less memory and time")
    if trainer.compile == CUDA_GRAPHS:
        lines.append(
            f"trainer.compile: {CUDA_GRAPHS} works on one rank only; its CUDA graphs start many kernels with one call; "
            "the plan does not include their memory"
        )
        lines += describe_cuda_graphs(trainer, max(run.rollout.values()), has_gpu=True)
    if trainer.parallelism.cpu_offload:
        lines.append("transfers between host and GPU and the update in host memory take no time")
    if len(run.rollout) > 1:
        lines.append("the time of a rollout is proportional to its length")
    return lines


def _describe_nodes(gpu: Gpu, world: int) -> str:
    """Return the number and size of the nodes of `world` GPUs as a string, such as "2 nodes of 8"."""
    # A single node may have unused GPUs.
    nodes = math.ceil(world / gpu.per_node)
    plural = "s" if nodes > 1 else ""
    return f"{nodes} node{plural} of {gpu.per_node}"


def _format_meshes(plan: Plan) -> list[str]:
    """Return the lines of the Markdown table of the best meshes and the mesh of the config."""
    rows = [
        "| data | replicate x shard x domain x tensor | GiB per GPU | estimate: s per step | estimate: samples/s "
        "| estimate: hours | estimate: MWh | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    # The best meshes are the first in the plan. The mesh of the config is shown even if it is not among them.
    shown_meshes = list(plan.meshes[:_MAX_MESHES_SHOWN])
    if plan.configured not in shown_meshes:
        shown_meshes.append(plan.configured)
    for mesh in shown_meshes:
        degrees = mesh.degrees
        notes = []
        if mesh is plan.best:
            notes.append("recommended")
        if mesh is plan.configured:
            notes.append("config")
        if not mesh.fits:
            notes.append("does not fit")
        if not mesh.steps:
            notes.append("too many samples per step")
        sequence = " sequence parallel" if degrees.sequence_parallel else ""
        rows.append(
            f"| {mesh.data} | {degrees.replicate} x {degrees.shard} x {degrees.domain} x {degrees.tensor}{sequence} "
            f"| {mesh.memory.device_bytes / 2**30:.1f} | {mesh.step_seconds:.3f} | {mesh.samples_per_second:.1f} "
            f"| {mesh.hours:.3g} | {mesh.megawatt_hours:.3g} | {', '.join(notes)} |"
        )
    if len(plan.meshes) > len(shown_meshes):
        # An empty line ends the table before the next paragraph.
        rows += ["", f"{len(plan.meshes)} meshes in total"]
    return rows


def _explain_choice(plan: Plan) -> list[str]:
    """Return lines that compare the recommended mesh with meshes of other degrees of domain and tensor parallelism."""
    best = plan.best
    lines = []
    fastest: dict[tuple[int, int], MeshPlan] = {}
    # The meshes that work come first, in order of decreasing speed.
    for mesh in plan.meshes:
        fastest.setdefault((mesh.degrees.domain, mesh.degrees.tensor), mesh)
    for (domain, tensor), mesh in sorted(fastest.items()):
        if mesh.degrees.domain == best.degrees.domain and mesh.degrees.tensor == best.degrees.tensor:
            continue
        if not mesh.steps:
            reason = f"needs {mesh.samples} samples per step, which is too many"
        elif not mesh.fits:
            reason = f"needs {mesh.memory.device_bytes / 2**30:.1f} GiB and does not fit"
        else:
            ratio = mesh.samples_per_second / best.samples_per_second
            reason = f"has {ratio:.2f} times as many samples/s (estimate)"
        lines.append(f"  domain {domain}, tensor {tensor}: {reason}")
    if plan.domain_refusal is not None:
        lines.append(f"  the fields cannot be divided into more parts: {plan.domain_refusal}")
    return lines


def _format_memory(mesh: MeshPlan, gpu: Gpu) -> list[str]:
    """Return the lines of the Markdown table of the memory of the fullest rank."""
    sizes = asdict(mesh.memory)
    # With ``trainer.parallelism.cpu_offload``, these attributes of `Memory` use no GPU memory.
    fields_on_host: tuple[str, ...] = ()
    if mesh.memory.host:
        fields_on_host = ("parameters", "gradients", "optimizer", "average")
    rows = ["| memory of the fullest rank | MiB |", "|---|---|"]
    for field, text in _MEMORY_KINDS.items():
        suffix = ", in host memory" if field in fields_on_host else ""
        rows.append(f"| {text}{suffix} | {sizes[field] / 2**20:.1f} |")
    device_mib = mesh.memory.device_bytes / 2**20
    rows.append(f"| on the GPU, of {gpu.usable_bytes / 2**20:.0f} that a run may use | {device_mib:.1f} |")
    return rows


def _format_collectives(mesh: MeshPlan) -> list[str]:
    """Return the lines of the Markdown table of the collectives in a step."""
    if not mesh.collectives:
        return ["no collectives"]
    calls = count_calls_by_kind(mesh.collectives)
    result_bytes = sum_bytes_by_kind(mesh.collectives)
    rows = ["| collectives of a step, on each rank | calls | MB of results | MB sent in rings |", "|---|---|---|---|"]
    for kind, sent_bytes in sum_ring_bytes_by_kind(mesh.collectives).items():
        rows.append(f"| {kind} | {calls[kind]} | {result_bytes[kind] / 1e6:.1f} | {sent_bytes / 1e6:.1f} |")
    return rows


def _format_checkpointing(plan: Plan, run: PlannedRun) -> list[str]:
    """Return the lines of the Markdown table of the recommended mesh with each kind of activation checkpointing."""
    rows = _format_alternatives_header("trainer.activation_checkpoint")
    for kind, mesh in plan.checkpointing.items():
        notes = []
        if kind == run.trainer.activation_checkpoint:
            notes.append("config")
        rows.append(_format_alternative(str(kind).lower(), mesh, notes))
    return rows


def _format_members_at_once(plan: Plan, run: PlannedRun) -> list[str]:
    """Return the lines of the Markdown table of the recommended mesh with each value of ``trainer.members_at_once``.

    The list is empty if there is only one possible value.
    """
    if len(plan.members_at_once) == 1:
        return []
    rows = _format_alternatives_header("trainer.members_at_once")
    for number, mesh in plan.members_at_once.items():
        notes = []
        if number == plan.best_members_at_once:
            notes.append("recommended")
        if number == run.trainer.members_at_once:
            notes.append("config")
        rows.append(_format_alternative(str(number), mesh, notes))
    # An empty line ends the table before the next paragraph.
    return [*rows, ""]


def _format_alternatives_header(key: str) -> list[str]:
    """Return the first two lines of a Markdown table that compares the values of a config key."""
    return [f"| {key} | activations, GiB | total, GiB | estimate: s per step | |", "|---|---|---|---|---|"]


def _format_alternative(value: str, mesh: MeshPlan, notes: list[str]) -> str:
    """Return the table row of one value of a config key.

    Args:
        value: value of the key as a string.
        mesh: plan of the recommended mesh with this value.
        notes: remarks for the last column.
    """
    if not mesh.fits:
        notes = [*notes, "does not fit"]
    return (
        f"| {value} | {mesh.memory.activations / 2**30:.2f} | {mesh.memory.device_bytes / 2**30:.2f} | "
        f"{mesh.step_seconds:.3f} | {', '.join(notes)} |"
    )


def _mesh_to_dict(mesh: MeshPlan) -> dict[str, Any]:
    """Return the plan of one mesh for JSON, in bytes, seconds and hours."""
    return {
        "data": mesh.data,
        **asdict(mesh.degrees),
        "works": mesh.is_usable,
        "fits": mesh.fits,
        "memory": {**asdict(mesh.memory), "device": mesh.memory.device_bytes},
        "calls": count_calls_by_kind(mesh.collectives),
        "bytes": sum_bytes_by_kind(mesh.collectives),
        "sent": sum_ring_bytes_by_kind(mesh.collectives),
        "flops": mesh.flops,
        "samples": mesh.samples,
        "steps": mesh.steps,
        "estimate": {
            "step_seconds": mesh.step_seconds,
            "kernel_seconds": mesh.kernel_seconds,
            "launch_seconds": mesh.launch_seconds,
            "blocking_seconds": mesh.blocking_seconds,
            "overlapped_seconds": mesh.overlapped_seconds,
            "samples_per_second": mesh.samples_per_second,
            "hours": mesh.hours,
            "megawatt_hours": mesh.megawatt_hours,
        },
    }
