"""Program of test_registry that resolves every built-in name of some registries; the arguments are their keys.

Each name is resolved in a fork of its own, so that no name profits from the imports of another name. The forks share
the imports of the large libraries, which would take seconds in each of them.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from credit.config import registry


def find_registry(key: str) -> registry.Registry:
    """Return the registry with a key."""
    return next(kinds for kinds in vars(registry).values() if getattr(kinds, "key", "") == key)


def check_section(kinds: registry.Registry, name: str, section_path: str) -> None:
    """Check that a name has the section of the table, and that the section imports no torch."""
    section = kinds.find_section(name)
    assert "torch" not in sys.modules, "the section imports torch"
    assert f"{section.__module__}:{section.__name__}" == section_path


def check_class(kinds: registry.Registry, name: str, section_path: str) -> None:
    """Check that the decorator of the class registers the same section as the table."""
    section = kinds.find_section(name)
    kinds.find_class(name)
    assert kinds._sections[name] is section, "the decorator names another section"


def check_in_forks(kinds: registry.Registry, check: Callable[[registry.Registry, str, str], None]) -> None:
    """Run a check in a fork for each built-in name; end the program at the first failure."""
    for name, built_in in kinds._built_in.items():
        pid = os.fork()
        if pid == 0:
            try:
                check(kinds, name, built_in.section)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{check.__name__} of {kinds.noun} {name} failed")


def main(keys: Sequence[str]) -> None:
    registries = [find_registry(key) for key in keys]
    for kinds in registries:
        check_in_forks(kinds, check_section)
    for library in ("torch", "torch.distributed.fsdp", "xarray", "matplotlib.figure"):
        importlib.import_module(library)
    for kinds in registries:
        check_in_forks(kinds, check_class)


if __name__ == "__main__":
    main(sys.argv[1:])
