"""The ``_tp_plan`` of a block, read and checked before anything is split."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from credit.errors import ConfigError
from credit.parallel.blocks.marks import plain_name

KINDS = ("colwise", "rowwise", "replicated", "colwise:N")


@dataclass(frozen=True)
class PlannedLayer:
    """One entry of a plan.

    Attributes:
        path: of the layer in the model.
        where: the entry, for messages.
        module: the layer; a Linear unless it is replicated.
        parent: module in which activations between the split layers belong to the rank.
        kind: ``colwise``, ``rowwise`` or ``replicated``.
        parts: fused parts of a colwise layer's outputs, one behind the other.
        units: whole things that are dealt to the ranks, heads or hidden units; 0 for what is replicated.
    """

    path: str
    where: str
    module: nn.Module
    parent: nn.Module
    kind: str
    parts: int
    units: int


def read_plan(path: str, block: nn.Module) -> list[list[PlannedLayer]]:
    """Return the layers of a block's plan, in groups that are split together or not at all.

    Args:
        path: of the block in the model.
        block: has a ``_tp_plan``.

    Raises:
        ConfigError: if a name matches no module, a kind is unknown, or the widths of a group do not fit together.
    """
    modules = dict(block.named_modules())
    entries: dict[str, tuple[str, int | None]] = {}
    for name, value in block._tp_plan.items():
        location = _where(path, block, name)
        if name not in modules:
            raise ConfigError(f"{location}: there is no such submodule; it has {', '.join(filter(None, modules))}")
        entries[name] = _read_kind(value, location)
        if entries[name][0] != "replicated" and not isinstance(modules[name], nn.Linear):
            raise ConfigError(f"{location}: only Linear layers are split, this is a {type(modules[name]).__name__}")
    groups = []
    for parent, names in _group_names({name: kind for name, (kind, _) in entries.items()}).items():
        groups.append(
            [
                PlannedLayer(
                    path=plain_name(f"{path}.{name}" if path else name),
                    where=_where(path, block, name),
                    module=modules[name],
                    parent=modules[parent],
                    kind=entries[name][0],
                    parts=entries[name][1] or 1,
                    units=_count_units(path, block, name, _partner(name, names, entries), entries[name]),
                )
                for name in names
            ]
        )
    return groups


def require_splittable(model: nn.Module, layers: list[PlannedLayer]) -> None:
    """Refuse layers that compute something else than a product with a plain or a known parametrized weight.

    Splitting replaces a layer's weight, bias and forward. What sets or uses them in another way would go on with the
    whole weight, or be lost, and the sum over the ranks would be wrong without an error.

    Raises:
        ConfigError: naming the layer.
    """
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    for layer in layers:
        module = layer.module
        problem = _problem_of_weight(module) or _problem_of_bias(module) or _problem_of_forward(module)
        if problem is None:
            is_parametrized = parametrize.is_parametrized(module, "weight")
            weight = module.parametrizations.weight.original if is_parametrized else module.weight
            if len(holders[id(weight)]) > 1:
                problem = "its weight is also that of another module, which would keep the whole one; give each its own"
        if problem is not None:
            raise ConfigError(f"{layer.where}: {problem}; or leave the layer out of the plan")


def _where(path: str, block: nn.Module, name: str) -> str:
    return f"{type(block).__name__}._tp_plan[{name!r}] (at {plain_name(path) or 'the model'})"


def _read_kind(value: object, location: str) -> tuple[str, int | None]:
    """Return the kind of an entry and its number of fused parts, None where it does not say."""
    fused = re.fullmatch(r"colwise:([1-9]\d*)", value) if isinstance(value, str) else None
    if fused:
        return "colwise", int(fused[1])
    if value not in ("colwise", "rowwise", "replicated"):
        raise ConfigError(
            f"{location}: {value!r} is not one of {', '.join(KINDS)} (of N fused parts, such as colwise:2)"
        )
    return value, None


def _group_names(kinds: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of a plan by the module that holds a colwise layer, its rowwise partner and what is between.

    That is usually the parent of both. Where one of them lies deeper, it is a module further up.
    """
    groups: dict[str, list[str]] = {}
    for name in kinds:
        groups.setdefault(name.rpartition(".")[0], []).append(name)

    def is_complete(names: list[str]) -> bool:
        return {"colwise", "rowwise"} <= {kinds[name] for name in names}

    while True:
        parent = next((p for p, names in groups.items() if p and not is_complete(names)), None)
        if parent is None:
            break
        groups.setdefault(parent.rpartition(".")[0], []).extend(groups.pop(parent))
    if "" in groups and all(kinds[name] == "replicated" for name in groups[""]):
        # it is not known which of the groups uses it, so they are split together or not at all
        groups = {"": list(kinds)}
    return {parent: [name for name in kinds if name in names] for parent, names in groups.items()}


