"""Costs of checkpoints by the number of ranks: planning, saving and loading, with the code of a run.

One process is rank 0 (or the rank `--rank`) of N ranks in a fake process group. It has the real tensors of this rank:
the published 6 h network with AdamW and an average of the weights, sharded by FSDP2 over all ranks. Collectives of
objects are replaced with a function that counts the bytes of this rank's answers. Each N runs in a separate process.
Times are processor times, because other processes disturb them less.

    python -m benchmarks.scale.checkpoints [--ranks 8 64 512 4096 16384] [--rank 0] [--replicas 1] [--before 8 64]

The first table has the costs on one rank. Its last row has the slope of each cost over N: 0 does not grow, and 1 is
proportional to N. `--before` measures the method of version 0.20 for these N: DCP's planner on rank 0 gets the plans of
all ranks, and DCP's reader opens all files. The current writer creates the files, with one rank for each file and holes
for the data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from benchmarks.networks import PUBLISHED
from credit.parallel.mesh import ParallelDims, build_mesh
from credit.parallel.parallelize import parallelize
from credit.parallel.process_info import fake_process_group
from credit.train.checkpoint.manifest import MANIFEST, read_manifest
from credit.train.checkpoint.sharded import writer
from credit.train.checkpoint.sharded.index import StemIndex, shard_file_name
from credit.train.checkpoint.sharded.reader import read_index, read_into

# Ranks of a host, which write into the same files.
RANKS_PER_HOST = 8

State = Mapping[str, Mapping[str, Tensor]]


def build_state(num_ranks: int, replicas: int, rank: int) -> State:
    """Return file stem -> name -> this rank's part of a tensor that a run saves; the values are not set."""
    from credit.models.wxformer import WXFormer

    with torch.device("meta"):
        model = WXFormer.from_kwargs(**PUBLISHED)
    degrees = ParallelDims(replicate=replicas, shard=num_ranks // replicas)
    parallelize(model, build_mesh(degrees, rank, "cpu").device_mesh)
    model.to_empty(device="cpu")
    optimizer = {}
    for name, parameter in model.named_parameters():
        optimizer[f"{name}/step"] = torch.zeros(())
        for moment in ("exp_avg", "exp_avg_sq"):
            optimizer[f"{name}/{moment}"] = torch.zeros_like(parameter.detach())
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return {"model": weights, "forecast": weights, "optimizer": optimizer}


def read_peak_memory_mb() -> float:
    """Return the peak memory of this process in MB (1e6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def time_call(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function, and return its processor time in seconds and its result."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def measure_current_version(num_ranks: int, replicas: int, rank: int, folder: Path) -> dict[str, float]:
    """Return the costs of a save and a load on one of `num_ranks` ranks: label -> value."""
    answer_sizes: list[int] = []

    def count(function: Callable[[], Any], *_: object) -> Any:
        result = function()
        answer_sizes.append(len(pickle.dumps(result)))
        return result

    # The collectives answer with the result of this rank.
    writer.reduce_over_ranks = count
    writer.find_ranks_per_file = lambda _: RANKS_PER_HOST
    with fake_process_group(num_ranks, rank):
        state = build_state(num_ranks, replicas, rank)
        shard_writer = writer.ShardWriter(None)
        memory_before = read_peak_memory_mb()
        plan_seconds, _ = time_call(lambda: shard_writer._plan(state))
        plan_megabytes = read_peak_memory_mb() - memory_before
        staged = shard_writer.copy_to_host(state)
        copy_seconds, staged = time_call(lambda: shard_writer.copy_to_host(state))
        for stem in () if rank == 0 else state:
            (folder / stem).mkdir()
        write_seconds, _ = time_call(lambda: shard_writer.write(folder, staged))
        for stem, shares in staged.shares.items():
            for share in shares:
                # The parts of the other ranks are holes.
                os.truncate(folder / stem / share.name, share.size)
        if rank:
            for stem, text in staged.indices.items():
                (folder / stem / "index.json").write_text(text)
        index_seconds, indices = time_call(lambda: {stem: read_index(folder / stem) for stem in state})
        pickled = pickle.dumps(indices)
        unpickle_seconds, indices = time_call(lambda: pickle.loads(pickled))
        find_seconds, metadata = time_call(
            lambda: {stem: indices[stem].metadata_for(folder / stem, state[stem]) for stem in state}
        )
        load_seconds = math.nan
        if replicas == 1 and rank == 0:
            load_seconds, _ = time_call(
                lambda: [read_into(folder / stem, indices[stem], state[stem]) for stem in state]
            )
    files_read = {chunk.relative_path for entry in metadata.values() for chunk in entry.storage_data.values()}
    return {
        "items": sum(map(len, state.values())),
        "plan, CPU s": plan_seconds,
        "plan, MB": plan_megabytes,
        "own answers, kB": sum(answer_sizes) / 1e3,
        "index, kB": sum(map(len, staged.indices.values())) / 1e3,
        "MB of the rank": sum(part.nbytes for parts in staged.parts.values() for part in parts.values()) / 1e6,
        "copy, CPU s": copy_seconds,
        "write, CPU s": write_seconds,
        "read index, CPU s": index_seconds,
        "index sent, kB": len(pickled) / 1e3,
        "unpickle, CPU s": unpickle_seconds,
        "find parts, CPU s": find_seconds,
        "load, CPU s": load_seconds,
        "opens to load": len(files_read),
        **measure_file_list(indices, folder),
    }


def measure_file_list(indices: Mapping[str, StemIndex], folder: Path) -> dict[str, float]:
    """Return the costs of the list of all files, which grow with the number of hosts: label -> value.

    Every rank receives the sizes and checksums of all files, and rank 0 writes the manifest and reads it.
    """
    names = []
    for stem, index in indices.items():
        # Parts are dealt to the ranks from 0 upwards, so the holder of the last element is the last one with a part.
        last_ranks = [0]
        for tensor in index.tensors.values():
            if 0 not in tensor.shape:
                last_element = tuple((length - 1, length) for length in tensor.shape)
                last_ranks += [rank for rank, _ in tensor.split.find_parts(tensor.shape, last_element)]
        groups = range(max(last_ranks) // index.ranks_per_file + 1)
        names += [f"{stem}/index.json", *(f"{stem}/{shard_file_name(group * RANKS_PER_HOST, 0)}" for group in groups)]

    def write_and_read() -> None:
        entries = {name: {"size": 10**9, "crc32": 2**32 - 1} for name in names}
        (folder / MANIFEST).write_text(json.dumps(entries, indent=1))
        assert len(read_manifest(folder)) == len(names)

    seconds, _ = time_call(write_and_read)
    # Different numbers, because pickle writes equal objects once.
    answers = {name: (10**9 + number, 2**32 - 1 - number) for number, name in enumerate(names)}
    return {
        "files of all": len(names),
        "answers of all, kB": len(pickle.dumps(answers)) / 1e3,
        "manifest, kB": (folder / MANIFEST).stat().st_size / 1e3,
        "manifest, CPU s": seconds,
    }


def measure_version_0_20(num_ranks: int, folder: Path) -> dict[str, float]:
    """Return the costs on rank 0 in version 0.20: label -> value."""
    with fake_process_group(num_ranks):
        state = build_state(num_ranks, 1, 0)
        indices = {stem: StemIndex.of_tensors(tensors, num_ranks, 1) for stem, tensors in state.items()}
    memory_before = read_peak_memory_mb()
    planner = DefaultSavePlanner(flatten_state_dict=False)
    plan_seconds = 0.0
    sent_bytes = 0
    for index in indices.values():
        plans = [build_dcp_plan(index, rank) for rank in range(num_ranks)]
        sent_bytes += sum(len(pickle.dumps(plan)) for plan in plans)
        plan_seconds += time_call(lambda plans=plans: planner.create_global_plan(plans))[0]
    plans_megabytes = read_peak_memory_mb() - memory_before
    num_files = 0
    for stem, index in indices.items():
        (folder / stem).mkdir()
        for rank in range(num_ranks):
            for share in writer.plan_file_shares(index, rank):
                num_files += 1
                with (folder / stem / share.name).open("wb") as file:
                    file.write(share.header)
                    file.truncate(share.size)
    read_seconds, metadata = time_call(
        lambda: [HuggingFaceStorageReader(str(folder / stem)).read_metadata() for stem in indices]
    )
    pickled = pickle.dumps(metadata)
    unpickle_seconds, _ = time_call(lambda: pickle.loads(pickled))
    return {
        "plan, CPU s": plan_seconds,
        "memory of the plans, MB": plans_megabytes,
        "received by rank 0, kB": sent_bytes / 1e3,
        "read index, CPU s": read_seconds,
        "index sent, kB": len(pickled) / 1e3,
        "unpickle, CPU s": unpickle_seconds,
        "opens of rank 0": num_files,
        "files of all": num_files,
    }


def build_dcp_plan(index: StemIndex, rank: int) -> SavePlan:
    """Build the plan that DCP creates for the tensors of a rank."""
    items = []
    for name, tensor in index.tensors.items():
        box = tensor.split.box_at(tensor.split.coordinate(rank), tensor.shape)
        offsets = torch.Size([start for start, _ in box])
        sizes = torch.Size([stop - start for start, stop in box])
        chunk = ChunkStorageMetadata(offsets, sizes)
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items)


def find_slope(num_ranks: list[int], values: list[float]) -> float:
    """Return the slope of log(value) over log(number of ranks), by least squares."""
    if len(values) < 2 or not all(value > 0 for value in values):
        return math.nan
    return statistics.linear_regression([math.log(n) for n in num_ranks], [math.log(value) for value in values]).slope


def print_table(results: dict[int, dict[str, float]]) -> None:
    """Print a Markdown table with a row for each cost and a column for each number of ranks."""
    num_ranks = list(results)
    print("| cost of one rank | " + " | ".join(map(str, num_ranks)) + " | slope |")
    print("|---|" + "---|" * (len(num_ranks) + 1))
    for label in results[num_ranks[0]]:
        values = [results[n][label] for n in num_ranks]
        cells = " | ".join(f"{value:.4g}" for value in values)
        print(f"| {label} | {cells} | {find_slope(num_ranks, values):.2f} |")
    print()


def run_in_new_process(kind: str, num_ranks: int, replicas: int, rank: int) -> dict[str, float]:
    """Return the output of `measure_current_version` or `measure_version_0_20` in a new process."""
    arguments = ["--one", kind, "--ranks", str(num_ranks), "--replicas", str(replicas), "--rank", str(rank)]
    command = [sys.executable, "-m", "benchmarks.scale.checkpoints", *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096, 16384])
    parser.add_argument("--rank", type=int, default=0, help="rank that is measured")
    parser.add_argument("--replicas", type=int, default=1, help="number of replicas of the weights")
    parser.add_argument("--before", type=int, nargs="*", default=[], help="numbers of ranks for the way of 0.20")
    parser.add_argument("--one", choices=("now", "before"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.one == "now":
                result = measure_current_version(arguments.ranks[0], arguments.replicas, arguments.rank, Path(folder))
            else:
                result = measure_version_0_20(arguments.ranks[0], Path(folder))
        print(json.dumps(result))
        return
    for kind, numbers in (("before", arguments.before), ("now", arguments.ranks)):
        if numbers:
            print(f"{kind}, rank {arguments.rank}, {arguments.replicas} replicas\n")
            print_table({n: run_in_new_process(kind, n, arguments.replicas, arguments.rank) for n in numbers})


if __name__ == "__main__":
    main()
