"""What every section of the config shares: frozen, and an unknown key is an error."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config; immutable, strict about unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
