"""Initial weights that depend on (seed, parameter name) alone.

Every value is drawn from a generator of its own, so the weights do not depend on the order of construction, on
which other parameters exist, or on how the model is sharded. `initial_values` yields whole tensors one at a time: a
sharded model takes its parts of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from credit.errors import ConfigError
from credit.parallel.blocks.marks import plain_name

_NORMS = (nn.LayerNorm, nn.GroupNorm)
_KNOWN = (*_NORMS, nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
_OWN_NORM = (
    "weights that torch's spectral_norm, weight_norm or another parametrization makes cannot be started; "
    "credit.models.layers.spectral_norm.apply_spectral_norm(model) normalises on any mesh, a parametrization of your "
    "own needs a method initial_buffers(weight, generator)"
)


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


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own parameters and those of its buffers that its state dict has."""
    buffers = {k: b for k, b in module.named_buffers(recurse=False) if k not in module._non_persistent_buffers_set}
    return dict(module.named_parameters(recurse=False)) | buffers


def _values(path: str, module: nn.Module, own: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, value) of a module's own tensors.

    Raises:
        ConfigError: if nothing tells how they start.
    """
    dot = f"{path}." if path else ""
    if hasattr(module, "initial_value"):
        for key, tensor in own.items():
            yield key, module.initial_value(key, tensor.shape, generator_for(seed, f"{dot}{key}"))
    elif isinstance(module, _KNOWN) and own.keys() <= {"weight", "bias"}:
        for key, tensor in own.items():
            if isinstance(module, _NORMS):
                yield key, torch.full(tensor.shape, float(key == "weight"), device="cpu")
                continue
            bound = _inputs_per_output(module, own["weight"].shape) ** -0.5
            value = torch.empty(tensor.shape, device="cpu")
            yield key, value.uniform_(-bound, bound, generator=generator_for(seed, f"{dot}{key}"))
    elif own:
        yield from _reset_values(path, module, own, seed)


def _reset_values(path: str, module: nn.Module, own: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield what a module's own ``reset_parameters`` draws, as torch's kinds of layers have one."""
    where = f"model.type: {path or 'the model'} ({type(module).__name__})"
    if isinstance(module, batchnorm._BatchNorm) or (
        isinstance(module, batchnorm._NormBase) and module.track_running_stats
    ):
        raise ConfigError(
            f"{where}: its statistics are those of one rank's samples; use GroupNorm, or InstanceNorm without "
            "track_running_stats"
        )
    if any(isinstance(hook, (SpectralNorm, WeightNorm)) for hook in module._forward_pre_hooks.values()):
        raise ConfigError(f"{where}: {_OWN_NORM}")
    drawn = generator_for(seed, path).initial_seed()
    try:
        values = others = _as_reset(module, drawn, high=False)
        if not all(_has_nan(tensor.dtype) for tensor in own.values()):
            others = _as_reset(module, drawn, high=True)
    except (IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{where}: its reset_parameters fails where tensors are not set yet ({error}); have it set each before "
            "use, or give the class a method initial_value(key, shape, generator)"
        ) from error
    unset = [key for key, value in values.items() if value.isnan().any() or not torch.equal(value, others[key])]
    if unset:
        raise ConfigError(
            f"{where}: nothing tells how {', '.join(unset)} start: no reset_parameters sets them; give the class a "
            "method initial_value(key, shape, generator) that returns the value of each of its tensors"
        )
    yield from ((key, value.detach()) for key, value in values.items())


def _as_reset(module: nn.Module, seed: int, high: bool) -> dict[str, Tensor]:
    """Return a module's own tensors on the CPU after ``reset_parameters``; what that leaves alone is as `_blank`."""
    whole = _unset_copy(module, high)
    reset = getattr(whole, "reset_parameters", None) or getattr(whole, "_reset_parameters", None)
    if reset is not None:
        state = torch.get_rng_state()
        torch.random.default_generator.manual_seed(seed)
        try:
            reset()
        finally:
            torch.set_rng_state(state)
    return _own_tensors(whole)


def _unset_copy(module: nn.Module, high: bool) -> nn.Module:
    """Return a module like `module` on the CPU whose tensors are whole and not set, as `_blank` has them."""
    whole = object.__new__(type(module))
    whole.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        blank = {
            key: tensor if tensor is None else _blank(tensor, high) for key, tensor in getattr(module, kind).items()
        }
        whole.__dict__[kind] = blank
    whole.__dict__["_modules"] = {key: child and _unset_copy(child, high) for key, child in module._modules.items()}
    return whole


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _blank(tensor: Tensor, high: bool) -> Tensor:
    """Return NaN; where there is none, the highest or the lowest value: what is set does not depend on which."""
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    if _has_nan(tensor.dtype):
        value.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        value.fill_(high)
    else:
        info = torch.iinfo(tensor.dtype)
        value.fill_(info.max if high else info.min)
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (state-dict name, whole CPU tensor) for every parameter and buffer in the state dict of `model`.

    Works on the meta device and after sharding: only names, types and global shapes are read. Linear and
    convolution weights and biases are uniform in +-1/sqrt(inputs per output), norms are the identity; a module that
    wants something else has a method `initial_value(key, shape, generator)`, and one of another kind that has not
    starts as its `reset_parameters` says. A parametrization with buffers has `initial_buffers(weight, generator)`.

    Raises:
        ConfigError: naming a module of which nothing tells how it starts.
    """
    links: set[nn.Module] = set()
    for path, module in model.named_modules():
        path = plain_name(path)
        if isinstance(module, parametrize.ParametrizationList):
            links.update(module)
            continue  # its parameter belongs to the layer above, which is where it is drawn
        if module in links:
            continue  # and so do its buffers
        dot = f"{path}." if path else ""
        own, chain = _own_tensors(module), ()
        if parametrize.is_parametrized(module):
            chain = _own_chain(path, module)
            own["weight"] = chain.original
        for key, value in _values(path, module, own, seed):
            name = f"{dot}{key}"
            if key != "weight" or not chain:
                yield name, value
                continue
            yield f"{dot}parametrizations.weight.original", value
            for i, link in enumerate(chain):
                for buffer, vector in link.initial_buffers(value, generator_for(seed, f"{name}/{i}")).items():
                    yield f"{dot}parametrizations.weight.{i}.{buffer}", vector


def _own_chain(path: str, module: nn.Module) -> parametrize.ParametrizationList:
    """Return the parametrizations of a module's weight.

    Raises:
        ConfigError: if there are others, or others' that do not tell how they start.
    """
    chains = module.parametrizations
    if set(chains) != {"weight"} or not all(hasattr(link, "initial_buffers") for link in chains.weight):
        raise ConfigError(f"model.type: {path or 'the model'} ({type(module).__name__}): {_OWN_NORM}")
    return chains.weight


@torch.no_grad()
def initialise_(model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of an unsharded `model` in place from `initial_values`."""
    state = model.state_dict()
    for name, value in initial_values(model, seed):
        state.pop(name).copy_(value)
    assert not state, f"no initial value for {sorted(state)}"
