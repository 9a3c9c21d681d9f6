"""Plans: shards compared with those of FSDP2, times computed by hand, recommended meshes, and invalid settings."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest

from credit.cli import main
from credit.config.sections.execution import MixedPrecisionConfig
from credit.config.sections.trainer import TrainerConfig
from credit.errors import ConfigError
from credit.hpc.planner import report
from credit.hpc.planner.collectives import Collective
from credit.hpc.planner.gpus import Gpu, find_gpu, list_gpu_names
from credit.hpc.planner.matrices import MuonMatrix, count_matrix_collectives, estimate_matrix_seconds
from credit.hpc.planner.memory import (
    ElementBytes,
    PassSchedule,
    ShardUnit,
    Weight,
    bound_in_flight_memory,
    compute_state_memory,
    count_buffer_bytes,
    read_sharding_units,
)
from credit.hpc.planner.mesh import CHECKPOINTING, list_busy_ranks
from credit.hpc.planner.plan import Plan, make_plan
from credit.hpc.planner.planned_run import MemberBatches, PlannedRun
from credit.hpc.planner.report import format_plan, plan_to_dict
from credit.hpc.planner.trace import trace_step
from credit.hpc.planner.traffic import estimate_call_seconds
from credit.losses import member_loss
from credit.parallel.domain.division import divide_field
from credit.parallel.dtensor import local_shard
from credit.parallel.mesh import DeviceGrid, ParallelDims, build_mesh
from credit.parallel.process_info import fake_process_group
from tests.unit.hpc.measured import small_config, step_builder_of

H100 = find_gpu("h100")


def build_planned_run(*overrides: str, samples: int = 1000) -> PlannedRun:
    config = small_config("model.use_spectral_norm=false", *overrides)
    return PlannedRun(config.trainer, {0.0: config.data.forecast_len}, samples, step_builder_of(config))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(build_planned_run(), 16, H100)


@pytest.mark.parametrize(
    "degrees",
    [
        ParallelDims(1, 512, 1),
        ParallelDims(8, 64, 1),
        ParallelDims(1, 32, 2),
        ParallelDims(4, 1, 4),
        ParallelDims(1, 7, 1),
    ],
)
def test_shards_equal_those_of_fully_shard(degrees: ParallelDims) -> None:
    step_builder = step_builder_of(small_config())
    with fake_process_group(degrees.world):
        smallest_mesh = build_mesh(ParallelDims(1, min(2, degrees.world // degrees.tensor), degrees.tensor), 0, "cpu")
        model, _ = step_builder.build_network(smallest_mesh, True, False)
        planned = compute_state_memory(
            read_sharding_units(model, True), degrees, count_buffer_bytes(model), average=True
        )
        model, _ = step_builder.build_network(build_mesh(degrees, 0, "cpu"), True, False)
        local_bytes = [sum(4 * local_shard(t).numel() for t in kind) for kind in (model.parameters(), model.buffers())]
        weights = len([*model.parameters()])
    assert [planned.parameters, planned.buffers] == local_bytes
    assert planned.optimizer == 2 * local_bytes[0] + 4 * weights
    assert planned.gradients == planned.average == local_bytes[0]


def test_muon_memory_and_time_by_hand() -> None:
    """Muon keeps one moment and no step count for a matrix, and divides the products among the ranks of a replica."""
    weights = (Weight(10, 3, 4, True, False), Weight(8, 5, 4, True, False, moments=1))
    units = (ShardUnit(weights, has_split_weights=False, stays_gathered=True),)
    memory = compute_state_memory(units, ParallelDims(1, 4, 1), 0, average=False)
    # The rank with the largest shards of four has 3 of 10 rows and 2 of 8 rows.
    assert memory.optimizer == 2 * 3 * 3 * 4 + 4 + 2 * 5 * 4
    gpu = find_gpu("h100")
    trainer = TrainerConfig(max_steps=1, optimizer="muon", tf32=True)
    matrices = [MuonMatrix(8, 4, flops, "dp", 0) for flops in (4e12, 2e12, 2e12)]
    one_rank, replicas, shards = (
        estimate_matrix_seconds(matrices, degrees, trainer, gpu)
        for degrees in (ParallelDims(1, 1, 1), ParallelDims(2, 1, 1), ParallelDims(1, 2, 1))
    )
    assert one_rank == replicas == gpu.estimate_kernel_seconds("tf32", 8e12, 0)
    assert shards == gpu.estimate_kernel_seconds("tf32", 4e12, 0)
    amp = trainer.model_copy(update={"amp": True})
    assert estimate_matrix_seconds(matrices, ParallelDims(1, 1, 1), amp, gpu) < one_rank
    policy = MixedPrecisionConfig(param_dtype="float32")
    float32_weights = amp.model_copy(update={"fsdp2_mp_policy": policy})
    assert estimate_matrix_seconds(matrices, ParallelDims(1, 1, 1), float32_weights, gpu) == one_rank
    assert estimate_matrix_seconds([], ParallelDims(1, 1, 1), amp, gpu) == 0
    # The owner of the first matrix receives its 32 bytes, and each of two ranks gets its half of all three back.
    exchanges = count_matrix_collectives(matrices, ParallelDims(1, 2, 1))
    assert exchanges == {Collective("all-to-all", 2, 64): 1, Collective("all-to-all", 2, 48): 1}
    assert not count_matrix_collectives(matrices, ParallelDims(2, 1, 1))


def test_in_flight_memory_by_hand() -> None:
    units = (
        ShardUnit((Weight(10, 3, 4, True, False),), has_split_weights=False, stays_gathered=True),
        ShardUnit(
            (Weight(8, 5, 4, True, False), Weight(2, 1, 4, False, False)), has_split_weights=False, stays_gathered=False
        ),
    )
    degrees = ParallelDims(1, 4, 1)
    # On four ranks, 10 rows are padded to 12 and 2 rows to 4.
    gathered_elements, freed_elements = 12 * 3, 8 * 5 + 4
    gathered, reduced = bound_in_flight_memory(units, degrees, ElementBytes(2, 4), PassSchedule())
    assert gathered == 2 * (gathered_elements + 2 * freed_elements + freed_elements)
    assert reduced == 2 * 40 + 4 * 40, "the frozen weight has no gradient"
    gathered, reduced = bound_in_flight_memory(units, degrees, ElementBytes(4, 4), PassSchedule(2, 2, True))
    assert gathered == 4 * (gathered_elements + freed_elements + freed_elements), "a recomputed step keeps all"
    assert reduced == 4 * 40 + 4 * (40 + 30 + 40)


def test_collective_seconds_by_hand() -> None:
    billion = 10**9
    within = estimate_call_seconds(Collective("all-gather", 8, billion, 1, is_blocking=False), H100)
    assert within == pytest.approx(7 / 8 / (450 * 0.8) + 14e-6 + 7 * 1.9e-6)
    # Two nodes: each has eight ports of 50 GB/s, which is less than the 450 GB/s within a node.
    across = estimate_call_seconds(Collective("reduce-scatter", 16, billion // 16, 1, is_blocking=False), H100)
    assert across == pytest.approx(15 / 16 / (400 * 0.8) + 14e-6 + 14 * 1.9e-6 + 4e-6)
    # Every eighth rank: one rank and one port of each node.
    alone = estimate_call_seconds(Collective("all-reduce", 4, billion, 8, is_blocking=False), H100)
    assert alone == pytest.approx(2 * 3 / 4 / (50 * 0.8) + 14e-6 + min(2 * 3 * 4e-6, 2 * 2 * 8.5e-6))
    assert estimate_call_seconds(Collective("all-gather", 1, billion, 1, is_blocking=False), H100) == 0


def test_kernel_time_is_that_of_its_slowest_part() -> None:
    assert H100.estimate_kernel_seconds("bfloat16", 989e12, 0) == pytest.approx(2.0)
    assert H100.estimate_kernel_seconds("float32", 0, int(3350e9)) == pytest.approx(1.25)
    assert H100.estimate_kernel_seconds("tf32", 1, 1) == 4e-6


def test_meshes_of_a_plan(plan: Plan) -> None:
    assert {mesh.degrees.world for mesh in plan.meshes} == {16}
    degrees = [mesh.degrees for mesh in plan.meshes]
    assert len(set(degrees)) == len(degrees)
    assert {ParallelDims(r, 16 // r, 1) for r in (1, 2, 4, 8, 16)} <= set(degrees)
    assert any(d.tensor == 2 for d in degrees)
    assert plan.configured.degrees == ParallelDims(1, 16, 1) and plan.configured in plan.meshes
    fastest = max(mesh.samples_per_second for mesh in plan.meshes if mesh.is_usable)
    assert plan.best.is_usable and plan.best.samples_per_second > 0.98 * fastest
    by_degrees = {mesh.degrees: mesh for mesh in plan.meshes}
    state_bytes = [by_degrees[ParallelDims(16 // s, s, 1)].memory.state_bytes for s in (1, 2, 4, 8, 16)]
    assert state_bytes == sorted(state_bytes, reverse=True)
    assert set(plan.checkpointing) == set(CHECKPOINTING)
    activations = [plan.checkpointing[kind].memory.activations for kind in (False, "selective", True)]
    assert activations == sorted(activations, reverse=True) and activations[0] > 1.2 * activations[2]


def test_best_mesh_has_tensor_parallelism_if_samples_are_few() -> None:
    plan = make_plan(build_planned_run("trainer.train_batch_size=600"), 2, H100)
    assert plan.best.degrees == ParallelDims(1, 1, 2) and plan.best.steps == 10
    assert plan.configured.degrees == ParallelDims(1, 2, 1) and not plan.configured.steps
    assert "too many samples per step" in format_plan(plan, build_planned_run())


def test_hours_and_energy(plan: Plan) -> None:
    best = plan.best
    assert best.samples == 16 and best.steps == 10
    assert best.hours == pytest.approx(10 * best.step_seconds / 3600)
    assert best.megawatt_hours == pytest.approx(best.hours * 16 * 700 / 1e6)
    longest = max(best.kernel_seconds, best.launch_seconds, best.overlapped_seconds)
    assert best.step_seconds == best.blocking_seconds + longest


def test_epochs_and_growing_rollouts() -> None:
    run = replace(build_planned_run(samples=1000), rollout={0.0: 1, 0.5: 2, 0.75: 4})
    run = replace(run, trainer=run.trainer.model_copy(update={"max_steps": None, "num_epoch": 3}))
    assert run.count_steps(ParallelDims(2, 8, 4)) == 3 * (1000 // 16)
    assert run.count_steps(ParallelDims(1, 1001, 1)) == 0
    assert run.mean_rollout_fraction == pytest.approx((0.5 * 1 + 0.25 * 2 + 0.25 * 4) / 4)


def test_report(plan: Plan) -> None:
    text = format_plan(plan, build_planned_run())
    for word in ("recommended", "exact", "upper bound", "assumed", "the host needs 40 us", "MWh"):
        assert word in text
    for line in text.splitlines():
        if re.search(r"\bs per step|samples/s|\bhours|MWh| s = ", line):
            assert "estimate" in line, line
    document = json.loads(json.dumps(plan_to_dict(plan, build_planned_run())))
    assert document["recommended"]["memory"]["device"] == plan.best.memory.device_bytes
    assert document["configured"]["shard"] == 16
    assert len(document["meshes"]) == len(plan.meshes)
    assert f"a checkpoint has at most {document['checkpoint_files']} files" in text


def test_reads_of_a_step(plan: Plan) -> None:
    """16 samples read three times each. Two ranks that divide the fields both open each chunk, and read half of it."""
    run = replace(build_planned_run(), times_per_sample=3, bytes_per_time=10**9)
    seconds = plan.best.step_seconds
    assert " 48 GB of fields, uncompressed, with 48 opens of chunks of the training store " in format_plan(plan, run)
    divided = replace(plan.best, degrees=replace(plan.best.degrees, domain=2))
    text = report.describe_reads(divided, run)
    assert " 48 GB of fields, uncompressed, with 96 opens of chunks of the training store " in text
    assert f"estimate: {96 / seconds:.0f} opens/s, {48 / seconds:.3g} GB/s" in text


def test_tables_end_with_an_empty_line(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markdown treats every line up to the next empty line as a row of the table."""
    monkeypatch.setattr(report, "_MAX_MESHES_SHOWN", 3)
    text = format_plan(plan, build_planned_run())
    assert f"\n\n{len(plan.meshes)} meshes in total\n" in text
    for line, next_line in pairwise(text.splitlines()):
        assert not line.startswith("|") or next_line.startswith("|") or not next_line, next_line


