"""Conversion of configs of NCAR's miles-credit, version 2026.2.0, to configs of this package."""

from credit.interop.miles_credit.conversion import Conversion, convert_file, convert_tree
from credit.interop.miles_credit.reading import find_generation, read_yaml_tree

__all__ = ["Conversion", "convert_file", "convert_tree", "find_generation", "read_yaml_tree"]
