"""Base of the entries of ``model.postprocess``, the ordered list of what is applied to the output of every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import SerializeAsAny

from credit.config.registry import POSTPROCESSES, KindOf
from credit.config.schema_base import Section
from credit.config.schema_data import DataConfig

# A later entry must not undo an earlier one: damping moves values past their bounds, a clamp opens a closed budget.
# Kinds of plugins may stand anywhere.
BUILT_IN_ORDER = ("hyperdiffusion", "clamp", "dry_mass", "water", "energy")


class PostprocessSection(Section):
    """Keys that every post-process has."""

    kind: str

    # whether the post-process sums over whole columns of air, which needs the layers' edges
    needs_whole_columns: ClassVar[bool] = False
    # whether the list may have several entries of this kind
    may_repeat: ClassVar[bool] = False

    def require_variables(self, data: DataConfig, key: str) -> None:
        """Refuse variables that are not in the part of ``data.variables`` that this entry needs.

        Args:
            data: the data section.
            key: of this entry, for messages.

        Raises:
            ValueError: naming key, variable and what it must be.
        """


PostprocessEntry = Annotated[SerializeAsAny[PostprocessSection], KindOf(POSTPROCESSES, base=PostprocessSection)]


def require_order(entries: Sequence[PostprocessSection]) -> None:
    """Refuse a list in which a later entry undoes an earlier one, or in which an entry is repeated.

    Raises:
        ValueError: naming the two.
    """
    kinds = [entry.kind for entry in entries]
    ordered = [kind for kind in kinds if kind in BUILT_IN_ORDER]
    for earlier, later in zip(ordered, ordered[1:], strict=False):
        if BUILT_IN_ORDER.index(later) < BUILT_IN_ORDER.index(earlier):
            raise ValueError(
                f"postprocess: {later} after {earlier} would undo it; the order is {', '.join(BUILT_IN_ORDER)}"
            )
    for entry in entries:
        if not entry.may_repeat and kinds.count(entry.kind) > 1:
            raise ValueError(f"postprocess: {entry.kind} is listed twice; once is enough")


def replace_entries(
    entries: Sequence[PostprocessSection], replacements: Sequence[PostprocessSection]
) -> list[PostprocessSection]:
    """Return the list in which `replacements` take the place of the entries of their kinds.

    A replacement whose kind the list lacks is added: hyperdiffusion at the beginning, any other kind at the end.
    """
    replaced_kinds = {entry.kind for entry in replacements}
    present_kinds = {entry.kind for entry in entries}
    result = [entry for entry in replacements if entry.kind == "hyperdiffusion" and entry.kind not in present_kinds]
    inserted_kinds = {entry.kind for entry in result}
    for entry in entries:
        if entry.kind not in replaced_kinds:
            result.append(entry)
        elif entry.kind not in inserted_kinds:
            result += [replacement for replacement in replacements if replacement.kind == entry.kind]
            inserted_kinds.add(entry.kind)
    result += [replacement for replacement in replacements if replacement.kind not in inserted_kinds]
    return result


def require_member(key: str, name: str, allowed: set[str], rule: str) -> None:
    """Refuse a variable that is not in the part of ``data.variables`` that a post-process needs.

    Args:
        key: that names the variable.
        name: the variable.
        allowed: the variables that fit.
        rule: where it must stand: "in prognostic.vars_2D".

    Raises:
        ValueError: if it is not among them.
    """
    if name not in allowed:
        raise ValueError(
            f'{key}: "{name}" must be {rule} of data.variables; these are {", ".join(sorted(allowed)) or "none"}'
        )
