"""Search in the table of keys of miles-credit."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from credit.errors import find_nearest
from credit.interop.miles_credit.keys import data_keys, model_keys, other_keys, trainer_keys
from credit.interop.miles_credit.keys.row import ANY_NAME, ANY_VARIABLE, SUBTREE, KeyRow

# Title of a part of the table -> rows of this part.
TABLES: dict[str, Sequence[KeyRow]] = {
    "Data": data_keys.ROWS,
    "Model": model_keys.ROWS,
    "Trainer and loss": trainer_keys.ROWS,
    "Other sections": other_keys.ROWS,
}
ROWS: tuple[KeyRow, ...] = tuple(row for rows in TABLES.values() for row in rows)
_WILDCARDS = (ANY_NAME, ANY_VARIABLE, SUBTREE)
# Older name of a section in generation 2 -> its name in the table.
SECTION_ALIASES = {"data_valid": "validation_data"}


def _group_rows() -> dict[tuple[str, str], list[KeyRow]]:
    """Return the rows of the table by (generation, first segment of the key), for a faster search for a key."""
    groups: dict[tuple[str, str], list[KeyRow]] = {}
    for row in ROWS:
        for generation in row.generations:
            groups.setdefault((generation, row.segments[0]), []).append(row)
    return groups


_ROWS_BY_SECTION = _group_rows()


def find_row(path: str, generation: int, variables: Collection[str]) -> KeyRow | None:
    """Return the row of a key; None if the table does not have the key.

    If several rows match, exact names are preferred to wildcards, and longer paths to shorter paths.

    Args:
        path: dotted key of the config.
        generation: generation of the config, 1 or 2.
        variables: names of the variables of the config.
    """
    segments = path.split(".")
    segments[0] = SECTION_ALIASES.get(segments[0], segments[0])
    best_row = None
    best_rank: tuple[int, ...] = ()
    for row in _ROWS_BY_SECTION.get((str(generation), segments[0]), ()):
        rank = _rank_match(row.segments, segments, variables)
        if rank is not None and (best_row is None or rank > best_rank):
            best_row = row
            best_rank = rank
    return best_row


def _rank_match(pattern: Sequence[str], segments: Sequence[str], variables: Collection[str]) -> tuple[int, ...] | None:
    """Return the quality of the match of a row with a key, as one number for each segment; None if they do not match.

    Args:
        pattern: segments of the row's path, which may be wildcards.
        segments: segments of the key.
        variables: names of the variables of the config.
    """
    is_subtree = pattern[-1] == SUBTREE
    # Most rows differ in the second segment, so this comparison comes first.
    if len(pattern) > 1 < len(segments) and pattern[1] != segments[1] and pattern[1] not in _WILDCARDS:
        return None
    names = pattern[:-1] if is_subtree else pattern
    if len(segments) < len(names) or (len(segments) > len(names) and not is_subtree):
        return None
    rank = []
    for name, segment in zip(names, segments, strict=False):
        if name == segment:
            rank.append(2)
        elif name == ANY_NAME or (name == ANY_VARIABLE and segment in variables):
            rank.append(1)
        else:
            return None
    return tuple(rank)


def is_section(path: str, generation: int) -> bool:
    """Return True if a key is a section that contains keys of the table; an empty section has no effect."""
    segments = path.split(".")
    segments[0] = SECTION_ALIASES.get(segments[0], segments[0])
    length = len(segments)
    for row in _ROWS_BY_SECTION.get((str(generation), segments[0]), ()):
        if len(row.segments) > length:
            pairs = zip(row.segments, segments, strict=False)
            if all(name in (segment, ANY_NAME) for name, segment in pairs):
                return True
    return False


def find_nearest_key(path: str, generation: int) -> str | None:
    """Return the key of the table with the most similar spelling to an unknown key; None if no key is similar.

    Args:
        path: unknown dotted key.
        generation: generation of the config, 1 or 2.
    """
    section, _, name = path.rpartition(".")
    choices = {}
    for row in ROWS:
        if str(generation) in row.generations:
            row_section, _, row_name = row.path.rpartition(".")
            if row_name not in (SUBTREE, ANY_VARIABLE):
                choices.setdefault(row_name, []).append(row_section)
    nearest = find_nearest(name, choices)
    if nearest is None:
        return None
    sections = choices[nearest]
    nearest_section = section if section in sections else sections[0]
    return f"{nearest_section}.{nearest}" if nearest_section else nearest
