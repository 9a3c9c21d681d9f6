"""Lazy exports of a package: each exported name is imported when it is first used, so the package imports quickly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the function ``__getattr__`` of a package; it imports each exported name when the name is first used.

    Args:
        package: name of the package, for error messages.
        modules: exported name -> module that defines it.
    """

    def get_attribute(name: str) -> Any:
        """Return the object that is exported as `name`.

        Raises:
            AttributeError: if the package does not export `name`.
        """
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get_attribute
