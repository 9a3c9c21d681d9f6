"""Installation of the package: its folder, its distribution, and other distributions with the import name ``credit``.

The distribution is called `DISTRIBUTION`, because the name ``credit`` belongs to another project on the package index.
The import name and the commands are ``credit``.
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
# The distribution's name up to version 0.14.
FORMER_DISTRIBUTION = "credit"
# Distribution of NCAR's package, whose import name and commands are those of this package.
MILES_CREDIT = "miles-credit"
# Only this package has a command that starts here, so the entry point identifies its distribution under any name.
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
    """Return the root of the checkout that this package is imported from, None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    if (root / "setup.cfg").is_file() and (root / "pyproject.toml").is_file():
        return root
    return None


def describe_installation(search_path: Sequence[str] | None = None) -> str:
    """Return text with the folder that the package is imported from and the distribution that installed it, in lines.

    Args:
        search_path: folders in which distributions are looked for; None for ``sys.path``.
    """
    folder = Path(__file__).resolve().parents[1]
    kind = "an installed wheel"
    if find_checkout() is not None:
        kind = "a checkout"
    lines = [f"imported from {folder} ({kind})"]
    # There are several if the package was installed under its former name as well.
    distributions = [candidate for _, candidate in _find_distributions(search_path) if _is_this_project(candidate)]
    lines += [f"installed as {_describe_distribution(distribution)}" for distribution in distributions]
    if not distributions:
        lines.append(f"no distribution named {DISTRIBUTION} is installed")
    return "\n".join(lines)


def find_conflicts(search_path: Sequence[str] | None = None) -> list[str]:
    """Return a message, with a remedy, for each distribution that may hide this package or be mistaken for it.

    Args:
        search_path: as for `describe_installation`.
    """
    conflicts = []
    for name, distribution in _find_distributions(search_path):
        if _is_this_project(distribution):
            if name == FORMER_DISTRIBUTION:
                conflicts.append(
                    f"{_describe_distribution(distribution)} is this package under its former name. The name belongs "
                    "to another project on the package index, so an upgrade would replace it. Remove it with "
                    f"`{_pip_command()} uninstall {name}`; this removes the commands too, so install again afterwards: "
                    f"`{_reinstall_command()}`"
                )
            continue
        # Distributions of other projects.
        if name == FORMER_DISTRIBUTION:
            conflicts.append(
                f"{_describe_distribution(distribution)} is another project's package of that name; this one is called "
                f"{DISTRIBUTION}. Remove it with `{_pip_command()} uninstall {name}`"
            )
        elif name == MILES_CREDIT or _installs_this_import_name(distribution):
            conflict = (
                f"{_describe_distribution(distribution)} also installs a package `{PACKAGE}`; either may hide the "
                f"other. Use one environment for each: `{_pip_command()} uninstall {name}`, then "
                f"`{_reinstall_command()}`"
            )
            if name == MILES_CREDIT:
                conflict += (
                    f". Both also have the commands `{PACKAGE}` and `{PACKAGE}_train`; docs/migration.md describes two "
                    "environments"
                )
            conflicts.append(conflict)
    return conflicts


def _find_distributions(search_path: Sequence[str] | None) -> Iterator[tuple[str, metadata.Distribution]]:
    """Yield name and distribution of all that is installed, except for metadata that a build has left in the checkout.

    Args:
        search_path: as for `describe_installation`.
    """
    if search_path is None:
        search_path = sys.path
    names = set()
    for distribution in metadata.distributions(path=list(search_path)):
        # Each access to this property parses the metadata, of which the README is a part.
        name = distribution.name
        # A damaged installation may have no name. A name that is found again is hidden by the first on the path.
        if name is None or name in names:
            continue
        # A build leaves `NAME.egg-info` in the checkout. It is listed if the checkout is on the search path, although
        # nothing was installed.
        folder = getattr(distribution, "_path", None)
        is_build_metadata = folder is not None and Path(folder).suffix == ".egg-info"
        if is_build_metadata and Path(folder).parent == find_checkout():
            continue
        names.add(name)
        yield name, distribution


def _is_this_project(distribution: metadata.Distribution) -> bool:
    """Return True if a distribution is this package, which has had two names."""
    return any(point.value == _ENTRY_POINT for point in distribution.entry_points)


def _installs_this_import_name(distribution: metadata.Distribution) -> bool:
    """Return True if a distribution installs a package `PACKAGE`."""
    names_text = distribution.read_text("top_level.txt")
    if names_text is not None:
        return PACKAGE in names_text.split()
    # Not every build tool writes that list; the paths of the installed files give the same names. The search of the
    # text spares nearly all distributions the list of their files, whose presence is checked one by one.
    record = distribution.read_text("RECORD")
    if record is not None and f"{PACKAGE}/" not in record:
        return False
    for path in distribution.files or ():
        if len(path.parts) > 1 and path.parts[0] == PACKAGE and path.suffix == ".py":
            return True
    return False


def _describe_distribution(distribution: metadata.Distribution) -> str:
    """Return name, version and folder of a distribution; the folder of an editable installation is its checkout."""
    # The installer writes this file for a distribution that does not come from a package index.
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
