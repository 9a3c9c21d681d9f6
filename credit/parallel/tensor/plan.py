"""Parser of the ``_tp_plan`` of a block, with all checks that are necessary before a layer is split.

See `credit.parallel.tensor.tensor_parallel` for the values in a plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from credit.errors import ConfigError
from credit.parallel.blocks.marks import strip_wrapper_prefixes

# Valid values in a plan, for messages; N is a number of fused parts.
KINDS = ("colwise", "rowwise", "replicated", "colwise:N")


@dataclass(frozen=True)
class PlanEntry:
    """Parsed value of one entry of a ``_tp_plan``.

    Attributes:
        kind: ``colwise`` (split by outputs), ``rowwise`` (split by inputs) or ``replicated`` (not split).
        fused_parts: number N of equal parts of the outputs in ``colwise:N``; None for ``colwise`` without N.
    """

    kind: Literal["colwise", "rowwise", "replicated"]
    fused_parts: int | None = None


@dataclass(frozen=True)
class PlannedLayer:
    """Layer of a ``_tp_plan`` that has passed the checks of `read_plan`.

    Attributes:
        path: path of the layer in the model, without the prefixes of wrappers.
        location: description of the plan's entry, for messages.
        module: the layer; a Linear, or any module if `kind` is ``replicated``.
        parent: module that contains all layers of the group; between these layers, ranks have different activations.
        kind: ``colwise`` (split by outputs), ``rowwise`` (split by inputs) or ``replicated`` (not split).
        fused_parts: number of equal parts of a colwise layer's outputs, one after the other; 1 if outputs are not
            fused.
        num_units: number of attention heads or hidden units; the units are divided evenly among the ranks. It is 0 for
            a replicated layer.
    """

    path: str
    location: str
    module: nn.Module
    parent: nn.Module
    kind: Literal["colwise", "rowwise", "replicated"]
    fused_parts: int
    num_units: int


def read_plan(path: str, block: nn.Module) -> list[list[PlannedLayer]]:
    """Parse the plan of a block, and return its layers in groups; either all layers of a group are split, or none.

    Args:
        path: path of the block in the model; empty for the model itself.
        block: module with a ``_tp_plan``.

    Raises:
        ConfigError: if a name in the plan matches no module, a value is unknown, a layer to split is not a Linear, or
            the outputs of a layer do not match the inputs of its rowwise partner.
    """
    # Check each entry separately.
    modules = dict(block.named_modules())
    entries: dict[str, PlanEntry] = {}
    for name, value in block._tp_plan.items():
        location = _describe_location(path, block, name)
        if name not in modules:
            # The block itself has the empty name.
            submodule_names = ", ".join(other for other in modules if other)
            raise ConfigError(f"{location}: there is no such submodule; the submodules are {submodule_names}")
        entry = _read_entry(value, location)
        if entry.kind != "replicated" and not isinstance(modules[name], nn.Linear):
            raise ConfigError(f"{location}: only Linear layers can be split, not a {type(modules[name]).__name__}")
        entries[name] = entry

    # Group the layers that are split together, and find the number of heads or hidden units of each layer.
    groups = []
    for parent, names in _group_layer_names(entries).items():
        group = []
        for name in names:
            entry = entries[name]
            partner = _find_rowwise_partner(name, names, entries)
            layer_path = f"{path}.{name}" if path else name
            layer = PlannedLayer(
                path=strip_wrapper_prefixes(layer_path),
                location=_describe_location(path, block, name),
                module=modules[name],
                parent=modules[parent],
                kind=entry.kind,
                fused_parts=entry.fused_parts or 1,
                num_units=_count_units(path, block, name, partner, entry),
            )
            group.append(layer)
        groups.append(group)
    return groups


def require_splittable(model: nn.Module, layers: list[PlannedLayer]) -> None:
    """Require that all layers are plain linear layers whose weight can be split.

    Splitting replaces the weight, bias and forward of a layer. If a layer sets or uses them in a different way, it
    would still use the whole weight, and the sum over the ranks would be silently wrong.

    Args:
        model: the whole model, which is searched for weights that several layers share.
        layers: layers of all plans.

    Raises:
        ConfigError: if a layer cannot be split; the message has its path and the reason.
    """
    # `id` of a parameter -> modules with this direct parameter
    holders: dict[int, set[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(module)
    for layer in layers:
        module = layer.module
        problem = _describe_weight_problem(module)
        problem = problem or _describe_bias_problem(module)
        problem = problem or _describe_forward_problem(module)
        if problem is None:
            # A second module that shares the weight would still compute with the whole weight.
            if parametrize.is_parametrized(module, "weight"):
                weight = module.parametrizations.weight.original
            else:
                weight = module.weight
            if len(holders[id(weight)]) > 1:
                problem = (
                    "its weight is shared with another module, which would keep the whole weight; do not share the "
                    "weight"
                )
        if problem is not None:
            raise ConfigError(f"{layer.location}: {problem}; or remove the layer from the plan")


def _describe_location(path: str, block: nn.Module, name: str) -> str:
    """Return a description of a plan's entry for messages: class of the block, name in the plan, path of the block."""
    return f"{type(block).__name__}._tp_plan[{name!r}] (at {strip_wrapper_prefixes(path) or 'the model'})"