def test_configured_parallelism_is_planned() -> None:
    plan = make_plan(build_planned_run("trainer.parallelism={data: none, tensor: 2}"), 2, H100)
    assert (plan.configured.data, plan.configured.degrees) == ("none", ParallelDims(1, 1, 2))
    assert plan.configured.memory.gathered == 0 and plan.configured.memory.parameters > 0
    assert all(message.kind == "all-reduce" for message in plan.configured.collectives)


def test_dropout_and_adapters() -> None:
    changes = ["model.attn_dropout=0.1", "model.ff_dropout=0.1", "trainer.parallelism.tensor=2", "trainer.amp=true"]
    plan = make_plan(build_planned_run(*changes, 'trainer.lora={targets: ["*.to_qkv", "*.to_out"]}'), 2, H100)
    memory = plan.configured.memory
    assert memory.gradients < 0.1 * memory.parameters, "the adapters' alone"
    assert memory.optimizer == pytest.approx(2 * memory.gradients, rel=0.1)


def test_one_gpu() -> None:
    plan = make_plan(build_planned_run("trainer.amp=true", "trainer.parallelism.cpu_offload=true"), 1, H100)
    assert len(plan.meshes) == 1 and not plan.best.collectives
    assert not plan.best.memory.host, "one process has nothing sharded to offload"
    assert "one GPU" in format_plan(plan, build_planned_run())


