"""Initial weights that depend only on the seed and the name of the parameter.

Each tensor has its own random generator. So the weights do not depend on the order in which layers are built, on other
parameters, or on the sharding. `initial_values` yields whole (unsharded) tensors one at a time, and each rank of a
sharded model keeps only its part of each tensor.
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
from credit.parallel.blocks.marks import strip_wrapper_prefixes

_NORMS = (nn.LayerNorm, nn.GroupNorm)
_STANDARD_LAYERS = (*_NORMS, nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
_UNSUPPORTED_PARAMETRIZATION = (
    "weights with torch's spectral_norm, weight_norm or another parametrization cannot be initialised; use "
    "credit.models.layers.spectral_norm.apply_spectral_norm(model), or add a method initial_buffers(weight, generator) "
    "to your parametrization"
)


def build_generator(seed: int, name: str) -> torch.Generator:
    """Return a random generator on the CPU whose numbers depend only on `seed` and `name`.

    Args:
        seed: seed of the model.
        name: name of a tensor, or path of a module, in the model.
    """
    # Python's built-in hash of a string differs from process to process.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # The shift leaves 63 bits, so that the number fits into a signed 64-bit integer.
    generator_seed = int.from_bytes(digest[:8], "little") >> 1
    return torch.Generator().manual_seed(generator_seed)


def kaiming_normal(shape: Sequence[int], fan_in: int, generator: torch.Generator) -> Tensor:
    """Return a CPU tensor of normal random numbers with variance 2 / fan_in (He et al. 2015, arXiv 1502.01852).

    Args:
        shape: shape of the tensor.
        fan_in: number of input values that contribute to one output value.
        generator: random generator on the CPU.
    """
    return torch.randn(tuple(shape), generator=generator, device="cpu") * math.sqrt(2.0 / fan_in)


def _count_inputs_per_output(module: nn.Module, shape: torch.Size) -> float:
    """Return the mean number of input values that contribute to one output value of a linear layer or convolution.

    Args:
        module: the layer.
        shape: shape of the layer's weight.
    """
    if isinstance(module, nn.ConvTranspose2d):
        # The weight is (in, out, rows, columns). Each input value is multiplied by all elements of the kernel, and
        # there are product(strides) outputs per input. So an output is a sum over 1 / product(strides) of the elements
        # on average.
        return shape[0] * math.prod(shape[2:]) / math.prod(module.stride)
    return math.prod(shape[1:])


def _list_direct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the direct parameters and persistent buffers of a module by name, excluding submodules."""
    tensors = dict(module.named_parameters(recurse=False))
    for key, buffer in module.named_buffers(recurse=False):
        if key not in module._non_persistent_buffers_set:
            tensors[key] = buffer
    return tensors