def _partner(name: str, names: list[str], entries: dict[str, tuple[str, int | None]]) -> str | None:
    """Return the rowwise layer that takes what a colwise one returns: the next of its group, or else the last."""
    rowwise = [other for other in names if entries[other][0] == "rowwise"]
    behind = [other for other in rowwise if names.index(other) > names.index(name)]
    return next(iter(behind or rowwise[-1:]), None)


def _count_units(path: str, block: nn.Module, name: str, partner: str | None, entry: tuple[str, int | None]) -> int:
    """Return how many whole things of a layer there are to deal to the ranks.

    Raises:
        ConfigError: if its outputs are no whole number of heads or hidden units, or do not say how they are ordered.
    """
    kind, parts = entry
    layer = block.get_submodule(name)
    if kind == "replicated":
        return 0
    heads = getattr(block.get_submodule(name.rpartition(".")[0]), "heads", None)
    heads = heads if isinstance(heads, int) else None
    if kind == "rowwise":
        return heads or layer.in_features
    where, rows = _where(path, block, name), layer.out_features
    if rows % (parts or 1):
        raise ConfigError(f"{where}: its {rows} outputs are not {parts} equal parts")
    width = rows // (parts or 1)
    inputs = block.get_submodule(partner).in_features if partner else width
    if heads is None:
        if width == inputs:
            return width
        if parts == 1 and width % inputs == 0:
            return inputs
        raise ConfigError(
            f"{where}: its {rows} outputs are not the {inputs} inputs of {partner!r}; if they are fused parts one "
            f'behind the other (gate and up), say how many, such as "colwise:2"; if they are ordered hidden unit by '
            f'hidden unit, write "colwise:1"; attention says its heads in the attribute heads of the module that '
            "holds the layers"
        )
    if inputs % heads or width % (inputs // heads) or (width > inputs and width % inputs):
        raise ConfigError(
            f"{where}: its {rows} outputs do not divide into heads, of which there are {heads} in the {inputs} inputs "
            f"of {partner!r}; use a layer of its own for each of q, k and v, and for what is no attention another "
            "module than the one with the attribute heads"
        )
    # Keys and values may have fewer heads than queries. What is fused head by head counts once a head.
    return min(heads, width // (inputs // heads))


def _problem_of_weight(layer: nn.Linear) -> str | None:
    weight = layer._parameters.get("weight")
    if parametrize.is_parametrized(layer, "weight"):
        chain = layer.parametrizations.weight
        # a link that makes the weight from several tensors (weight norm) has no `share` either
        strange = next((link for link in chain if not hasattr(link, "share")), None)
        if strange is not None:
            return (
                f"the parametrization {type(strange).__name__} of its weight does not know how to treat a part of a "
                "weight (method share); use the package's own spectral norm (docs/add_a_model.md), or set "
                "trainer.parallelism.tensor to 1"
            )
        weight = chain.original
    if weight is None:
        return (
            "its weight is no parameter but is made by a hook before each forward, as torch.nn.utils.spectral_norm, "
            "weight_norm and prune do, from a whole weight that cannot be split; use the package's own spectral norm "
            "(docs/add_a_model.md), or remove the hook"
        )
    if isinstance(weight, DTensor):
        return "its weight is sharded or split already; apply tensor parallelism once, before sharding"
    return None


def _problem_of_bias(layer: nn.Linear) -> str | None:
    if layer.bias is None or layer._parameters.get("bias") is not None:
        return None
    return "its bias is no plain parameter (a hook or a parametrization makes it); remove that"


def _problem_of_forward(layer: nn.Linear) -> str | None:
    if "forward" in vars(layer):
        return "its forward was replaced, by compilation or another plan; split a layer once, before anything else"
    forward = type(layer).forward
    # a layer whose caller may name the product does nothing but that product
    if forward is nn.Linear.forward or "product" in inspect.signature(forward).parameters:
        return None
    return f"{type(layer).__name__} has a forward of its own, which splitting would replace; use a plain Linear"