def test_cpu_offload_moves_states_to_host() -> None:
    memory = make_plan(build_planned_run("trainer.parallelism.cpu_offload=true"), 2, H100).configured.memory
    assert (
        memory.host and memory.device_bytes < memory.state_bytes + memory.activations + memory.buffers + memory.gathered
    )


def build_small_gpu(gib: float) -> Gpu:
    return replace(H100, name="small", memory_gib=gib)


@pytest.mark.parametrize(
    ("world", "gpu", "overrides", "says"),
    [
        (0, H100, [], ["--world-size: 0"]),
        (12, H100, [], ["nodes of 8", "8 and 16", "--per-node"]),
        (8, H100, ["trainer.parallelism.tensor=3"], ["8 / 3", "valid settings", "tensor: 2"]),
        (4, H100, ["trainer.parallelism={data: ddp, tensor: 2}"], ["ddp", "valid settings"]),
        (8, H100, ["trainer.train_batch_size=2000"], ["more samples than the 1000", "train_batch_size"]),
        (2, build_small_gpu(2.12), [], ["small", "--gpu h100", "possible changes"]),
        (
            2,
            build_small_gpu(2.45),
            ["trainer.train_batch_size=96"],
            ["activation_checkpoint: true", "a smaller trainer"],
        ),
    ],
)
def test_impossible_settings_are_refused(world: int, gpu: Gpu, overrides: list[str], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make_plan(build_planned_run(*overrides), world, gpu)
    for message in says:
        assert message in str(error.value)


def test_gpus() -> None:
    assert {"a100-40", "a100-80", "h100", "h200"} <= set(list_gpu_names())
    for name in list_gpu_names():
        gpu = find_gpu(name)
        assert gpu.bfloat16 > gpu.tf32 > gpu.float32 and gpu.node_gbs > gpu.network_gbs
        assert 0 < gpu.usable_bytes < gpu.memory_gib * 2**30
    assert find_gpu("h100", per_node=4, network_gbs=25).per_node == 4
    assert find_gpu("h100", launch_us=10).launch_seconds == pytest.approx(1e-5)
    with pytest.raises(ConfigError, match='"h10" is not known; choices are a100-40, .*h100'):
        find_gpu("h10")
    with pytest.raises(ConfigError, match="--network"):
        find_gpu("h100", network_gbs=0)


QUICK = ["model.use_spectral_norm=false", "model.depth=[1, 1, 1, 1]"]


def write_quickstart(tmp_path, capsys: pytest.CaptureFixture) -> str:
    main.main(["init", "quickstart"])
    (tmp_path / "config.yml").write_text(capsys.readouterr().out)
    return str(tmp_path / "config.yml")


def test_command(tmp_path, capsys: pytest.CaptureFixture) -> None:
    config = write_quickstart(tmp_path, capsys)
    assert main.main(["plan", config, "--world-size", "2", "--json", *QUICK]) == 0
    document = json.loads(capsys.readouterr().out)
    # 366 days have four times each. The last time has no target.
    assert any("1463 samples" in line for line in document["assumed"])
    assert document["recommended"]["works"]


def test_command_without_data(tmp_path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    config = write_quickstart(tmp_path, capsys)
    missing = ["data.sources=[{path: absent.nc}]", *QUICK]
    assert main.main(["plan", config, "--world-size", "2", *missing]) == 2
    messages = capsys.readouterr().err
    assert "absent.nc" in messages and "--grid ROWSxCOLUMNS" in messages
    unset = ["data.sources=[{path: $NOWHERE/a.nc}]", "save_loc=$NOWHERE/run", "data.store=$NOWHERE/store.zarr", *QUICK]
    assert main.main(["plan", config, "--world-size", "2", "--grid", "32x64", *unset]) == 0
    assert "1463 samples" in capsys.readouterr().out
    assert main.main(["plan", config, "--world-size", "2", "--grid", "32", *QUICK]) == 2
    assert "ROWSxCOLUMNS" in capsys.readouterr().err
    misfit = ["model.padding={mode: earth, lat: [4, 4], lon: [8, 8]}", *QUICK]
    assert main.main(["plan", config, "--world-size", "2", "--grid", "33x64", *misfit]) == 2
    assert "model.padding.lat" in capsys.readouterr().err


def test_loss_in_parts_has_same_operations_as_whole_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of large fields is computed by rows, and the plan has the same operations as with the whole loss."""
    config = small_config("loss={kind: crps}", "trainer.members=2", "model.noise=global")
    flops = []
    for min_part_values in (10**9, 1):
        monkeypatch.setattr(member_loss, "MIN_PART_VALUES", min_part_values)
        step_builder = step_builder_of(config)
        model, autocast = step_builder.build_network(DeviceGrid(), False, False)
        start = functools.partial(step_builder.build_step, model, autocast, 1, MemberBatches(2, 2))
        flops.append(trace_step(model, start, gpu=True, autocast=autocast).flops)
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize(
    ("num_parts", "ranks"), [((1, 1), (0,)), ((2, 2), (0,)), ((4, 1), (0, 1)), ((2, 4), (0, 1)), ((4, 4), (0, 1, 4, 5))]
)
def test_busy_ranks_are_the_first_and_one_with_all_neighbours(
    num_parts: tuple[int, int], ranks: tuple[int, ...]
) -> None:
    assert list_busy_ranks(divide_field((32, 64), num_parts)) == ranks


def test_fields_are_divided_if_samples_are_few() -> None:
    run = replace(build_planned_run(), max_samples_per_step=1)
    plan = make_plan(run, 2, H100)
    assert {(mesh.degrees.domain, mesh.degrees.tensor) for mesh in plan.meshes if mesh.is_usable} == {(2, 1), (1, 2)}
    assert all(mesh.samples == 1 for mesh in plan.meshes if mesh.is_usable)
    text = format_plan(plan, run)
    assert "domain 1, tensor 1: needs 2 samples per step, which is too many" in text
    assert "at most 1 samples" in text
    with pytest.raises(ConfigError, match="--samples-per-step: 0 must be 1 or more"):
        make_plan(replace(run, max_samples_per_step=0), 2, H100)


def test_fields_are_divided_if_memory_is_too_small() -> None:
    overrides = ["trainer.train_batch_size=64"]
    divided = make_plan(build_planned_run(*overrides), 2, build_small_gpu(2.5))
    assert divided.best.degrees.domain == 2 and divided.best.is_usable
    assert not divided.configured.fits and divided.configured.degrees.domain == 1
    assert divided.best.memory.activations < 0.6 * divided.configured.memory.activations


def test_fields_are_not_divided_if_run_needs_whole_fields() -> None:
    run = build_planned_run("trainer.preview={}")
    plan = make_plan(run, 2, H100)
    assert {mesh.degrees.domain for mesh in plan.meshes} == {1}
    assert "trainer.preview: plots whole fields" in format_plan(plan, run)
