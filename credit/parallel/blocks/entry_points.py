"""Entry points of a block: ``forward``, and the methods that its attribute ``_fsdp2_forward_methods`` names."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from credit.errors import ConfigError


def custom_entry_points(block: nn.Module) -> tuple[str, ...]:
    """Return the names of a block's entry points other than ``forward``.

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
    """Change every entry point of `module`, in place, to return copies instead of views; call this before FSDP2.

    FSDP2 gathers weights for the backward pass by a hook on each tensor that an entry point returns. An in-place
    operation on a returned view, such as ``y += 1`` on the result of the module, would drop the hook. For that reason
    torch warns of every view that is returned.

    Raises:
        ConfigError: if the module names an entry point that it does not have.
    """
    module.register_forward_hook(_copy_output_views)
    for name in custom_entry_points(module):
        setattr(module, name, functools.partial(_call_and_copy_views, getattr(module, name)))


def _copy_output_views(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook: return the output with copies in place of views."""
    return copy_views(output)


def _call_and_copy_views(entry_point: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an entry point and return its output with copies in place of views."""
    return copy_views(entry_point(*args, **kwargs))


def copy_views(output: Any) -> Any:
    """Return `output` with copies in place of the views in it that need a gradient, at any depth of its containers.

    Args:
        output: a tensor, or tensors inside tuples, named tuples, dicts, lists and dataclasses. A container that holds
            no such view is returned unchanged and not copied, and so is any other object.
    """
    if isinstance(output, Tensor):
        # Only a view has a base, the tensor whose memory it shows.
        is_view = output._base is not None
        if is_view and output.requires_grad:
            return output.clone()
        return output
    if isinstance(output, tuple):
        items = [copy_views(item) for item in output]
        if all(new is old for new, old in zip(items, output, strict=True)):
            return output
        # A named tuple takes its items one by one.
        if hasattr(output, "_fields"):
            return type(output)(*items)
        return type(output)(items)
    if isinstance(output, dict):
        return _replace_views(output, output.items(), type(output).__setitem__)
    if isinstance(output, list):
        return _replace_views(output, enumerate(output), type(output).__setitem__)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
        # `object.__setattr__` sets the fields of a frozen dataclass as well.
        return _replace_views(output, members, object.__setattr__)
    return output


def _replace_views(
    container: Any, members: Iterable[tuple[Any, Any]], set_member: Callable[[Any, Any, Any], None]
) -> Any:
    """Return `container` itself, or a shallow copy of it in which the members that hold views are replaced.

    Args:
        container: a dict, list or dataclass.
        members: (key, value) pairs of its members; the key is a key of the dict, an index of the list, or the name of a
            field of the dataclass.
        set_member: function that sets a member of a container: ``set_member(container, key, value)``.
    """
    replacements = []
    for key, value in members:
        replacement = copy_views(value)
        if replacement is not value:
            replacements.append((key, replacement))
    if not replacements:
        return container
    new_container = copy.copy(container)
    for key, replacement in replacements:
        set_member(new_container, key, replacement)
    return new_container
