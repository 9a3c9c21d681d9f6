"""Conversion of the configs of miles-credit, if the environment variable MILES_CREDIT_CONFIGS names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from credit.errors import ConfigError
from credit.interop.miles_credit import convert_file, find_generation, read_yaml_tree

FOLDER = os.environ.get("MILES_CREDIT_CONFIGS")


def find_configs() -> list[Path]:
    """Return the training configs in the folder, without other YAML files."""
    paths = []
    for path in sorted(Path(FOLDER).rglob("*.yml")):
        try:
            tree = read_yaml_tree(path)
        except ConfigError:
            continue
        if find_generation(tree) is not None and "trainer" in tree:
            paths.append(path)
    return paths


@pytest.mark.skipif(FOLDER is None, reason="MILES_CREDIT_CONFIGS names no folder")
def test_each_config_is_converted_or_refused_with_reasons() -> None:
    networks = {}
    for path in find_configs():
        network = (yaml.safe_load(path.read_text(encoding="utf-8")).get("model") or {}).get("type")
        try:
            conversion = convert_file(path)
        except ConfigError as error:
            assert "the conversion (generation" in str(error), error
            assert "not a key of miles-credit" not in str(error) or network not in ("wxformer", "crossformer"), error
            continue
        networks[path] = network
        assert conversion.yaml_text
    assert set(networks.values()) == {"wxformer", "crossformer", "fuxi"}
    assert len(networks) >= 24
