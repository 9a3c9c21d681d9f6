"""Generator of docs/migration_keys.md: ``python -m credit.interop.miles_credit.docs_page > docs/migration_keys.md``."""

from __future__ import annotations

from collections.abc import Sequence

from credit.interop.miles_credit.keys.other_keys import IGNORED_POSTBLOCKS, REFUSED_POSTBLOCKS
from credit.interop.miles_credit.keys.row import KeyRow
from credit.interop.miles_credit.keys.table import TABLES
from credit.interop.miles_credit.sections.fuxi import KEYS as FUXI_KEYS
from credit.interop.miles_credit.sections.networks import NETWORKS

_INTRODUCTION = """# Keys of miles-credit

This page lists the config keys of miles-credit 2026.2.0, and how `credit convert CONFIG --output FILE` converts them.
See [From miles-credit](migration.md) for the procedure.

- **mapped**: the value is kept, or written in a different form.
- **derived**: other values are computed from the key; the report of a conversion lists these values.
- **ignored**: the key can be ignored safely, for the reason in the table.
- **refused**: the key has no counterpart, and a config with this key is not converted.
  With the values after "unless", the key has no effect, so it is ignored.

`NAME` means any name, `VARIABLE` means a variable of the config, and `*` means all keys below a key.
`data_valid` is an older name of `validation_data`.
A section with `activate: false` is ignored.
A key that is not in these tables is refused.

This page is generated from the table of keys in the package (`python -m credit.interop.miles_credit.docs_page`).
A test compares the page with the table.
"""
_FUXI_INTRODUCTION = """## FuXi

With `model.type: fuxi`, these results replace the results in the table "Model", which are for a WXFormer.
Padding and numbers of channels are converted in the same way as for a WXFormer.

"""


def render_key_reference() -> str:
    """Return the text of the page docs/migration_keys.md, in Markdown."""
    paragraphs = [_INTRODUCTION]
    paragraphs += [f"## {title}\n\n{_render_rows(rows)}" for title, rows in TABLES.items()]
    paragraphs.append(_FUXI_INTRODUCTION + _render_fuxi())
    paragraphs.append("## Networks\n\nValues of `model.type`.\n\n" + _render_networks())
    paragraphs.append("## Postblocks\n\nValues of `postblocks.per_step.NAME.type`.\n\n" + _render_postblocks())
    return "\n".join(paragraphs)


def _render_rows(rows: Sequence[KeyRow]) -> str:
    """Return the Markdown table of some keys."""
    lines = ["| generation | key | result | key of this package, or reason |", "|---|---|---|---|"]
    for row in rows:
        generations = " and ".join(row.generations)
        result = row.disposition.value
        values = [_describe_value(value) for value in row.harmless_values]
        if values:
            result += f", unless {' or '.join(values)}"
        lines.append(f"| {generations} | `{row.path}` | {result} | {row.text} |")
    return "\n".join(lines) + "\n"


def _describe_value(value: object) -> str:
    """Return a value in YAML notation, in backticks."""
    names = {"None": "null", "True": "true", "False": "false"}
    return f"`{names.get(str(value), value)}`"


def _render_fuxi() -> str:
    """Return the Markdown table of the keys of FuXi."""
    lines = ["| key | key of this package |", "|---|---|"]
    lines.append("| `model.patch_height`, `patch_width` | `model.patch_size`; both values must be equal |")
    lines += [f"| `model.{name}` | `model.{our_name}` |" for name, (our_name, _) in FUXI_KEYS.items()]
    lines.append("| `model.frames`, `frame_patch_size` | `data.history_len`; both values must be equal |")
    lines.append("| `model.drop_path` | none; a value above 0 is reported as approximate |")
    return "\n".join(lines) + "\n"


def _render_networks() -> str:
    """Return the Markdown table of the networks."""
    lines = ["| network | result |", "|---|---|"]
    for name, network in NETWORKS.items():
        result = f"converted to `model.type: {network.counterpart}`"
        if network.convert is None:
            result = f"refused: {network.reason}"
        lines.append(f"| `{name}` | {result} |")
    return "\n".join(lines) + "\n"


def _render_postblocks() -> str:
    """Return the Markdown table of the postblocks."""
    lines = ["| postblock | result |", "|---|---|", "| `tracer_fixer` | `data.variable_options.NAME.minimum` |"]
    lines += [f"| `{name}` | not needed: {reason} |" for name, reason in IGNORED_POSTBLOCKS.items()]
    lines += [f"| `{name}` | refused: {reason} |" for name, reason in REFUSED_POSTBLOCKS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_key_reference(), end="")
