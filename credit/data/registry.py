"""Former place of `credit.data.formats.plugin_source`, for plugins of version 0.14. It goes with version 0.16."""

from __future__ import annotations

import warnings

from credit.data.formats.plugin_source import SourceVariable, register_source

__all__ = ["SourceVariable", "register_source"]

warnings.warn(
    "credit.data.registry has moved: import register_source and SourceVariable from "
    "credit.data.formats.plugin_source; the old name goes with version 0.16",
    DeprecationWarning,
    stacklevel=2,
)