def _read_entry(value: object, location: str) -> PlanEntry:
    """Parse the value of an entry of a plan; ``"colwise:2"`` means the kind ``colwise`` with 2 fused parts.

    Args:
        value: value in the ``_tp_plan``.
        location: description of the entry, for messages.

    Raises:
        ConfigError: if the value is not one of `KINDS`.
    """
    fused = None
    if isinstance(value, str):
        fused = re.fullmatch(r"colwise:([1-9]\d*)", value)
    if fused:
        return PlanEntry("colwise", int(fused[1]))
    if value not in ("colwise", "rowwise", "replicated"):
        raise ConfigError(
            f"{location}: {value!r} is not one of {', '.join(KINDS)} (of N fused parts, such as colwise:2)"
        )
    return PlanEntry(value)


def _group_layer_names(entries: dict[str, PlanEntry]) -> dict[str, list[str]]:
    """Group the layers of a plan that are split together.

    The layers of a group have a common parent module, which contains a colwise layer, its rowwise partner and all
    modules between them. Usually it is the direct parent of both layers. If the two layers have different direct
    parents, it is an outer module.

    Args:
        entries: name of a layer -> entry of the plan.

    Returns:
        Path of the common parent module in the block (empty for the block itself) -> names of the layers.
    """
    groups: dict[str, list[str]] = {}
    for name in entries:
        groups.setdefault(name.rpartition(".")[0], []).append(name)

    def is_complete(names: list[str]) -> bool:
        kinds = {entries[name].kind for name in names}
        return {"colwise", "rowwise"} <= kinds

    # Merge incomplete groups into the groups of their parents, until every group has both kinds. The group of the block
    # itself, with the empty path, has no parent in the plan.
    while True:
        incomplete_paths = [path for path, names in groups.items() if path and not is_complete(names)]
        if not incomplete_paths:
            break
        path = incomplete_paths[0]
        parent_path = path.rpartition(".")[0]
        groups.setdefault(parent_path, []).extend(groups.pop(path))
    if "" in groups and all(entries[name].kind == "replicated" for name in groups[""]):
        # Any group may use these replicated layers, so all groups are split together or not at all.
        groups = {"": list(entries)}
    # Restore the order of the plan, in which colwise layers precede their rowwise layer.
    ordered_groups = {}
    for path, names in groups.items():
        ordered_groups[path] = [name for name in entries if name in names]
    return ordered_groups


def _find_rowwise_partner(name: str, names: list[str], entries: dict[str, PlanEntry]) -> str | None:
    """Return the name of the rowwise layer whose inputs are a layer's outputs; None if the group has no rowwise layer.

    This is the next rowwise layer of the group, or the last rowwise layer if no rowwise layer follows.

    Args:
        name: name of the layer.
        names: names of the layers in the group, in the order of the plan.
        entries: name of a layer -> entry of the plan.
    """
    rowwise_names = [other for other in names if entries[other].kind == "rowwise"]
    position = names.index(name)
    for other in rowwise_names:
        if names.index(other) > position:
            return other
    return rowwise_names[-1] if rowwise_names else None


