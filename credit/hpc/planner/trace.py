"""One training step run without memory: what it would keep, compute and send.

The step is the run's own, with every tensor a `FakeTensor`: shapes, dtypes and storages are real, values are not. A
dispatch mode sees each kernel. What a kernel needs inside itself (cuDNN's workspaces, say) it does not see.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from credit.models.kernels.dispatch import force_gpu_path
from credit.parallel.dtensor import local
from credit.parallel.state.materialise import allocate_

# torch names collectives differently from release to release
_COLLECTIVES = {"allgather": "all-gather", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
                "allreduce": "all-reduce", "all_reduce": "all-reduce", "broadcast": "broadcast"}  # fmt: skip


class Kernel(NamedTuple):
    """What a kernel does: its rate is a field of `credit.hpc.planner.gpus.Gpu`; bytes are read and written."""

    rate: str
    flops: int
    bytes: int


class Call(NamedTuple):
    """A collective: its kind, the ranks that take part, and the bytes of its result on each."""

    kind: str
    ranks: int
    bytes: int


@dataclass(frozen=True)
class Trace:
    """What an optimizer step costs a rank, up to the end of the backward pass.

    Attributes:
        activations: most bytes alive at once besides weights and gradients, the samples included.
        constants: bytes of fields that the step reads and that are neither weights nor samples.
        kernels: how often each kernel runs.
        calls: how often each collective of the forward and backward pass runs.
        closing: the collective after the backward pass, which brings the norm of the gradients; None for one process.
    """

    activations: int
    constants: int
    kernels: Mapping[Kernel, int]
    calls: Mapping[Call, int]
    closing: Call | None

    @property
    def flops(self) -> int:
        """Floating point operations of matrix products and convolutions."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())


# number of micro-steps -> the optimizer, and what takes a step and calls back as it begins a micro-step
Start = Callable[[int], tuple[torch.optim.Optimizer, Callable[[Callable[[], None]], object]]]


def extend(shorter: Trace, longer: Trace, further: int) -> Trace:
    """Return the trace of a step that has, `further` times more, what `longer` has more than `shorter`.

    A kernel whose size grows with the step may be counted less than never; the sums are right.
    """

    def at(a: int, b: int) -> int:
        return b + (b - a) * further

    def counts(a: Mapping, b: Mapping) -> dict:
        return {key: at(a.get(key, 0), b.get(key, 0)) for key in a.keys() | b.keys()}

    return Trace(
        at(shorter.activations, longer.activations),
        max(shorter.constants, longer.constants),
        counts(shorter.kernels, longer.kernels),
        counts(shorter.calls, longer.calls),
        longer.closing,
    )


def trace_step(
    model: nn.Module,
    start: Start,
    *,
    micro_steps: int = 1,
    gpu: bool = True,
    autocast: bool = False,
    dtypes: Sequence[torch.dtype] = (),
    tf32: bool = True,
) -> Trace:
    """Run one training step of a model on the meta device, in a model of this machine's memory.

    Args:
        model: on the meta device; its weights may be split over tensor-parallel ranks, not sharded by FSDP2.
        start: called when the model has (fake) memory, with the number of micro-steps.
        micro_steps: of the step; the second one stands for all that follow it.
        gpu: whether the kernels are those of a GPU; else those of this machine's CPU.
        autocast: whether the step runs under autocast.
        dtypes: of weights and activations, and of the output, under FSDP2's mixed precision; empty without.
        tf32: whether float32 products and convolutions run in TF32.
    """
    if dtypes:
        _cast_as_fsdp2(model, *dtypes)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        allocate_(model, torch.device("cpu"))
        model.train()
        optimizer, take_step = start(min(micro_steps, 2))
        watch = _Watch([*model.parameters(), *model.buffers()], tf32)
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda p: watch.note_gradient(p.grad))
        # what comes after the backward pass works on the shards; it is counted from their sizes
        optimizer.register_step_pre_hook(lambda *_: watch.stop())
        stack.enter_context(watch)
        if gpu:
            stack.enter_context(_gpu_kernels(autocast))
        take_step(watch.begin_micro_step)
    return watch.trace(micro_steps)


