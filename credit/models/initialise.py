"""Initial weights that depend on (seed, parameter name) alone.

Every value is drawn from a generator of its own, so the weights do not depend on the order of construction, on
which other parameters exist, or on how the model is sharded. `initial_values` yields whole tensors one at a time: a
sharded model takes its parts of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# Activation checkpointing and torch.compile put these into module names, and leave them out of state dicts.
_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator whose stream is determined by `seed` and `name`."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def kaiming_normal(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    """Draw N(0, 2 / fan_in) (He et al. 2015, arXiv 1502.01852)."""
    return torch.randn(tuple(shape), generator=generator, device="cpu") * math.sqrt(2.0 / fan_in)


def _inputs_per_output(module: nn.Module, shape: torch.Size) -> float:
    """Return how many input values reach one output value through a weight of this shape."""
    if isinstance(module, nn.ConvTranspose2d):
        return shape[0] * math.prod(shape[2:]) / math.prod(module.stride)
    return math.prod(shape[1:])


def _initial_value(
    module: nn.Module, key: str, weight_shape: torch.Size, shape: torch.Size, generator: torch.Generator
) -> Tensor:
    if hasattr(module, "initial_value"):
        return module.initial_value(key, shape, generator)
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return torch.full(shape, float(key == "weight"), device="cpu")
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
        bound = _inputs_per_output(module, weight_shape) ** -0.5
        return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)
    raise TypeError(f"{type(module).__name__} has parameters but no method initial_value(key, shape, generator)")


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (state-dict name, whole float32 CPU tensor) for every parameter and buffer of `model`.

    Works on the meta device and after sharding: only names, types and global shapes are read. Linear and
    convolution weights and biases are uniform in +-1/sqrt(inputs per output), norms are the identity; a module of
    another kind, or one that wants something else, has a method `initial_value(key, shape, generator)`. A
    parametrization with buffers has `initial_buffers(weight, generator)`.
    """
    for path, module in model.named_modules():
        for prefix in _WRAPPER_PREFIXES:
            path = path.replace(prefix, "")
        if isinstance(module, parametrize.ParametrizationList):
            continue  # its parameter belongs to the layer above, which is where it is drawn
        dot = f"{path}." if path else ""
        chain = module.parametrizations.weight if parametrize.is_parametrized(module, "weight") else ()
        own = dict(module.named_parameters(recurse=False))
        if chain:
            own["weight"] = chain.original
        for key, parameter in own.items():
            name = f"{dot}{key}"
            value = _initial_value(module, key, own["weight"].shape, parameter.shape, generator_for(seed, name))
            if key != "weight" or not chain:
                yield name, value
                continue
            yield f"{dot}parametrizations.weight.original", value
            for i, link in enumerate(chain):
                for buffer, vector in link.initial_buffers(value, generator_for(seed, f"{name}/{i}")).items():
                    yield f"{dot}parametrizations.weight.{i}.{buffer}", vector


@torch.no_grad()
def initialise_(model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of an unsharded `model` in place from `initial_values`."""
    state = model.state_dict()
    for name, value in initial_values(model, seed):
        state.pop(name).copy_(value)
    assert not state, f"no initial value for {sorted(state)}"