def _count_units(path: str, block: nn.Module, name: str, partner: str | None, entry: PlanEntry) -> int:
    """Return the number of attention heads or hidden units of a layer; 0 for a replicated layer.

    Args:
        path: path of the block in the model.
        block: module with the plan.
        name: name of the layer in the plan.
        partner: name of the rowwise layer whose inputs are the layer's outputs; None if there is none.
        entry: entry of the plan for the layer.

    Raises:
        ConfigError: if the layer's outputs are not a whole number of units, or if the plan does not define their order.
    """
    if entry.kind == "replicated":
        return 0
    layer = block.get_submodule(name)
    # A module with attention layers has the number of heads in the attribute `heads`.
    heads = getattr(block.get_submodule(name.rpartition(".")[0]), "heads", None)
    if not isinstance(heads, int):
        heads = None
    if entry.kind == "rowwise":
        return heads or layer.in_features
    location = _describe_location(path, block, name)
    outputs = layer.out_features
    fused_parts = entry.fused_parts or 1
    if outputs % fused_parts:
        raise ConfigError(f"{location}: its {outputs} outputs cannot be divided into {fused_parts} equal parts")
    part_width = outputs // fused_parts
    # The rowwise partner has one input for each hidden unit, or for each channel of all heads.
    partner_inputs = part_width
    if partner:
        partner_inputs = block.get_submodule(partner).in_features
    if heads is not None:
        return _count_heads(location, outputs, part_width, heads, partner, partner_inputs)
    if part_width == partner_inputs:
        return part_width
    # With `colwise:1`, each hidden unit has several adjacent outputs.
    if entry.fused_parts == 1 and part_width % partner_inputs == 0:
        return partner_inputs
    raise ConfigError(
        f"{location}: its {outputs} outputs do not match the {partner_inputs} inputs of {partner!r}; if they are fused "
        f'parts, one after the other (gate and up), write their number, such as "colwise:2"; if they are ordered by '
        'hidden unit, write "colwise:1"; for attention, set the attribute heads of the module that contains the layers'
    )


def _count_heads(
    location: str, outputs: int, part_width: int, heads: int, partner: str | None, partner_inputs: int
) -> int:
    """Return the number of heads of a colwise layer in attention, at most `heads`.

    A layer for keys and values may have fewer heads than the queries. In a fused projection that is ordered by head,
    the query, key and value of a head together are treated as one head.

    Args:
        location: description of the plan's entry, for messages.
        outputs: number of outputs of the layer.
        part_width: number of outputs of one fused part.
        heads: number of heads of the queries.
        partner: name of the rowwise layer whose inputs are the outputs of this layer; None if there is none.
        partner_inputs: number of inputs of this rowwise layer, summed over all heads.

    Raises:
        ConfigError: if the outputs are not a whole number of heads.
    """
    head_width = partner_inputs // heads
    has_whole_heads = partner_inputs % heads == 0 and part_width % head_width == 0
    # A projection that is ordered by head has the outputs of query, key and value for each head.
    is_head_by_head = part_width > partner_inputs
    if not has_whole_heads or (is_head_by_head and part_width % partner_inputs):
        raise ConfigError(
            f"{location}: its {outputs} outputs cannot be divided into heads; the {partner_inputs} inputs of "
            f"{partner!r} have {heads} heads; use separate layers for q, k and v, and do not put other layers than "
            "attention into the module with the attribute heads"
        )
    return min(heads, part_width // head_width)


def _describe_weight_problem(layer: nn.Linear) -> str | None:
    """Return the reason why a layer's weight cannot be split; None if it can be split."""
    weight = layer._parameters.get("weight")
    if parametrize.is_parametrized(layer, "weight"):
        chain = layer.parametrizations.weight
        # Parametrizations that compute the weight from several tensors (weight norm) have no method `share`.
        for parametrization in chain:
            if not hasattr(parametrization, "share"):
                return (
                    f"the parametrization {type(parametrization).__name__} of its weight has no method share, so it "
                    "does not support a split weight; use the package's own spectral norm (docs/add_a_model.md), or "
                    "set trainer.parallelism.tensor to 1"
                )
        weight = chain.original
    if weight is None:
        return (
            "its weight is not a parameter; a hook (torch.nn.utils.spectral_norm, weight_norm or prune) computes the "
            "weight before each forward pass from a whole weight, which cannot be split; use the package's own "
            "spectral norm (docs/add_a_model.md), or remove the hook"
        )
    if isinstance(weight, DTensor):
        return "its weight is already sharded or split; apply tensor parallelism only once, before sharding"
    return None


def _describe_bias_problem(layer: nn.Linear) -> str | None:
    """Return the reason why a layer's bias cannot be split; None if it can be split, or there is no bias."""
    if layer.bias is None or layer._parameters.get("bias") is not None:
        return None
    return "its bias is not a plain parameter; remove the hook or parametrization that computes the bias"


def _describe_forward_problem(layer: nn.Linear) -> str | None:
    """Return the reason why a layer's forward cannot be replaced; None if it can be replaced."""
    if "forward" in vars(layer):
        return (
            "its forward was already replaced, by compilation or a different plan; split a layer only once, and before "
            "compilation"
        )
    # A layer with this attribute only computes product(x, weight, bias); its caller may choose the function product.
    takes_product = getattr(type(layer), "_tp_takes_product", False)
    if takes_product or type(layer).forward is nn.Linear.forward:
        return None
    return f"{type(layer).__name__} overrides forward, but splitting replaces forward; use a plain Linear"
