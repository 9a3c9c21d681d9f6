"""Base of the entries of ``model.postprocess``, the ordered list of functions applied to the output of every step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import SerializeAsAny

from credit.config.registry import POSTPROCESSES, RegisteredSection
from credit.config.sections.base import StrictModel
from credit.config.sections.data import DataConfig

# A later entry must not undo an earlier one: damping moves values past their bounds, a clamp opens a closed budget.
# Kinds of plugins may stand anywhere.
BUILT_IN_ORDER = ("hyperdiffusion", "clamp", "dry_mass", "water", "energy")


class PostprocessSection(StrictModel):
    """Base class of the config sections of post-processes, with the key that every post-process has."""

    kind: str

    # True if the post-process sums over whole columns of air, which needs the edges of the layers.
    needs_whole_columns: ClassVar[bool] = False

    @property
    def subject(self) -> str:
        """Text that identifies this entry in its list: the kind, with the variable if the entry has one.

        No two built-in entries of a list may have the same subject.
        """
        return self.kind

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Refuse variables that are not in the group of ``data.variables`` that this entry needs.

        This base class accepts every variable; a section that names variables overrides the method.

        Args:
            data: the data section.
            key: config key of this entry, for messages.

        Raises:
            ValueError: if a variable is not in the group that this entry needs.
        """


PostprocessEntry = Annotated[
    SerializeAsAny[PostprocessSection], RegisteredSection(POSTPROCESSES, base=PostprocessSection)
]


def list_entries_by_key(
    section: str, hyperdiffusion: PostprocessSection | None, postprocess: Sequence[PostprocessSection] | None
) -> dict[str, PostprocessSection]:
    """Return the post-processes of a section by config key, such as ``model.postprocess.0``, in their order.

    Args:
        section: ``model`` or ``inference``.
        hyperdiffusion: value of the key ``hyperdiffusion``, which becomes the first entry; None if the key is not set.
        postprocess: value of the key ``postprocess``; None if the key is not set.
    """
    entries = {}
    if hyperdiffusion is not None:
        entries[f"{section}.hyperdiffusion"] = hyperdiffusion
    for number, entry in enumerate(postprocess or []):
        entries[f"{section}.postprocess.{number}"] = entry
    return entries


def require_order(entries: Mapping[str, PostprocessSection], key: str) -> None:
    """Refuse a list in which a later entry undoes an earlier one, or in which a built-in entry is repeated.

    Kinds of plugins may stand at any position and may be repeated.

    Args:
        entries: post-processes by config key, in their order.
        key: config key of the list, for messages.

    Raises:
        ValueError: if built-in entries are in another order than `BUILT_IN_ORDER`, or two have the same subject.
    """
    built_in_kinds = [entry.kind for entry in entries.values() if entry.kind in BUILT_IN_ORDER]
    for earlier, later in itertools.pairwise(built_in_kinds):
        if BUILT_IN_ORDER.index(later) < BUILT_IN_ORDER.index(earlier):
            raise ValueError(f"{key}: {later} after {earlier} would undo it; the order is {', '.join(BUILT_IN_ORDER)}")
    subjects = [entry.subject for entry in entries.values() if entry.kind in BUILT_IN_ORDER]
    for subject in subjects:
        if subjects.count(subject) > 1:
            raise ValueError(f"{key}: {subject} is listed twice; give everything in one entry")


def replace_entries(
    entries: Mapping[str, PostprocessSection], replacements: Mapping[str, PostprocessSection]
) -> dict[str, PostprocessSection]:
    """Replace all post-processes of some kinds by others.

    All replacements of a kind are put at the position of the first entry of that kind. A kind that `entries` lacks is
    added. A built-in kind is inserted before the first entry that must follow it (`BUILT_IN_ORDER`), any other kind at
    the end.

    Args:
        entries: post-processes by config key, in their order.
        replacements: post-processes by config key, which replace all entries of their kinds.

    Returns:
        Post-processes by config key, in the new order.
    """
    replaced_kinds = {entry.kind for entry in replacements.values()}
    result: list[tuple[str, PostprocessSection]] = []
    # Put the replacements of a kind at the position of its first entry, and leave out its other entries.
    placed_kinds = set()
    for key, entry in entries.items():
        if entry.kind not in replaced_kinds:
            result.append((key, entry))
        elif entry.kind not in placed_kinds:
            placed_kinds.add(entry.kind)
            result += _entries_of_kind(replacements, entry.kind)
    # Add the kinds that the list does not have, in the order of the replacements. `dict.fromkeys` names each kind once.
    for kind in dict.fromkeys(entry.kind for entry in replacements.values()):
        if kind not in placed_kinds:
            position = _find_insert_position(kind, [entry for _, entry in result])
            result[position:position] = _entries_of_kind(replacements, kind)
    return dict(result)


def _entries_of_kind(entries: Mapping[str, PostprocessSection], kind: str) -> list[tuple[str, PostprocessSection]]:
    """Return the pairs of config key and entry of one kind, in their order."""
    return [(key, entry) for key, entry in entries.items() if entry.kind == kind]


def _find_insert_position(kind: str, entries: Sequence[PostprocessSection]) -> int:
    """Return the index in a list at which entries of a kind that the list does not have are inserted."""
    if kind in BUILT_IN_ORDER:
        following_kinds = BUILT_IN_ORDER[BUILT_IN_ORDER.index(kind) + 1 :]
        for position, entry in enumerate(entries):
            # Hyperdiffusion is the first entry of every list, also before kinds of plugins.
            if kind == "hyperdiffusion" or entry.kind in following_kinds:
                return position
    return len(entries)


def require_variable_in(key: str, name: str, allowed: set[str], rule: str) -> None:
    """Refuse a variable that is not in the group of ``data.variables`` that a post-process needs.

    Args:
        key: config key that names the variable, for the message.
        name: name of the variable.
        allowed: names of the allowed variables.
        rule: description of the allowed variables for the message, such as "in prognostic.vars_2D".

    Raises:
        ValueError: if the variable is not allowed.
    """
    if name not in allowed:
        raise ValueError(
            f'{key}: "{name}" must be {rule} of data.variables; these are {", ".join(sorted(allowed)) or "none"}'
        )
