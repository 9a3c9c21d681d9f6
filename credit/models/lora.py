"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): fine-tuning that trains a small part of a model.

Layers that add noise (their attribute ``may_be_added`` is True) are trained and saved together with the adapters,
because the base model may not have such layers.

An adapted weight is W + alpha / rank * B A. W is frozen. B (outputs x rank) starts as zeros and A (rank x inputs) as
random numbers, so training starts exactly from the base model. The sum is computed by a parametrization that
comes before spectral norm, so that the adapters can be merged into W without changing the output. The vectors u and v
of spectral norm are updated only for adapted weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.errors import ConfigError, did_you_mean
from credit.models.initialise import build_generator, find_addable_parameters
from credit.models.kernels.autocast import without_autocast
from credit.parallel.blocks.marks import strip_wrapper_prefixes
from credit.parallel.dtensor import to_local

# Kinds of layers that can have an adapter.
ADAPTABLE_LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


class LoRA(nn.Module):
    """Parametrization that adds ``scale * b @ a`` to a weight.

    `b` starts as zeros and `a` as random numbers from torch's global generator. `initial_adapters` yields values
    that depend only on a seed and the path of the layer.

    Args:
        weight: weight to adapt. It is treated as a matrix (first dimension, product of all other dimensions). Only its
            shape and device are read.
        rank: rank of the product b @ a.
        alpha: numerator of `scale` = alpha / rank.

    Attributes:
        a: (rank, columns) trainable factor.
        b: (rows, rank) trainable factor.
        scale: factor by which the product b @ a is multiplied.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        rows = weight.shape[0]
        columns = weight.numel() // rows
        self.scale = alpha / rank
        bound = columns**-0.5
        self.a = nn.Parameter(torch.empty(rank, columns, device=weight.device).uniform_(-bound, bound))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        # Set by `share` if tensor parallelism has split the weight.
        self._split_dim: int | None = None
        self._sum_gradient: Callable[[Tensor], Tensor] | None = None

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the initial values of a whole (unsharded) factor, on the CPU.

        Args:
            key: ``"a"`` for uniform values in +-1/sqrt(columns), ``"b"`` for zeros.
            shape: shape of the whole factor.
            generator: random generator on the CPU.
        """
        value = torch.zeros(shape, device="cpu")
        if key == "a":
            bound = value.shape[1] ** -0.5
            value.uniform_(-bound, bound, generator=generator)
        return value

    def share(
        self, split_dim: int, all_reduce: Callable[[Tensor], Tensor], sum_gradient: Callable[[Tensor], Tensor]
    ) -> dict[str, int | None]:
        """Prepare the adapter for a weight that tensor parallelism splits: each rank then has a part of the matrix.

        If the rows of the matrix are split, `b` is split by rows, and every rank has the whole `a`. If the columns are
        split, `a` is split by columns, and every rank has the whole `b`.

        Args:
            split_dim: dimension of the matrix that is split over the ranks: 0 for rows, 1 for columns.
            all_reduce: function that sums a tensor over the ranks, and its gradient as well; not used.
            sum_gradient: function that returns its argument unchanged and sums its gradient over the ranks.

        Returns:
            Name of the factor, ``a`` or ``b`` -> dimension along which it is split; None if it is not split.
        """
        # The factor that has the split dimension is split with the weight; the other factor is not split.
        self._split_dim = split_dim
        self._sum_gradient = sum_gradient
        if split_dim == 0:
            return {"a": None, "b": 0}
        return {"a": 1, "b": None}

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight, or this rank's part of it, with the shape of `weight`."""
        weight = to_local(weight)
        a = to_local(self.a)
        b = to_local(self.b)
        # All ranks contribute to the gradient of the factor that is not split, so it is summed over the ranks.
        if self._split_dim == 0:
            a = self._sum_gradient(a)
        elif self._split_dim == 1:
            b = self._sum_gradient(b)
        with without_autocast(weight):
            return torch.addmm(weight.flatten(1), b, a, alpha=self.scale).view(weight.shape)


def apply_lora(model: nn.Module, targets: Sequence[str], rank: int = 8, alpha: float = 16.0) -> nn.Module:
    """Freeze `model`, add trainable adapters to the layers in `targets`, in place, and return the model.

    Layers that add noise get no adapters and are not frozen.

    Args:
        model: model on any device, neither wrapped nor sharded yet.
        targets: paths of Linear or convolution layers in the model; ``*`` matches any characters (``"*.to_out"``).
        rank: rank of each adapter.
        alpha: the product of an adapter is multiplied by alpha / rank.

    Raises:
        ConfigError: if a pattern matches no Linear or convolution; the message suggests the most similar valid pattern.
    """
    # Layers that add noise are trained themselves, so they need no adapter.
    layers = {}
    for path, layer in model.named_modules():
        if isinstance(layer, ADAPTABLE_LAYERS) and not getattr(layer, "may_be_added", False):
            layers[path] = layer
    # All patterns are checked before the model is changed.
    adapted_paths = set()
    for pattern in targets:
        matches = [path for path in layers if fnmatchcase(path, pattern)]
        if not matches:
            raise ConfigError(
                f"trainer.lora.targets: {pattern!r} matches no Linear or convolution of {type(model).__name__}"
                + did_you_mean(pattern, _suggest_patterns(layers))
            )
        adapted_paths.update(matches)
    model.requires_grad_(False)
    for parameter in find_addable_parameters(model).values():
        parameter.requires_grad_(True)
    for path in sorted(adapted_paths):
        layer = layers[path]
        if parametrize.is_parametrized(layer, "weight"):
            # The adapter must come before spectral norm, so that it can be merged into the weight.
            chain = layer.parametrizations.weight
            chain.insert(0, LoRA(chain.original, rank, alpha))
        else:
            parametrize.register_parametrization(layer, "weight", LoRA(layer.weight, rank, alpha), unsafe=True)
    return model


