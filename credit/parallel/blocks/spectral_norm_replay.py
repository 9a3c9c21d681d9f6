"""Replay of torch's own spectral norm in blocks that activation checkpointing computes twice.

In training, torch's spectral norm updates its singular vectors u and v with a power iteration in every forward pass. A
recomputed block would therefore use different vectors and a different weight than in its first pass. To prevent this,
the vectors of every call in the first pass are recorded. The recomputation uses the recorded vectors and does not
iterate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


@dataclass(frozen=True)
class NormalizedWeight:
    """Weight that torch's spectral norm normalizes, with a hook or a parametrization.

    Attributes:
        norm: hook or parametrization of torch's spectral norm; it has the attribute ``n_power_iterations``.
        module: module with the vectors u and v as buffers; for a parametrization, this is `norm` itself.
        vector_names: names of the buffers of u and v in `module`.
    """

    norm: Any
    module: nn.Module
    vector_names: tuple[str, str]


class SingularVectorRecord:
    """Record of the singular vectors u and v that torch's spectral norm uses in one forward pass of a block.

    A weight may be used several times in a forward pass, so the record has an entry for each call.

    Args:
        weights: weights of the block that torch's spectral norm normalizes.
    """

    def __init__(self, weights: list[NormalizedWeight]) -> None:
        self._weights = weights
        # For each weight, a list with one dict for each call: buffer name -> vector.
        self._calls: list[list[dict[str, Tensor]]] = [[] for _ in weights]

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context of the first pass: record the vectors that each call uses.

        For a weight that is not used in the pass, the vectors at the end of the pass are recorded once.
        """
        with ExitStack() as hooks:
            for weight, calls in zip(self._weights, self._calls, strict=True):
                # A parametrization iterates in its forward. torch's hook iterates before the forward of its layer, and
                # before hooks that are registered later.
                if weight.norm is weight.module:
                    register = weight.module.register_forward_hook
                else:
                    register = weight.module.register_forward_pre_hook
                hook = functools.partial(_record_call, calls, weight.vector_names)
                # The handle of a hook is a context manager that removes the hook at the end of the context.
                hooks.enter_context(register(hook))
            yield
        for weight, calls in zip(self._weights, self._calls, strict=True):
            if not calls:
                _record_call(calls, weight.vector_names, weight.module)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Context of the recomputation: each call uses its recorded vectors, without power iterations.

        The previous vectors of the modules are restored at the end, even after an exception.
        """
        present_vectors = []
        present_iterations = []
        for weight in self._weights:
            present_vectors.append({name: weight.module._buffers[name] for name in weight.vector_names})
            present_iterations.append(weight.norm.n_power_iterations)
        try:
            with ExitStack() as hooks:
                for weight, calls in zip(self._weights, self._calls, strict=True):
                    weight.norm.n_power_iterations = 0
                    hook = functools.partial(_replay_call, iter(calls))
                    # The hook is prepended, because torch's hook, which normalizes the weight, needs the recorded
                    # vectors.
                    handle = weight.module.register_forward_pre_hook(hook, prepend=True)
                    hooks.enter_context(handle)
                yield
        finally:
            for weight, vectors, iterations in zip(self._weights, present_vectors, present_iterations, strict=True):
                weight.module._buffers.update(vectors)
                weight.norm.n_power_iterations = iterations


def find_normalized_weights(block: nn.Module) -> list[NormalizedWeight]:
    """Return the weights inside `block` that torch's own spectral norm normalizes."""
    weights = []
    for module in block.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                weights.append(NormalizedWeight(hook, module, (f"{hook.name}_u", f"{hook.name}_v")))
    for module in block.modules():
        # Without `_u` the weight is a vector. A vector is divided by its norm and needs no power iteration.
        if isinstance(module, _SpectralNorm) and hasattr(module, "_u"):
            weights.append(NormalizedWeight(module, module, ("_u", "_v")))
    return weights


def _record_call(
    calls: list[dict[str, Tensor]], vector_names: tuple[str, str], module: nn.Module, *hook_arguments: Any
) -> None:
    """Forward hook: append a copy of the module's current vectors u and v to `calls`, the record of one weight."""
    calls.append({name: module._buffers[name].clone() for name in vector_names})


def _replay_call(calls: Iterator[dict[str, Tensor]], module: nn.Module, *hook_arguments: Any) -> None:
    """Forward pre-hook: set the module's u and v to the vectors of the next recorded call."""
    # After all recorded calls have been replayed, the vectors of the last call remain.
    module._buffers.update(next(calls, {}))
