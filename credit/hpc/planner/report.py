"""A plan in words and as JSON: what is exact, what is an upper bound and what is assumed is said beside the figures."""

from __future__ import annotations

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
from credit.hpc.planner.mesh import MeshPlan, Run
from credit.hpc.planner.plan import Plan
from credit.hpc.planner.traffic import bytes_by_kind, calls_by_kind, sent_by_kind

_SHOWN = 10
# field of Memory -> what it is and how well it is known
_KINDS = {
    "parameters": "weights, this rank's part (exact)",
    "gradients": "gradients, this rank's part (exact)",
    "optimizer": "AdamW's state, this rank's part (exact)",
    "average": "moving average of the weights (exact)",
    "buffers": "buffers (exact)",
    "fields": "static fields, masks, weights of the loss (exact)",
    "activations": "activations and samples (traced; without the kernels' own scratch space)",
    "gathered": "whole weights in flight (upper bound)",
    "reduced": "whole gradients in flight (upper bound)",
}


def describe(plan: Plan, run: Run) -> str:
    """Return the plan as text with tables in Markdown."""
    best, gpu, world = plan.best, plan.gpu, plan.best.degrees.world
    lines = [
        f"{plan.parameters / 1e6:.1f} million parameters on {world} x {gpu.name} ({_nodes(gpu, world)})",
        "",
        *_meshes(plan),
        "",
        f"recommended: {settings(best)}; of the fastest that fit, the one with the shortest collectives",
        f"  {best.samples} samples a step, {best.steps} steps; {best.hours:.3g} hours, "
        f"{best.megawatt_hours:.3g} MWh at the boards' full power",
        f"  a step: {best.step_seconds:.3f} s = max(kernels {best.compute:.3f}, gathers and reductions "
        f"{best.hidden:.3f}) + sums that the kernels wait for {best.waiting:.3f}",
        f"  {best.flops / 1e12:.1f} TFLOP a GPU and step",
        "",
        *_memory(best, gpu),
        "",
        *_traffic(best),
        "",
        *_checkpointing(plan, run),
        "",
        "assumed:",
        *(f"- {line}" for line in assumptions(run, gpu)),
    ]
    if best.steps and run.trainer.num_epoch and best.steps < 1000:
        lines += ["", f"beware: {best.steps} optimizer steps are few for {run.trainer.num_epoch} epochs"]
    return "\n".join(lines)


def to_dict(plan: Plan, run: Run) -> dict[str, Any]:
    """Return the plan for JSON; bytes, seconds, hours."""
    return {
        "parameters": plan.parameters,
        "gpu": asdict(plan.gpu),
        "usable_bytes": plan.gpu.usable,
        "recommended": _mesh_dict(plan.best),
        "asked": _mesh_dict(plan.asked),
        "meshes": [_mesh_dict(mesh) for mesh in plan.meshes],
        "checkpointing": {str(way).lower(): _mesh_dict(mesh) for way, mesh in plan.checkpointing.items()},
        "assumed": assumptions(run, plan.gpu),
    }


def settings(mesh: MeshPlan) -> str:
    """Return the keys of ``trainer.parallelism`` that give a mesh."""
    if mesh.degrees.world == 1:
        return "one GPU"
    d = mesh.degrees
    if mesh.data != "fsdp2":
        return f"{{data: {mesh.data}, tensor: {d.tensor}}}" if mesh.data == "none" else "{data: ddp}"
    return f"{{data: fsdp2, replicate: {d.replicate}, tensor: {d.tensor}}}"


def assumptions(run: Run, gpu: Gpu) -> list[str]:
    """Return what the figures rest on, in sentences."""
    conf = run.trainer
    lines = [
        f"kernels reach {COMPUTE_SHARE:.0%} of the peak rate or {MEMORY_SHARE:.0%} of the memory bandwidth and take at "
        f"least {KERNEL_SECONDS * 1e6:.0f} us; never measured on a GPU",
        f"links reach {LINK_SHARE:.0%} of {gpu.node_gbs:g} GB/s in a node and {gpu.network_gbs:g} GB/s a GPU between "
        "nodes, hops the latency of NCCL's own model; gathers and reductions hide behind the kernels",
        f"{RESERVED_GIB:g} GiB and {RESERVED_SHARE:.0%} of the memory are CUDA's, NCCL's, the libraries' and lost to "
        "fragmentation",
        f"{run.samples} samples in the training period; loading, validation and checkpoints take no time",
    ]
    if conf.compile:
        lines.append("the step is traced as it runs without trainer.compile, which needs less memory and time")
    if conf.parallelism.cpu_offload:
        lines.append("transfers between host and GPU and the update in host memory take no time")
    if len(run.rollout) > 1:
        lines.append("a shorter rollout takes time in proportion")
    return lines


