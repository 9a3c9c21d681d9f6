"""What an error costs in one cell, by name; plugins add their own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from credit.config.schema_trainer import register_loss_kind
from credit.errors import ConfigError

Pointwise = Callable[[Tensor], Tensor]
_KINDS: dict[str, Pointwise] = {"mse": torch.square, "mae": torch.abs}


def register_loss(name: str) -> Callable[[Pointwise], Pointwise]:
    """Decorator that makes a function available as ``loss.kind: name``.

    The function maps the error (B, C, H, W), float32 and in the unit of ``loss.scaling``, to what each cell costs, of
    the same shape; it is differentiated. Weights of cells, variables and levels are applied to what it returns.

    Raises:
        ConfigError: if another function has the name.
    """

    def register(function: Pointwise) -> Pointwise:
        other = _KINDS.get(name, function)
        # a plugin that is loaded again brings its function anew
        same = (other.__module__, other.__qualname__) == (function.__module__, function.__qualname__)
        if name == "huber" or not same:
            raise ConfigError(f"loss name {name!r} of {function.__module__} is taken; choose another name")
        _KINDS[name] = function
        register_loss_kind(name)
        return function

    return register


def pointwise_loss(kind: str, huber_delta: float) -> Pointwise:
    """Return the function of ``loss.kind``."""
    return functools.partial(_huber, delta=huber_delta) if kind == "huber" else _KINDS[kind]


def _huber(error: Tensor, delta: float) -> Tensor:
    return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
