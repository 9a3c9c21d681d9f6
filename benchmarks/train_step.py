"""Where a training step of the 1 degree starter spends its time and memory, by part of the network, ours or the reference's.

    python benchmarks/train_step.py [--threads 2] [--rounds 5] [--dtype float32] [--reference FOLDER] [--figure FILE.png]

FOLDER is as in ``wxformer.py``. Parts are timed inside of whole steps, forward by hooks around modules and backward by
hooks on the gradients that enter and leave them; the least of the steps of a process counts, and the table shows the
median over processes, which alternate. GFLOP are those of matrix products and convolutions, forward and backward; the
floor is what they take at the rate that a large matrix product of the same process reaches. `kept` is what the forward
pass leaves for the backward pass, counted where a tensor is kept first. `other` is what no part holds: padding,
gradients that are added, the loss.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))
from wxformer import INPUTS, OUTPUTS, STARTER, build_ours, build_reference, run_case  # noqa: E402

PARTS = ("embedding", "attention", "feed-forward", "decoder blocks", "head")
# part -> names of its modules
MODULES = {
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
}  # fmt: skip


class Watch:
    """Times the parts of a network, forward and backward."""

    def __init__(self, model: nn.Module, parts: dict[str, str]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._began: dict[str, float] = {}
        self.inside: list[str] = []
        self.names = {
            name: part
            for name, _ in model.named_modules()
            for part, pattern in parts.items()
            if re.fullmatch(pattern, name)
        }
        for name, part in self.names.items():
            self._follow(model.get_submodule(name), name, part)

    def _follow(self, module: nn.Module, name: str, part: str) -> None:
        def begin(module: nn.Module, args: tuple) -> tuple:
            self.inside.append(part)
            self._began[name] = time.perf_counter()
            return tuple(self._mark(arg, part, name, leaves=True) for arg in args)

        def end(module: nn.Module, args: tuple, output: Any) -> Any:
            self.seconds[part, "forward"] += time.perf_counter() - self._began[name]
            self.inside.pop()
            return self._mark(output, part, name, leaves=False)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def _mark(self, value: Any, part: str, name: str, leaves: bool) -> Any:
        return _Mark.apply(value, self, part, name, leaves) if isinstance(value, Tensor) else value

    def passed(self, part: str, name: str, leaves: bool) -> None:
        now = time.perf_counter()
        if leaves:
            self.seconds[part, "backward"] += now - self._began[name]
        else:
            self._began[name] = now


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *what: Any) -> Tensor:
        ctx.what = what
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        watch, *what = ctx.what
        watch.passed(*what)
        return gradient, None, None, None, None