def _nodes(gpu: Gpu, world: int) -> str:
    nodes = -(-world // gpu.per_node)
    return f"{nodes} node{'s' if nodes > 1 else ''} of {gpu.per_node}"


def _meshes(plan: Plan) -> list[str]:
    rows = ["| data | replicate x shard x tensor | GiB a GPU | s a step | samples/s | hours | MWh | |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    shown = [*plan.meshes[:_SHOWN], *(mesh for mesh in (plan.asked,) if mesh not in plan.meshes[:_SHOWN])]
    for mesh in shown:
        d = mesh.degrees
        notes = ["recommended"] if mesh is plan.best else []
        notes += ["the config's"] if mesh is plan.asked else []
        notes += [] if mesh.fits else ["does not fit"]
        notes += [] if mesh.steps else ["more samples a step than there are"]
        rows.append(
            f"| {mesh.data} | {d.replicate} x {d.shard} x {d.tensor} | {mesh.memory.device / 2**30:.1f} | "
            f"{mesh.step_seconds:.3f} | {mesh.samples_per_second:.1f} | {mesh.hours:.3g} | {mesh.megawatt_hours:.3g} | "
            f"{', '.join(notes)} |"
        )
    return [*rows, *([f"{len(plan.meshes)} meshes in all"] if len(plan.meshes) > len(shown) else [])]


def _memory(mesh: MeshPlan, gpu: Gpu) -> list[str]:
    fields = asdict(mesh.memory)
    rows = ["| memory of the fullest rank | MiB |", "|---|---|"]
    on_host = ("parameters", "gradients", "optimizer", "average") if mesh.memory.host else ()
    for name, text in _KINDS.items():
        where = ", in host memory" if name in on_host else ""
        rows.append(f"| {text}{where} | {fields[name] / 2**20:.1f} |")
    return [*rows, f"| on the GPU, of {gpu.usable / 2**20:.0f} that a run may use | {mesh.memory.device / 2**20:.1f} |"]


def _traffic(mesh: MeshPlan) -> list[str]:
    calls, results = calls_by_kind(mesh.messages), bytes_by_kind(mesh.messages)
    rows = ["| collectives of a step, on each rank | calls | MB of results | MB sent in rings |", "|---|---|---|---|"]
    for kind, size in sent_by_kind(mesh.messages).items():
        rows.append(f"| {kind} | {calls[kind]} | {results[kind] / 1e6:.1f} | {size / 1e6:.1f} |")
    return rows if mesh.messages else ["no collectives"]


def _checkpointing(plan: Plan, run: Run) -> list[str]:
    rows = ["| trainer.activation_checkpoint | activations, GiB | all, GiB | s a step | |", "|---|---|---|---|---|"]
    for way, mesh in plan.checkpointing.items():
        notes = ["the config's"] if way == run.trainer.activation_checkpoint else []
        notes += [] if mesh.fits else ["does not fit"]
        rows.append(
            f"| {str(way).lower()} | {mesh.memory.activations / 2**30:.2f} | {mesh.memory.device / 2**30:.2f} | "
            f"{mesh.step_seconds:.3f} | {', '.join(notes)} |"
        )
    return rows


def _mesh_dict(mesh: MeshPlan) -> dict[str, Any]:
    return {
        "data": mesh.data,
        **asdict(mesh.degrees),
        "works": mesh.works,
        "fits": mesh.fits,
        "memory": {**asdict(mesh.memory), "device": mesh.memory.device},
        "calls": calls_by_kind(mesh.messages),
        "bytes": bytes_by_kind(mesh.messages),
        "sent": sent_by_kind(mesh.messages),
        "flops": mesh.flops,
        "seconds": {
            "step": mesh.step_seconds,
            "kernels": mesh.compute,
            "waiting": mesh.waiting,
            "hidden": mesh.hidden,
        },
        "samples": mesh.samples,
        "samples_per_second": mesh.samples_per_second,
        "steps": mesh.steps,
        "hours": mesh.hours,
        "megawatt_hours": mesh.megawatt_hours,
    }
