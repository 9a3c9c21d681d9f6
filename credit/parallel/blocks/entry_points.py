"""Entry points of a block: ``forward``, and the methods that it names in ``_fsdp2_forward_methods``."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from credit.errors import ConfigError


def custom_entry_points(block: nn.Module) -> tuple[str, ...]:
    """Return the names of a block's entry points beside ``forward``.

    Raises:
        ConfigError: if the block names a method that it does not have.
    """
    names = tuple(name for name in getattr(block, "_fsdp2_forward_methods", ()) if name != "forward")
    for name in names:
        if not callable(getattr(block, name, None)):
            raise ConfigError(
                f"{type(block).__name__}._fsdp2_forward_methods: {name!r} is not one of its methods; name the methods "
                "that are called in place of forward"
            )
    return names


def copy_returned_views(module: nn.Module) -> None:
    """Make every entry point of `module` return copies of the views that it would return; in place, before FSDP2.

    FSDP2 gathers weights for the backward pass by a hook on each returned tensor. An operation in place on a view,
    such as ``y += 1`` behind the module, would drop the hook, and torch warns of every view for that reason.
    """
    module.register_forward_hook(_copy_views_of_output)
    for name in custom_entry_points(module):
        setattr(module, name, functools.partial(_call_and_copy_views, getattr(module, name)))


def _copy_views_of_output(module: nn.Module, args: tuple, output: Any) -> Any:
    return copy_views(output)


def _call_and_copy_views(entry: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return copy_views(entry(*args, **kwargs))


def copy_views(output: Any) -> Any:
    """Return `output` with copies in place of the views in it that need a gradient, at any depth of its containers.

    A container without such views is returned itself.
    """
    if isinstance(output, Tensor):
        return output.clone() if output.requires_grad and output._base is not None else output
    if isinstance(output, tuple):
        items = [copy_views(item) for item in output]
        if all(new is old for new, old in zip(items, output, strict=True)):
            return output
        is_named = hasattr(output, "_fields")
        return type(output)(*items) if is_named else type(output)(items)
    if isinstance(output, dict):
        return _with_copies(output, output.items(), type(output).__setitem__)
    if isinstance(output, list):
        return _with_copies(output, enumerate(output), type(output).__setitem__)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
        # also those of a frozen dataclass
        return _with_copies(output, members, object.__setattr__)
    return output


def _with_copies(
    container: Any, members: Iterable[tuple[Any, Any]], set_member: Callable[[Any, Any, Any], None]
) -> Any:
    """Return `container` itself, or a shallow copy of it with those members replaced that hold views."""
    changed = []
    for key, value in members:
        copied = copy_views(value)
        if copied is not value:
            changed.append((key, copied))
    if not changed:
        return container
    replaced = copy.copy(container)
    for key, value in changed:
        set_member(replaced, key, value)
    return replaced
