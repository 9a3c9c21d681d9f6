"""Ordered list of post-processes: order, replacements in forecasts, and the shorthand `hyperdiffusion`."""

from __future__ import annotations

import pytest

from credit.config import build_config
from credit.config.sections.postprocess import PostprocessSection, replace_entries, require_order
from credit.errors import ConfigError
from credit.forecast.postprocess.section import ClampSection, HyperdiffusionSection
from tests.unit.config.test_load import with_key


class AnchorSection(PostprocessSection):
    kind: str = "anchor"


def build_clamp(variable: str, minimum: float = 0.0) -> ClampSection:
    return ClampSection(kind="clamp", variable=variable, minimum=minimum)


def list_kinds(entries: dict[str, PostprocessSection]) -> list[str]:
    return [entry.kind for entry in entries.values()]


def test_replacements_take_the_position_of_their_kind() -> None:
    trained = {"0": HyperdiffusionSection(), "1": build_clamp("q"), "2": AnchorSection()}
    replaced = replace_entries(trained, {"a": build_clamp("q", 1.0), "b": build_clamp("t2m")})
    assert list(replaced) == ["0", "a", "b", "2"]


def test_added_kind_precedes_kinds_that_must_follow_it() -> None:
    water = PostprocessSection(kind="water")
    anchor = AnchorSection()
    assert list_kinds(replace_entries({"0": anchor, "1": water}, {"a": build_clamp("q")})) == [
        "anchor",
        "clamp",
        "water",
    ]
    assert list_kinds(replace_entries({"0": anchor}, {"a": HyperdiffusionSection()})) == ["hyperdiffusion", "anchor"]
    assert list_kinds(replace_entries({"0": build_clamp("q")}, {"a": anchor})) == ["clamp", "anchor"]


def test_the_order_is_checked_and_names_its_list() -> None:
    with pytest.raises(ValueError, match="^inference.postprocess: hyperdiffusion after clamp would undo it"):
        require_order({"0": build_clamp("q"), "1": HyperdiffusionSection()}, "inference.postprocess")
    with pytest.raises(ValueError, match="^model.postprocess: clamp of q is listed twice"):
        require_order({"0": build_clamp("q"), "1": build_clamp("q", 1.0)}, "model.postprocess")
    # Kinds of plugins may be repeated.
    require_order({"0": AnchorSection(), "1": build_clamp("q"), "2": AnchorSection()}, "model.postprocess")


@pytest.mark.parametrize("section", ["model", "inference"])
def test_shorthand_accepts_only_hyperdiffusion(section: str) -> None:
    raw = with_key(f"{section}.hyperdiffusion", {"kind": "clamp", "variable": "t2m", "minimum": 0})
    with pytest.raises(ConfigError, match=rf'{section}\.hyperdiffusion\.kind: "clamp" is not a post-process'):
        build_config(raw)
