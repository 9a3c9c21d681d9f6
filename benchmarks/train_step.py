"""Time and memory of a training step of the 1 degree starter by part of the network, here and in the reference.

    python benchmarks/train_step.py [--threads 2] [--rounds 5] [--reference FOLDER] [--figure FILE.png]

FOLDER is as in ``wxformer.py``. A part is timed from where the step enters its modules to where it leaves them, in the
forward and in the backward pass. Of the steps of a process, the fastest counts. The tables show the median over the
rounds, in which the processes of all cases alternate. GFLOP are those of matrix products and convolutions. The floor is
the time of these operations at the rate of a large matrix product, measured in the same process. `kept` is what the
forward pass leaves for the backward pass, counted for the part that leaves it first. `other` is all outside of the
parts: padding, the loss, sums of gradients.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from networks import STARTER
from options import add_counts, add_reference
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from wxformer import build_ours, build_reference, mean_square, prepare, random_sample, run_script

OTHER, OPTIMIZER = "other", "optimizer"
# Package -> part -> regular expression of the names of its modules.
PARTS = {
    "ours": {
        "embedding": r"stages\.\d\.embed",
        "attention": r"stages\.\d\.layers\.\d\.(short|long)_attention",
        "feed-forward": r"stages\.\d\.layers\.\d\.(short|long)_feed_forward",
        "decoder blocks": r"decoder\.blocks\.\d",
        "head": r"decoder\.head",
    },
    "reference": {
        "embedding": r"layers\.\d\.0",
        "attention": r"layers\.\d\.1\.layers\.\d\.[02]",
        "feed-forward": r"layers\.\d\.1\.layers\.\d\.[13]",
        "decoder blocks": r"up_block[123]",
        "head": r"up_block4",
    },
}
ROWS = (*PARTS["ours"], OTHER, OPTIMIZER)
CASES = [("reference", "float32"), ("ours", "float32"), ("ours", "bfloat16")]
_PASSES = ("forward", "backward")


class PartMeter(TorchDispatchMode):
    """Meter of the time, operations and kept memory of a step in each part of the network.

    Args:
        model: the network.
        patterns: part -> regular expression of the names of its modules.

    Attributes:
        totals: ``forward``, ``backward`` (seconds), ``flops`` or ``kept`` (bytes) -> part -> sum.
    """

    def __init__(self, model: nn.Module, patterns: dict[str, str]) -> None:
        super().__init__()
        self.totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        # The part and the pass in which the step is now, and the time at which it entered them.
        self._part = OTHER
        self._pass = "forward"
        self._entry_time = 0.0
        # The address of a storage is its key. Kept storages stay alive, so that their keys are not used again.
        self._weight_keys = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._kept_storages: dict[int, torch.UntypedStorage] = {}
        for name, module in model.named_modules():
            for part, pattern in patterns.items():
                if re.fullmatch(pattern, name):
                    self._follow(module, part)

    def _follow(self, module: nn.Module, part: str) -> None:
        """Register hooks that count the time of a module for `part`, in the forward and the backward pass."""

        def begin(module: nn.Module, args: tuple) -> tuple:
            self.enter(part)
            # The backward pass leaves the part when it reaches the inputs.
            gated_args = []
            for arg in args:
                if isinstance(arg, Tensor):
                    arg = _PartBoundary.apply(arg, self, OTHER)
                gated_args.append(arg)
            return tuple(gated_args)

        def end(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            self.enter(OTHER)
            # The backward pass enters the part at the output.
            return _PartBoundary.apply(output, self, part)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def enter(self, part: str, new_pass: str | None = None) -> None:
        """Add the elapsed time to the part that the step leaves, and enter a different part.

        Args:
            part: the part that begins.
            new_pass: ``backward`` if the backward pass begins; None to stay in the current pass.
        """
        now = time.perf_counter()
        self.totals[self._pass][self._part] += now - self._entry_time
        self._part = part
        self._entry_time = now
        if new_pass is not None:
            self._pass = new_pass

    def begin(self) -> None:
        """Reset all sums; the forward pass of a step begins."""
        self.totals.clear()
        self._kept_storages.clear()
        self._part = OTHER
        self._pass = "forward"
        self._entry_time = time.perf_counter()

    def count_kept_tensor(self, tensor: Tensor) -> Tensor:
        """Count the bytes of a tensor that is kept for the backward pass; return the tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._kept_storages and key not in self._weight_keys:
            self._kept_storages[key] = storage
            self.totals["kept"][self._part] += storage.nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.totals["flops"][self._part] += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _PartBoundary(torch.autograd.Function):
    """Identity; when the gradient of the tensor arrives here in the backward pass, the step enters `part`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: PartMeter, part: str) -> Tensor:
        ctx.parts = parts
        ctx.part = part
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.parts.enter(ctx.part)
        return gradient, None, None


@contextmanager
def count_operations(parts: PartMeter) -> Iterator[None]:
    """Context in which operations and kept bytes are also counted, which makes a step slower."""
    with ExitStack() as stack:
        stack.enter_context(parts)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(parts.count_kept_tensor, lambda tensor: tensor))
        yield


def measure(package: str, dtype: str, steps: int) -> dict[str, Any]:
    """Run one case in this process.

    Args:
        package: ``ours`` or ``reference``.
        dtype: ``float32`` or ``bfloat16``.
        steps: number of steps, of which the fastest counts.

    Returns:
        ``rate`` -> FLOP/s of a large matrix product; ``forward``, ``backward``, ``flops`` and ``kept`` -> part ->
        seconds, FLOP or bytes.
    """
    torch.manual_seed(0)
    if package == "ours":
        model = build_ours()
        prepare(model, "train", dtype)
    else:
        model = build_reference()
    x, target = random_sample(STARTER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parts = PartMeter(model.train(), PARTS[package])

    def step() -> dict[str, dict[str, float]]:
        parts.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = mean_square(model(x), target)
        parts.enter(OTHER, "backward")
        loss.backward()
        parts.enter(OPTIMIZER, "backward")
        optimizer.step()
        optimizer.zero_grad()
        parts.enter(OTHER)
        return {name: dict(totals) for name, totals in parts.totals.items()}

    def total_seconds(totals: dict[str, dict[str, float]]) -> float:
        return sum(sum(totals[name].values()) for name in _PASSES)

    # Counting takes time, so the step that is counted is not among those that are timed.
    with count_operations(parts):
        counted = step()
    timed_steps = [step() for _ in range(steps)]
    fastest = min(timed_steps, key=total_seconds)
    result: dict[str, Any] = {"rate": _measure_product_rate(getattr(torch, dtype))}
    for name in _PASSES:
        result[name] = fastest[name]
    for name in ("flops", "kept"):
        result[name] = counted[name]
    return result


def _measure_product_rate(dtype: torch.dtype) -> float:
    """Measure and return the FLOP/s of a large matrix product."""
    n = 2048
    a = torch.randn(n, n).to(dtype)
    b = torch.randn(n, n).to(dtype)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    # Each of the n * n results takes n multiplications and n additions.
    return 2 * n**3 / min(seconds)


def summarise(rounds: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return column -> part -> median over the rounds: milliseconds, GFLOP, MB."""
    units = {"forward": 1e3, "backward": 1e3, "flops": 1e-9, "kept": 1e-6}
    columns: dict[str, dict[str, float]] = {}
    for column, unit in units.items():
        columns[column] = {}
        for part in ROWS:
            values = [result[column].get(part, 0.0) * unit for result in rounds]
            columns[column][part] = statistics.median(values)
    columns["floor"] = {}
    for part in ROWS:
        floors = [result["flops"].get(part, 0.0) / result["rate"] * 1e3 for result in rounds]
        columns["floor"][part] = statistics.median(floors)
    return columns


