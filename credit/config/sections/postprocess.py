"""Base class of the entries of ``model.postprocess``, the ordered list of corrections of the output of every step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import SerializeAsAny

from credit.config.registry import POSTPROCESSES, RegisteredSection
from credit.config.sections.base import StrictModel
from credit.config.sections.data import DataConfig

# A later entry must not undo an earlier entry: damping can move values beyond their bounds, and a clamp changes a
# budget. Kinds of plugins may be at any position.
BUILT_IN_ORDER = ("hyperdiffusion", "clamp", "dry_mass", "water", "energy")


class PostprocessSection(StrictModel):
    """Base class of the config sections of post-processes, with the key that all post-processes have."""

    kind: str

    # True if the post-process sums over whole columns of air and therefore needs the edges of the layers.
    needs_whole_columns: ClassVar[bool] = False

    @property
    def subject(self) -> str:
        """String that identifies this entry in its list.

        The string is the kind of the entry, followed by the variable if the entry has a variable. Two built-in
        entries of a list must not have the same subject.
        """
        return self.kind

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Raise an error if a variable is not in the group of ``data.variables`` that this entry needs.

        This base class accepts every variable. Sections that name variables override this method.

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
    """Return a dict from config keys, such as ``model.postprocess.0``, to the post-processes of a section, in order.

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
    """Raise an error if a later entry would undo an earlier entry, or if a built-in entry is repeated.

    Kinds of plugins may be at any position and may be repeated.

    Args:
        entries: config key -> post-process, in order.
        key: config key of the list, for messages.

    Raises:
        ValueError: if built-in entries are not in the order of `BUILT_IN_ORDER`, or two entries have the same subject.
    """
    built_in_kinds = [entry.kind for entry in entries.values() if entry.kind in BUILT_IN_ORDER]
    for earlier, later in itertools.pairwise(built_in_kinds):
        if BUILT_IN_ORDER.index(later) < BUILT_IN_ORDER.index(earlier):
            raise ValueError(f"{key}: {later} after {earlier} would undo it; the order is {', '.join(BUILT_IN_ORDER)}")
    subjects = [entry.subject for entry in entries.values() if entry.kind in BUILT_IN_ORDER]
    for subject in subjects:
        if subjects.count(subject) > 1:
            raise ValueError(f"{key}: {subject} is listed twice; combine these entries")


def replace_entries(
    entries: Mapping[str, PostprocessSection], replacements: Mapping[str, PostprocessSection]
) -> dict[str, PostprocessSection]:
    """Replace all post-processes of some kinds with other post-processes.

    All replacements of a kind are put at the position of the first entry of that kind. A kind that is not in `entries`
    is added: a built-in kind before the first entry that must follow it (`BUILT_IN_ORDER`), any other kind at the end.

    Args:
        entries: config key -> post-process, in order.
        replacements: config key -> post-process; each replaces all entries of its kind.

    Returns:
        Config key -> post-process, in the new order.
    """
    replaced_kinds = {entry.kind for entry in replacements.values()}
    result: list[tuple[str, PostprocessSection]] = []
    # Put the replacements of a kind at the position of the first entry of this kind, and remove its other entries.
    placed_kinds = set()
    for key, entry in entries.items():
        if entry.kind not in replaced_kinds:
            result.append((key, entry))
        elif entry.kind not in placed_kinds:
            placed_kinds.add(entry.kind)
            result += _select_entries_of_kind(replacements, entry.kind)
    # Add the kinds that are not in the list, in the order of the replacements. `dict.fromkeys` removes duplicates.
    for kind in dict.fromkeys(entry.kind for entry in replacements.values()):
        if kind not in placed_kinds:
            position = _find_insert_position(kind, [entry for _, entry in result])
            result[position:position] = _select_entries_of_kind(replacements, kind)
    return dict(result)


def _select_entries_of_kind(
    entries: Mapping[str, PostprocessSection], kind: str
) -> list[tuple[str, PostprocessSection]]:
    """Return the pairs of config key and entry of one kind, in order."""
    return [(key, entry) for key, entry in entries.items() if entry.kind == kind]


def _find_insert_position(kind: str, entries: Sequence[PostprocessSection]) -> int:
    """Return the index at which entries of a new kind are inserted into a list."""
    if kind in BUILT_IN_ORDER:
        following_kinds = BUILT_IN_ORDER[BUILT_IN_ORDER.index(kind) + 1 :]
        for position, entry in enumerate(entries):
            # Hyperdiffusion is the first entry of every list, even before kinds of plugins.
            if kind == "hyperdiffusion" or entry.kind in following_kinds:
                return position
    return len(entries)


def require_variable_in(key: str, name: str, allowed: set[str], rule: str) -> None:
    """Raise an error if a variable is not in the group of ``data.variables`` that a post-process needs.

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