def _build_values(
    path: str, module: nn.Module, tensors: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, initial tensor) for each parameter and buffer of a module; see `initial_values` for the rules.

    Args:
        path: path of the module in the model; empty for the model itself.
        module: the module.
        tensors: key -> parameter or buffer of the module. A key is the name of the tensor in the module, such as
            ``weight``.
        seed: seed of the model.

    Raises:
        ConfigError: if the initial values of a tensor are not defined.
    """
    prefix = f"{path}." if path else ""
    if hasattr(module, "initial_value"):
        for key, tensor in tensors.items():
            yield key, module.initial_value(key, tensor.shape, build_generator(seed, f"{prefix}{key}"))
    # A subclass that has further tensors is initialised by its `reset_parameters`, as any other module is.
    elif isinstance(module, _STANDARD_LAYERS) and tensors.keys() <= {"weight", "bias"}:
        for key, tensor in tensors.items():
            if isinstance(module, _NORMS):
                # The weight is 1 and the bias is 0.
                yield key, torch.full(tensor.shape, float(key == "weight"), device="cpu")
                continue
            bound = _count_inputs_per_output(module, tensors["weight"].shape) ** -0.5
            value = torch.empty(tensor.shape, device="cpu")
            yield key, value.uniform_(-bound, bound, generator=build_generator(seed, f"{prefix}{key}"))
    elif tensors:
        yield from _build_reset_values(path, module, tensors, seed)


def _build_reset_values(
    path: str, module: nn.Module, tensors: Mapping[str, Tensor], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, initial tensor) for each parameter and buffer of a module, as its ``reset_parameters`` sets them.

    ``reset_parameters`` is called on a copy of the module whose tensors are filled with NaN. A tensor that contains NaN
    afterwards was not set. Integer and bool tensors cannot contain NaN. If the module has such tensors, the method is
    also called on a second copy with other fill values. A tensor that differs between the two copies was not set.

    Args:
        path: path of the module in the model; empty for the model itself.
        module: the module.
        tensors: key -> parameter or buffer of the module. A key is the name of the tensor in the module.
        seed: seed of the model.

    Raises:
        ConfigError: if the module is a batch norm, an instance norm with running statistics, or has torch's own
            spectral or weight norm; if its ``reset_parameters`` reads a tensor before setting it; or if a tensor is not
            set.
    """
    description = f"model.type: {path or 'the model'} ({type(module).__name__})"
    # `_NormBase` is the base class of batch norms and of instance norms.
    is_tracking_norm = isinstance(module, batchnorm._NormBase) and module.track_running_stats
    if is_tracking_norm or isinstance(module, batchnorm._BatchNorm):
        raise ConfigError(
            f"{description}: its running statistics would differ between ranks; use GroupNorm, or InstanceNorm without "
            "track_running_stats"
        )
    if any(isinstance(hook, (SpectralNorm, WeightNorm)) for hook in module._forward_pre_hooks.values()):
        raise ConfigError(f"{description}: {_UNSUPPORTED_PARAMETRIZATION}")
    module_seed = build_generator(seed, path).initial_seed()
    try:
        values = _reset_parameters_of_copy(module, module_seed, high=False)
        second_values = values
        # NaN marks an unset tensor. A second copy is needed only for dtypes without NaN.
        if not all(_can_hold_nan(tensor.dtype) for tensor in tensors.values()):
            second_values = _reset_parameters_of_copy(module, module_seed, high=True)
    except (IndexError, RuntimeError) as error:
        raise ConfigError(
            f"{description}: its reset_parameters reads a tensor that it has not set yet ({error}); set every tensor "
            "before reading it, or give the class a method initial_value(key, shape, generator)"
        ) from error
    unset_keys = []
    for key, value in values.items():
        if value.isnan().any() or not torch.equal(value, second_values[key]):
            unset_keys.append(key)
    if unset_keys:
        raise ConfigError(
            f"{description}: {', '.join(unset_keys)} cannot be initialised: reset_parameters does not set them; give "
            "the class a method initial_value(key, shape, generator) that returns the value of each of its tensors"
        )
    for key, value in values.items():
        yield key, value.detach()


def _reset_parameters_of_copy(module: nn.Module, seed: int, high: bool) -> dict[str, Tensor]:
    """Call ``reset_parameters`` on a CPU copy of a module; return its direct parameters and buffers by key.

    Tensors that the method does not set keep the fill value of `_build_unset_tensor`.

    Args:
        module: module on any device, sharded or not.
        seed: seed of the random numbers that ``reset_parameters`` uses.
        high: selects one of two fill values for dtypes without NaN, see `_build_unset_tensor`.
    """
    unset_module = _copy_with_unset_tensors(module, high)
    # In torch's attention and transformer, the name of the method begins with an underscore.
    reset = getattr(unset_module, "reset_parameters", None) or getattr(unset_module, "_reset_parameters", None)
    if reset is not None:
        # reset_parameters uses torch's global generator. Its state is restored afterwards.
        rng_state = torch.get_rng_state()
        torch.random.default_generator.manual_seed(seed)
        try:
            reset()
        finally:
            torch.set_rng_state(rng_state)
    return _list_direct_tensors(unset_module)


def _copy_with_unset_tensors(module: nn.Module, high: bool) -> nn.Module:
    """Return a CPU copy of `module` and its submodules, in which `_build_unset_tensor` has replaced all tensors."""
    # The arguments of the constructor are unknown, so the copy is created without calling the constructor.
    unset_module = object.__new__(type(module))
    unset_module.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        unset_tensors = {}
        for key, tensor in getattr(module, kind).items():
            unset_tensors[key] = None if tensor is None else _build_unset_tensor(tensor, high)
        unset_module.__dict__[kind] = unset_tensors
    children = {}
    for key, child in module._modules.items():
        children[key] = None if child is None else _copy_with_unset_tensors(child, high)
    unset_module.__dict__["_modules"] = children
    return unset_module


def _can_hold_nan(dtype: torch.dtype) -> bool:
    """Return True if the dtype can represent NaN."""
    return dtype.is_floating_point or dtype.is_complex


def _build_unset_tensor(tensor: Tensor, high: bool) -> Tensor:
    """Return a CPU tensor with the whole (unsharded) shape and the dtype of `tensor`, filled with NaN.

    A tensor whose dtype has no NaN is filled with the highest value of the dtype if `high` is true, otherwise with the
    lowest value.
    """
    value = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    if _can_hold_nan(tensor.dtype):
        value.fill_(torch.nan)
    elif tensor.dtype == torch.bool:
        value.fill_(high)
    else:
        info = torch.iinfo(tensor.dtype)
        fill_value = info.max if high else info.min
        value.fill_(fill_value)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=False)
    return value


