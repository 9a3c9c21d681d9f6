"""Installation of the package: its folder, its distribution, and other distributions with the import name ``credit``.

The name of the distribution is `DISTRIBUTION`, because a different project on the package index has the name
``credit``. The import name and the command of this package are ``credit``.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = "credit"
DISTRIBUTION = "credit-weather"
# Name of the distribution up to version 0.14.
FORMER_DISTRIBUTION = "credit"
# Distribution of NCAR's package, which has the same import name and commands as this package.
MILES_CREDIT = "miles-credit"
# Entry point that identifies the distribution of this package, because no other package has this entry point.
_ENTRY_POINT = "credit.cli.main:main"


def install_command(extra: str) -> str:
    """Return the shell command that installs an extra of ``setup.cfg`` into the environment of this process.

    Args:
        extra: name of the extra, for example ``cluster``.
    """
    checkout = find_checkout()
    if checkout is not None:
        return f"{_pip_command()} install -e {shlex.quote(f'{checkout}[{extra}]')}"
    return f"{_pip_command()} install '{DISTRIBUTION}[{extra}]'"


def find_checkout() -> Path | None:
    """Return the root of the git checkout that this package is imported from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    if (root / "setup.cfg").is_file() and (root / "pyproject.toml").is_file():
        return root
    return None


def describe_installation(search_path: Sequence[str] | None = None) -> str:
    """Return a multi-line message with the folder of the package and the distributions that installed it.

    Args:
        search_path: folders that are searched for distributions; None for ``sys.path``.
    """
    folder = Path(__file__).resolve().parents[1]
    kind = "an installed wheel"
    if find_checkout() is not None:
        kind = "a checkout"
    lines = [f"imported from {folder} ({kind})"]
    # There are several distributions if the package was also installed under its former name.
    distributions = [candidate for _, candidate in _find_distributions(search_path) if _is_this_project(candidate)]
    lines += [f"installed as {_describe_distribution(distribution)}" for distribution in distributions]
    if not distributions:
        lines.append(f"no distribution named {DISTRIBUTION} is installed")
    return "\n".join(lines)


def describe_conflicts(search_path: Sequence[str] | None = None) -> list[str]:
    """Return a message with a remedy for each distribution that may hide this package or be mistaken for it.

    Args:
        search_path: folders that are searched for distributions; None for ``sys.path``.
    """
    conflicts = []
    for name, distribution in _find_distributions(search_path):
        if _is_this_project(distribution):
            if name == FORMER_DISTRIBUTION:
                conflicts.append(
                    f"{_describe_distribution(distribution)} is this package under its former name. A different "
                    "project on the package index has this name, so an upgrade would replace this package. Remove it "
                    f"with `{_pip_command()} uninstall {name}`; this also removes the commands, so install again "
                    f"afterwards: `{_reinstall_command()}`"
                )
            continue
        # Distributions of other projects.
        if name == FORMER_DISTRIBUTION:
            conflicts.append(
                f"{_describe_distribution(distribution)} is a package of a different project; the distribution of this "
                f"package is called {DISTRIBUTION}. Remove it with `{_pip_command()} uninstall {name}`"
            )
        elif name == MILES_CREDIT or _installs_this_import_name(distribution):
            conflict = (
                f"{_describe_distribution(distribution)} also installs a package `{PACKAGE}`, so one of the two may "
                f"hide the other. Use a separate environment for each: `{_pip_command()} uninstall {name}`, then "
                f"`{_reinstall_command()}`"
            )
            if name == MILES_CREDIT:
                conflict += (
                    f". Both also have the commands `{PACKAGE}` and `{PACKAGE}_train`; docs/migration.md describes how "
                    "to use two environments"
                )
            conflicts.append(conflict)
    return conflicts


def _find_distributions(search_path: Sequence[str] | None) -> Iterator[tuple[str, metadata.Distribution]]:
    """Yield (name, distribution) for each installed distribution; metadata of a build in the checkout is skipped.

    Args:
        search_path: folders that are searched for distributions; None for ``sys.path``.
    """
    if search_path is None:
        search_path = sys.path
    names = set()
    for distribution in metadata.distributions(path=list(search_path)):
        # The name is read only once, because each access parses the metadata, which include the README.
        name = distribution.name
        # A damaged installation may have no name. Of several distributions with the same name, Python uses the first.
        if name is None or name in names:
            continue
        # A build creates `NAME.egg-info` in the checkout. If the checkout is on the search path, this folder is listed,
        # although nothing was installed.
        folder = getattr(distribution, "_path", None)
        is_build_metadata = folder is not None and Path(folder).suffix == ".egg-info"
        if is_build_metadata and Path(folder).parent == find_checkout():
            continue
        names.add(name)
        yield name, distribution


def _is_this_project(distribution: metadata.Distribution) -> bool:
    """Return True if a distribution is this package, under its current or its former name."""
    return any(point.value == _ENTRY_POINT for point in distribution.entry_points)


def _installs_this_import_name(distribution: metadata.Distribution) -> bool:
    """Return True if a distribution installs a package with the import name `PACKAGE`."""
    names_text = distribution.read_text("top_level.txt")
    if names_text is not None:
        return PACKAGE in names_text.split()
    # Not every build tool writes top_level.txt; the paths of the installed files give the same names. Listing the files
    # is slow, because each file is checked. The search in RECORD avoids this for nearly all distributions.
    record = distribution.read_text("RECORD")
    if record is not None and f"{PACKAGE}/" not in record:
        return False
    for path in distribution.files or ():
        if len(path.parts) > 1 and path.parts[0] == PACKAGE and path.suffix == ".py":
            return True
    return False


def _describe_distribution(distribution: metadata.Distribution) -> str:
    """Return name, version and folder of a distribution; the folder of an editable installation is its checkout."""
    # The installer writes direct_url.json for a distribution that does not come from a package index.
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        checkout = unquote(urlsplit(origin["url"]).path)
        return f"{distribution.name} {distribution.version} (editable, {checkout})"
    folder = Path(str(distribution.locate_file("")))
    return f"{distribution.name} {distribution.version} ({folder})"


def _reinstall_command() -> str:
    """Return the shell command that installs this package again, from its checkout or from a wheel."""
    checkout = find_checkout()
    if checkout is not None:
        return f"{_pip_command()} install -e {shlex.quote(str(checkout))}"
    return f"{_pip_command()} install --force-reinstall --no-deps WHEEL"


def _pip_command() -> str:
    """Return the shell command of this interpreter's pip; the ``pip`` on the path may belong to another environment."""
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
