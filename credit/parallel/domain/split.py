"""Domain parallelism: division of the fields of a network among the ranks of a group."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from credit.errors import ConfigError
from credit.parallel.domain.division import FieldDivision, list_shapes
from credit.parallel.domain.domain import Domain
from credit.parallel.domain.rules import DomainRule
from credit.parallel.tensor.dropout import has_dropout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DomainPlan:
    """Division of a network's fields, with a rule for each layer that exchanges cells.

    Attributes:
        grid: division of the network's input and output.
        rules: path of a layer -> its rule.
        imbalance: time of the busiest rank divided by the mean time of the ranks, estimated from the cells of each
            stage; at least 1.
    """

    grid: FieldDivision
    rules: Mapping[str, DomainRule]
    imbalance: float


def split_domain(model: nn.Module, group: dist.ProcessGroup, num_parts: tuple[int, int] | None = None) -> DomainPlan:
    """Change a network in place so that each rank of a group computes a part of every field; return the plan.

    The network's method `plan_domain` defines the division and the rules of the layers. After this call, input and
    output of the network are this rank's part of the grid, ``model.domain.part``. Outputs and gradients equal those of
    the whole network on one process, but the gradient of a weight must be summed over the ranks of the group.

    Args:
        model: network, on any device.
        group: ranks that share the fields.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns; None to choose the pair
            with the most even work.

    Raises:
        ConfigError: if the network does not support domain parallelism, or if the fields cannot be divided into these
            parts; the message lists valid values.
    """
    num_ranks = dist.get_world_size(group)
    plan = plan_domain(model, num_ranks, num_parts)
    for path, rule in plan.rules.items():
        rule.install(model.get_submodule(path), group)
    model.domain = Domain(group, plan.grid)
    rows, columns = len(plan.grid.rows.owned), len(plan.grid.columns.owned)
    logger.info(
        "each field is divided among %d ranks: %d parts of the rows x %d parts of the columns", num_ranks, rows, columns
    )
    return plan


def plan_domain(model: nn.Module, num_ranks: int, num_parts: tuple[int, int] | None = None) -> DomainPlan:
    """Return the plan with which `split_domain` divides a network; the network is not changed.

    Args:
        model: network, on any device.
        num_ranks: number of ranks that share the fields.
        num_parts: (M, N) numbers of parts of the latitude rows and of the longitude columns; None to choose the pair
            with the most even work.

    Raises:
        ConfigError: if the network does not support domain parallelism, or if the fields cannot be divided into these
            parts; the message lists valid values.
    """
    # `plan_domain` describes one `forward`, so a subclass that overrides `forward` must also override `plan_domain`.
    defining_classes = [cls for cls in type(model).__mro__ if "plan_domain" in vars(cls) or "forward" in vars(cls)]
    if not hasattr(model, "plan_domain") or "plan_domain" not in vars(defining_classes[0]):
        raise ConfigError(
            f"domain parallelism: {type(model).__name__} does not declare how its fields are divided (plan_domain); "
            "set domain to 1 and sequence_parallel to false, or choose a model that supports it (docs/models.md)"
        )
    if has_dropout(model):
        raise ConfigError(
            "domain parallelism: the masks of torch's dropout would depend on how the field is divided; set the keys "
            "of model with dropout (attn_dropout, ff_dropout) to 0, or use model.noise: {kind: dropout, rate: ...}"
        )
    if num_parts is not None:
        if num_parts[0] * num_parts[1] != num_ranks:
            raise ConfigError(
                f"domain parallelism: {num_parts[0]} parts of the rows x {num_parts[1]} parts of the columns is not "
                f"the number of ranks, {num_ranks}; valid choices: {_describe_shapes(list_shapes(num_ranks))}"
            )
        return model.plan_domain(num_parts)
    plans = []
    problems = []
    for shape in list_shapes(num_ranks):
        try:
            plans.append((shape, model.plan_domain(shape)))
        except ConfigError as error:
            problems.append(str(error))
    if not plans:
        raise ConfigError("; ".join(problems))
    # Prefer even work, then nearly square parts (which have short borders), then few parts of the columns (because rows
    # are copied faster than columns).
    _, best = min(plans, key=lambda plan: (round(plan[1].imbalance, 3), max(plan[0]) / min(plan[0]), plan[0][1]))
    return best


def _describe_shapes(shapes: list[tuple[int, int]]) -> str:
    """Return pairs (M, N) of numbers of parts as a string for a message."""
    return ", ".join(f"{{lat: {rows}, lon: {columns}}}" for rows, columns in shapes)