def collective_of(func: Any, result: Any) -> tuple[str, int] | None:
    """Return the kind of a collective and the bytes of its result, None for an operator that is none."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.split("::")[1].strip("_")
    kind = next((kind for start, kind in _COLLECTIVES.items() if name.startswith(start)), None)
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return (kind, sum(t.numel() * t.element_size() for t in tensors)) if kind else None


class _Watch(TorchDispatchMode):
    """Follows storages from birth to death and counts kernels and collectives, until it is stopped.

    Args:
        held: weights and buffers, which are not counted.
        tf32: whether float32 products and convolutions run in TF32.
    """

    def __init__(self, held: Iterable[Tensor], tf32: bool) -> None:
        super().__init__()
        self._wide = "tf32" if tf32 else "float32"
        self.most = self.constants = 0
        self.kernels: Counter[Kernel] = Counter()
        self.calls: list[Call] = []
        self._kept = [local(tensor).untyped_storage() for tensor in held]
        self._known = {storage._cdata for storage in self._kept}
        self._alive: dict[int, tuple[int, weakref.ref]] = {}
        self._now = 0
        self._running = True
        self._begun: list[tuple[Counter[Kernel], int]] = []

    def begin_micro_step(self) -> None:
        self._begun.append((self.kernels.copy(), len(self.calls)))

    def stop(self) -> None:
        self._running = False

    def trace(self, micro_steps: int) -> Trace:
        """Return what was seen, the last micro-step as often as there are more than one."""
        # The power iterations before the first micro-step are counted by mesh, see `credit.hpc.planner.traffic`.
        first = self._begun[0][1] if self._begun else 0
        *calls, closing = self.calls[first:] or [None]
        kernels, sums = self.kernels, Counter(calls)
        if micro_steps > 1:
            earlier, number = self._begun[-1]
            for counts, before in ((kernels, earlier), (sums, Counter(calls[: number - first]))):
                for key in counts:
                    counts[key] += (counts[key] - before[key]) * (micro_steps - 2)
        return Trace(self.most, self.constants, kernels, sums, closing)

    def note_gradient(self, gradient: Tensor) -> None:
        """Take a gradient that has become a parameter's out of the activations."""
        storage = local(gradient).untyped_storage()
        if storage._cdata in self._alive:
            self._now -= self._alive.pop(storage._cdata)[0]
            self._known.add(storage._cdata)
            self._kept.append(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # a value that Python asks for: a seed, say; nothing that shapes depend on
        result = func(*args, **kwargs)
        if self._running:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        collective = collective_of(func, result)
        if collective is not None:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            self.calls.append(Call(collective[0], dist.ProcessGroup.unbox(group).size(), collective[1]))
        inputs = {t.untyped_storage()._cdata: t for t in _tensors((args, kwargs))}
        outputs = {t.untyped_storage()._cdata: t for t in _tensors(result)}
        for key, tensor in inputs.items():
            if key not in self._alive and key not in self._known:
                self.constants += tensor.untyped_storage().nbytes()
                self._known.add(key)
                self._kept.append(tensor.untyped_storage())
        for key, tensor in outputs.items():
            if key not in self._alive and key not in self._known:
                self._follow(key, tensor)
        looks = outputs.keys() <= inputs.keys() and not func._schema.is_mutable
        if collective is None and not looks and not func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            formula = flop_registry.get(func.overloadpacket)
            flops = formula(*args, **kwargs, out_val=result) if formula else 0
            moved = sum(_size(t) for t in (*inputs.values(), *outputs.values()))
            self.kernels[Kernel(self._rate(inputs.values()), flops, moved)] += 1

    def _rate(self, inputs: Iterable[Tensor]) -> str:
        dtype = next((t.dtype for t in inputs if t.is_floating_point()), torch.float32)
        return "bfloat16" if dtype in (torch.bfloat16, torch.float16) else self._wide

    def _follow(self, key: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def end(_: object) -> None:
            if key in self._alive:
                self._now -= self._alive.pop(key)[0]

        self._alive[key] = (size, weakref.ref(storage, end))
        self._now += size
        self.most = max(self.most, self._now)


@contextmanager
def _gpu_kernels(autocast: bool) -> Iterator[None]:
    """Take the way that a GPU takes where this machine's CPU, whose tensors are traced, goes another one.

    Attention with a bias that trains runs in the memory-efficient kernel. Under autocast norms are float32 on a GPU. A
    `TorchFunctionMode` would not do: it is off in the backward pass, where blocks run again.
    """
    names = ("scaled_dot_product_attention", "layer_norm", "group_norm")
    originals = {name: getattr(F, name) for name in names}
    F.scaled_dot_product_attention = _efficient_attention
    if autocast:
        for name in names[1:]:
            norm = originals[name]
            setattr(F, name, lambda x, *args, norm=norm, **options: norm(x.float(), *args, **options))
    try:
        with force_gpu_path():
            yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)


def _efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]


def _cast_as_fsdp2(model: nn.Module, param_dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    """Give weights, inputs and the output the dtypes that FSDP2's mixed precision computes with, in place."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = nn.Parameter(parameter.detach().to(param_dtype), parameter.requires_grad)

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)

    model.register_forward_pre_hook(lambda _, args: cast(args, param_dtype))
    model.register_forward_hook(lambda _, args, output: cast(output, output_dtype))


def _tensors(tree: Any) -> list[Tensor]:
    return [local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _size(tensor: Tensor) -> int:
    """Return the bytes that a kernel moves for a tensor; an expanded one is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