def find_addable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the layers that add noise, by name. These layers have ``may_be_added = True``.

    With their initial values, these layers do not change the output of the model. So they can be added to a model that
    was trained without them.
    """
    parameters = {}
    for path, module in model.named_modules():
        if getattr(module, "may_be_added", False):
            for name, parameter in module.named_parameters(path, recurse=False):
                parameters[strip_wrapper_prefixes(name)] = parameter
    return parameters


def initial_values_of_addable(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the initial value of each parameter of `find_addable_parameters`.

    The values are whole (unsharded) tensors on the CPU.

    Args:
        model: model on any device, sharded or not.
        seed: seed of the model.
    """
    for path, module in model.named_modules():
        if getattr(module, "may_be_added", False):
            plain_path = strip_wrapper_prefixes(path)
            for key, value in _build_values(plain_path, module, _list_direct_tensors(module), seed):
                yield f"{plain_path}.{key}", value


def initial_values(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the initial value of every tensor in the state dict of `model`.

    The values are whole (unsharded) tensors on the CPU. They depend only on the seed and on the model's tensor
    names, global shapes and module types. The first rule that applies to a module is used:

    - A module with a method ``initial_value(key, shape, generator)`` gets the tensors that the method returns.
    - The weight and bias of a linear layer or convolution are uniform in +-1/sqrt(inputs per output). A layer norm or
      group norm has weight 1 and bias 0.
    - Any other module gets the values that its method ``reset_parameters`` sets.

    A parametrization needs a method ``initial_buffers(weight, generator)`` that returns its buffers by name.

    Args:
        model: model on any device (the meta device included), sharded or not.
        seed: seed of the model.

    Raises:
        ConfigError: if the initial values of a module are not defined; the message names the module.
    """
    parametrizations: set[nn.Module] = set()
    for path, module in model.named_modules():
        path = strip_wrapper_prefixes(path)
        if isinstance(module, parametrize.ParametrizationList):
            # Its tensors were already yielded together with the layer that has the weight, which comes first.
            parametrizations.update(module)
            continue
        if module in parametrizations:
            continue
        prefix = f"{path}." if path else ""
        tensors = _list_direct_tensors(module)
        # torch stores the unparametrized weight in the list of its parametrizations, under the name "original".
        chain = ()
        if parametrize.is_parametrized(module):
            chain = _weight_parametrizations(path, module)
            tensors["weight"] = chain.original
        for key, value in _build_values(path, module, tensors, seed):
            name = f"{prefix}{key}"
            if key != "weight" or not chain:
                yield name, value
                continue
            # The buffers of a parametrization, such as u and v of spectral norm, depend on the value of the weight.
            yield f"{prefix}parametrizations.weight.original", value
            for number, parametrization in enumerate(chain):
                buffers = parametrization.initial_buffers(value, build_generator(seed, f"{name}/{number}"))
                for buffer_name, buffer in buffers.items():
                    yield f"{prefix}parametrizations.weight.{number}.{buffer_name}", buffer


def _weight_parametrizations(path: str, module: nn.Module) -> parametrize.ParametrizationList:
    """Return the parametrizations of a module's weight; their attribute `original` is the unparametrized weight.

    Args:
        path: path of the module in the model, for the message.
        module: module with at least one parametrization.

    Raises:
        ConfigError: if another tensor of the module is parametrized, or a parametrization of the weight has no method
            `initial_buffers`.
    """
    chains = module.parametrizations
    if set(chains) != {"weight"} or not all(hasattr(layer, "initial_buffers") for layer in chains.weight):
        raise ConfigError(
            f"model.type: {path or 'the model'} ({type(module).__name__}): {_UNSUPPORTED_PARAMETRIZATION}"
        )
    return chains.weight


@torch.no_grad()
def initialise_(model: nn.Module, seed: int) -> None:
    """Fill every parameter and persistent buffer of an unsharded model, in place, with the tensors of `initial_values`.

    Args:
        model: a model without wrappers, on any device except the meta device.
        seed: seed of the model.

    Raises:
        ConfigError: if the initial values of a module are not defined; the message names the module.
    """
    state = model.state_dict()
    for name, value in initial_values(model, seed):
        state.pop(name).copy_(value)
    assert not state, f"no initial value for {sorted(state)}"
