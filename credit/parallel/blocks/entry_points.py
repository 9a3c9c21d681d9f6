"""Entry points of a block (a module that FSDP2 shards): ``forward``, and the methods in ``_fsdp2_forward_methods``."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from credit.errors import ConfigError


def list_custom_entry_points(block: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods in a block's ``_fsdp2_forward_methods``, without ``forward``.

    Raises:
        ConfigError: if the block names a method that it does not have.
    """
    names = tuple(name for name in getattr(block, "_fsdp2_forward_methods", ()) if name != "forward")
    for name in names:
        if not callable(getattr(block, name, None)):
            raise ConfigError(
                f"{type(block).__name__}._fsdp2_forward_methods: {name!r} is not a method of the class; list the "
                "methods that are called instead of forward"
            )
    return names


def copy_returned_views(module: nn.Module) -> None:
    """Change ``forward`` and the other entry points of `module` in place, so that they return copies instead of views.

    Call this function before FSDP2. FSDP2 registers a hook on each tensor that an entry point returns; this hook
    gathers the weights for the backward pass. An in-place operation on a returned view, such as ``y += 1``, would
    remove the hook. torch therefore warns about every returned view.

    Raises:
        ConfigError: if ``_fsdp2_forward_methods`` of the module lists a method that does not exist.
    """
    module.register_forward_hook(_copy_output_views)
    for name in list_custom_entry_points(module):
        setattr(module, name, functools.partial(_call_and_copy_views, getattr(module, name)))


def _copy_output_views(module: nn.Module, args: tuple, output: Any) -> Any:
    """Forward hook: return the output with copies instead of views."""
    return copy_views(output)


def _call_and_copy_views(entry_point: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an entry point and return its output with copies instead of views."""
    return copy_views(entry_point(*args, **kwargs))


def copy_views(output: Any) -> Any:
    """Return `output` with a copy of each view that needs a gradient; views in nested containers are copied as well.

    Args:
        output: a tensor, or tensors inside tuples, named tuples, dicts, lists and dataclasses. A container without
            such a view is returned itself, without a copy. Objects of other types are also returned unchanged.
    """
    if isinstance(output, Tensor):
        # Only a view has a base, which is the tensor that owns the memory.
        is_view = output._base is not None
        if is_view and output.requires_grad:
            return output.clone()
        return output
    if isinstance(output, tuple):
        items = [copy_views(item) for item in output]
        if all(new is old for new, old in zip(items, output, strict=True)):
            return output
        # The constructor of a named tuple takes each item as a separate argument.
        if hasattr(output, "_fields"):
            return type(output)(*items)
        return type(output)(items)
    if isinstance(output, dict):
        return _replace_views(output, output.items(), type(output).__setitem__)
    if isinstance(output, list):
        return _replace_views(output, enumerate(output), type(output).__setitem__)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        members = [(field.name, getattr(output, field.name)) for field in dataclasses.fields(output)]
        # `object.__setattr__` can also set the fields of a frozen dataclass.
        return _replace_views(output, members, object.__setattr__)
    return output


def _replace_views(
    container: Any, members: Iterable[tuple[Any, Any]], set_member: Callable[[Any, Any, Any], None]
) -> Any:
    """Return `container` itself, or a shallow copy of it in which members with views are replaced.

    Args:
        container: a dict, list or dataclass.
        members: (key, value) of each member; the key is a key of the dict, an index of the list, or the name of a field
            of the dataclass.
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
