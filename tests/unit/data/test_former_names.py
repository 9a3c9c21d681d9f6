"""Names that plugins of the version before import."""

from __future__ import annotations

import importlib

import pytest

from credit.data.formats.plugin_source import register_source


def test_register_source_is_found_where_it_was() -> None:
    with pytest.warns(DeprecationWarning, match=r"credit\.data\.formats\.plugin_source"):
        former = importlib.import_module("credit.data.registry")
    assert former.register_source is register_source
