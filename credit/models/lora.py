"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): fine-tuning that trains a small part of a model.

An adapted weight is W + alpha / rank * B A: W is frozen, B (outputs x rank) starts as zeros and A (rank x inputs) as
random numbers, so training starts from the base model exactly. The sum is a parametrization of the weight that comes
before spectral normalisation, so the adapters can be merged into W without changing the function; behind it, they could
not. Spectral norm's vectors go on following an adapted weight; those of a frozen one stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from credit.config.schema_trainer import LoraConfig
from credit.errors import ConfigError, did_you_mean
from credit.models.initialise import generator_for
from credit.models.kernels.autocast import without_autocast
from credit.parallel.blocks.marks import plain_name
from credit.parallel.dtensor import local

LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


class LoRA(nn.Module):
    """Parametrization that adds ``scale * b @ a`` to a weight.

    Args:
        weight: to be adapted; only its shape, with every dimension but the first taken as one, and device are read.
        rank: of the sum's second term.
        alpha: `scale` is alpha / rank.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        rows = weight.shape[0]
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.zeros(rank, weight.numel() // rows, device=weight.device))
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        self._split: int | None = None
        self._common: Callable[[Tensor], Tensor] | None = None

    def initial_value(self, key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """Return the whole initial value of `a` or `b`, on the CPU: uniform in +-1/sqrt(inputs), and zeros."""
        value = torch.zeros(shape, device="cpu")
        bound = value.shape[1] ** -0.5
        return value.uniform_(-bound, bound, generator=generator) if key == "a" else value

    def share(
        self, split: int, total: Callable[[Tensor], Tensor], common: Callable[[Tensor], Tensor]
    ) -> dict[str, int | None]:
        """Take the weight from now on as one part of a matrix: `b` has its rows, `a` its columns.

        The arguments and what is returned are those of `SpectralNorm.share`.
        """
        self._split, self._common = split, common
        return {"a": None, "b": 0} if split == 0 else {"a": 1, "b": None}

    def forward(self, weight: Tensor) -> Tensor:
        """Return the adapted weight, or this rank's part of it."""
        weight, a, b = local(weight), local(self.a), local(self.b)
        if self._split == 0:
            a = self._common(a)
        elif self._split == 1:
            b = self._common(b)
        with without_autocast(weight):
            return torch.addmm(weight.flatten(1), b, a, alpha=self.scale).view(weight.shape)


def apply_lora(model: nn.Module, conf: LoraConfig) -> nn.Module:
    """Freeze `model` and give the layers that `conf` names adapters that train; in place, returns the model.

    Args:
        model: on any device; not wrapped or sharded yet.
        conf: ``trainer.lora``.

    Raises:
        ConfigError: if a pattern matches no Linear or convolution, with the nearest that does.
    """
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LAYERS)}
    chosen = set()
    for pattern in conf.targets:
        found = {path for path in layers if fnmatchcase(path, pattern)}
        if not found:
            raise ConfigError(
                f"trainer.lora.targets: {pattern!r} matches no Linear or convolution of {type(model).__name__}"
                + did_you_mean(pattern, _patterns(layers))
            )
        chosen |= found
    model.requires_grad_(False)
    for path in sorted(chosen):
        layer = layers[path]
        if parametrize.is_parametrized(layer, "weight"):
            chain = layer.parametrizations.weight
            chain.insert(0, LoRA(chain.original, conf.rank, conf.alpha))
        else:
            parametrize.register_parametrization(
                layer, "weight", LoRA(layer.weight, conf.rank, conf.alpha), unsafe=True
            )
    return model


def _patterns(paths: Iterable[str]) -> set[str]:
    """Return patterns that match something: each layer's own name anywhere, and its path without the numbers."""
    patterns = set()
    for path in paths:
        parts = ["*" if part.isdigit() else part for part in path.split(".")]
        patterns |= {".".join(parts), f"*.{parts[-1]}" if parts[-1] != "*" else f"*{'.'.join(parts[-2:])}"}
    return patterns


def _adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module, LoRA]]:
    """Yield (plain path, layer, adapter) of every adapted layer."""
    for path, layer in model.named_modules():
        if parametrize.is_parametrized(layer, "weight") and isinstance(layer.parametrizations.weight[0], LoRA):
            yield plain_name(path), layer, layer.parametrizations.weight[0]


def initial_adapters(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (state-dict name, whole CPU tensor) of every adapter, from the seed and its layer's path alone.

    Works on the meta device and after sharding, where only names and whole shapes are read.
    """
    for path, _, adapter in _adapted(model):
        for key, own in adapter.named_parameters():
            name = f"{path}.parametrizations.weight.0.{key}"
            yield name, adapter.initial_value(key, own.shape, generator_for(seed, name))


def checkpoint_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint holds: of an adapted model the adapters with their u and v, else the state dict."""
    state = model.state_dict()
    adapted = tuple(f"{path}.parametrizations.weight." for path, _, _ in _adapted(model))
    if not adapted:
        return state
    return {n: t for n, t in state.items() if n.startswith(adapted) and not n.endswith(".original")}


def base_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an adapted model that it has without adapters, by the names that they have then."""
    state = model.state_dict()
    for path, layer, _ in _adapted(model):
        chain = f"{path}.parametrizations.weight."
        links = len(layer.parametrizations.weight)
        del state[f"{chain}0.a"], state[f"{chain}0.b"]
        if links == 1:
            state[f"{path}.weight"] = state.pop(f"{chain}original")
        for name in [name for name in state if name.startswith(chain) and not name.endswith(".original")]:
            number, _, rest = name.removeprefix(chain).partition(".")
            state[f"{chain}{int(number) - 1}.{rest}"] = state.pop(name)
    return state


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """Add the adapters to their weights and take them out, in place; returns the model, as it is without adapters.

    Args:
        model: neither wrapped nor sharded.
    """
    for _, layer, adapter in list(_adapted(model)):
        chain = layer.parametrizations.weight
        chain.original.copy_(adapter(chain.original))
        if len(chain) == 1:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
        else:
            del chain[0]
    return model