def _suggest_patterns(paths: Iterable[str]) -> set[str]:
    """Return two patterns for each path, as suggestions for `trainer.lora.targets`.

    The first pattern has ``*`` instead of each number in the path. The second has ``*`` instead of everything before
    the name of the layer. The path ``stages.0.attention.to_out`` gives ``stages.*.attention.to_out`` and ``*.to_out``.
    """
    patterns = set()
    for path in paths:
        components = []
        for component in path.split("."):
            components.append("*" if component.isdigit() else component)
        patterns.add(".".join(components))
        if components[-1] != "*":
            patterns.add(f"*.{components[-1]}")
        else:
            # The path ends with a number. ``*.*`` would match every layer, so include the name before the number.
            patterns.add("*" + ".".join(components[-2:]))
    return patterns


def _find_adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, LoRA]]:
    """Yield (path without the prefixes of wrappers, layer, adapter) for every adapted layer."""
    for path, layer in model.named_modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        # `apply_lora` puts the adapter first.
        first_parametrization = layer.parametrizations.weight[0]
        if isinstance(first_parametrization, LoRA):
            yield strip_wrapper_prefixes(path), layer, first_parametrization


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the state-dict name and the initial value of both factors of every adapter.

    The values are whole (unsharded) tensors on the CPU. They depend only on the seed and the path of the layer.

    Args:
        model: model with adapters, on any device (the meta device included), sharded or not.
        seed: seed of the model.
    """
    for path, _, adapter in _find_adapted_layers(model):
        for key, parameter in adapter.named_parameters():
            name = f"{path}.parametrizations.weight.0.{key}"
            yield name, adapter.initial_value(key, parameter.shape, build_generator(seed, name))


def checkpoint_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of `model` contains, by state-dict name and without copying them.

    For a model with adapters, these are the adapters, the vectors u and v of adapted weights, and the parameters of
    layers that add noise, but no frozen weights. For any other model, they are the whole state dict.
    """
    state = model.state_dict()
    prefixes = tuple(f"{path}.parametrizations.weight." for path, _, _ in _find_adapted_layers(model))
    if not prefixes:
        return state
    noise_names = find_addable_parameters(model).keys()
    trained_state = {}
    for name, tensor in state.items():
        is_adapter = name.startswith(prefixes) and not name.endswith(".original")
        if is_adapter or name in noise_names:
            trained_state[name] = tensor
    return trained_state


def base_state_dict(model: nn.Module, stored_names: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of an adapted model that are loaded from its base model, by their names in the base model.

    The tensors are not copied, so loading values into them changes `model`.

    Args:
        model: the model with adapters.
        stored_names: names of the stored tensors of the base model. Parameters of layers that add noise are omitted
            from the result if they are not stored.
    """
    state = model.state_dict()
    for name in find_addable_parameters(model):
        if name not in stored_names:
            del state[name]
    for path, layer, _ in _find_adapted_layers(model):
        prefix = f"{path}.parametrizations.weight."
        del state[f"{prefix}0.a"]
        del state[f"{prefix}0.b"]
        # A layer without spectral norm has a plain weight in the base model.
        if len(layer.parametrizations.weight) == 1:
            state[f"{path}.weight"] = state.pop(f"{prefix}original")
        # The adapter is parametrization 0. The base model lacks it, so its other parametrizations are numbered from 0.
        later_names = []
        for name in state:
            if name.startswith(prefix) and not name.endswith(".original"):
                later_names.append(name)
        for name in later_names:
            number, _, key = name.removeprefix(prefix).partition(".")
            state[f"{prefix}{int(number) - 1}.{key}"] = state.pop(name)
    return state


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Add each adapter to its weight and remove the adapter, in place; return the model.

    Args:
        model: model with adapters, neither wrapped nor sharded.
    """
    # Make a list first, because removing adapters changes the modules that are iterated over.
    for _, layer, adapter in list(_find_adapted_layers(model)):
        chain = layer.parametrizations.weight
        chain.original.copy_(adapter(chain.original))
        # A layer without spectral norm gets a plain weight again; otherwise spectral norm stays.
        if len(chain) == 1:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        else:
            del chain[0]
    return model
