"""Trace of one training step on fake tensors; the trace counts the bytes, kernels and collectives of the step.

The trace runs the training step of the run, but every tensor is a `FakeTensor`: it has a shape, a dtype and a storage,
but no values. A dispatch mode records each kernel, but not the workspace inside a kernel, such as the workspace of
cuDNN.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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

from credit.hpc.planner.collectives import Collective, read_collective
from credit.models.kernels.dispatch import force_gpu_path
from credit.parallel.dtensor import to_local
from credit.parallel.state.materialise import allocate_


class Kernel(NamedTuple):
    """Cost of one run of a kernel.

    Attributes:
        rate: name of the attribute of `credit.hpc.planner.gpus.Gpu` with the peak rate of the kernel.
        flops: number of floating-point operations of matrix products, convolutions and attention; 0 for other kernels.
        bytes: number of bytes that the kernel reads and writes.
    """

    rate: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Trace:
    """Cost of an optimizer step on one rank, from the forward pass to the norm of the gradients, without the update.

    The ranks of a collective are tensor-parallel peers or a domain group; for the norm, they are all ranks.

    Attributes:
        activations: peak of the bytes of all tensors except weights, gradients and constants. It includes the samples.
        constants: bytes of the tensors that the step reads and that are neither weights nor samples.
        kernels: kernel -> number of its runs.
        pass_collectives: collective -> number of its calls in the forward and backward passes.
        norm_collective: sum over the ranks for the norm of the gradients; None for a single process.
    """

    activations: int
    constants: int
    kernels: Mapping[Kernel, int]
    pass_collectives: Mapping[Collective, int]
    norm_collective: Collective | None

    @property
    def flops(self) -> int:
        """Number of floating-point operations of all matrix products, convolutions and attention in the step."""
        return sum(kernel.flops * count for kernel, count in self.kernels.items())

    @property
    def collectives(self) -> Counter[Collective]:
        """Collective -> number of its calls in the step."""
        collectives = Counter(self.pass_collectives)
        if self.norm_collective is not None:
            collectives[self.norm_collective] += 1
        return collectives


# Builder of the traced step. Its argument is the number of micro-steps. It returns the optimizer and a function that
# takes one optimizer step. This function calls its argument at the beginning of each micro-step.
BuildStep = Callable[[int], tuple[torch.optim.Optimizer, Callable[[Callable[[], None]], object]]]


def extrapolate_trace(shorter: Trace, longer: Trace, num_further: int) -> Trace:
    """Return the trace of a step with a long rollout, extrapolated from the traces of two shorter rollouts.

    `activations` and each count of `kernels` and `pass_collectives` are extrapolated linearly:
    ``longer + num_further * (longer - shorter)``. `constants` is the larger value of the two traces, and
    `norm_collective` is copied from `longer`. If the size of a kernel differs between the two traces, its count may be
    negative, but totals over all kernels are correct.

    Args:
        shorter: trace of a rollout of n steps.
        longer: trace of a rollout of n + 1 steps.
        num_further: number of steps of the long rollout in addition to n + 1 steps.
    """

    def extrapolate_value(short_value: int, long_value: int) -> int:
        return long_value + (long_value - short_value) * num_further

    def extrapolate_counts(short_counts: Mapping, long_counts: Mapping) -> dict:
        counts = {}
        for key in short_counts.keys() | long_counts.keys():
            counts[key] = extrapolate_value(short_counts.get(key, 0), long_counts.get(key, 0))
        return counts

    return Trace(
        activations=extrapolate_value(shorter.activations, longer.activations),
        constants=max(shorter.constants, longer.constants),
        kernels=extrapolate_counts(shorter.kernels, longer.kernels),
        pass_collectives=extrapolate_counts(shorter.pass_collectives, longer.pass_collectives),
        norm_collective=longer.norm_collective,
    )


def trace_step(
    model: nn.Module,
    build_step: BuildStep,
    *,
    micro_steps: int = 1,
    gpu: bool = True,
    autocast: bool = False,
    dtypes: Sequence[torch.dtype] = (),
    tf32: bool = True,
) -> Trace:
    """Run one training step of a model on fake tensors and return its trace.

    Args:
        model: model on the meta device. Tensor parallelism may have split its weights, but FSDP2 must not shard them.
        build_step: builder of the step, which is called after the model has been materialised as fake tensors; see
            `BuildStep`.
        micro_steps: number of micro-steps in the optimizer step. At most two micro-steps are traced; each later
            micro-step is assumed to have the cost of the second.
        gpu: True to trace the kernels of a GPU, False to trace the kernels of the CPU of this machine.
        autocast: True if the step runs under autocast.
        dtypes: (dtype of weights and activations, dtype of the output) of FSDP2's mixed precision; empty without it.
        tf32: True if float32 products and convolutions run in TF32.
    """

    def end_step(*_: object) -> None:
        raise _UpdateReachedError

    if dtypes:
        _cast_as_fsdp2(model, *dtypes)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        allocate_(model, torch.device("cpu"))
        model.train()
        optimizer, take_step = build_step(min(micro_steps, 2))
        recorder = _CostRecorder([*model.parameters(), *model.buffers()], tf32)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: recorder.exclude_gradient(p.grad))
        # The update is not traced, because it may communicate with ranks that do not exist in this process.
        optimizer.register_step_pre_hook(end_step)
        stack.enter_context(recorder)
        if gpu:
            stack.enter_context(_use_gpu_kernels(autocast))
        with suppress(_UpdateReachedError):
            take_step(recorder.begin_micro_step)
    return recorder.build_trace(micro_steps)


class _UpdateReachedError(Exception):
    """Signal that the traced step has reached the update of the optimizer."""


class _CostRecorder(TorchDispatchMode):
    """Dispatch mode that records the allocation and release of storages, and counts kernels and collectives.

    Args:
        weights_and_buffers: tensors of the model, which are neither activations nor constants.
        tf32: True if float32 products and convolutions run in TF32.
    """

    def __init__(self, weights_and_buffers: Iterable[Tensor], tf32: bool) -> None:
        super().__init__()
        self._float32_rate = "tf32" if tf32 else "float32"
        self.peak_bytes = 0
        self.constants = 0
        self.kernels: Counter[Kernel] = Counter()
        self.collectives: list[Collective] = []
        # These storages are kept alive, because a new storage could get the key of a released storage.
        self._held_storages = [to_local(tensor).untyped_storage() for tensor in weights_and_buffers]
        self._counted_keys = {storage._cdata for storage in self._held_storages}
        # key of a storage -> (its bytes, weak reference that reports its release)
        self._live_storages: dict[int, tuple[int, weakref.ref]] = {}
        self._live_bytes = 0
        self._micro_step_starts: list[tuple[Counter[Kernel], int]] = []  # kernels, number of collectives

    def begin_micro_step(self) -> None:
        """Record the current counts; call this method at the beginning of each micro-step."""
        self._micro_step_starts.append((self.kernels.copy(), len(self.collectives)))

    def build_trace(self, micro_steps: int) -> Trace:
        """Return the trace of a step of `micro_steps` micro-steps, of which at most the first two were run."""
        # Collectives before the first micro-step (power iterations) are counted in `credit.hpc.planner.traffic`.
        num_before = self._micro_step_starts[0][1] if self._micro_step_starts else 0
        collectives = self.collectives[num_before:]
        # The norm of the gradients is the last collective of a step.
        norm_collective = collectives[-1] if collectives else None
        calls = collectives[:-1]
        pass_collectives = Counter(calls)
        if micro_steps > 1:
            # The counts after the first micro-step are added once for each micro-step that was not traced.
            first_kernels, num_at_second = self._micro_step_starts[-1]
            first_collectives = Counter(calls[: num_at_second - num_before])
            for counts, first_counts in ((self.kernels, first_kernels), (pass_collectives, first_collectives)):
                for key in counts:
                    counts[key] += (counts[key] - first_counts[key]) * (micro_steps - 2)
        return Trace(self.peak_bytes, self.constants, self.kernels, pass_collectives, norm_collective)

    def exclude_gradient(self, gradient: Tensor) -> None:
        """Stop counting a finished gradient as an activation, because it now belongs to its parameter."""
        storage = to_local(gradient).untyped_storage()
        if storage._cdata in self._live_storages:
            self._live_bytes -= self._live_storages.pop(storage._cdata)[0]
            self._counted_keys.add(storage._cdata)
            self._held_storages.append(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            # A fake tensor reports this device, although its storage is on the meta device.
            return args[0].fake_device
        if func is torch.ops.aten._local_scalar_dense.default:
            # Python reads a value, such as a seed. Shapes do not depend on this value.
            return 1
        result = func(*args, **kwargs)
        self._count_operator(func, args, kwargs, result)
        return result

    def _count_operator(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """Add the storages, the kernel and the collective of one call of a torch operator to the counts."""
        collective = read_collective(func, args, result)
        if collective is not None:
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            kind, num_bytes = collective
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            self.collectives.append(Collective(kind, len(ranks), num_bytes, stride))
        # Tensors with a common storage are counted only once.
        inputs = _tensors_by_storage((args, kwargs))
        outputs = _tensors_by_storage(result)
        # An input that is not the output of a traced operator is a constant, such as a static field.
        for key, tensor in inputs.items():
            if key not in self._live_storages and key not in self._counted_keys:
                self.constants += tensor.untyped_storage().nbytes()
                self._counted_keys.add(key)
                self._held_storages.append(tensor.untyped_storage())
        for key, tensor in outputs.items():
            if key not in self._live_storages and key not in self._counted_keys:
                self._track_storage(key, tensor)
        # Views and allocations launch no kernel.
        is_view = outputs.keys() <= inputs.keys() and not func._schema.is_mutable
        is_allocation = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if collective is None and not is_view and not is_allocation:
            flops = 0
            formula = flop_registry.get(func.overloadpacket)
            if formula:
                flops = formula(*args, **kwargs, out_val=result)
            moved_bytes = sum(_count_bytes(tensor) for tensor in (*inputs.values(), *outputs.values()))
            self.kernels[Kernel(self._find_rate(inputs.values()), flops, moved_bytes)] += 1

    def _find_rate(self, inputs: Iterable[Tensor]) -> str:
        """Return the attribute name of `Gpu` with the peak rate for the dtype of the first floating-point input."""
        for tensor in inputs:
            if tensor.is_floating_point():
                is_half = tensor.dtype in (torch.bfloat16, torch.float16)
                return "bfloat16" if is_half else self._float32_rate
        return self._float32_rate

    def _track_storage(self, key: int, tensor: Tensor) -> None:
        """Add the storage of a new tensor to the live storages until it is released; `key` identifies the storage."""
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()

        def release(_: object) -> None:
            if key in self._live_storages:
                self._live_bytes -= self._live_storages.pop(key)[0]

        self._live_storages[key] = (num_bytes, weakref.ref(storage, release))
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


@contextmanager
def _use_gpu_kernels(autocast: bool) -> Iterator[None]:
    """Context in which operators on fake CPU tensors are traced with the kernels that a GPU would use.

    On a GPU, attention with a trained bias runs in the memory-efficient kernel, and norms compute in float32 under
    autocast. The context therefore replaces these functions in `torch.nn.functional`. A `TorchFunctionMode` is not
    enough, because it is inactive in the backward pass, where checkpointed blocks run again.

    Args:
        autocast: True if the traced step runs under autocast.
    """
    norm_names = ("layer_norm", "group_norm")
    originals = {name: getattr(F, name) for name in ("scaled_dot_product_attention", *norm_names)}
    F.scaled_dot_product_attention = _efficient_attention
    if autocast:
        for name in norm_names:
            norm = originals[name]
            # The default `norm=norm` keeps the norm of this pass through the loop.
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
    """Compute attention with the memory-efficient kernel of GPUs; see torch's `scaled_dot_product_attention`."""
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]


def _cast_as_fsdp2(model: nn.Module, param_dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    """Change a model in place so that weights, inputs and output have the dtypes of FSDP2's mixed precision.

    Args:
        model: model that FSDP2 has not sharded.
        param_dtype: dtype of weights, inputs and activations.
        output_dtype: dtype of the output.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = nn.Parameter(parameter.detach().to(param_dtype), parameter.requires_grad)

    def cast(tree: Any, dtype: torch.dtype) -> Any:
        def cast_tensor(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, cast_tensor, tree)

    model.register_forward_pre_hook(lambda _, args: cast(args, param_dtype))
    model.register_forward_hook(lambda _, args, output: cast(output, output_dtype))


def _tensors_by_storage(tree: Any) -> dict[int, Tensor]:
    """Return the tensors in nested containers, by the key of their storage; DTensors are replaced with local parts."""
    tensors = [to_local(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}


def _count_bytes(tensor: Tensor) -> int:
    """Return the bytes that a kernel moves for a tensor; for an expanded tensor, at most the bytes of its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
