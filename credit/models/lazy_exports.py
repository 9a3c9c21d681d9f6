"""Lazy exports: names of a package that are imported at their first use, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a function ``__getattr__`` for a package, which imports exported names at their first use.

    Args:
        package: name of the package, for the message of an unknown name.
        modules: exported name -> module that defines it.
    """

    def get_attribute(name: str) -> Any:
        """Return an exported name.

        Raises:
            AttributeError: for any other name.
        """
        if name in modules:
            return getattr(importlib.import_module(modules[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get_attribute