def print_case(case: tuple[str, str], columns: dict[str, dict[str, float]]) -> None:
    """Print the table of a case."""
    print(f"\n{' '.join(case):22}{'GFLOP':>8}{'floor':>9}{'forward':>9}{'backward':>9}{'sum':>9} ms{'kept':>8} MB")
    rows = {part: {column: values[part] for column, values in columns.items()} for part in ROWS}
    rows["all"] = {column: sum(values.values()) for column, values in columns.items()}
    for part, row in rows.items():
        both = row["forward"] + row["backward"]
        print(
            f"{part:22}{row['flops']:8.1f}{row['floor']:9.0f}{row['forward']:9.0f}{row['backward']:9.0f}{both:9.0f}   "
            f"{row['kept']:8.0f}",
            flush=True,
        )


def draw_cases(results: dict[tuple[str, str], dict[str, dict[str, float]]], path: Path) -> None:
    """Draw the time of each case as a bar of its parts, with its floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.1 + 0.75 * len(results)), layout="constrained")
    names = {"ours": "credit", "reference": "miles-credit"}
    for row, columns in enumerate(results.values()):
        left = 0.0
        for number, part in enumerate(ROWS):
            width = columns["forward"][part] + columns["backward"][part]
            # The legend lists a part once, from the first bar.
            label = part if row == 0 else None
            bar = axes.barh(row, width, left=left, color=f"C{number}", label=label, height=0.6)
            # A narrow part has no room for its number.
            if width > 60:
                axes.bar_label(bar, [f"{width:.0f}"], label_type="center", fontsize=8, color="white")
            left += width
        floor = sum(columns["floor"].values())
        floor_label = "floor" if row == 0 else None
        axes.plot([floor, floor], [row - 0.38, row + 0.38], color="black", label=floor_label)
    axes.set_yticks(range(len(results)), [f"{names[package]}\n{dtype}" for package, dtype in results])
    axes.invert_yaxis()
    axes.set_xlabel("ms of a training step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=8, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Print the tables, or with --case measure one case and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_counts(parser, rounds=5, steps=4)
    add_reference(parser)
    parser.add_argument("--figure", type=Path, help="PNG file to draw")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.figure and not args.figure.parent.is_dir():
        parser.error(f"--figure: there is no folder {args.figure.parent}")
    torch.set_num_threads(args.threads)
    if args.case:
        print(json.dumps(measure(*args.case, args.steps)))
        return
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(args.rounds):
        for case in CASES:
            package, _ = case
            if package == "ours" or args.reference:
                rounds[case].append(run_script(Path(__file__), case, args))
    results = {case: summarise(case_rounds) for case, case_rounds in rounds.items()}
    print(f"torch {torch.__version__}, {args.threads} threads, medians of {args.rounds} rounds")
    for case, columns in results.items():
        print_case(case, columns)
    if args.figure:
        draw_cases(results, args.figure)


if __name__ == "__main__":
    sys.exit(main())
